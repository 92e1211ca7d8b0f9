# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "numpy>=2.0", "tyro>=1.0.17", "wandb>=0.25", "tqdm>=4.67",
#     "filelock>=3.24"]
# ///
"""P3O on token sequences, in one file: what stale data does to P3O, PPO and GRPO.

A small transformer learns to add two numbers, character by character. First it imitates a teacher
that often forgets to carry. Then reinforcement learning repairs what the teacher spoilt. An answer
earns 1 if it is exactly right, else 0. All its tokens share one advantage A: what the answer earned
minus the mean of the G answers to the same problem. So no critic is needed.

A sampler with the policy π_b writes the answers. A learner with the policy π_θ makes one gradient
step on each batch. Its loss is a mean over the N valid tokens i: those of each answer up to its end
mark, which counts, too. Their ratio is ρ_i = π_θ(token_i) / π_b(token_i). sg stops the gradient.

    p3o    -sg(min(ρ_i, e_B)) log π_θ(token_i) A_i + (1 - e_B) KL( π_θ ‖ π_b )    [arXiv 2605.12380]
           e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²)
    ppo    -min( ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i )                           [arXiv 1707.06347]
    grpo   ppo's, with A divided by the standard deviation of the G rewards       [arXiv 2402.03300]

e_B is the effective sample size as a share of N: what the batch is still worth. If the policies
agree, all ρ are 1, and e_B is 1. The more unequal the ρ are, the lower e_B is. Then a single token
may weigh less, and the KL divergence pulls π_θ harder back to π_b.

On fresh data ρ is 1, and P3O and PPO have the same gradient, -A ∇ log π_θ. They differ with --lag,
where an earlier policy writes the answers, and with --behavior-noise, where the sampler is not
quite the learner, as with a serving engine.

--adapt-batch adds Adaptive Batch Scaling [ABS: arXiv 2605.21557]. A batch has L problems with G
answers to each. Every K-th iteration measures δ, the mean of KL( π_θold ‖ π_θ ) over the valid
tokens: how far the update moved the policy. Where δ is large, L falls, and updates come more often.
Where δ is small, L grows, and batches have less noise (Eq. 4, at rollout_length).

P3O on fresh data, one minute:
    python p3o_tokens.py
PPO, 16 updates behind:
    python p3o_tokens.py --loss ppo --lag 16
P3O, with a sampler in bfloat16, and with ABS:
    python p3o_tokens.py --behavior-noise bfloat16 --adapt-batch
Continue a run after Ctrl-C or a crash:
    python p3o_tokens.py --resume runs/...
Your own model or rule for L: pass CausalTransformer or rollout_length to launch().
"""

import argparse
import copy
import ctypes
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from filelock import FileLock
from torch.distributions import Categorical, kl_divergence
from tqdm import tqdm


@dataclass
class Args:
    """P3O, PPO and GRPO on token sequences. A step is one answer; symbols are in brackets."""

    env_id: Literal["addition"] = "addition"  # the task, after which the run is named
    loss: Literal["p3o", "ppo", "grpo"] = "p3o"  # as above
    seed: int = 1  # seed of the model, the teacher, the problems and the answers
    total_timesteps: int = 30_720  # [T_total] answers to learn from
    group_size: int = 8  # [G] answers to each problem
    learning_rate: float = 1e-3  # learning rate of Adam
    clip_coef: float = 0.2  # [ε] of ppo and grpo
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    supervised_updates: int = 1500  # imitation of the teacher first, 64 answers each; 0 skips it
    supervised_rate: float = 2e-3  # learning rate of the imitation, before warm-up and decay
    forget_share: float = 0.5  # share of the teacher's answers in which it forgets to carry
    lag: int = 0  # the policy that answers is that of this many updates ago
    behavior_noise: Literal["none", "bfloat16", "temperature"] = "none"  # how the sampler differs
    temperature: float = 1.3  # of the sampler, if --behavior-noise is temperature
    eval_frequency: int = 10  # iterations from one evaluation to the next

    adapt_batch: bool = False  # ABS: adapt L; without it, L = num_problems
    num_problems: int = 32  # [L] problems in the first batch
    problems_min: int = 16  # [L_min] problems for a volatile policy
    problems_max: int = 64  # [L_max] problems for a stable policy
    adapt_frequency: int = 5  # [K] measure the KL divergence in every K-th iteration
    delta_min: float = 5e-4  # [δ_min] at this KL divergence or less, the policy counts as stable
    delta_max: float = 2e-2  # [δ_max] at this KL divergence or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L; the value is from the code of ABS's author

    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1 ...
    runs_dir: str = "runs"  # where the run's folder is created
    run_name: str | None = None  # the folder's name; by default task, script, seed and time
    checkpoint_every: float = 300.0  # seconds between checkpoints
    resume: str | None = None  # continue the run in this folder; its arguments become the defaults
    track: bool = False  # also log to Weights & Biases (the project is $WANDB_PROJECT)

    def __post_init__(self):
        check_args(self)  # refuses values that would fail late


# The task: " 347+  58=" is answered by "504\n". That is 405 backwards: one adds units first.
VOCABULARY = "0123456789+= \n"
END = VOCABULARY.index("\n")
PROMPT = 10  # tokens of a problem: two numbers of up to 4 digits, "+" and "="
ANSWER = 6  # tokens of an answer: up to 5 digits and END; more END is padding


def draw_problems(rng, count, held_out=False):
    """Pairs of numbers of 2 to 4 digits. Sums that 7 divides are held out of training."""
    problems = []
    while len(problems) < count:
        smallest_a, smallest_b = rng.choices((10, 100, 1000), k=2)
        a = rng.randrange(smallest_a, 10 * smallest_a)
        b = rng.randrange(smallest_b, 10 * smallest_b)
        is_held_out = (a + b) % 7 == 0
        if is_held_out == held_out:
            problems.append((a, b))
    return problems


def sum_without_carries(a, b):
    """The teacher's flaw: 58 + 67 = 15, each place by itself, modulo 10."""
    total = 0
    for place in (1, 10, 100, 1000):
        total += (a // place + b // place) % 10 * place
    return total


def encode(problems, totals, device):
    """The problems as prompts (N, PROMPT), and the totals as answers (N, ANSWER): int64 tokens."""
    tokens = []
    for (a, b), total in zip(problems, totals, strict=True):
        answer = str(total)[::-1].ljust(ANSWER, "\n")
        tokens.append([VOCABULARY.index(character) for character in f"{a:4}+{b:4}={answer}"])
    return torch.tensor(tokens, device=device).split([PROMPT, ANSWER], 1)


def valid_tokens(answers):
    """Which tokens of answers (N, ANSWER) count: those up to the first END."""
    is_end = (answers == END).long()
    ends_before = is_end.cumsum(1) - is_end
    return ends_before == 0


class CausalTransformer(nn.Module):
    """Tokens (N, T) -> float32 logits (N, T, V) of the next tokens, each given those up to it."""

    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(PROMPT + ANSWER, width)
        as_gpt2 = {"activation": "gelu", "norm_first": True, "batch_first": True}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, **as_gpt2)
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(VOCABULARY))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)  # with PyTorch's own, some seeds stall

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        return self.head(self.layers(x, mask, is_causal=True))


def policy_at(network, sequences, valid):
    """π before each valid token of an answer; sequences are prompts with answers."""
    logits = network(sequences[:, :-1])[:, PROMPT - 1 :]  # those at t are of token t + 1
    return Categorical(logits=logits[valid])


@torch.no_grad()
def write_answers(network, prompts, temperature=1.0, bfloat16=False):
    """Answers (N, ANSWER) to prompts (N, PROMPT), and the logits of π_b (N, ANSWER, V)."""
    tokens = F.pad(prompts, (0, ANSWER), value=END)
    behavior_logits = []
    for t in range(ANSWER):  # without a KV cache, which would round, so that fresh ρ are exactly 1
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            logits = network(tokens[:, :-1])[:, PROMPT - 1 + t]
        logits = logits.float() / temperature
        tokens[:, PROMPT + t] = Categorical(logits=logits).sample()
        behavior_logits.append(logits)
    answers = tokens[:, PROMPT:]
    answers = answers.where(valid_tokens(answers), END)  # what follows an END is padding
    return answers, torch.stack(behavior_logits, 1)


def accuracy(network, prompts, targets, temperature) -> float:
    """Share of the prompts that the network answers exactly; temperature 1e-6 is greedy."""
    answers, _ = write_answers(network, prompts, temperature)
    return (answers == targets).all(1).float().mean().item()


def imitate_teacher(network, args):
    """The supervised start: cross-entropy on the answers of a teacher with a flaw."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.supervised_rate)
    for update in range(args.supervised_updates):
        warm_up = update / 100
        decay = 1 - update / args.supervised_updates
        optimizer.param_groups[0]["lr"] = args.supervised_rate * min(warm_up, decay)
        problems = draw_problems(rng, 64)
        totals = []
        for a, b in problems:
            forgets = rng.random() < args.forget_share
            totals.append(sum_without_carries(a, b) if forgets else a + b)
        prompts, answers = encode(problems, totals, args.device)
        valid = valid_tokens(answers)
        policy = policy_at(network, torch.cat([prompts, answers], 1), valid)
        loss = -policy.log_prob(answers[valid]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def effective_sample_size(log_ratios):
    """e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²), from log ρ (N,): 1 where all ρ are equal, 1/N at worst."""
    ratios = (log_ratios - log_ratios.max()).exp()  # a common factor cancels; exp can't overflow
    return ratios.sum().square() / (len(ratios) * ratios.square().sum())


def rollout_length(divergence, length, *, rollout_min, rollout_max, delta_min, delta_max, beta):
    """The next L, a real number, from δ and the current L [ABS, Eq. 4].

    δ at or below delta_min asks for rollout_max, δ at or above delta_max for rollout_min.
    """
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * length + beta * target


def main(args, *, CausalTransformer=CausalTransformer, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own CausalTransformer or rollout_length."""
    torch.manual_seed(args.seed)
    network = CausalTransformer().to(args.device)
    sampler = CausalTransformer().to(args.device)  # filled in the loop
    if not args.resume:
        imitate_teacher(network, args)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    exam = draw_problems(random.Random(0), 256, held_out=True)  # the same in every run
    exam_prompts, exam_targets = encode(exam, np.sum(exam, 1), args.device)
    bfloat16 = args.behavior_noise == "bfloat16"
    temperature = args.temperature if args.behavior_noise == "temperature" else 1.0
    # Run keeps the log and the checkpoints. It saves, and loads, what has a state_dict.
    parts = {"network": network, "optimizer": optimizer, "rollout_length": rollout_length}
    with Run(args, parts) as run:
        iteration = run.saved.get("iteration", 0)  # saved is empty, unless the run is resumed
        global_step = run.saved.get("global_step", 0)
        adaptive_length = run.saved.get("adaptive_length", float(args.num_problems))  # ABS
        # Weights of the last lag + 1 policies. A full deque drops its oldest.
        policies = deque(run.saved.get("policies", []), maxlen=args.lag + 1)
        optimizer.param_groups[0]["lr"] = args.learning_rate  # --resume may bring a new one
        while global_step < args.total_timesteps and not run.interrupted:
            iteration += 1
            # Each iteration has its own seed, so a resumed run needs no state of the generators.
            seed = 1_000_000 * args.seed + iteration
            torch.manual_seed(seed)
            num_problems = round(adaptive_length) if args.adapt_batch else args.num_problems  # L
            batch_size = num_problems * args.group_size

            # 1. Collect G answers to each of L problems, by the policy of lag updates ago.
            policies.append(copy.deepcopy(network.state_dict()))
            sampler.load_state_dict(policies[0])  # the oldest
            problems = draw_problems(random.Random(seed), num_problems)
            problems = np.repeat(problems, args.group_size, 0)
            prompts, targets = encode(problems, problems.sum(1), args.device)
            answers, behavior_logits = write_answers(sampler, prompts, temperature, bfloat16)
            rewards = (answers == targets).all(1).float()
            run.scores.extend(rewards.tolist())  # an answer counts as a game
            global_step += batch_size

            # 2. Update θ by one gradient step on the mean loss of all valid tokens.
            groups = rewards.view(num_problems, args.group_size)
            advantages = groups - groups.mean(1, keepdim=True)  # A
            if args.loss == "grpo":
                advantages /= groups.std(1, correction=0, keepdim=True) + 1e-6
            sequences = torch.cat([prompts, answers], 1)
            valid = valid_tokens(answers)
            # [valid] picks the valid tokens of all answers: from here on, one row is one token.
            tokens = answers[valid]
            advantages = advantages.view(-1, 1).expand_as(valid)[valid]
            behavior = Categorical(logits=behavior_logits[valid])  # π_b
            policy = policy_at(network, sequences, valid)  # π_θ
            log_probs = policy.log_prob(tokens)
            log_ratios = log_probs - behavior.log_prob(tokens)
            ratios = log_ratios.exp()  # ρ
            # p3o: -sg(min(ρ, e_B)) log π_θ(token) A + (1 - e_B) KL( π_θ ‖ π_b )
            e_b = effective_sample_size(log_ratios.detach())
            weights = torch.minimum(ratios.detach(), e_b)
            kl = kl_divergence(policy, behavior).mean()
            p3o_loss = -(weights * log_probs * advantages).mean() + (1 - e_b) * kl
            # ppo, and grpo with other advantages: -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
            clipped_ratios = ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            ppo_loss = -torch.minimum(ratios * advantages, clipped_ratios * advantages).mean()
            losses = {"p3o": p3o_loss, "ppo": ppo_loss, "grpo": ppo_loss}
            loss = losses[args.loss]
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()

            # 3. ABS: measure how far the update moved the policy, and adapt L. policy is θ_old's.
            divergence = None
            if iteration % args.adapt_frequency == 0:
                with torch.no_grad():
                    new_policy = policy_at(network, sequences, valid)
                    divergence = kl_divergence(policy, new_policy).mean().item()
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

            # 4. Log and save. Evaluate every eval_frequency iterations, and at the end.
            greedy_accuracy = sampled_accuracy = None
            is_last = global_step >= args.total_timesteps
            if is_last or (iteration - 1) % args.eval_frequency == 0:
                greedy_accuracy = accuracy(network, exam_prompts, exam_targets, temperature=1e-6)
                sampled_accuracy = accuracy(network, exam_prompts, exam_targets, temperature=1.0)
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
                "p3o/ess": e_b.item(),
                "p3o/kl_weight": 1 - e_b.item(),
                "p3o/kl": kl.item(),
                "p3o/capped": (ratios > e_b).float().mean().item(),
                "ppo/clipped": (ratios != clipped_ratios).float().mean().item(),
            }
            run.log(row)
            run.checkpoint(
                iteration=iteration,
                global_step=global_step,
                adaptive_length=float(adaptive_length),
                policies=list(policies),
            )
    return run.folder


# --- From here on: checks, files, Ctrl-C and W&B. Nothing below is about the algorithm. ---


def check_args(args):
    """Refuse arguments that would fail late, or quietly train something else."""
    for name, value in vars(args).items():
        if isinstance(value, np.generic):  # a checkpoint cannot hold NumPy's numbers
            setattr(args, name, value.item())
    counts = "total_timesteps num_problems problems_min adapt_frequency eval_frequency"
    for name in counts.split():
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    for name in "clip_coef forget_share beta".split():
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1")
    if not (args.max_grad_norm > 0 and args.temperature > 0):
        raise ValueError("--max-grad-norm and --temperature must be above 0")
    if args.group_size < 2 or args.lag < 0:  # one answer alone has the advantage 0
        raise ValueError("--group-size must be at least 2, and --lag at least 0")
    if not 0 < args.delta_min < args.delta_max:
        raise ValueError("--delta-min must be above 0, and below --delta-max")
    if args.adapt_batch and not args.problems_min <= args.num_problems <= args.problems_max:
        raise ValueError("--num-problems must be from --problems-min to --problems-max")


class Run(AbstractContextManager):
    """A run's folder (config.json, metrics.csv, checkpoint.pt), progress bar, W&B and Ctrl-C."""

    def __init__(self, args, parts):
        """Open the folder. Parts with a state_dict are in checkpoints; a resumed run loads them."""
        script = Path(sys.argv[0]).stem
        name = f"{args.env_id}__{script}__{args.seed}__{int(time.time())}".replace("/", "-")
        self.folder = Path(args.resume or Path(args.runs_dir, args.run_name or name))
        self.folder.mkdir(parents=True, exist_ok=bool(args.resume))
        self.lock = FileLock(self.folder / "lock", blocking=False)
        self.lock.acquire()  # raises Timeout if another process is at work on the run
        self.saved = {}  # the checkpoint that a resumed run starts from
        self.counters = {}  # those of the last call of checkpoint()
        self.parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        if args.resume:
            # With weights_only, a file from someone else cannot run code.
            self.saved = torch.load(self.folder / "checkpoint.pt", "cpu", weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(self.saved[name])
        else:
            for source in (__file__, sys.argv[0]):  # this file, and the one that imported it
                if Path(source).is_file():
                    shutil.copy(source, self.folder)
        self.scores = deque(self.saved.get("scores", []), maxlen=100)  # of the last games

        config = {"script": script, "args": asdict(args), "torch": torch.__version__}
        self.wandb = None
        self.wandb_id = self.saved.get("wandb_id")
        if args.track:
            import wandb

            self.wandb = wandb.init(
                name=self.folder.name,
                id=self.wandb_id,
                resume="allow",
                config=config,
                reinit="create_new",  # a run that the caller has open stays open
            )
            self.wandb.define_metric("*", step_metric="global_step")
            self.wandb_id = self.wandb.id

        (self.folder / "config.tmp").write_text(json.dumps(config, indent=2, default=str) + "\n")
        os.replace(self.folder / "config.tmp", self.folder / "config.json")  # whole, or not at all
        table = self.folder / "metrics.csv"
        table.touch()
        # Rows after the checkpoint will be written again. What is kept ends with a whole row.
        kept = table.read_bytes()[: self.saved.get("metrics_size", 0)]
        os.truncate(table, kept.rfind(b"\n") + 1)
        self.metrics = table.open("a", buffering=1)

        first = self.saved.get("global_step", 0)
        self.bar = tqdm(total=args.total_timesteps, initial=first, unit_scale=True, mininterval=1)
        self.interrupted = False
        self.handlers = {}  # those of Ctrl-C and SIGTERM before this run
        with suppress(ValueError):  # only the main thread can set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.interrupt)
        self.checkpoint_every = args.checkpoint_every
        self.save_at = 0.0  # when the next checkpoint is due: the first one comes at once
        self.row_at = time.perf_counter()  # when the last row was written

    def interrupt(self, number, frame):
        """On Ctrl-C or SIGTERM, let main finish its iteration and save."""
        self.interrupted = True
        for handled, handler in self.handlers.items():
            signal.signal(handled, handler)
        with suppress(OSError):  # a closed terminal; print could fail inside a handler
            os.write(2, b"\nfinishing the iteration, then saving; Ctrl-C again stops at once\n")

    def log(self, row):
        """Write an iteration's row to metrics.csv, the progress bar and W&B."""
        # A NaN spreads to all weights, and to this last gradient. The run ends before it is saved.
        if not math.isfinite(row["losses/grad_norm"]):
            raise FloatingPointError(f"the gradient is not finite at step {row['global_step']:,}")
        now = time.perf_counter()
        row["charts/SPS"] = row["abs/batch_size"] / (now - self.row_at)
        row["charts/episodic_return"] = np.mean(self.scores) if self.scores else None
        self.row_at = now
        if self.metrics.tell() == 0:
            self.metrics.write(",".join(row) + "\n")
        cells = ["" if value is None else str(value) for value in row.values()]
        self.metrics.write(",".join(cells) + "\n")
        if self.wandb:
            self.wandb.log({name: value for name, value in row.items() if value is not None})
        with suppress(OSError):  # a closed terminal
            shown = {"score": row["charts/episodic_return"], "L": row["abs/rollout_length"]}
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(row["global_step"] - self.bar.n)

    def checkpoint(self, **counters):
        """Keep main's counters; save them, and the parts, every checkpoint_every seconds."""
        self.counters = counters
        if time.perf_counter() >= self.save_at:
            self.save()

    def save(self):
        """Write checkpoint.pt."""
        state = self.counters | {name: part.state_dict() for name, part in self.parts.items()}
        state |= {"scores": list(self.scores), "wandb_id": self.wandb_id}
        state["metrics_size"] = self.metrics.tell()
        torch.save(state, self.folder / "checkpoint.tmp")
        # What weights_only cannot read fails now, not when somebody wants to resume the run.
        torch.load(self.folder / "checkpoint.tmp", "cpu", weights_only=True)
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")
        self.save_at = time.perf_counter() + self.checkpoint_every

    def __exit__(self, kind, error, traceback):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if kind is None and self.counters:
            self.save()
        with suppress(OSError):  # a closed terminal
            self.bar.close()
        self.metrics.close()
        self.lock.release()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))


def launch(Args=Args, **parts):
    """The command line. The parts, by name, are those that main takes."""
    if sys.platform == "linux":
        # Keep freed memory instead of returning it to the system: up to 1.8 times as fast on a CPU.
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX is 0
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD is the largest number
    # A resumed run's arguments are the defaults of the command line. So --resume is read first.
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    resume = parser.parse_known_args()[0].resume
    try:
        default = Args()
        if resume:
            default = Args(**json.loads(Path(resume, "config.json").read_text())["args"])
        folder = main(tyro.cli(Args, default=default), **parts)
        print(f"saved; to continue or to extend it: --resume '{folder}'", file=sys.stderr)
    except OSError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    launch()
