# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "numpy>=2.0", "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""P3O on token sequences, in one file: what stale data does to P3O, PPO and GRPO.

A small transformer learns to add two numbers, character by character. First it imitates a teacher
that often forgets to carry. Then reinforcement learning repairs what the teacher spoilt. An
environment step is one whole answer here. An answer earns 1 if it is exactly right, else 0. All its
tokens share one advantage A: its reward minus the mean reward of the G answers to the same problem.
So no critic is needed.

The policy π_b that wrote a token may differ from the policy π_θ that learns from it. With the ratio
ρ_i = π_θ(token_i) / π_b(token_i), the losses are means over the N valid tokens of a batch:

    p3o    -sg(min(ρ_i, e_B)) log π_θ(token_i) A_i + (1 - e_B) KL( π_θ ‖ π_b )    [arXiv 2605.12380]
           e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²),   the effective sample size, from 1/N to 1
    ppo    -min( ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i )                           [arXiv 1707.06347]
    grpo   ppo's, with A divided by the standard deviation of the G rewards       [arXiv 2402.03300]

sg stops the gradient: the weights min(ρ_i, e_B) count as plain numbers, and so does 1 - e_B. N e_B
is the number of tokens that the batch is still worth. If the policies agree, all ρ are 1 and
e_B = 1: nothing is capped, and nothing pulls. The more unequal the ρ are, the lower is e_B. e_B is
the cap: the less a batch is worth, the less a single token may weigh. And 1 - e_B is the weight of
the KL divergence: the less a batch is worth, the harder π_θ is pulled back to π_b.

The valid tokens are those of an answer, its end mark included. The padding after it decides
nothing, so it must not count in e_B.

Every batch makes one gradient step. So P3O and PPO make the same update on fresh data. They differ
with --lag, where an earlier policy writes the answers, and with --behavior-noise, where the sampler
is not quite the learner, as with a serving engine.

--adapt-batch adds Adaptive Batch Scaling [ABS: arXiv 2605.21557]. A batch has L problems with G
answers to each. L follows the KL divergence δ of an update:

    δ   = mean over the valid tokens of KL( π_θold ‖ π_θ )
    α   = log(clip(δ, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)          0: stable, 1: volatile
    L_adapt ← (1 - β) L_adapt + β (L_max - α (L_max - L_min)),      L = round(L_adapt)       (Eq. 4)

P3O on fresh data, one minute:
    python p3o_tokens.py
PPO, 16 updates behind:
    python p3o_tokens.py --loss ppo --lag 16
P3O, with a sampler in bfloat16:
    python p3o_tokens.py --behavior-noise bfloat16
P3O with ABS:
    python p3o_tokens.py --adapt-batch
Continue a run after Ctrl-C or a crash:
    python p3o_tokens.py --resume runs/...
Your own model or schedule: pass CausalTransformer or rollout_length to launch().
"""

import copy
import json
import math
import multiprocessing
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
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
from tqdm import tqdm

try:
    import fcntl  # for a lock on the run's folder
except ImportError:  # on Windows
    fcntl = None


@dataclass
class Args:
    """P3O, PPO and GRPO on token sequences. A step is one answer; symbols are in brackets."""

    env_id: Literal["addition"] = "addition"  # the task
    loss: Literal["p3o", "ppo", "grpo"] = "p3o"  # as above
    seed: int = 1  # seed of the model, the teacher, the problems and the sampled answers
    total_timesteps: int = 30_720  # [T_total] answers to learn from: a step is one answer
    group_size: int = 8  # [G] answers to each problem
    learning_rate: float = 1e-3  # learning rate of Adam
    clip_coef: float = 0.2  # [ε] of ppo and grpo
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    supervised_updates: int = 1500  # imitation of the teacher first, 64 answers each; 0 skips it
    supervised_rate: float = 2e-3  # learning rate of the imitation; it rises first, and falls to 0
    forget_share: float = 0.5  # share of the teacher's answers in which it forgets to carry
    lag: int = 0  # the policy that answers is that of this many updates ago
    behavior_noise: Literal["none", "bfloat16", "temperature"] = "none"  # of the sampler
    temperature: float = 1.3  # of the sampler with --behavior-noise temperature; the learner's is 1
    eval_frequency: int = 10  # iterations from one evaluation to the next

    adapt_batch: bool = False  # ABS: adapt L; without it, L = num_problems
    num_problems: int = 32  # [L] problems in the first batch
    problems_min: int = 16  # [L_min] problems for a volatile policy
    problems_max: int = 64  # [L_max] problems for a stable policy
    adapt_frequency: int = 5  # [K] measure the KL divergence in every K-th iteration
    delta_min: float = 5e-4  # [δ_min] at this KL divergence or less, the policy counts as stable
    delta_max: float = 2e-2  # [δ_max] at this KL divergence or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L_adapt; the value is from its author's code

    runs_dir: str = "runs"  # where the run's folder is created
    run_name: str | None = None  # the folder's name; by default task, script, seed and time
    checkpoint_every: float = 300.0  # seconds between checkpoints
    resume: str | None = None  # continue the run in this folder; its arguments become the defaults
    track: bool = False  # also log to Weights & Biases (the project is $WANDB_PROJECT)


# The task: " 347+  58=" is answered by "504\n", with the units first, as one adds on paper.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def encode(problems, totals):
    """The problems as prompts (N, PROMPT), and the totals as answers (N, ANSWER): int64 tokens."""
    tokens = []
    for (a, b), total in zip(problems, totals, strict=True):
        answer = str(total)[::-1].ljust(ANSWER, "\n")
        tokens.append([VOCABULARY.index(character) for character in f"{a:4}+{b:4}={answer}"])
    return torch.tensor(tokens, device=DEVICE).split([PROMPT, ANSWER], 1)


def valid_tokens(answers):
    """Which tokens of answers (N, ANSWER) count: those up to the first END."""
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
                nn.init.normal_(parameter, std=0.02)  # with PyTorch's own, some seeds stall

    def forward(self, tokens):
        positions = self.positions.weight[: tokens.shape[1]]
        x = self.blocks(self.tokens(tokens) + positions)
        return self.head(self.norm(x))


def answer_logits(network, tokens):
    """Logits (N, ANSWER, V) of the answers in whole sequences (N, PROMPT + ANSWER), in float32."""
    logits = network(tokens[:, :-1])
    return logits[:, PROMPT - 1 :].float()


@torch.no_grad()
def write_answers(network, prompts, temperature):
    """Answers (N, ANSWER) to prompts (N, PROMPT), and log π_b (N, ANSWER, V) of all tokens.

    Each token takes a pass over the whole sequence. Attention is causal: what a pass says about one
    token depends only on those before it. So the last pass, which sees all of them, has log π_b of
    the whole answer. Learning makes the same pass, and so fresh data has ρ = 1 to the bit. A KV
    cache would be faster, but it would round differently.
    """
    tokens = F.pad(prompts, (0, ANSWER), value=END)
    for t in range(ANSWER):
        log_pi = (answer_logits(network, tokens) / temperature).log_softmax(-1)
        tokens[:, PROMPT + t] = log_pi[:, t].exp().multinomial(1).squeeze(1)
    answers = tokens[:, PROMPT:]
    return answers.where(valid_tokens(answers), END), log_pi  # what follows an END is padding


def accuracy(network, problems, temperature) -> float:
    """Share of the problems that the network answers exactly; temperature 1e-6 is greedy."""
    prompts, targets = encode(problems, np.sum(problems, 1))
    answers, _ = write_answers(network, prompts, temperature)
    is_right = (answers == targets).all(1)
    return is_right.float().mean().item()


def imitate_teacher(network, args):
    """The supervised start: cross-entropy on the answers of a teacher with a flaw."""
    rng = random.Random(seed_all(args.seed, 0))
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
    """A = r - mean(r) over the G answers to each of L problems, (L, G); if scaled, A / std(r)."""
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scaled:
        advantages = advantages / (rewards.std(1, correction=0, keepdim=True) + 1e-6)
    return advantages


def log_prob_of(log_pi, actions):
    """log π(a|s) (N,) of the actions a (N,), from log π(·|s) (N, A)."""
    return log_pi.gather(1, actions[:, None]).squeeze(1)


def effective_sample_size(log_ratios):
    """e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²), from log ρ (N,): 1 if all ρ are equal, 1/N if one dominates.

    Dividing all ρ by the largest changes nothing, and keeps exp from overflowing.
    """
    ratios = (log_ratios - log_ratios.max()).exp()
    return ratios.sum().square() / (len(ratios) * ratios.square().sum())


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)): log-probabilities (N, A) -> (N,)."""
    log_ratios = log_p - log_q
    return (log_p.exp() * log_ratios).sum(-1)


def p3o_loss(log_pi, log_behavior, actions, advantages):
    """Returns P3O's policy loss, e_B, the mean KL divergence, and the share of ratios above e_B.

    L_π = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) mean_i KL( π_θ ‖ π_b )(s_i)

    log_pi and log_behavior are log π_θ(·|s) and log π_b(·|s), (N, A). actions are (N,), advantages
    too. No gradient flows through e_B.
    """
    log_probs = log_prob_of(log_pi, actions)
    log_ratios = (log_probs - log_prob_of(log_behavior, actions)).detach()  # sg
    ratios = log_ratios.exp()
    ess = effective_sample_size(log_ratios)  # e_B
    weights = torch.minimum(ratios, ess)
    policy_gradient = -(weights * log_probs * advantages).mean()
    kl = kl_divergence(log_pi, log_behavior).mean()
    loss = policy_gradient + (1 - ess) * kl
    capped_share = (ratios > ess).float().mean()
    return loss, ess, kl.detach(), capped_share


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's policy loss of each sample. All are (N,), the result too.

    ρ = π_θ(a|s) / π_θold(a|s),    L_π = -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
    """
    ratios = (log_probs - old_log_probs).exp()
    clipped_ratios = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.minimum(ratios * advantages, clipped_ratios * advantages)


def rollout_length(
    divergence, adaptive_length, *, rollout_min, rollout_max, delta_min, delta_max, beta
) -> float:
    """The next L_adapt, a real number of steps, from δ_π and the current L_adapt [ABS, Eq. 4].

    α = log(δ_clipped / δ_min) / log(δ_max / δ_min)          0: stable, 1: volatile
    L' = L_max - α (L_max - L_min)
    L_adapt ← (1 - β) L_adapt + β L'

    The paper also writes α for β. They cannot be the same number: with β = α, a stable policy
    (α = 0) would never change L_adapt. Raises ValueError if the limits are not positive and in
    order.
    """
    if not (0 < delta_min < delta_max and 0 < rollout_min <= rollout_max):
        raise ValueError("needs 0 < delta_min < delta_max and 0 < rollout_min <= rollout_max")
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * adaptive_length + beta * target


def seed_all(seed, iteration) -> int:
    """Seed Python, NumPy and PyTorch with one number derived from both arguments; return it."""
    number = np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1)[0]
    number = int(number) >> 2  # below 2^30: environment i gets number + i, which must be < 2^31
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def main(args, CausalTransformer=CausalTransformer, rollout_length=rollout_length) -> Path:
    """Train, and return the run's folder. Pass your own CausalTransformer or rollout_length."""
    check_args(args)
    folder = run_folder(args)
    noise = args.behavior_noise
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=noise == "bfloat16")
    temperature = args.temperature if noise == "temperature" else 1.0
    seed_all(args.seed, 0)
    network = CausalTransformer().to(DEVICE)
    if args.resume is None:
        imitate_teacher(network, args)
    network.eval()  # no dropout from here on, also in learning: fresh data must have ρ = 1
    # Slot i mod (lag + 1) holds iteration i's policy, so the next slot has that of lag iterations
    # ago. At first, all of them hold the first policy.
    policies = nn.ModuleList()
    for _ in range(args.lag + 1):
        policies.append(copy.deepcopy(network))
    optimizer = torch.optim.Adam(network.parameters())  # the loop sets the learning rate
    # What a checkpoint stores. Your own rollout_length may be an object with a state_dict().
    modules = {"network": network, "policies": policies, "optimizer": optimizer}
    modules["rollout_length"] = rollout_length
    saved = load_checkpoint(args, folder, modules)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    saved_length = saved.get("adaptive_length", float(args.num_problems))  # limits may be new
    adaptive_length = min(max(saved_length, args.problems_min), args.problems_max)  # ABS: L_adapt
    exam = draw_problems(random.Random(0), 256, held_out=True)  # the same in every run

    with Run(args, folder, DEVICE, noise == "bfloat16", saved) as run:
        done = global_step >= args.total_timesteps
        while not done:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed = seed_all(args.seed, iteration)
            # ABS: L is a number of problems here.
            num_problems = round(adaptive_length) if args.adapt_batch else args.num_problems
            batch_size = num_problems * args.group_size
            global_step += batch_size
            optimizer.param_groups[0]["lr"] = args.learning_rate

            # 1. Collect G answers to each of L problems, by the policy of lag iterations ago.
            policies[iteration % len(policies)].load_state_dict(network.state_dict())
            sampler = policies[(iteration + 1) % len(policies)]
            problems = draw_problems(random.Random(seed), num_problems)
            problems = np.repeat(problems, args.group_size, 0)
            prompts, targets = encode(problems, problems.sum(1))
            with autocast:
                answers, log_behavior = write_answers(sampler, prompts, temperature)
            rewards = (answers == targets).all(1).float()
            run.scores.extend(rewards.tolist())  # an answer counts as an episode

            # 2. Update θ by one gradient step on the mean loss of all valid tokens.
            grouped = rewards.view(num_problems, args.group_size)
            answer_advantages = group_advantages(grouped, scaled=args.loss == "grpo").flatten()
            # From here on, tensors have one row per valid token. [valid] picks them, in order.
            valid = valid_tokens(answers)
            tokens = answers[valid]
            log_pi_b = log_behavior[valid]
            advantages = answer_advantages.repeat_interleave(valid.sum(1))
            sequences = torch.cat([prompts, answers], 1)
            log_pi = answer_logits(network, sequences)[valid].log_softmax(-1)
            log_probs = log_prob_of(log_pi, tokens)
            log_probs_b = log_prob_of(log_pi_b, tokens)
            loss, ess, kl, capped_share = p3o_loss(log_pi, log_pi_b, tokens, advantages)
            if args.loss != "p3o":
                losses = clipped_surrogate(log_probs, log_probs_b, advantages, args.clip_coef)
                loss = losses.mean()
            ratios = (log_probs - log_probs_b).exp()
            is_outside = (ratios - 1).abs() > args.clip_coef  # of PPO's 1 ± ε
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()

            # 3. ABS: measure how far the update moved the policy, and adapt L. log_pi is θ_old's.
            divergence = None
            if iteration % args.adapt_frequency == 0:
                with torch.no_grad():
                    new_log_pi = answer_logits(network, sequences)[valid].log_softmax(-1)
                    divergence = kl_divergence(log_pi, new_log_pi).mean().item()
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
            is_last = global_step >= args.total_timesteps
            if is_last or (iteration - 1) % args.eval_frequency == 0:
                greedy_accuracy = accuracy(network, exam, temperature=1e-6)
                sampled_accuracy = accuracy(network, exam, temperature=1.0)
            row = {
                "global_step": global_step,
                "charts/reward": rewards.mean().item(),
                "charts/greedy_accuracy": greedy_accuracy,
                "charts/sampled_accuracy": sampled_accuracy,
                "abs/rollout_length": num_problems,  # L
                "abs/batch_size": batch_size,
                "abs/kl_divergence": divergence,
                "losses/policy_loss": loss.item(),
                "losses/grad_norm": grad_norm.item(),
                "p3o/ess": ess.item(),
                "p3o/kl_weight": 1 - ess.item(),
                "p3o/kl": kl.item(),
                "p3o/capped": capped_share.item(),
                "ppo/clipped": is_outside.float().mean().item(),
            }
            run.check_finite(network)
            run.log(row)
            done = is_last or run.interrupted
            if done or run.save_is_due():
                counters = {"global_step": global_step, "iteration": iteration}
                run.save(modules, adaptive_length=float(adaptive_length), **counters)
    return folder


# --- From here on: checks, files, signals and W&B. Nothing below is about the algorithm. ---

SCRIPT = Path(sys.argv[0]).name  # the program that was started, for example minatar_abs.py
COMMANDS = ("python {} --resume",)  # named at the end of a run; tools need episodes of a game


def say(message):
    """Print a line to stderr, above the progress bar."""
    try:
        tqdm.write(message, file=sys.stderr)
    except OSError:  # a closed pipe or a full disk must not stop training
        sys.stderr = open(os.devnull, "w")


def fail(message, status=2):
    """Print one line to stderr and exit: status 2 for bad input, 1 for a run that failed."""
    say(f"{SCRIPT}: {message}".partition("\n")[0])
    raise SystemExit(status)


def check_args(args):
    """Refuse arguments that cannot work, before anything starts."""
    limits = [
        (0, 2**63, "seed"),
        (1, 10**15, "total_timesteps"),
        (0, 10**6, "supervised_updates"),
        (1, 10**6, "num_problems problems_min"),
        (args.problems_min, 10**6, "problems_max"),
        (1, 10**9, "eval_frequency adapt_frequency"),
        (2, 10**6, "group_size"),
        (0, 10**4, "lag"),
        (0, 1, "forget_share beta"),
        (1e-9, 1, "learning_rate supervised_rate clip_coef"),
        (1e-9, 1e9, "max_grad_norm temperature checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),  # above 0 and below delta_max
    ]
    if args.adapt_batch:
        limits.append((args.problems_min, args.problems_max, "num_problems"))
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if not low <= value <= high:  # NaN is refused, too
                option = name.replace("_", "-")
                shown = str(value)[:20]  # somebody may type 400 digits
                fail(f"--{option} {shown}: it must be from {low} to {high}")


def run_folder(args):
    """The folder of --resume, or that of a new run, which must not exist yet."""
    if args.resume is not None:
        return Path(args.resume)
    name = f"{args.env_id}__{Path(SCRIPT).stem}__{args.seed}__{int(time.time())}"
    folder = Path(args.runs_dir, args.run_name or name.replace("/", "-"))
    if os.path.exists(folder):  # Path.exists raises an error if the name is too long
        fail(f"{folder} exists already: choose another --run-name, or --resume it")
    return folder


def load_checkpoint(args, folder, modules):
    """The checkpoint of --resume, or {} in a new run. The modules get their saved states."""
    if args.resume is None:
        return {}
    try:  # with weights_only=True, a file from someone else cannot run code
        saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        for name, module in modules.items():
            if hasattr(module, "state_dict"):  # a function such as rollout_length has none
                module.load_state_dict(saved[name])
        # load_state_dict does not check the shapes of the optimizer's averages; copy_ does.
        for parameter, state in modules["optimizer"].state.items():
            for name, value in state.items():
                expected = torch.tensor(0.0, device=value.device) if name == "step" else parameter
                state[name] = torch.empty_like(expected).copy_(value)
    except Exception as error:  # a missing, damaged or unrelated file raises many types of error
        fail(f"--resume {folder}: no checkpoint that {SCRIPT} can continue: {error}")
    return saved


def provenance() -> dict:
    """The versions of Python and the packages, and this file's git commit, if it has one."""
    found = {"python": platform.python_version(), "commit": None}
    for name in ("torch", "gymnasium", "ale_py", "mujoco"):  # None if not imported
        found[name] = getattr(sys.modules.get(name), "__version__", None)
    # The full commit hash, with "-dirty" if files have changed since.
    git = "git describe --always --abbrev=40 --exclude=* --dirty".split()
    with suppress(OSError):  # git may not be installed
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
        found["commit"] = done.stdout.strip() or None
    return found


def replace_file(path, write):
    """Replace a file atomically: path always holds the whole old file or the whole new one."""
    temporary = path.with_suffix(".tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from error


class Run(AbstractContextManager):
    """A run's folder (config.json, metrics.csv, checkpoint.pt), progress bar, W&B and signals."""

    def __init__(self, args, folder, device, bfloat16, saved):
        self.args = args
        self.folder = folder
        self.interrupted = False  # by Ctrl-C, SIGTERM or SIGHUP
        self.scores = deque(saved.get("scores", []), maxlen=100)  # of the last episodes
        self.score = 0.0  # of the episodes in progress: (E,) after the first step
        self.step = saved.get("global_step", 0)
        self.seconds = saved.get("seconds", 0.0)
        config = {"script": SCRIPT, "args": asdict(args), "provenance": provenance()}
        config |= {"device": str(device), "bfloat16": bfloat16}
        try:
            folder.mkdir(parents=True, exist_ok=args.resume is not None)
            self.metrics = (folder / "metrics.csv").open("a", buffering=1)
        except OSError as error:
            fail(error)
        try:
            fcntl.flock(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process is at work on {folder}")
        except (AttributeError, OSError):  # Windows, or a file system that has no locks
            pass
        self.wandb = None
        self.wandb_id = saved.get("wandb_id")
        if args.track:
            try:
                import wandb

                names = {"name": folder.resolve().name, "id": self.wandb_id}
                self.wandb = wandb.init(**names, resume="allow", config=config)
                self.wandb.define_metric("*", step_metric="global_step")
                self.wandb_id = self.wandb.id
            except Exception as error:  # not installed, not logged in, or an invalid name
                if not saved:
                    shutil.rmtree(folder)
                fail(f"--track: {error}")
        text = json.dumps(config, indent=2) + "\n"
        replace_file(folder / "config.json", lambda path: path.write_text(text))
        # Rows after the checkpoint will be written again. (A file that was edited may be shorter.)
        self.metrics.truncate(min(saved.get("metrics_size", 0), self.metrics.tell()))
        # The delay keeps tqdm from drawing now: only log() survives a stderr that is closed.
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit_scale=True, delay=1e-9)
        self.bar.mininterval = 0.1 if sys.stderr.isatty() else 60  # seconds
        # Ctrl-C reaches the whole process group: move environments that are processes out of it.
        for worker in multiprocessing.active_children():
            with suppress(AttributeError, OSError):
                os.setpgid(worker.pid, 0)
        self.handlers = {}  # the old ones; __exit__ restores them
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self.handlers[number] = signal.signal(number, self.interrupt)
        self.shown = "no iteration was left to do"  # log() replaces it; __exit__ prints it
        self.row_at = time.perf_counter()
        self.save_at = 0.0  # the first save is due after the first iteration

    def interrupt(self, number, frame):
        self.interrupted = True
        signal.signal(number, signal.SIG_DFL)  # a second one ends the run at once
        with suppress(OSError):  # os.write, because print is not safe in a signal handler
            os.write(2, b"\nfinishing the iteration, then saving; once more to stop at once\n")

    def add_rewards(self, reward, game_over):
        """Add a step's rewards (E,) to the scores; the mean of the last 100 is shown and logged."""
        self.score = self.score + reward
        self.scores.extend(self.score[game_over].tolist())
        self.score[game_over] = 0

    def check_finite(self, network):
        """If learning has diverged, end the run but keep its last checkpoint."""
        for name, weights in network.state_dict().items():
            if not weights.isfinite().all():
                fail(f"{name} is no longer finite; {self.folder} keeps its checkpoint, if any", 1)

    def log(self, row):
        """Write an iteration's row to metrics.csv, the progress bar and W&B."""
        now = time.perf_counter()
        self.seconds += now - self.row_at
        row["charts/seconds"] = self.seconds
        row["charts/SPS"] = row["abs/batch_size"] / (now - self.row_at)
        row["charts/episodic_return"] = np.mean(self.scores) if self.scores else None
        self.row_at = now
        if self.metrics.tell() == 0:
            self.metrics.write(",".join(row) + "\n")
        cells = ["" if value is None else str(value) for value in row.values()]
        self.metrics.write(",".join(cells) + "\n")
        if self.wandb:
            self.wandb.log({name: value for name, value in row.items() if value is not None})
        self.step = row["global_step"]
        score = f"return {np.mean(self.scores):.4g}" if self.scores else "no episode yet"
        self.shown = f"{score}, L {row['abs/rollout_length']}"
        try:
            self.bar.set_postfix_str(self.shown, refresh=False)
            self.bar.update(min(self.step, self.args.total_timesteps) - self.bar.n)
        except OSError:  # stderr is a closed pipe or a full disk
            self.bar.disable = True

    def save_is_due(self):
        return time.perf_counter() >= self.save_at

    def save(self, modules, **state):
        """Write checkpoint.pt: counters and scores, and the states of the modules."""
        for name, module in modules.items():
            if hasattr(module, "state_dict"):
                state[name] = module.state_dict()
        state |= {"scores": list(self.scores), "seconds": self.seconds}
        state |= {"metrics_size": self.metrics.tell(), "wandb_id": self.wandb_id}
        replace_file(self.folder / "checkpoint.pt", lambda path: torch.save(state, path))
        self.save_at = time.perf_counter() + self.args.checkpoint_every

    def __exit__(self, *error):
        """Undo what __init__ did, even if training ended with an exception."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        with suppress(OSError):
            self.metrics.close()
        with suppress(OSError):
            self.bar.close()
        if self.wandb:
            self.wandb.finish()
        if not (self.folder / "checkpoint.pt").exists():  # nothing to resume
            shutil.rmtree(self.folder)
        elif error == (None, None, None):
            verb = "stopped" if self.interrupted else "finished"
            say(f"{verb} after {self.step:,} steps and {self.seconds:,.0f} s: {self.shown}")
            threads = os.environ.get("OMP_NUM_THREADS")
            prefix = f"OMP_NUM_THREADS={threads} " if threads and os.name == "posix" else ""
            folder = shlex.quote(self.folder.as_posix())
            for command in COMMANDS:
                say(f"    {prefix}{command.format(sys.argv[0])} {folder}")


def launch(Args=Args, **parts):
    """The command line. parts are passed to main: make_envs, a network class, rollout_length."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends it at once
    sys.stderr = sys.stderr or open(os.devnull, "w")  # None if it was closed
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # not every console can print Greek letters
    args = tyro.cli(Args)
    if args.resume is not None:
        try:
            config = json.loads(Path(args.resume, "config.json").read_text())
            if config["script"] != SCRIPT:
                fail(f"--resume {args.resume}: made by {config['script']}, so start that script")
            defaults = Args(**config["args"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            fail(f"--resume {args.resume}: no run that {SCRIPT} can continue: {error}")
        args = tyro.cli(Args, default=defaults)  # again: options given now override the run's
    try:
        main(args, **parts)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # a bug. (PyTorch also raises RuntimeError when memory runs out.)
        fail(f"{type(error).__name__}: {error}", 1)


if __name__ == "__main__":
    launch()
