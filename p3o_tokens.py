# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "numpy>=2.0", "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""P3O on token sequences, in one file: what stale data does to P3O, PPO and GRPO.

A small transformer learns to add two numbers, character by character. First it imitates a teacher
that often forgets to carry. Then reinforcement learning repairs what the teacher spoilt. An answer
earns 1 if it is exactly right, else 0. All its tokens share one advantage A: what the answer earned
minus the mean of the G answers to the same problem. So no critic is needed.

A sampler with the policy π_b writes the answers. A learner with the policy π_θ learns from them.
Their ratio is ρ_i = π_θ(token_i) / π_b(token_i). A batch has N valid tokens: those of each answer
up to its end mark, which counts, too. The padding after it decides nothing. The losses are means
over the valid tokens i. sg stops the gradient: what is in it counts as a plain number.

    p3o    -sg(min(ρ_i, e_B)) log π_θ(token_i) A_i + (1 - e_B) KL( π_θ ‖ π_b )    [arXiv 2605.12380]
           e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²)
    ppo    -min( ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i )                           [arXiv 1707.06347]
    grpo   ppo's, with A divided by the standard deviation of the G rewards       [arXiv 2402.03300]

e_B, from 1/N to 1, is the effective sample size as a share of N: what the batch is still worth. If
the policies agree, all ρ are 1 and e_B is 1. No weight is capped then, and the KL divergence has
the weight 0. The more unequal the ρ are, the lower e_B is. Then a single token may weigh less, and
the KL divergence pulls π_θ harder back to π_b.

Every batch makes one gradient step. On fresh data ρ is 1, and P3O and PPO have the same gradient,
-A ∇ log π_θ. They differ with --lag, where an earlier policy writes the answers, and with
--behavior-noise, where the sampler is not quite the learner, as with a serving engine.

--adapt-batch adds Adaptive Batch Scaling [ABS: arXiv 2605.21557]. A batch has L problems with G
answers to each. In every K-th iteration it measures δ, the mean of KL( π_θold ‖ π_θ ) over the
valid tokens: how far the update moved the policy. Where δ is large, L falls, and there are more
updates. Where δ is small, L grows, and batches have less noise (Eq. 4, at rollout_length).

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

import copy
import ctypes
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm


@dataclass
class Args:
    """P3O, PPO and GRPO on token sequences. A step is one answer; symbols are in brackets."""

    env_id: Literal["addition"] = "addition"  # the task
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
    beta: float = 0.1  # [β] step size of L_adapt; the value is from the code of ABS's author

    runs_dir: str = "runs"  # where the run's folder is created
    run_name: str | None = None  # the folder's name; by default task, script, seed and time
    checkpoint_every: float = 300.0  # seconds between checkpoints
    resume: str | None = None  # continue the run in this folder; its arguments become the defaults
    track: bool = False  # also log to Weights & Biases (the project is $WANDB_PROJECT)


# The task: " 347+  58=" is answered by "504\n". That is 405 backwards: one adds units first.

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
    """Tokens (N, T) -> logits (N, T, V). Position t predicts token t + 1 from tokens 0 to t."""

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


def answer_log_pi(network, tokens, temperature=1.0):
    """log π (N, ANSWER, V) of all tokens at an answer's places, given what stands before them.

    tokens are problems with answers (N, PROMPT + ANSWER).
    """
    next_token_logits = network(tokens[:, :-1])
    logits = next_token_logits[:, PROMPT - 1 :]
    log_pi = (logits.float() / temperature).log_softmax(-1)
    # Your own model may mask tokens with -inf. In the KL divergence, 0 times inf would be a NaN.
    return log_pi.clamp(min=-1e9)


@torch.no_grad()
def write_answers(network, prompts, temperature):
    """Answers (N, ANSWER) to prompts (N, PROMPT), and log π_b (N, ANSWER, V) of all tokens.

    Each token takes a pass over the whole sequence. A KV cache would be faster, but it rounds
    differently, and fresh data should have ρ = 1 exactly.
    """
    tokens = F.pad(prompts, (0, ANSWER), value=END)
    log_behavior = []
    for t in range(ANSWER):
        log_pi = answer_log_pi(network, tokens, temperature)[:, t]
        tokens[:, PROMPT + t] = log_pi.exp().multinomial(1).squeeze(1)
        log_behavior.append(log_pi)
    answers = tokens[:, PROMPT:]
    answers = answers.where(valid_tokens(answers), END)  # what follows an END is padding
    return answers, torch.stack(log_behavior, 1)


def accuracy(network, problems, temperature) -> float:
    """Share of the problems that the network answers exactly; temperature 1e-6 is greedy."""
    prompts, targets = encode(problems, np.sum(problems, 1))
    answers, _ = write_answers(network, prompts, temperature)
    is_right = (answers == targets).all(1)
    return is_right.float().mean().item()


def imitate_teacher(network, args, rng):
    """The supervised start: cross-entropy on the answers of a teacher with a flaw."""
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
        prompts, answers = encode(problems, totals)
        valid = valid_tokens(answers)
        log_pi = answer_log_pi(network, torch.cat([prompts, answers], 1))
        loss = F.nll_loss(log_pi[valid], answers[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def group_advantages(rewards, group_size, scaled):
    """A = r - mean(r) over the G answers to a problem; if scaled, A / std(r). Takes r (N,)."""
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scaled:
        advantages = advantages / (groups.std(1, correction=0, keepdim=True) + 1e-6)
    return advantages.flatten()


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
    e_b = effective_sample_size(log_ratios)
    weights = torch.minimum(ratios, e_b)
    policy_gradient = -(weights * log_probs * advantages).mean()
    kl = kl_divergence(log_pi, log_behavior).mean()
    loss = policy_gradient + (1 - e_b) * kl
    capped_share = (ratios > e_b).float().mean()
    return loss, e_b, kl.detach(), capped_share


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's policy loss (N,) of N samples. old_log_probs are those of π_b, the policy that played.

    ρ = π_θ(a|s) / π_b(a|s),    L_π = -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
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

    The paper calls β α, too. Raises ValueError if the limits are not positive and in order.
    """
    if not (0 < delta_min < delta_max and 0 < rollout_min <= rollout_max):
        raise ValueError("needs 0 < delta_min < delta_max and 0 < rollout_min <= rollout_max")
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * adaptive_length + beta * target


def main(args, *, CausalTransformer=CausalTransformer, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own CausalTransformer or rollout_length."""
    check_args(args)
    folder, saved = run_folder(args)  # saved is what a checkpoint holds; empty in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    adaptive_length = saved.get("adaptive_length", float(args.num_problems))  # ABS: L_adapt
    # --resume may bring new limits.
    adaptive_length = min(max(adaptive_length, args.problems_min), args.problems_max)

    seed = seed_all(args.seed, 0)
    network = CausalTransformer().to(DEVICE)
    if not saved:
        imitate_teacher(network, args, random.Random(seed))
    network.eval()  # dropout, if your model has any, would make ρ differ from 1 on fresh data
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    modules = {"network": network, "optimizer": optimizer}  # whose states a checkpoint stores
    if hasattr(rollout_length, "state_dict"):  # your own may be an object with a state
        modules["rollout_length"] = rollout_length
    if saved:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
        optimizer.param_groups[0]["lr"] = args.learning_rate  # --resume may bring a new one
    sampler = copy.deepcopy(network)
    # Weights of the last lag + 1 policies. A full deque drops its oldest.
    policies = deque(saved.get("policies", []), maxlen=args.lag + 1)
    bfloat16 = args.behavior_noise == "bfloat16"
    autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=bfloat16)
    temperature = args.temperature if args.behavior_noise == "temperature" else 1.0
    exam = draw_problems(random.Random(0), 256, held_out=True)  # the same in every run
    with Run(args, folder, DEVICE, bfloat16, saved) as run:
        finished = False
        while not finished:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed = seed_all(args.seed, iteration)
            num_problems = round(adaptive_length) if args.adapt_batch else args.num_problems  # L
            batch_size = num_problems * args.group_size
            global_step += batch_size

            # 1. Collect G answers to each of L problems, by the policy of lag updates ago.
            policies.append(copy.deepcopy(network.state_dict()))
            sampler.load_state_dict(policies[0])  # the oldest
            problems = draw_problems(random.Random(seed), num_problems)
            problems = np.repeat(problems, args.group_size, 0)
            prompts, targets = encode(problems, problems.sum(1))
            with autocast:
                answers, log_behavior = write_answers(sampler, prompts, temperature)
            rewards = (answers == targets).all(1).float()
            run.scores.extend(rewards.tolist())  # an answer counts as an episode

            # 2. Update θ by one gradient step on the mean loss of all valid tokens.
            is_scaled = args.loss == "grpo"
            answer_advantages = group_advantages(rewards, args.group_size, is_scaled)
            sequences = torch.cat([prompts, answers], 1)
            valid = valid_tokens(answers)
            # [valid] picks the valid tokens of all answers: from here on, one row is one token.
            tokens = answers[valid]
            advantages = answer_advantages[:, None].expand_as(valid)[valid]
            log_pi_b = log_behavior[valid]
            log_pi = answer_log_pi(network, sequences)[valid]
            log_probs = log_prob_of(log_pi, tokens)
            log_probs_b = log_prob_of(log_pi_b, tokens)
            # e_B and KL are logged whichever loss it is, so that they can be compared.
            p3o, e_b, kl, capped_share = p3o_loss(log_pi, log_pi_b, tokens, advantages)
            ppo = clipped_surrogate(log_probs, log_probs_b, advantages, args.clip_coef).mean()
            loss = p3o if args.loss == "p3o" else ppo  # grpo is ppo with other advantages
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()
            # A NaN in a weight or a loss spreads to the gradient.
            if not grad_norm.isfinite():
                raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")

            # 3. ABS: measure how far the update moved the policy, and adapt L. log_pi is θ_old's.
            divergence = None
            if iteration % args.adapt_frequency == 0:
                with torch.no_grad():
                    new_log_pi = answer_log_pi(network, sequences)[valid]
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

            # 4. Log and save. Evaluate first and last, and in between every eval_frequency times.
            greedy_accuracy = sampled_accuracy = None
            is_last = global_step >= args.total_timesteps
            if is_last or (iteration - 1) % args.eval_frequency == 0:
                greedy_accuracy = accuracy(network, exam, temperature=1e-6)
                sampled_accuracy = accuracy(network, exam, temperature=1.0)
            ratios = (log_probs - log_probs_b).exp()
            is_outside = (ratios - 1).abs() > args.clip_coef  # of PPO's 1 ± ε
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
                "p3o/ess": e_b.item(),
                "p3o/kl_weight": 1 - e_b.item(),
                "p3o/kl": kl.item(),
                "p3o/capped": capped_share.item(),
                "ppo/clipped": is_outside.float().mean().item(),
            }
            run.log(row)
            finished = is_last or run.interrupted
            if finished or time.perf_counter() >= run.save_at:
                counters = {"global_step": global_step, "iteration": iteration}
                counters["adaptive_length"] = float(adaptive_length)
                run.save(modules, policies=list(policies), **counters)
    return folder


# --- From here on: checks, files, signals and W&B. Nothing below is about the algorithm. ---

SCRIPT = Path(sys.argv[0]).name  # the program that was started, for example minatar_abs.py


class UsageError(ValueError):
    """Something that was passed cannot work. launch() prints it as one line."""


def check_args(args):
    """Refuse arguments that would fail late, or quietly train something else."""
    for name, value in asdict(args).items():
        if isinstance(value, np.generic):  # checkpoints can hold only Python's own numbers
            setattr(args, name, value.item())
    for name in ("env_id", "loss", "behavior_noise"):  # a program can pass any text
        choices = get_args(Args.__annotations__[name])
        if getattr(args, name) not in choices:
            raise UsageError(f"--{name.replace('_', '-')} must be one of {choices}")
    limits = [
        (0, math.inf, "seed supervised_updates lag"),
        (1, math.inf, "total_timesteps num_problems problems_min eval_frequency adapt_frequency"),
        (2, math.inf, "group_size"),
        (1e-9, math.inf, "max_grad_norm temperature checkpoint_every delta_min"),
        (0, 1, "learning_rate supervised_rate clip_coef forget_share beta"),
        (args.delta_min * 1.001, math.inf, "delta_max"),
        (args.problems_min, math.inf, "problems_max"),
    ]
    if args.adapt_batch:
        limits.append((args.problems_min, args.problems_max, "num_problems"))
    for low, high, names in limits:
        for name in names.split():
            if not low <= getattr(args, name) <= high:  # refuses NaN, too
                raise UsageError(f"--{name.replace('_', '-')} must be from {low} to {high}")


def seed_all(seed, iteration) -> int:
    """Seed Python, NumPy and PyTorch with one number derived from both arguments; return it."""
    number = np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1)[0]
    number = int(number) >> 2  # below 2^30: environment i gets number + i, which must be < 2^31
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def run_folder(args):
    """The run's folder, and its checkpoint if it is resumed. A new folder must not exist yet."""
    name = f"{args.env_id}__{Path(SCRIPT).stem}__{args.seed}__{int(time.time())}".replace("/", "-")
    folder = Path(args.resume or Path(args.runs_dir, args.run_name or name))
    if folder.exists() and not args.resume:
        raise UsageError(f"{folder} exists already: --resume it, or choose another --run-name")
    saved = {}
    if args.resume:
        # With weights_only, a file from someone else cannot run code.
        saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        if saved["global_step"] >= args.total_timesteps:
            raise UsageError(f"{folder} has no steps left: give a larger --total-timesteps")
    return folder, saved


class Run(AbstractContextManager):
    """A run's folder (config.json, metrics.csv, checkpoint.pt), progress bar, W&B and signals."""

    def __init__(self, args, folder, device, bfloat16, saved):
        self.folder = folder
        self.checkpoint_every = args.checkpoint_every
        self.scores = deque(saved.get("scores", []), maxlen=100)  # of the last games
        self.seconds = saved.get("seconds", 0.0)
        config = {"script": SCRIPT, "args": asdict(args), "device": str(device)}
        config |= {"bfloat16": bfloat16, "versions": {}}
        for name in ("torch", "numpy", "gymnasium", "ale_py", "mujoco"):
            if name in sys.modules:
                config["versions"][name] = sys.modules[name].__version__
        text = json.dumps(config, indent=2, default=str) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=bool(args.resume))
        except OSError as error:
            raise UsageError(f"cannot create the run's folder: {error}") from error
        try:
            self.metrics = (folder / "metrics.csv").open("a", buffering=1)
            self.lock()
            if args.resume:
                latest = torch.load(folder / "checkpoint.pt", "cpu", weights_only=True)
                if latest["seconds"] != self.seconds:  # saved after main had loaded it
                    raise UsageError(f"another process has just used {folder}: resume it again")
            # Rows after the checkpoint will be written again.
            self.metrics.truncate(saved.get("metrics_size", 0))
            (folder / "config.tmp").write_text(text)
            os.replace(folder / "config.tmp", folder / "config.json")  # whole, even after kill -9
            for source in {__file__, sys.argv[0]}:  # the code that produces these numbers
                # A copy in this very folder may itself be what runs.
                if Path(source).is_file() and Path(source).resolve().parent != folder.resolve():
                    shutil.copyfile(source, folder / Path(source).name)
            self.wandb = None
            self.wandb_id = saved.get("wandb_id")
            if args.track:
                import wandb

                names = {"name": folder.name, "id": self.wandb_id, "resume": "allow"}
                self.wandb = wandb.init(**names, config=config, reinit="create_new")
                self.wandb.define_metric("*", step_metric="global_step")
                self.wandb_id = self.wandb.id
        except BaseException:
            if not args.resume:
                shutil.rmtree(folder, ignore_errors=True)  # Windows keeps open files
            raise
        first = saved.get("global_step", 0)
        self.bar = tqdm(total=args.total_timesteps, initial=first, unit="", unit_scale=True)
        self.bar.mininterval = 0.1 if sys.stderr.isatty() else 60  # seconds
        self.interrupted = False
        self.handlers = {}  # the old ones; __exit__ restores them
        hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has no SIGHUP
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            for number in {signal.SIGINT, signal.SIGTERM, hangup}:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self.handlers[number] = signal.signal(number, self.interrupt)
        self.row_at = time.perf_counter()
        self.save_at = self.row_at  # the first save, after one iteration, shows whether it works

    def lock(self):
        """Refuse a run that another process is using."""
        try:
            import fcntl

            fcntl.flock(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is at work on {self.folder}") from None
        except (ImportError, OSError):  # Windows, or a file system that has no locks
            pass

    def interrupt(self, number, frame):
        """On Ctrl-C, SIGTERM or SIGHUP, main finishes the iteration, saves and ends."""
        self.interrupted = True
        if number == signal.SIGINT:  # a terminal that closes sends SIGHUP twice
            signal.signal(number, self.handlers[number])  # a second Ctrl-C ends the run at once
        # print is not safe in a signal handler.
        with suppress(OSError):  # the terminal may be gone
            os.write(2, b"\nfinishing the iteration, then saving; Ctrl-C again to stop at once\n")

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
        shown = {"return": row["charts/episodic_return"], "L": row["abs/rollout_length"]}
        self.bar.set_postfix(shown, refresh=False)
        with suppress(OSError):  # the terminal may be gone
            self.bar.update(min(row["global_step"], self.bar.total) - self.bar.n)

    def save(self, modules, **state):
        """Write checkpoint.pt: counters and scores, and the states of the modules."""
        for name, module in modules.items():
            state[name] = module.state_dict()
        state |= {"scores": list(self.scores), "seconds": self.seconds}
        state |= {"metrics_size": self.metrics.tell(), "wandb_id": self.wandb_id}
        torch.save(state, self.folder / "checkpoint.tmp")
        torch.load(self.folder / "checkpoint.tmp", "cpu", weights_only=True)  # can it be resumed?
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")
        self.save_at = time.perf_counter() + self.checkpoint_every

    def __exit__(self, kind, error, traceback):
        """Undo what __init__ did. A run that failed before its first save leaves no folder."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        if self.wandb:
            self.wandb.finish(exit_code=0 if kind is None else 1)
        with suppress(OSError):  # on a full disk
            self.metrics.close()
        if not (self.folder / "checkpoint.pt").exists():
            shutil.rmtree(self.folder)
        if kind is None:
            print(f"saved; to continue or to extend it: --resume '{self.folder}'", file=sys.stderr)


def launch(Args=Args, **parts):
    """The command line. parts are passed to main: make_envs, a network class, rollout_length."""
    for name in parts:
        if name not in main.__kwdefaults__:
            raise TypeError(f"launch() has the parts {', '.join(main.__kwdefaults__)}, not {name}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while games load: no traceback
    if sys.platform == "linux":
        # Keep freed memory instead of returning it to the system: a CPU learns 1.15 times as fast.
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # not every console can print Greek letters
    args = tyro.cli(Args)
    try:
        if args.resume:  # the run's own arguments, unless they are given anew
            if not Path(args.resume, "checkpoint.pt").exists():
                raise UsageError(f"--resume {args.resume}: there is no checkpoint.pt in it")
            config = json.loads(Path(args.resume, "config.json").read_text())
            if config["script"] != SCRIPT:
                raise UsageError(f"--resume {args.resume}: start {config['script']}, which made it")
            args = tyro.cli(Args, default=Args(**config["args"]))
            if args.env_id != config["args"]["env_id"]:
                raise UsageError(f"--env-id: a run of {config['args']['env_id']} cannot change it")
        main(args, **parts)
    except (UsageError, FloatingPointError) as error:
        line = str(error).partition("\n")[0]
        print(f"{SCRIPT}: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    launch()
