# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PQN with Adaptive Batch Scaling (ABS), on Atari, in one file.

PQN [arXiv 2407.04811] is Q-learning with many parallel environments and LayerNorm, but no replay
buffer and no target network. An iteration plays L steps in each of E environments, learns from
these steps in a fixed number of mini-batches, and discards them.

ABS [arXiv 2605.21557] adapts L to the policy. In every K-th iteration it measures the Behavioral
Divergence (BD) δ_π: it samples M states s_i from the rollout, and counts in which share of them
its updates changed the greedy action. θ_old is the network before these updates, θ the one after.
δ_min and δ_max say which divergence counts as stable and as volatile, and β is a step size:

    δ_π = (1/M) Σ_i 1[ argmax_a Q_θ(s_i, a) ≠ argmax_a Q_θold(s_i, a) ]
    α   = log(clip(δ_π, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)      0: stable, 1: volatile
    L'  = L_max - α (L_max - L_min)                                                  (Eq. 4)
    L_adapt ← (1 - β) L_adapt + β L',    L = round(L_adapt),    batch |B| = E L

A volatile policy gets short rollouts, and so small batches. A stable policy gets long rollouts and
large batches, and fewer gradient steps per environment step. In main, "ABS" marks its lines.

One GPU; the ABS paper's settings and --episodic-life, a default without which a game may stall:
    python pqn_abs.py --env-id BreakoutNoFrameskip-v4
A laptop without a GPU, on one thread; smaller batches suit a short run:
    OMP_NUM_THREADS=1 python pqn_abs.py --num-envs 32 --num-minibatches 16 --adapt-frequency 10 \
        --exploration-fraction 0.2 --end-e 0.01 --total-timesteps 500000
Plain PQN, with L = 32 throughout:
    python pqn_abs.py --no-adapt-rollout
Continue a run after Ctrl-C or a crash:
    python pqn_abs.py --resume runs/...
Your own environment, network or rule for L: pass it to launch(), as the files in examples/ do.
"""

import copy
import ctypes
import difflib
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
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorWrapper
from tqdm import tqdm


@dataclass
class Args:
    """PQN with Adaptive Batch Scaling. Defaults follow its paper; symbols are in brackets."""

    env_id: str = "BreakoutNoFrameskip-v4"  # an Atari game; ALE/Breakout-v5 has sticky actions
    seed: int = 1  # seed of the network, the exploration and the environments
    total_timesteps: int = 20_000_000  # [T_total] steps, of 4 frames each; 1_000_000, not 1e6
    num_envs: int = 128  # [E] environments in parallel
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    anneal_lr: bool = False  # lower the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    q_lambda: float = 0.65  # [λ] of the Q(λ) targets: 0 is one-step Q-learning, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch
    update_epochs: int = 2  # [N_epochs] passes over each rollout
    max_grad_norm: float = 10.0  # gradients are clipped to this norm
    start_e: float = 1.0  # [ε] share of random actions at the start
    end_e: float = 0.001  # [ε] share of random actions once ε has stopped falling
    exploration_fraction: float = 0.10  # fraction of total_timesteps over which ε falls
    episodic_life: bool = True  # a lost life ends the episode; not in the paper's table

    adapt_rollout: bool = True  # ABS: adapt L; --no-adapt-rollout is plain PQN with L = num_steps
    num_steps: int = 32  # [L] steps in each environment in the first rollout
    rollout_min: int = 16  # [L_min] rollout length of a volatile policy
    rollout_max: int = 64  # [L_max] rollout length of a stable policy
    adapt_frequency: int = 50  # [K] measure BD in every K-th iteration
    delta_min: float = 0.05  # [δ_min] at this BD or less, the policy counts as stable
    delta_max: float = 0.95  # [δ_max] at this BD or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L_adapt; the value is from the ABS author's code
    reference_states: int = 2048  # [M] states sampled for BD; from the ABS author's code
    scale_epochs: bool = False  # N_epochs * L // 32 epochs where L > 32, as in the author's code

    device: str = "auto"  # auto (CUDA if there is one, else the CPU), cpu, cuda:1, mps, ...
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of all layers but the last; auto is bfloat16 where the hardware supports it"""
    runs_dir: str = "runs"  # where the run's folder is created
    run_name: str | None = None  # the folder's name; by default game, script, seed and time
    checkpoint_every: float = 300.0  # seconds between checkpoints
    resume: str | None = None  # continue the run in this folder; its arguments become the defaults
    track: bool = False  # also log to Weights & Biases (the project is $WANDB_PROJECT)


def layer_init(layer, gain: float = math.sqrt(2)):
    """Orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PixelConv(nn.Conv2d):
    """A convolution of pixels / 255. Dividing the weights is cheaper than dividing the pixels."""

    def forward(self, pixels):
        return F.conv2d(pixels, self.weight / 255, self.bias, self.stride)


class ImageNorm(nn.LayerNorm):
    """LayerNorm of images (N, C, H, W) over C, H and W; the argument is their shape [H, W, C].

    It turns them into (N, H, W, C) and back. That is the order in which they lie in memory
    ("channels last", see QNetwork), so nothing is copied. It is faster on a CPU.
    """

    def forward(self, images):
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class QNetwork(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 Q-values (N, A): Nature CNN with LayerNorm [PQN].

    LayerNorm after each layer keeps Q-learning stable without a target network.
    """

    def __init__(self, envs):
        super().__init__()
        self.body = nn.Sequential(
            layer_init(PixelConv(4, 32, 8, stride=4)),
            ImageNorm([20, 20, 32]),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            ImageNorm([9, 9, 64]),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            ImageNorm([7, 7, 64]),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(7 * 7 * 64, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
        )
        self.head = layer_init(nn.Linear(512, int(envs.single_action_space.n)))
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        # Under autocast the layers compute in bfloat16, which holds every byte exactly.
        is_bfloat16 = torch.is_autocast_enabled(frames.device.type)
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        x = self.body(frames.to(dtype, memory_format=torch.channels_last))
        # On Atari, Q-values of two actions often differ by under 1%: in bfloat16 they would tie.
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float())


class EpisodicLife(VectorWrapper):
    """A lost life ends the learner's episode ("terminated"), but the game goes on without a reset.

    Then the next action is fire_action instead of the agent's: games like Breakout wait for FIRE.
    The environments must report info["lives"]. The wrapper adds to info where a whole game ended,
    and which actions were executed. All are arrays (E,).
    """

    def __init__(self, envs, fire_action):
        super().__init__(envs)
        self.fire_action = fire_action

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.lives = np.array(info["lives"])
        self.lost_life = np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions):
        actions = np.where(self.lost_life, self.fire_action, actions)
        obs, rewards, terminated, truncated, info = super().step(actions)
        game_over = terminated | truncated
        # Where a game is over, these lives are the next game's, which may begin with fewer.
        self.lost_life = (info["lives"] < self.lives) & ~game_over
        self.lives = np.array(info["lives"])
        info = info | {"game_over": game_over, "executed_actions": actions}
        return obs, rewards, terminated | self.lost_life, truncated, info


def make_envs(args: Args):
    """A vector of args.num_envs copies of an Atari game.

    Observations are uint8 (E, 4, 84, 84): the last 4 grey frames. A step is 4 emulator frames, and
    the last two of them are max-pooled. Rewards are points in the game. AtariVectorEnv starts a
    game with FIRE and 0 to 28 no-ops, and truncates it after 108,000 emulator frames.

    Your own make_envs may return any Gymnasium VectorEnv with actions Discrete(A) and same-step
    autoreset: where an episode ends, step() returns the next one's first observation, and
    info["final_obs"] holds the last one of the episode that ended. A vector wrapper that transforms
    observations must transform info["final_obs"], too.
    """
    gymnasium.register_envs(ale_py)
    spec = gymnasium.registry.get(args.env_id)
    is_atari = spec is not None and spec.entry_point == "ale_py.env:AtariEnv"
    # AtariVectorEnv always skips 4 frames. Breakout-v4 would skip 2 to 4 at random.
    if not is_atari or isinstance(spec.kwargs["frameskip"], tuple):
        games = [name for name in gymnasium.registry if name.endswith("NoFrameskip-v4")]
        (near,) = difflib.get_close_matches(args.env_id, games, n=1, cutoff=0)
        why = "not an Atari game, or it skips frames at random"
        raise UsageError(f"--env-id {args.env_id}: {why}; did you mean {near}?")
    tqdm.write(f"loading {args.num_envs} x {args.env_id}", sys.stderr)  # about 0.2 s each
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # sticky actions
        reward_clipping=False,  # main takes the sign
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    if not args.episodic_life:
        return envs
    buttons = [button.name for button in envs.ale.get_action_set()]
    return EpisodicLife(envs, buttons.index("FIRE") if "FIRE" in buttons else 0)  # 0 is NOOP


def lambda_returns(rewards, next_values, terminated, truncated, gamma: float, q_lambda: float):
    """Peng's Q(λ) targets of a rollout, computed backwards [PQN]. All tensors are (L, E).

    G_t = r_t + γ (1 - terminated_t) [ λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a) ]

    next_values[t] is max_a Q(s_{t+1}, a) of the state that followed s_t in its episode, never of
    the next episode's first. It stands in for G_{t+1} at the end of the rollout, and where a time
    limit truncated the episode. Where the episode terminated it is ignored.
    """
    returns = torch.empty_like(next_values)
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        next_return = torch.where(truncated[t], next_values[t], next_return)
        bootstrap = q_lambda * next_return + (1 - q_lambda) * next_values[t]
        returns[t] = rewards[t] + gamma * ~terminated[t] * bootstrap
        next_return = returns[t]
    return returns


@torch.no_grad()
def behavioral_divergence(network, old_network, states) -> float:
    """Share of the states (M, ...) in which two networks' greedy actions differ, in [0, 1] [ABS].

    δ_π = (1/M) Σ_i 1[ π_θ(s_i) ≠ π_θold(s_i) ],   π_θ(s) = argmax_a network(s)[a]

    Raises ValueError unless network(states) is (M, A), one score per action, with A > 1.
    """
    scores = network(states)
    if scores.dim() != 2 or scores.shape[1] < 2:
        raise ValueError(f"pass networks that return (M, A) scores, not {tuple(scores.shape)}")
    changed = scores.argmax(1) != old_network(states).argmax(1)
    return changed.float().mean().item()


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


def main(args, *, make_envs=make_envs, QNetwork=QNetwork, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own make_envs, QNetwork or rollout_length."""
    check_args(args)
    device, bfloat16 = pick_device(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    folder, saved = run_folder(args)  # saved is what a checkpoint holds; empty in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    adaptive_length = saved.get("adaptive_length", float(args.num_steps))  # ABS: L_adapt
    # --resume may bring new limits.
    adaptive_length = min(max(adaptive_length, args.rollout_min), args.rollout_max)

    env_seed = seed_all(args.seed, iteration)  # a resumed run plays new games
    envs = make_envs(args)
    num_envs = args.num_envs
    num_actions = int(envs.single_action_space.n)
    q_network = QNetwork(envs).to(device).eval()  # dropout, if any, is off while acting
    old_network = copy.deepcopy(q_network)  # ABS: θ_old, filled in the loop
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate, foreach=True)
    modules = {"network": q_network, "optimizer": optimizer}  # whose states a checkpoint stores
    if hasattr(rollout_length, "state_dict"):  # your own may be an object with a state
        modules["rollout_length"] = rollout_length
    if saved:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    next_obs = torch.tensor(envs.reset(seed=env_seed)[0], device=device)
    check_parts(args, envs, q_network(next_obs))
    score = np.zeros(num_envs)  # points so far in each environment's game
    with closing(envs), Run(args, folder, device, bfloat16, saved) as run:
        finished = False
        while not finished:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed_all(args.seed, iteration)
            length = args.num_steps  # plain PQN, where BD is only logged
            if args.adapt_rollout:
                length = round(adaptive_length)  # ABS: L
            batch_size = length * num_envs
            # BD covers only this iteration's updates. K sets how often it is measured.
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(q_network.state_dict())  # ABS: θ_old ← θ
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = learning_rate

            # 1. Collect L steps in each of the E environments, ε-greedily.
            exploration_steps = args.exploration_fraction * args.total_timesteps
            explored = min(global_step / max(exploration_steps, 1), 1)
            epsilon = args.start_e + explored * (args.end_e - args.start_e)
            explore = torch.rand((length, num_envs), device=device) < epsilon
            random_actions = torch.randint(num_actions, (length, num_envs), device=device)
            obs = torch.zeros((length, *next_obs.shape), dtype=next_obs.dtype, device=device)
            actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
            rewards = torch.zeros((length, num_envs), device=device)
            terminated = torch.zeros((length, num_envs), dtype=torch.bool, device=device)
            truncated = torch.zeros_like(terminated)
            values = torch.zeros((length + 1, num_envs), device=device)  # max_a Q(s_t, a), t = 0..L
            final_values = torch.zeros_like(rewards)  # where a time limit truncated the episode
            with torch.no_grad(), autocast:
                for t in range(length):
                    obs[t] = next_obs
                    # A network of your own may return bfloat16 here.
                    values[t], greedy_actions = q_network(next_obs).float().max(1)
                    actions[t] = torch.where(explore[t], random_actions[t], greedy_actions)
                    frames, reward, terminal, timeout, info = envs.step(actions[t].cpu().numpy())
                    next_obs = torch.tensor(frames, device=device)  # a copy: frames may be reused
                    if "executed_actions" in info:  # learn from what EpisodicLife really pressed
                        actions[t] = torch.tensor(info["executed_actions"])
                    rewards[t] = torch.tensor(np.sign(reward))  # the learner sees only the sign
                    terminated[t] = torch.tensor(terminal)
                    truncated[t] = torch.tensor(timeout)
                    if timeout.any():
                        # frames are the next episode's. The last ones of this episode are here,
                        # in an array of arrays.
                        final_obs = np.stack(info["final_obs"][timeout])
                        final_obs = torch.tensor(final_obs, dtype=next_obs.dtype, device=device)
                        final_values[t, truncated[t]] = q_network(final_obs).float().amax(1)
                    score += reward  # of a whole game, also where a lost life ends an episode
                    game_over = info.get("game_over", terminal | timeout)
                    run.scores.extend(score[game_over].tolist())
                    score[game_over] = 0
                    global_step += num_envs
                values[length] = q_network(next_obs).float().amax(1)

            # 2. Update θ towards the Q(λ) targets: N_epochs passes in shuffled mini-batches.
            # Where an episode was truncated, values[t + 1] belongs to the next episode's start.
            next_values = torch.where(truncated, final_values, values[1:])
            returns = lambda_returns(
                rewards, next_values, terminated, truncated, args.gamma, args.q_lambda
            )
            b_obs = obs.flatten(0, 1)
            b_actions = actions.flatten()
            b_returns = returns.flatten()
            epochs = args.update_epochs
            if args.scale_epochs:
                base_steps = 32  # the rollout length of the paper's plain PQN
                epochs = max(epochs, epochs * length // base_steps)
            q_network.train()
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size, device=device)
                for minibatch in shuffled.tensor_split(args.num_minibatches):
                    with autocast:
                        q_values = q_network(b_obs[minibatch]).float()
                    q_taken = q_values.gather(1, b_actions[minibatch, None]).squeeze(1)
                    loss = F.mse_loss(q_taken, b_returns[minibatch])
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1
            q_network.eval()
            # A NaN in an observation, a reward or a weight spreads to this last gradient.
            if not grad_norm.isfinite():
                raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")

            # 3. ABS: measure how much the updates changed the policy, and adapt the rollout length.
            divergence = None
            if is_measured:
                sample = torch.randperm(batch_size, device=device)[: args.reference_states]
                with autocast:
                    divergence = behavioral_divergence(q_network, old_network, b_obs[sample])
                adaptive_length = rollout_length(
                    divergence,
                    adaptive_length,
                    rollout_min=args.rollout_min,
                    rollout_max=args.rollout_max,
                    delta_min=args.delta_min,
                    delta_max=args.delta_max,
                    beta=args.beta,
                )

            # 4. Log and save. Losses are those of the last mini-batch.
            row = {
                "global_step": global_step,
                "charts/updates": updates,
                "charts/epsilon": epsilon,
                "abs/rollout_length": length,
                "abs/batch_size": batch_size,
                "abs/behavioral_divergence": divergence,
                "losses/td_loss": loss.item(),
                "losses/q_values": q_taken.mean().item(),
                "losses/grad_norm": grad_norm.item(),
            }
            run.log(row)
            finished = global_step >= args.total_timesteps or run.interrupted
            if finished or time.perf_counter() >= run.save_at:
                counters = {"global_step": global_step, "iteration": iteration, "updates": updates}
                run.save(modules, adaptive_length=float(adaptive_length), **counters)
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
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    limits = [
        (0, math.inf, "seed"),
        (1, math.inf, "total_timesteps num_envs num_steps rollout_min update_epochs"),
        (1, math.inf, "adapt_frequency reference_states num_minibatches"),
        (1e-9, math.inf, "max_grad_norm checkpoint_every delta_min"),
        (0, 1, "gamma q_lambda start_e end_e exploration_fraction beta learning_rate"),
        (args.delta_min * 1.001, 1, "delta_max"),
        (args.rollout_min, math.inf, "rollout_max"),
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, args.rollout_max, "num_steps"))
    for low, high, names in limits:
        for name in names.split():
            if not low <= getattr(args, name) <= high:  # refuses NaN, too
                raise UsageError(f"--{name.replace('_', '-')} must be from {low} to {high}")
    if args.num_minibatches > args.num_envs * shortest:
        raise UsageError("--num-minibatches must be at most the samples of the shortest rollout")


def check_parts(args, envs, q_values):
    """Refuse environments or a network that would make main learn the wrong thing."""
    space = envs.single_action_space
    is_same_step = envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
    if not is_same_step or space.start != 0:
        raise UsageError("make_envs must return actions from 0 up and autoreset_mode SAME_STEP")
    expected = (args.num_envs, int(space.n))
    if q_values.shape != expected:  # a wrong action can hang an emulator
        raise UsageError(f"the network must return {expected}, not {tuple(q_values.shape)}")


def pick_device(args):
    """The device, and whether all layers but the last use bfloat16 there."""
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {error}") from error
    if args.precision != "auto":
        return device, {"float32": False, "bfloat16": True}[args.precision]
    # Only where the hardware multiplies bfloat16.
    if device.type == "cuda":
        return device, torch.cuda.is_bf16_supported(including_emulation=False)
    cpu = torch.cpu.get_capabilities()
    is_fast = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
    return device, device.type == "cpu" and is_fast


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
