# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PPO with Adaptive Batch Scaling (ABS), on Atari, in one file.

PPO [arXiv 1707.06347] learns a policy π and its value V. It plays L steps in E environments, learns
from them in several epochs, throws them away and starts again. Its loss is clipped, so that the
epochs do not carry π far from the policy that played.

ABS [arXiv 2605.21557] adapts the rollout length L to the policy. In every K-th iteration it keeps
a copy θ_old of the network from before the update. After the update it draws a sample B_ref of M
states from the rollout, and measures how far the policy has moved in them. For PPO, the measure is
the mean KL divergence δ. A policy that moves far gets short rollouts, and with them small batches.
A stable policy gets long rollouts and large batches:

    δ   = (1/M) Σ_i KL( π_θold(·|s_i) ‖ π_θ(·|s_i) ),    s_i ~ B_ref
    α   = log(clip(δ, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)        0: stable, 1: volatile
    L'  = L_max - α (L_max - L_min)                                                  (Eq. 4)
    L_adapt ← (1 - β) L_adapt + β L'                  smooths L; it starts at 128, with β = 0.1
    L = round(L_adapt),    batch |B| = E L

Each rollout is split into a fixed number of mini-batches. So a longer rollout means larger
mini-batches, and fewer gradient steps per environment step. In main, "ABS" marks the lines that
only ABS needs. What drives L for Q-learning is logged, too: the Behavioral Divergence (BD), which
is the share of the M states whose most likely action has changed.

The paper has no numbers for PPO on Atari. Here, L_min and L_max are half and twice PPO's usual 128
steps, as they are half and twice 32 in the paper's Q-learning. δ_min and δ_max are the 5% and 95%
quantiles of δ in plain PPO on four games (results/ppo_kl). By default the learning rate falls to 0,
and δ with it. So L grows at the end, whatever the policy does.

One GPU:
    python ppo_abs.py --env-id BreakoutNoFrameskip-v4
A first impression on a laptop, with one thread, because two would wait for each other whenever
something else runs:
    OMP_NUM_THREADS=1 python ppo_abs.py --adapt-frequency 3 --total-timesteps 300000
Plain PPO, with L = 128 throughout:
    python ppo_abs.py --no-adapt-rollout
Continue a run after Ctrl-C or a crash:
    python ppo_abs.py --resume runs/...
Your own environment, network or rule for L: pass make_envs, ActorCritic or rollout_length to
launch(), as the files in examples/ do with pqn_abs.py. If your environment reports no lives, it
needs --no-episodic-life.
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
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from tqdm import tqdm

try:
    import fcntl  # for a lock on the run's folder
except ImportError:  # on Windows
    fcntl = None


@dataclass
class Args:
    """PPO with Adaptive Batch Scaling. Defaults are PPO's usual ones; symbols are in brackets."""

    env_id: str = "BreakoutNoFrameskip-v4"  # an Atari game; ALE/Breakout-v5 has sticky actions
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 10_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 8  # [E] environments in parallel
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages: 0 is one-step, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch
    update_epochs: int = 4  # [N_epochs] passes over each rollout
    clip_coef: float = 0.1  # [ε] ratios are clipped to 1 ± ε, and changes of V to ± ε
    ent_coef: float = 0.01  # [c_e] weight of the entropy bonus
    vf_coef: float = 0.5  # [c_v] weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    episodic_life: bool = True  # a lost life ends the learner's episode; the game goes on

    adapt_rollout: bool = True  # ABS: adapt L; --no-adapt-rollout is plain PPO with L = num_steps
    num_steps: int = 128  # [L] steps in each environment in the first rollout
    rollout_min: int = 64  # [L_min] rollout length of a volatile policy
    rollout_max: int = 256  # [L_max] rollout length of a stable policy
    adapt_frequency: int = 50  # [K] measure the KL divergence in every K-th iteration
    delta_min: float = 1e-4  # [δ_min] at this KL divergence or less, the policy counts as stable
    delta_max: float = 3.5e-3  # [δ_max] at this KL divergence or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L_adapt; the value is from its author's code
    reference_states: int = 2048  # [M] states in B_ref; not in the paper, but in its author's code
    scale_epochs: bool = False  # more epochs where L > 128: N_epochs * L // 128

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
    """A convolution of pixels / 255. Dividing the weights is cheaper than the pixels."""

    def forward(self, pixels):
        return F.conv2d(pixels, self.weight / 255, self.bias, self.stride)


class ActorCritic(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 logits (N, A) of π, and values (N,): Nature CNN.

    A network of your own may return bfloat16 under autocast: policy_and_value makes it float32.
    """

    def __init__(self, envs):
        super().__init__()
        self.body = nn.Sequential(
            layer_init(PixelConv(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(7 * 7 * 64, 512)),
            nn.ReLU(),
        )
        num_actions = int(envs.single_action_space.n)
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)  # π starts nearly uniform
        self.critic = layer_init(nn.Linear(512, 1), 1.0)
        # Images in the order N, H, W, C make learning 1.4 times as fast on a CPU, in float32.
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        # Bytes fit bfloat16 exactly. So where autocast uses it, they need no detour by float32.
        is_bfloat16 = torch.is_autocast_enabled(frames.device.type)
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        x = self.body(frames.to(dtype, memory_format=torch.channels_last))
        # The ratio of two nearly equal policies needs more digits than bfloat16 has.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            return self.actor(x), self.critic(x).squeeze(1)


def make_envs(args: Args):
    """A vector of args.num_envs copies of an Atari game.

    Observations are uint8 (E, 4, 84, 84): the last 4 grey frames. A step is 4 emulator frames, and
    the last two of them are max-pooled. Rewards are points in the game. As usual for
    AtariVectorEnv, an episode starts with FIRE and 0 to 28 no-ops, and is truncated after 108,000
    emulator frames.

    Your own make_envs may return any Gymnasium VectorEnv that has
    - a Discrete action space,
    - same-step autoreset: where an episode ends, step() returns the next one's first observation,
      and info["final_obs"] holds the last observation of the one that ended.
    Only --episodic-life needs more: a lost life is "terminated" but does not reset the game,
    info["lives"] counts the lives, and fire_action is the action that resumes play after it.
    """
    gymnasium.register_envs(ale_py)
    spec = gymnasium.registry.get(args.env_id)
    is_atari = spec is not None and spec.entry_point == "ale_py.env:AtariEnv"
    # AtariVectorEnv always skips 4 frames. Breakout-v4 would skip 2 to 4 at random.
    if not is_atari or isinstance(spec.kwargs["frameskip"], tuple):
        fail(f"--env-id {args.env_id} is no game here, or skips frames at random; try ALE/Pong-v5")
    say(f"loading {args.num_envs} x {args.env_id}")  # about 0.2 s each
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # sticky actions
        life_loss_info=args.episodic_life,
        reward_clipping=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    buttons = [button.name for button in envs.ale.get_action_set()]
    envs.fire_action = buttons.index("FIRE") if "FIRE" in buttons else 0
    return envs


def check_envs(args, envs):
    """Refuse environments that main cannot train on."""
    space = envs.single_action_space
    if not isinstance(space, Discrete) or space.n < 2:
        fail(f"--env-id {args.env_id}: needs a Discrete action space of 2 or more, not {space}")
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return environments with autoreset_mode=AutoresetMode.SAME_STEP")
    if envs.num_envs != args.num_envs:
        fail(f"make_envs returned {envs.num_envs} environments instead of {args.num_envs}")


def check_policy(args, envs, outputs):
    """Refuse a network that does not return logits (E, A) and values (E,)."""
    expected = [(args.num_envs, int(envs.single_action_space.n)), (args.num_envs,)]
    shapes = [tuple(output.shape) for output in outputs]
    if shapes != expected:
        fail(f"the network must return logits and values of shapes {expected}, not {shapes}")


def to_tensor(obs, device):
    """Observations as a tensor on the device; one that is not finite ends the run."""
    obs = np.ascontiguousarray(obs)  # torch.tensor accepts no negative strides
    tensor = torch.tensor(obs, device=device)
    if tensor.is_floating_point() and not tensor.isfinite().all():
        fail("an environment returned an observation that is not finite", status=1)
    return tensor


def reset(args, envs, seed, device):
    """Start the environments; returns first observations (E, ...) on the device, and lives (E,)."""
    # Environments may sample from their spaces, which envs.reset(seed=...) does not seed.
    sub_envs = getattr(envs.unwrapped, "envs", [])
    for i, env in enumerate([envs, *sub_envs]):
        for name in ("action", "observation", "single_action", "single_observation"):
            if hasattr(env, f"{name}_space"):
                getattr(env, f"{name}_space").seed(seed + i)
    obs, info = envs.reset(seed=seed)
    if not isinstance(obs, np.ndarray):
        fail(f"--env-id {args.env_id}: observations must be arrays, not {type(obs).__name__}")
    if args.episodic_life and not ("lives" in info and hasattr(envs, "fire_action")):
        fail(f"--episodic-life: {args.env_id} has no lives or fire_action; use --no-episodic-life")
    lives = np.array(info.get("lives"))  # without --episodic-life, nothing uses them
    return to_tensor(obs, device), lives


def step(envs, actions):
    """Take one action in each environment. Actions (E,) are int64, from 0 up. Returns

    - next_obs: the next observations (E, ...), a tensor on the actions' device
    - rewards, terminated, truncated: NumPy arrays (E,)
    - last_obs: the last observations (n, ...) of the n truncated episodes, a tensor
    - info: everything else the environments report

    All but info are copies, because environments may reuse their arrays.
    """
    first_action = envs.single_action_space.start
    obs, rewards, terminated, truncated, info = envs.step(actions.numpy(force=True) + first_action)
    next_obs = to_tensor(obs, actions.device)
    terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
    last_obs = next_obs[:0]  # empty, unless an episode is truncated
    if truncated.any():
        last_obs = np.stack(info["final_obs"][truncated])
        last_obs = torch.tensor(last_obs, dtype=next_obs.dtype, device=actions.device)
    return next_obs, np.array(rewards, float), terminated, truncated, last_obs, info


def with_fire(envs, actions, lost_life):
    """The actions (E,), but FIRE where a life was just lost: Breakout, for one, waits for it."""
    if not lost_life.any():
        return actions
    return torch.where(torch.tensor(lost_life, device=actions.device), envs.fire_action, actions)


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimates, computed backwards [arXiv 1506.02438]. All are (L, E).

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = δ_t + γ λ (1 - terminated_t) (1 - truncated_t) A_{t+1}

    next_values[t] is V(s_{t+1}), where s_{t+1} belongs to the same episode as s_t. If the episode
    was truncated at t, that is not values[t + 1], which belongs to the next episode. At the end of
    the rollout and of a truncated episode, next_values[t] stands in for all that follows. Where the
    episode terminated, it is ignored.
    """
    deltas = rewards + gamma * ~terminated * next_values - values
    goes_on = ~(terminated | truncated)
    advantages = torch.empty_like(values)
    next_advantage = torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        next_advantage = deltas[t] + gamma * gae_lambda * goes_on[t] * next_advantage
        advantages[t] = next_advantage
    return advantages


def normalize(advantages):
    """Advantages (N,) of a mini-batch, shifted and scaled to mean 0 and standard deviation 1."""
    # With correction=1, a mini-batch of one sample would become NaN.
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's policy loss of each sample. All are (N,), the result too.

    ρ = π_θ(a|s) / π_θold(a|s),    L_π = -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
    """
    ratios = (log_probs - old_log_probs).exp()
    clipped_ratios = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.minimum(ratios * advantages, clipped_ratios * advantages)


def clipped_value_loss(values, old_values, returns, clip_coef):
    """PPO's value loss of each sample. All are (N,), the result too.

    L_V = 1/2 max( (V - R)², (V_old + clip(V - V_old, -ε, ε) - R)² )
    """
    clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    errors = (values - returns).square()
    clipped_errors = (clipped_values - returns).square()
    return 0.5 * torch.maximum(errors, clipped_errors)


def policy_and_value(network, states):
    """An ActorCritic's log π(·|s) (N, A) and V(s) (N,) in the states (N, ...), in float32."""
    logits, values = network(states)
    log_pi = logits.float().log_softmax(-1)
    return log_pi, values.float()


def log_prob_of(log_pi, actions):
    """log π(a|s) (N,) of the actions a (N,), from log π(·|s) (N, A)."""
    return log_pi.gather(1, actions[:, None]).squeeze(1)


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)): log-probabilities (N, A) -> (N,)."""
    log_ratios = log_p - log_q
    return (log_p.exp() * log_ratios).sum(-1)


@torch.no_grad()
def mean_kl_divergence(network, old_network, states) -> float:
    """How far apart two networks' policies are in the states (M, ...) [ABS].

    δ = (1/M) Σ_i KL( π_θold(·|s_i) ‖ π_θ(·|s_i) ),    π_θ(·|s) = softmax(network(s))

    The paper does not give the direction. Here, the old policy weighs the actions, because it is
    the one that played. The code of ABS's author, which is for MuJoCo, has the other direction.
    """
    log_pi = network(states).float().log_softmax(-1)
    old_log_pi = old_network(states).float().log_softmax(-1)
    return kl_divergence(old_log_pi, log_pi).mean().item()


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


def policy_divergences(network, old_network, states):
    """The mean KL divergence and the BD of two ActorCritics' policies in the states (M, ...)."""

    def policy(states):
        return network(states)[0]

    def old_policy(states):
        return old_network(states)[0]

    kl = mean_kl_divergence(policy, old_policy, states)
    return kl, behavioral_divergence(policy, old_policy, states)


def pick_device(args):
    """The device, and whether all layers but the last use bfloat16 there."""
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # PyTorch raises many types of error for a missing device
        fail(f"--device {name}: {error}")
    bfloat16 = args.precision == "bfloat16"
    if args.precision == "auto":  # only where the hardware multiplies bfloat16
        cpu = torch.cpu.get_capabilities()
        bfloat16 = device.type == "cpu" and bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
        if device.type == "cuda":
            bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return device, bfloat16


def seed_all(seed, iteration) -> int:
    """Seed Python, NumPy and PyTorch with one number derived from both arguments; return it."""
    number = np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1)[0]
    number = int(number) >> 2  # below 2^30: environment i gets number + i, which must be < 2^31
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def main(args, make_envs=make_envs, ActorCritic=ActorCritic, rollout_length=rollout_length) -> Path:
    """Train, and return the run's folder. Pass your own make_envs, network or rollout_length."""
    check_args(args)
    folder = run_folder(args)
    device, bfloat16 = pick_device(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    seed_all(args.seed, 0)
    envs = make_envs(args)
    check_envs(args, envs)
    num_envs = args.num_envs
    network = ActorCritic(envs).to(device).eval()  # dropout, if any, is off while acting
    old_network = copy.deepcopy(network)  # ABS: θ_old, filled in the loop
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5, fused=True)  # the loop sets its lr
    modules = {"network": network, "optimizer": optimizer, "rollout_length": rollout_length}
    saved = load_checkpoint(args, folder, modules)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    saved_length = saved.get("adaptive_length", float(args.num_steps))  # limits may be new
    adaptive_length = min(max(saved_length, args.rollout_min), args.rollout_max)  # ABS: L_adapt
    seed = seed_all(args.seed, iteration)  # a resumed run plays new games
    next_obs, lives = reset(args, envs, seed, device)
    lost_life = np.zeros(num_envs, bool)  # in the latest step; only used with --episodic-life
    check_policy(args, envs, network(next_obs))
    with closing(envs), Run(args, folder, device, bfloat16, saved) as run:
        done = global_step >= args.total_timesteps
        while not done:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed_all(args.seed, iteration)
            length = round(adaptive_length) if args.adapt_rollout else args.num_steps  # ABS: L
            batch_size = length * num_envs
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ
            optimizer.param_groups[0]["lr"] = args.learning_rate
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] *= 1 - global_step / args.total_timesteps

            # 1. Collect L steps in each of the E environments, with actions drawn from π_θ.
            obs = torch.zeros((length, *next_obs.shape), dtype=next_obs.dtype, device=device)
            actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
            log_probs = torch.zeros((length, num_envs), device=device)  # log π_θ(a_t|s_t)
            rewards = torch.zeros_like(log_probs)
            terminated = torch.zeros((length, num_envs), dtype=torch.bool, device=device)
            truncated = torch.zeros_like(terminated)
            values = torch.zeros((length + 1, num_envs), device=device)  # V(s_t), t = 0..L
            last_values = torch.zeros_like(rewards)  # of truncated episodes' last states
            with torch.no_grad(), autocast:
                for t in range(length):
                    obs[t] = next_obs
                    log_pi, values[t] = policy_and_value(network, next_obs)
                    actions[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                    log_probs[t] = log_prob_of(log_pi, actions[t])
                    pressed = with_fire(envs, actions[t], lost_life)  # but π learns from actions[t]
                    next_obs, reward, terminal, timeout, last_obs, info = step(envs, pressed)
                    rewards[t] = torch.tensor(np.sign(reward))  # the learner sees only the sign
                    terminated[t] = torch.tensor(terminal)
                    truncated[t] = torch.tensor(timeout)
                    if timeout.any():
                        last_values[t, truncated[t]] = policy_and_value(network, last_obs)[1]
                    if args.episodic_life:  # at game over, "lives" is the next game's
                        lost_life = terminal & (info["lives"] < lives)
                        lives = np.array(info["lives"])
                    run.add_rewards(reward, (terminal | timeout) & ~lost_life)
                    global_step += num_envs
                values[length] = policy_and_value(network, next_obs)[1]

            # 2. Minimize L_π + c_v L_V - c_e H(π), in N_epochs passes over shuffled mini-batches.
            next_values = torch.where(truncated, last_values, values[1:])
            ends = terminated, truncated
            advantages = gae(rewards, values[:-1], next_values, *ends, args.gamma, args.gae_lambda)
            b_obs = obs.flatten(0, 1)
            b_actions = actions.flatten()
            b_log_probs = log_probs.flatten()
            b_values = values[:-1].flatten()
            b_advantages = advantages.flatten()
            b_returns = b_advantages + b_values  # R, the targets of V
            epochs = args.update_epochs
            if args.scale_epochs:
                epochs = max(epochs, epochs * length // 128)
            clip = args.clip_coef  # ε
            network.train()
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size, device=device)
                for mb in shuffled.tensor_split(args.num_minibatches):  # a mini-batch's indices
                    with autocast:
                        log_pi, new_values = policy_and_value(network, b_obs[mb])
                    new_log_probs = log_prob_of(log_pi, b_actions[mb])
                    mb_advantages = normalize(b_advantages[mb])
                    pg_loss = clipped_surrogate(new_log_probs, b_log_probs[mb], mb_advantages, clip)
                    v_loss = clipped_value_loss(new_values, b_values[mb], b_returns[mb], clip)
                    entropy = -(log_pi.exp() * log_pi).sum(1)  # H(π) = -Σ_a π(a|s) log π(a|s)
                    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
                    optimizer.zero_grad()
                    loss.mean().backward()
                    grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1
            network.eval()

            # 3. ABS: measure how far these updates moved the policy, and adapt the rollout length.
            kl = bd = None
            if is_measured:
                sample = torch.randperm(batch_size, device=device)[: args.reference_states]  # B_ref
                with autocast:
                    kl, bd = policy_divergences(network, old_network, b_obs[sample])
                adaptive_length = rollout_length(
                    kl,
                    adaptive_length,
                    rollout_min=args.rollout_min,
                    rollout_max=args.rollout_max,
                    delta_min=args.delta_min,
                    delta_max=args.delta_max,
                    beta=args.beta,
                )

            # 4. Log and save. The losses are those of the last mini-batch.
            is_clipped = ((new_log_probs - b_log_probs[mb]).exp() - 1).abs() > clip  # |ρ - 1| > ε
            row = {
                "global_step": global_step,
                "charts/updates": updates,
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "abs/rollout_length": length,
                "abs/batch_size": batch_size,
                "abs/kl_divergence": kl,
                "abs/behavioral_divergence": bd,
                "losses/policy_loss": pg_loss.mean().item(),
                "losses/value_loss": v_loss.mean().item(),
                "losses/entropy": entropy.mean().item(),
                "losses/clipfrac": is_clipped.float().mean().item(),
                "losses/grad_norm": grad_norm.item(),
            }
            run.check_finite(network)
            run.log(row)
            done = global_step >= args.total_timesteps or run.interrupted
            if done or run.save_is_due():
                counters = {"global_step": global_step, "iteration": iteration, "updates": updates}
                run.save(modules, adaptive_length=float(adaptive_length), **counters)
    return folder


# --- From here on: checks, files, signals and W&B. Nothing below is about the algorithm. ---

SCRIPT = Path(sys.argv[0]).name  # the program that was started, for example minatar_abs.py
COMMANDS = ("python {} --resume", "python tools/plot.py", "python tools/watch.py")  # shown last


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
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    limits = [
        (0, 2**63, "seed"),
        (1, 10**15, "total_timesteps"),
        (1, 10**6, "num_envs num_steps rollout_min update_epochs"),
        (args.rollout_min, 10**6, "rollout_max"),
        (1, 10**9, "adapt_frequency reference_states"),
        (1, args.num_envs * shortest, "num_minibatches"),
        (0, 1, "gamma gae_lambda beta learning_rate"),
        (0, 1e9, "ent_coef vf_coef"),
        (1e-9, 1, "clip_coef"),
        (1e-9, 1e9, "max_grad_norm checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),  # above 0 and below delta_max
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, args.rollout_max, "num_steps"))
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
