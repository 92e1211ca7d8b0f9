# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "numpy>=2.0", "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""P3O on token sequences, where it comes from, in one file: what stale data does to three losses.

A small transformer learns to add, character by character, from a teacher that often forgets to
carry. Then reinforcement learning repairs what the teacher spoilt. An answer earns 1 if it is
exactly right, else 0; the advantage A of all its tokens is this reward minus the mean reward of the
G answers to the same problem. There is no critic. With ρ_i = π_θ(token_i) / π_b(token_i), where the
policy π_b wrote the token, the losses are means over the N valid tokens of a batch:

    p3o    -sg(min(ρ_i, e_B)) log π_θ(token_i) A_i + (1 - e_B) KL( π_θ ‖ π_b )    [arXiv 2605.12380]
           e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²),   the effective sample size
    ppo    -min( ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i )                           [arXiv 1707.06347]
    grpo   ppo's, A divided by the standard deviation of the G rewards; no KL     [arXiv 2402.03300]

sg stops the gradient. Valid are an answer's tokens up to its end: padding decides nothing, and must
not count in e_B. A batch makes one gradient step, so fresh data has ρ = 1, and P3O is PPO. With
--lag, an earlier policy answers; with --behavior-noise, the sampler differs from the learner, as a
serving engine does. --adapt-batch adds ABS [arXiv 2605.21557]: the number of problems L follows the
KL divergence of updates; its lines are marked "ABS". For a model or a task of your own, replace
CausalTransformer or what stands above it.

P3O on fresh data, one minute:   python p3o_tokens.py
PPO, 16 updates behind:          python p3o_tokens.py --loss ppo --lag 16
P3O, sampler in bfloat16:        python p3o_tokens.py --behavior-noise bfloat16
P3O with ABS:                    python p3o_tokens.py --adapt-batch
After Ctrl-C or a crash:         python p3o_tokens.py --resume runs/...
"""

import copy
import csv
import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while modules load

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
import wandb
from tqdm import tqdm


@dataclass
class Args:
    """P3O, PPO and GRPO on token sequences. A step is a whole answer. In brackets, symbols."""

    loss: Literal["p3o", "ppo", "grpo"] = "p3o"  # as above
    seed: int = 1  # seed of the model, the teacher, the problems and the sampled answers
    total_timesteps: int = 30_720  # [T_total] answers to learn from
    group_size: int = 8  # [G] answers to each problem
    learning_rate: float = 1e-3  # of Adam, constant
    clip_coef: float = 0.2  # [ε] of ppo and grpo
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    supervised_updates: int = 1500  # imitation of the teacher before, with 64 answers each
    supervised_rate: float = 2e-3  # highest learning rate of its Adam, after a warm-up
    forget_share: float = 0.5  # share of the teacher's answers in which it forgets all carries
    lag: int = 0  # updates by which the policy that answers is behind
    behavior_noise: Literal["none", "bfloat16", "temperature"] = "none"  # of the sampler only
    temperature: float = 1.3  # the sampler's with --behavior-noise temperature; the learner's is 1
    eval_frequency: int = 10  # iterations from one evaluation to the next

    adapt_batch: bool = False  # let L follow the KL; else it stays num_problems
    num_problems: int = 32  # [L] problems in the first batch
    problems_min: int = 16  # [L_min] batch of a volatile policy
    problems_max: int = 64  # [L_max] batch of a stable policy
    adapt_frequency: int = 5  # [K] iterations from one measurement of the KL to the next
    delta_min: float = 5e-4  # [δ_min] KL at and below which the policy counts as stable
    delta_max: float = 2e-2  # [δ_max] KL at and above which it counts as volatile; both measured
    beta: float = 0.1  # [β] smoothing of L_adapt; from ABS's own code, not in the paper

    runs_dir: str = "runs"  # where the run's folder is made
    run_name: str | None = None  # its name; by default loss, script, seed and time
    checkpoint_every: float = 300.0  # seconds from one checkpoint to the next
    resume: str | None = None  # folder of a run to go on with; its arguments are the defaults then
    track: bool = False  # send the metrics to Weights & Biases too (project: $WANDB_PROJECT)


# --- The task: " 347+  58=" is answered by "504\n", units first, as one adds on paper. ---

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = "0123456789+= \n"
END = VOCABULARY.index("\n")
PROMPT = 10  # tokens of a problem: two numbers of up to 4 digits, "+" and "="
ANSWER = 6  # tokens of an answer: up to 5 digits and END; more END is padding


def draw_problems(rng, count, held_out=False):
    """Pairs of numbers of 2 to 4 digits. Held out of training are sums that 7 divides."""
    problems = []
    while len(problems) < count:
        smallest_a, smallest_b = rng.choices((10, 100, 1000), k=2)
        a = rng.randrange(smallest_a, 10 * smallest_a)
        b = rng.randrange(smallest_b, 10 * smallest_b)
        if ((a + b) % 7 == 0) == held_out:
            problems.append((a, b))
    return problems


def sum_without_carries(a, b):
    """The teacher's flaw: 58 + 67 = 15, each place by itself, modulo 10."""
    total = 0
    for place in (1, 10, 100, 1000):
        total += (a // place + b // place) % 10 * place
    return total


def encode(problems, totals):
    """Prompts (N, PROMPT) of the problems, and as answers (N, ANSWER) the totals: tokens, int64."""
    tokens = []
    for (a, b), total in zip(problems, totals, strict=True):
        answer = str(total)[::-1].ljust(ANSWER, "\n")
        tokens.append([VOCABULARY.index(character) for character in f"{a:4}+{b:4}={answer}"])
    return torch.tensor(tokens, device=DEVICE).split([PROMPT, ANSWER], 1)


def valid_tokens(answers):
    """Whether a token of answers (N, ANSWER) counts: those up to the first END do."""
    is_end = (answers == END).long()
    ends_before = is_end.cumsum(1) - is_end
    return ends_before == 0


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to what comes in, as in GPT-2."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.query_key_value(self.norm1(x))
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (N, heads, T, width / heads) each
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.widen(self.norm2(x)))
        return x + self.narrow(hidden)


class CausalTransformer(nn.Module):
    """Tokens (N, T) -> logits (N, T, V): position t's are of token t + 1, given tokens 0 to t."""

    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(PROMPT + ANSWER, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)  # from PyTorch's own, some seeds stall

    def forward(self, tokens):
        positions = self.positions.weight[: tokens.shape[1]]
        x = self.blocks(self.tokens(tokens) + positions)
        return self.head(self.norm(x))


def answer_logits(network, tokens):
    """Logits (N, ANSWER, V), float32, of the answers in whole sequences (N, PROMPT + ANSWER)."""
    logits = network(tokens[:, :-1])
    return logits[:, PROMPT - 1 :].float()


@torch.no_grad()
def write_answers(network, prompts, temperature):
    """Answers (N, ANSWER) to prompts (N, PROMPT), and log π_b (N, ANSWER, V) of all tokens.

    Each token takes a pass over the whole sequence, with padding that causal attention cannot see.
    Learning makes the same pass, and so fresh data has ρ = 1 to the bit; a KV cache would round.
    """
    tokens = F.pad(prompts, (0, ANSWER), value=END)
    for t in range(ANSWER):
        log_pi = (answer_logits(network, tokens) / temperature).log_softmax(-1)
        tokens[:, PROMPT + t] = log_pi[:, t].exp().multinomial(1).squeeze(1)
    answers = tokens[:, PROMPT:]
    return answers.where(valid_tokens(answers), END), log_pi


def accuracy(network, problems, temperature) -> float:
    """Share of the problems that the network answers exactly."""
    prompts, right = encode(problems, np.sum(problems, 1))
    answers, _ = write_answers(network, prompts, temperature)
    is_right = (answers == right).all(1)
    return is_right.float().mean().item()


def imitate_teacher(network, args):
    """The supervised start: cross-entropy on the answers of a teacher with a flaw."""
    rng = random.Random(fresh_seed(args.seed, 0))
    optimizer = torch.optim.Adam(network.parameters())
    for update in range(args.supervised_updates):
        warm_up = update / 100
        decay = 1 - update / args.supervised_updates
        optimizer.param_groups[0]["lr"] = args.supervised_rate * min(warm_up, decay)
        problems = draw_problems(rng, 64)
        totals = []
        for a, b in problems:
            forgets = rng.random() < args.forget_share
            totals.append(sum_without_carries(a, b) if forgets else a + b)
        prompts, answers = encode(problems, totals)
        valid = valid_tokens(answers)
        logits = answer_logits(network, torch.cat([prompts, answers], 1))
        loss = F.cross_entropy(logits[valid], answers[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def group_advantages(rewards, scaled: bool):
    """A = r - mean(r), over the G answers to each of L problems (L, G); scaled, A / std(r)."""
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scaled:
        advantages = advantages / (rewards.std(1, correction=0, keepdim=True) + 1e-6)
    return advantages


def log_prob_of(log_pi, actions):
    """log π(a|s) (N,) of the actions (N,), from log π(·|s) (N, A)."""
    return log_pi.gather(1, actions[:, None]).squeeze(1)


def effective_sample_size(log_ratios):
    """e_B = (Σ ρ_i)² / (N Σ ρ_i²) of log ρ (N,): from 1/N (one dominates) to 1 (all are equal)."""
    ratios = (log_ratios - log_ratios.max()).exp()  # e_B stays the same, and nothing overflows
    squared_sum = ratios.sum().square()
    return squared_sum / (len(ratios) * ratios.square().sum())


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)), in nats: log-probabilities (N, A) -> (N,)."""
    log_ratios = log_p - log_q
    return (log_p.exp() * log_ratios).sum(-1)


def p3o_loss(log_pi, log_behavior, actions, advantages):
    """P3O's loss of the policy, to be minimised; e_B; the KL; the share of capped ratios [P3O].

    L = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) mean_i KL( π_θ ‖ π_b )(s_i)

    log_pi and log_behavior are log π_θ(·|s) and log π_b(·|s) of all actions, (N, A); actions (N,)
    int64, advantages (N,). Gradients flow through log π_θ and the KL only.
    """
    log_probs = log_prob_of(log_pi, actions)
    behavior_log_probs = log_prob_of(log_behavior, actions)
    log_ratios = (log_probs - behavior_log_probs).detach()
    ratios = log_ratios.exp()
    ess = effective_sample_size(log_ratios)
    weights = torch.minimum(ratios, ess)
    kl = kl_divergence(log_pi, log_behavior).mean()
    policy_gradient = -(weights * log_probs * advantages).mean()
    loss = policy_gradient + (1 - ess) * kl
    capped = (ratios > ess).float().mean()
    return loss, ess, kl.detach(), capped


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's loss of the policy, to be minimised, of each sample. All are (N,), the result too.

    ρ = π_θ(a|s) / π_θold(a|s),   L^CLIP = min( ρ A, clip(ρ, 1 - ε, 1 + ε) A ),   loss = -L^CLIP
    """
    ratios = (log_probs - old_log_probs).exp()
    objective = ratios * advantages
    clipped_objective = ratios.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    return -torch.minimum(objective, clipped_objective)


def rollout_length(
    divergence, adaptive_length, *, rollout_min, rollout_max, delta_min, delta_max, beta
) -> float:
    """The next L_adapt, a real number of steps, from δ_π and the last L_adapt [ABS, Eq. 4].

    α = log(δ_clipped / δ_min) / log(δ_max / δ_min)          0: stable, 1: volatile
    L' = L_max - α (L_max - L_min)
    L_adapt ← (1 - β) L_adapt + β L'

    The paper calls the smoothing coefficient α too, but with the α of Eq. 4 the batch of a stable
    policy (α = 0) would stay as it is. So it is a constant of its own here, β.
    """
    if not (0 < delta_min < delta_max and 0 < rollout_min <= rollout_max):
        raise ValueError("needs 0 < delta_min < delta_max and 0 < rollout_min <= rollout_max")
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * adaptive_length + beta * target


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check(args)
    noise = args.behavior_noise
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=noise == "bfloat16")
    temperature = args.temperature if noise == "temperature" else 1.0
    torch.manual_seed(fresh_seed(args.seed, 0))
    network = CausalTransformer().to(DEVICE)
    if args.resume is None:
        imitate_teacher(network, args)
    # The last policies, as a ring: the newest takes the oldest's place, the next oldest answers.
    policies = nn.ModuleList(copy.deepcopy(network) for _ in range(args.lag + 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    saved = load_checkpoint(args, network=network, policies=policies, optimizer=optimizer)
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    adaptive_length = saved.get("adaptive_length", float(args.num_problems))  # ABS: L_adapt
    exam = draw_problems(random.Random(0), 256, held_out=True)  # the same in every run
    run = Run(args, saved)

    while global_step < args.total_timesteps and not run.stopped:
        iteration += 1
        # Anew in each iteration: no RNG state needs saving, and measuring changes no later draw.
        seed = fresh_seed(args.seed, iteration)
        torch.manual_seed(seed)
        num_problems = round(adaptive_length)  # ABS: L
        batch_size = num_problems * args.group_size
        global_step += batch_size

        # 1. Collect G answers to each of L problems, from the oldest policy of the ring.
        policies[iteration % len(policies)].load_state_dict(network.state_dict())
        sampler = policies[(iteration + 1) % len(policies)]
        problems = draw_problems(random.Random(seed), num_problems)
        problems = np.repeat(problems, args.group_size, 0)
        prompts, right = encode(problems, problems.sum(1))
        with autocast:
            answers, log_behavior = write_answers(sampler, prompts, temperature)
        rewards = (answers == right).all(1).float()

        # 2. Update θ by one gradient step on the mean loss of all valid tokens.
        valid = valid_tokens(answers)
        token = answers[valid]
        behavior = log_behavior[valid]
        grouped = rewards.view(num_problems, args.group_size)
        advantages = group_advantages(grouped, scaled=args.loss == "grpo").flatten()
        advantage = advantages.repeat_interleave(valid.sum(1))
        sequences = torch.cat([prompts, answers], 1)
        log_pi = answer_logits(network, sequences)[valid].log_softmax(-1)
        log_prob = log_prob_of(log_pi, token)
        old_log_prob = log_prob_of(behavior, token)
        p3o, ess, kl, capped = p3o_loss(log_pi, behavior, token, advantage)
        ppo = clipped_surrogate(log_prob, old_log_prob, advantage, args.clip_coef).mean()
        clipped = (log_prob - old_log_prob).expm1().abs() > args.clip_coef
        loss = p3o if args.loss == "p3o" else ppo
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
        optimizer.step()

        # 3. ABS: measure how far the update moved the policy, and let the next batches follow.
        # B_ref is the batch, where log_pi is θ_old's. Its greedy tokens hardly ever change: so KL.
        divergence = None
        if iteration % args.adapt_frequency == 0:
            with torch.no_grad():
                new_log_pi = answer_logits(network, sequences)[valid].log_softmax(-1)
                divergence = kl_divergence(log_pi, new_log_pi).mean().item()
            if args.adapt_batch:
                adaptive_length = rollout_length(
                    divergence,
                    adaptive_length,
                    rollout_min=args.problems_min,
                    rollout_max=args.problems_max,
                    delta_min=args.delta_min,
                    delta_max=args.delta_max,
                    beta=args.beta,
                )

        # 4. Evaluate, log and save.
        greedy_accuracy = sampled_accuracy = None
        ends = global_step >= args.total_timesteps
        if ends or (iteration - 1) % args.eval_frequency == 0:
            greedy_accuracy = accuracy(network, exam, temperature=1e-6)
            sampled_accuracy = accuracy(network, exam, temperature=1.0)
        row = {
            "global_step": global_step,
            "charts/reward": rewards.mean().item(),
            "charts/greedy_accuracy": greedy_accuracy,
            "charts/sampled_accuracy": sampled_accuracy,
            "abs/rollout_length": num_problems,
            "abs/batch_size": batch_size,
            "abs/kl_divergence": divergence,
            "losses/policy_loss": loss.item(),
            "losses/grad_norm": grad_norm.item(),
            "p3o/ess": ess.item(),
            "p3o/kl_weight": 1 - ess.item(),
            "p3o/kl": kl.item(),
            "p3o/capped": capped.item(),
            "ppo/clipped": clipped.float().mean().item(),
        }
        run.log(row)
        run.save(
            network=network.state_dict(),
            policies=policies.state_dict(),
            optimizer=optimizer.state_dict(),
            global_step=global_step,
            iteration=iteration,
            adaptive_length=adaptive_length,
        )
    run.close()
    return run.folder


# --- From here on: checks, files, signals, W&B. Nothing of it is about the algorithm. ---

SCRIPT = Path(__file__).name  # a file that replaces parts of this one puts its own name here


def fail(message, status=2):
    """End with one line on stderr. Status 2: the input is wrong; 1: the run went wrong."""
    tqdm.write(f"{SCRIPT}: {message}", file=sys.stderr)  # not into the progress bar
    raise SystemExit(status)


def check(args):
    """Refuse arguments that make no run, before any work starts."""
    limits = [
        (1, math.inf, "total_timesteps supervised_updates num_problems problems_min"),
        (1, math.inf, "eval_frequency adapt_frequency"),
        (2, math.inf, "group_size"),
        (0, math.inf, "seed lag"),
        (0, 1, "forget_share beta"),
        (1e-9, 1, "learning_rate supervised_rate clip_coef"),
        (1e-9, 1e9, "max_grad_norm temperature checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),
    ]
    if args.adapt_batch:
        limits.append((args.problems_min, args.problems_max, "num_problems"))
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if not low <= value <= high:  # as NaN is not, either
                fail(f"--{name.replace('_', '-')} {value}: it must be from {low} to {high}")
    if args.resume is None:
        folder = run_folder(args)
        if os.path.exists(folder):
            fail(f"{folder} is there already: choose another --run-name, or --resume it")


def fresh_seed(seed, iteration):
    """30 bits that differ with the run's seed and the iteration."""
    return int(np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1)[0]) >> 2


def run_folder(args):
    """Where the run's files are, or are going to be."""
    if args.resume is not None:
        return Path(args.resume.removesuffix("checkpoint.pt"))
    name = f"{args.loss}__{Path(SCRIPT).stem}__{args.seed}__{int(time.time())}"
    return Path(args.runs_dir, args.run_name or name)


def load_checkpoint(args, **modules):
    """The checkpoint of --resume, {} without; modules get their weights or optimiser state."""
    if args.resume is None:
        return {}
    try:  # with weights_only=True, a file from a stranger runs no code
        path = run_folder(args) / "checkpoint.pt"
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["args"].keys() != asdict(args).keys():
            raise ValueError("it has other options")
        for name in ("global_step", "iteration", "metrics_size"):
            checkpoint[name].bit_length()  # an error where it is no integer, and below no number
        length = min(max(checkpoint["adaptive_length"], args.problems_min), args.problems_max)
        if not args.adapt_batch:
            length = float(args.num_problems)
        checkpoint["adaptive_length"] = length
        checkpoint["seconds"] = float(checkpoint["seconds"])
        checkpoint["optimizer"]["param_groups"][0]["lr"] = args.learning_rate
        for name, module in modules.items():
            module.load_state_dict(checkpoint[name])
    except Exception as error:  # torn, foreign and wrong files have about ten ways to show it
        reason = str(error).partition("\n")[0]
        fail(f"--resume {args.resume}: no checkpoint of this version of {SCRIPT} ({reason})")
    return checkpoint


class Run:
    """A run's folder with its three files, the progress bar, W&B, and the signals that end it."""

    def __init__(self, args, saved):
        self.args = args
        self.interrupted = self.stopped = False
        self.seconds = saved.get("seconds", 0.0)
        self.folder = run_folder(args)
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(saved))
        except OSError as error:
            fail(f"{self.folder}: {error.strerror}; choose another --runs-dir or --run-name")
        config = {"script": SCRIPT, "args": asdict(args), "args_before": saved.get("args")}
        config |= {"device": DEVICE, "torch": torch.__version__}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.metrics = (self.folder / "metrics.csv").open("a", buffering=1)
        if saved:  # rows that came after the checkpoint are going to be written again
            self.metrics.truncate(min(saved["metrics_size"], self.metrics.tell()))
        if args.track:
            name = self.folder.name
            wandb.init(name=name, id=name, resume="allow", config=config)
        done = saved.get("global_step", 0)
        self.progress = tqdm(total=args.total_timesteps, initial=done, unit="step", unit_scale=True)
        self.progress.mininterval = 0.1 if sys.stderr.isatty() else 60  # seconds
        self.row_at = time.perf_counter()
        self.save_at = 0.0
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signum = getattr(signal, name, signal.SIGTERM)  # Windows has no SIGHUP
            if signal.getsignal(signum) == signal.SIG_DFL:  # not in a notebook or under nohup
                signal.signal(signum, self.interrupt)

    def interrupt(self, signum, frame):
        """Let the iteration finish; a second Ctrl-C ends at once."""
        self.interrupted = True
        signal.signal(signum, signal.SIG_DFL)

    def log(self, row):
        """Write, show and send an iteration's numbers, with its time."""
        now = time.perf_counter()
        self.seconds += now - self.row_at
        row["charts/seconds"] = self.seconds
        row["charts/SPS"] = row["abs/batch_size"] / (now - self.row_at)
        self.row_at = now
        table = csv.DictWriter(self.metrics, row, lineterminator="\n")
        if self.metrics.tell() == 0:
            table.writeheader()
        table.writerow(row)
        if self.args.track:
            sent = {name: value for name, value in row.items() if value is not None}
            wandb.log(sent, step=row["global_step"])
        shown = {"reward": row["charts/reward"], "L": row["abs/rollout_length"]}
        self.progress.set_postfix(shown, refresh=False)
        self.progress.update(row["abs/batch_size"])

    def save(self, **state):
        """Where it is due, replace checkpoint.pt: at any moment, a whole one is there."""
        for name, weights in state["network"].items():
            if not weights.isfinite().all():
                fail(f"{name} is not finite; a checkpoint in {self.folder} is from before", 1)
        self.stopped = self.interrupted or state["global_step"] >= self.args.total_timesteps
        if not self.stopped and time.perf_counter() < self.save_at:
            return
        state["args"] = asdict(self.args)
        state["seconds"] = self.seconds
        state["metrics_size"] = self.metrics.seek(0, os.SEEK_END)
        try:
            torch.save(state, self.folder / "checkpoint.tmp")
            os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")
        except (OSError, RuntimeError) as error:
            (self.folder / "checkpoint.tmp").unlink(missing_ok=True)
            fail(f"can't write {self.folder}/checkpoint.pt: {error}", 1)
        self.save_at = time.perf_counter() + self.args.checkpoint_every

    def close(self):
        self.progress.close()
        print(f"metrics and checkpoint: {self.folder}")


def launch():
    """What the command line starts. With --resume, the checkpoint's arguments are the defaults."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends at once
    sys.stderr = sys.stderr or open(os.devnull, "w")  # where it was closed
    try:
        args = tyro.cli(Args)
        if args.resume is not None:
            args = tyro.cli(Args, default=Args(**load_checkpoint(args)["args"]))
        main(args)
    except (OSError, wandb.Error) as error:  # a full disk, a closed pipe, no account
        fail(str(error).partition("\n")[0], 1)


if __name__ == "__main__":
    launch()
