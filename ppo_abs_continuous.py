# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium[mujoco]>=1.4", "numpy>=2.0", "tyro>=1.0",
#     "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PPO with Adaptive Batch Scaling (ABS), for continuous actions (MuJoCo), in one file.

PPO [arXiv 1707.06347] learns a policy π and its value V. It plays L steps, learns from them in
several epochs, throws them away and starts again. Its loss is clipped, so that the epochs do not
carry π far from the policy that played.

ABS [arXiv 2605.21557] adapts L to the policy. In every K-th iteration it keeps a copy θ_old of the
network from before the update. After the update it draws a sample B_ref of M states from the
rollout, and measures how far the policy has moved in them. The measure is the mean KL divergence δ
of two Gaussians. A policy that moves far gets small batches. A stable policy gets large batches:

    δ   = (1/M) Σ_i KL( π_θ(·|s_i) ‖ π_θold(·|s_i) ),    s_i ~ B_ref
    δ̄   = the mean of the last 20 δ;  L_adapt moves from the 10th δ on
    α   = log(clip(δ̄, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)          0: stable, 1: volatile
    L'  = L_max - α (L_max - L_min)                                                  (Eq. 4)
    L_adapt ← (1 - β) L_adapt + β L'                smooths L; it starts at L_min, with β = 0.1

L counts the steps of all E environments together, so it is the batch size. Each environment makes
L / E steps. In main, "ABS" marks the lines that only ABS needs.

The paper gives no numbers for PPO. The defaults are those of its author's code. That code differs
from this file in these points. It runs 5M steps, in the v4 environments. It rounds L_adapt down to
a multiple of 32 each time that it moves. So a rising L stops about 300 below its target. Once L has
moved, it makes N_epochs · L // 2048 epochs, even where these are fewer than N_epochs. It scales
rewards with Gymnasium's wrapper, and takes a time limit for the end of an episode. Here, the value
of the last observation stands in for what would have followed.

Install MuJoCo:
    pip install "gymnasium[mujoco]"
HalfCheetah, on one core:
    python ppo_abs_continuous.py --env-id HalfCheetah-v5
Plain PPO, with L = 2,048 throughout:
    python ppo_abs_continuous.py --no-adapt-rollout
Continue a run after Ctrl-C or a crash:
    python ppo_abs_continuous.py --resume runs/...
Your own environment, network or rule for L: pass make_envs, ActorCritic or rollout_length to
launch(), as the files in examples/ do with pqn_abs.py. An ActorCritic of your own needs .actor,
which gives the means, and .log_std.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small networks gain nothing by more

import gymnasium
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tqdm import tqdm

try:
    import fcntl  # for a lock on the run's folder
except ImportError:  # on Windows
    fcntl = None


@dataclass
class Args:
    """PPO with Adaptive Batch Scaling on MuJoCo. Symbols are in brackets."""

    env_id: str = "HalfCheetah-v5"  # a Gymnasium environment; observations and actions are vectors
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 1_000_000  # [T_total] environment steps
    num_envs: int = 1  # [E] environments, which take their steps one after the other
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages: 0 is one-step, 1 is Monte Carlo
    num_minibatches: int = 32  # mini-batches per epoch
    update_epochs: int = 10  # [N_epochs] passes over each rollout
    clip_coef: float = 0.2  # [ε] ratios are clipped to 1 ± ε, and changes of V to ± ε
    ent_coef: float = 0.0  # [c_e] weight of the entropy bonus
    vf_coef: float = 0.5  # [c_v] weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm

    adapt_rollout: bool = True  # ABS: adapt L; --no-adapt-rollout keeps L = num_steps
    num_steps: int = 2048  # [L] of plain PPO: steps of all environments together
    rollout_min: int = 1024  # [L_min] L of a volatile policy, and of the first rollout
    rollout_max: int = 8192  # [L_max] L of a stable policy
    adapt_frequency: int = 10  # [K] measure the KL divergence in every K-th iteration
    delta_min: float = 0.01  # [δ_min] at this KL divergence or less, the policy counts as stable
    delta_max: float = 0.1  # [δ_max] at this KL divergence or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L_adapt
    reference_states: int = 2048  # [M] states in B_ref
    divergence_window: int = 20  # L follows the mean of this many latest measurements
    burn_in: int = 10  # L moves from this measurement on
    scale_epochs: bool = True  # if L > base_steps, N_epochs * L // base_steps epochs
    base_steps: int = 2048  # L above which --scale-epochs adds epochs, with or without ABS

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


class ActorCritic(nn.Module):
    """Observations (..., D) -> means (..., A) of the Gaussian policy π, and values (...)."""

    def __init__(self, envs):
        super().__init__()
        inputs = envs.single_observation_space.shape[0]
        num_actions = envs.single_action_space.shape[0]
        self.actor = nn.Sequential(
            layer_init(nn.Linear(inputs, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), 0.01),  # all means start near 0
        )
        self.critic = nn.Sequential(
            layer_init(nn.Linear(inputs, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), 1.0),
        )
        self.log_std = nn.Parameter(torch.zeros(num_actions))  # the same in all states

    def forward(self, obs):
        return self.actor(obs), self.critic(obs).squeeze(-1)


def make_envs(args: Args):
    """A vector of args.num_envs copies of one of Gymnasium's environments.

    Your own make_envs may return any Gymnasium VectorEnv that has
    - observations (E, D) and actions (E, A) in Box spaces,
    - same-step autoreset: where an episode ends, step() returns the next one's first observation,
      and info["final_obs"] holds the last observation of the one that ended.
    """
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    try:
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except (gymnasium.error.Error, ImportError) as error:  # without MuJoCo, it says how to get it
        fail(f"--env-id {args.env_id}: {error}")


def check_envs(args, envs):
    """Refuse environments that main cannot train on; warn of actions that are badly scaled."""
    for space in (envs.single_observation_space, envs.single_action_space):
        if not isinstance(space, Box) or len(space.shape) != 1:
            fail(f"--env-id {args.env_id}: needs one-dimensional Box spaces, not {space}")
    space = envs.single_action_space
    one_sided = space.bounded_below != space.bounded_above
    if not np.issubdtype(space.dtype, np.floating) or one_sided.any():
        fail(f"--env-id {args.env_id}: needs real actions, bounded on both sides or none: {space}")
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return environments with autoreset_mode=AutoresetMode.SAME_STEP")
    if envs.num_envs != args.num_envs:
        fail(f"make_envs returned {envs.num_envs} environments instead of {args.num_envs}")
    low, high = space.low.min(), space.high.max()
    off_zero = (space.low > 0).any() or (space.high < 0).any()
    if space.is_bounded() and (off_zero or high - low > 20):
        say(
            f"{SCRIPT}: actions go from {low:g} to {high:g}, but the policy starts with mean 0 and "
            "standard deviation 1; gymnasium.wrappers.RescaleAction(env, -1, 1) fixes that"
        )


def check_policy(args, envs, outputs):
    """Refuse a network that does not return means and values of the right shapes."""
    shapes = [tuple(output.shape) for output in outputs]
    expected = [(args.num_envs, *envs.single_action_space.shape), (args.num_envs,)]
    if shapes != expected:
        fail(f"the network must return means and values of shapes {expected}, not {shapes}")


def to_array(obs):
    """A copy of observations, in float64; one that is not finite ends the run."""
    obs = np.array(obs, float)
    if not np.isfinite(obs).all():
        fail("an environment returned an observation that is not finite", status=1)
    return obs


def reset(envs, seed):
    """Start the environments; returns the first observations, float64 (E, D)."""
    # Environments may sample from their spaces, which envs.reset(seed=...) does not seed.
    sub_envs = getattr(envs.unwrapped, "envs", [])
    for i, env in enumerate([envs, *sub_envs]):
        for name in ("action", "observation", "single_action", "single_observation"):
            if hasattr(env, f"{name}_space"):
                getattr(env, f"{name}_space").seed(seed + i)
    obs, _ = envs.reset(seed=seed)
    return to_array(obs)


def step(envs, actions):
    """Take one action in each environment; actions are (E, A). Returns NumPy arrays, all copies:

    - next_obs (E, D): the observations to act on next
    - following (E, D): the same, but where an episode ended, its own last observation
    - rewards, terminated, truncated (E,)
    """
    obs, rewards, terminated, truncated, info = envs.step(actions)
    next_obs = to_array(obs)
    terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
    over = terminated | truncated
    following = next_obs.copy()
    if over.any():
        following[over] = to_array(np.stack(info["final_obs"][over]))
    return next_obs, following, np.array(rewards, float), terminated, truncated


class RunningMoments:
    """Mean and variance, in float64, of all the rows (N, *shape) that update() has seen."""

    def __init__(self, shape):
        self.count = 1e-4  # as if so many rows had been seen, with mean 0 and variance 1
        self.mean = np.zeros(shape)
        self.squares = np.full(shape, 1e-4)  # Σ (row - mean)²

    def update(self, rows):
        deviations = rows - self.mean
        self.count += len(rows)
        self.mean += deviations.sum(0) / self.count
        self.squares += (deviations * (rows - self.mean)).sum(0)  # exact for any number of rows

    def std(self):
        return np.sqrt(self.squares / self.count + 1e-8)

    def state_dict(self):
        """Plain numbers, which torch.load(weights_only=True) reads."""
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self.squares.tolist()}

    def load_state_dict(self, state):
        mean = np.array(state["mean"], float)
        squares = np.array(state["squares"], float)
        if mean.shape != self.mean.shape or squares.shape != self.mean.shape:
            raise ValueError(f"moments of shape {mean.shape} instead of {self.mean.shape}")
        self.count, self.mean, self.squares = float(state["count"]), mean, squares


class Normalizer:
    """Scales observations and rewards by their running moments, and clips them to ±10.

    Gymnasium has vector wrappers for it. But NormalizeObservation refuses same-step autoreset, and
    NormalizeReward drops an episode's earlier rewards from the return of its last step.
    """

    def __init__(self, envs, gamma):
        self.observations = RunningMoments(envs.single_observation_space.shape)
        self.returns = RunningMoments([])
        self.gamma = gamma
        self.discounted = np.zeros(envs.num_envs)  # Σ γ^k r_{t-k} of the episodes under way

    def scale(self, obs):
        """Observations (N, D) as the network sees them, float32."""
        scaled = (obs - self.observations.mean) / self.observations.std()
        return scaled.clip(-10, 10).astype(np.float32)

    def observe(self, obs):
        """The same, after counting them."""
        self.observations.update(obs)
        return self.scale(obs)

    def observe_step(self, next_obs, following, over):
        """Both results of step() as the network sees them, after counting each observation once."""
        scaled = self.observe(following)
        scaled_next = scaled.copy()
        if over.any():
            scaled_next[over] = self.observe(next_obs[over])
        return scaled_next, scaled

    def reward(self, rewards, over):
        """Rewards (E,), divided by the standard deviation of the discounted returns so far."""
        self.discounted = self.gamma * self.discounted + rewards
        self.returns.update(self.discounted)
        self.discounted[over] = 0
        return (rewards / self.returns.std()).clip(-10, 10)


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


def normalize(advantages):
    """Advantages (N,) of a mini-batch, shifted and scaled to mean 0 and standard deviation 1."""
    # With correction=1, a mini-batch of one sample would become NaN.
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def gaussian_log_prob(means, log_std, actions):
    """log π(a|s) (...) of actions (..., A): Σ_j [ -½ (a_j - μ_j)² / σ_j² - log σ_j - ½ log 2π ]."""
    z = (actions - means) / log_std.exp()
    log_probs = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    return log_probs.sum(-1)


def gaussian_entropy(log_std):
    """Entropy of the policy in any state, in nats: Σ_j [ log σ_j + ½ log 2πe ]."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def gaussian_kl(mean_p, log_std_p, mean_q, log_std_q):
    """KL(p ‖ q) (N,): Σ_j [ log σ_q - log σ_p + (σ_p² + (μ_p - μ_q)²) / (2 σ_q²) - ½ ], in nats."""
    log_ratio = log_std_p - log_std_q
    shift = (mean_p - mean_q) / log_std_q.exp()
    kl = 0.5 * ((2 * log_ratio).exp() + shift.square() - 1) - log_ratio
    return kl.sum(-1)


def ppo_loss(network, batch, args):
    """PPO's loss of a mini-batch, and its parts under the names that they are logged with.

    loss = mean_i[ L_π + c_v L_V - c_e H(π_θ) ]

    The mini-batch has obs (N, D), actions (N, A), and (N,) each of advantages, returns, and the
    log_probs and values from when it was collected.
    """
    means, values = network(batch["obs"])
    log_probs = gaussian_log_prob(means, network.log_std, batch["actions"])
    advantages = normalize(batch["advantages"])
    policy_loss = clipped_surrogate(log_probs, batch["log_probs"], advantages, args.clip_coef)
    value_loss = clipped_value_loss(values, batch["values"], batch["returns"], args.clip_coef)
    entropy = gaussian_entropy(network.log_std)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    ratios = (log_probs - batch["log_probs"]).exp()
    losses = {
        "losses/policy_loss": policy_loss.mean(),
        "losses/value_loss": value_loss.mean(),
        "losses/entropy": entropy,
        "losses/clipfrac": ((ratios - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss.mean(), losses


@torch.no_grad()
def policy_divergence(network, old_network, states) -> float:
    """How far apart two networks' policies are in the states (M, D), in nats [ABS].

    δ = (1/M) Σ_i KL( π_θ(·|s_i) ‖ π_θold(·|s_i) )

    The paper does not say which of the two comes first. This is how its author's code has it.
    """
    mean, old_mean = network.actor(states), old_network.actor(states)
    return gaussian_kl(mean, network.log_std, old_mean, old_network.log_std).mean().item()


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


def main(
    args, make_envs=make_envs, ActorCritic=ActorCritic, rollout_length=rollout_length, gae=gae
) -> Path:
    """Train, and return the run's folder. Parts that you pass replace those of this file."""
    check_args(args)
    folder = run_folder(args)
    seed_all(args.seed, 0)
    envs = make_envs(args)
    check_envs(args, envs)
    num_envs = args.num_envs
    space = envs.single_action_space
    network = ActorCritic(envs).eval()  # dropout, if any, is off while acting
    old_network = copy.deepcopy(network)  # ABS: θ_old, filled in the loop
    normalizer = Normalizer(envs, args.gamma)
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5, fused=True)  # fused: fastest
    # What a checkpoint stores. Your own rollout_length may be an object with a state_dict().
    modules = {"network": network, "optimizer": optimizer, "rollout_length": rollout_length}
    modules |= {"observations": normalizer.observations, "returns": normalizer.returns}
    saved = load_checkpoint(args, folder, modules)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    saved_length = saved.get("adaptive_length", float(args.rollout_min))  # limits may be new
    adaptive_length = min(max(saved_length, args.rollout_min), args.rollout_max)  # ABS: L_adapt
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)  # ABS
    seed = seed_all(args.seed, iteration)  # a resumed run starts new episodes
    next_obs = normalizer.observe(reset(envs, seed))
    check_policy(args, envs, network(torch.from_numpy(next_obs)))
    with closing(envs), Run(args, folder, torch.device("cpu"), False, saved) as run:
        done = global_step >= args.total_timesteps
        while not done:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed_all(args.seed, iteration)
            total_length = adaptive_length if args.adapt_rollout else args.num_steps  # ABS: L
            length = round(total_length / num_envs)  # of each environment: L / E
            batch_size = length * num_envs
            # The KL spans the updates of this one iteration. K only sets how often it is measured.
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ
            optimizer.param_groups[0]["lr"] = args.learning_rate
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] *= 1 - global_step / args.total_timesteps

            # 1. Collect L steps with actions drawn from π_θ, in NumPy, which writes rows faster.
            obs = np.zeros((length, *next_obs.shape), np.float32)
            following = np.zeros_like(obs)  # the observations after them, in the same episodes
            noise = torch.randn((length, num_envs, *space.shape)).numpy()
            actions = np.zeros_like(noise)
            rewards = np.zeros((length, num_envs), np.float32)
            terminated = np.zeros((length, num_envs), bool)
            truncated = np.zeros_like(terminated)
            with torch.no_grad():
                std = network.log_std.exp().numpy()
                for t in range(length):
                    obs[t] = next_obs
                    means = network.actor(torch.from_numpy(next_obs)).numpy()
                    actions[t] = means + std * noise[t]  # learning sees these, unclipped
                    allowed = actions[t].clip(space.low, space.high)
                    raw_obs, raw_following, reward, terminal, timeout = step(envs, allowed)
                    over = terminal | timeout
                    next_obs, following[t] = normalizer.observe_step(raw_obs, raw_following, over)
                    rewards[t] = normalizer.reward(reward, over)
                    terminated[t] = terminal
                    truncated[t] = timeout
                    run.add_rewards(reward, over)
                    global_step += num_envs
                obs, actions, rewards = map(torch.from_numpy, (obs, actions, rewards))
                terminated, truncated = map(torch.from_numpy, (terminated, truncated))
                means, values = network(obs)
                log_probs = gaussian_log_prob(means, network.log_std, actions)
                _, next_values = network(torch.from_numpy(following))

            # 2. Minimize PPO's loss, in N_epochs passes over shuffled mini-batches.
            advantages = gae(
                rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda
            )
            batch = {
                "obs": obs.flatten(0, 1),
                "actions": actions.flatten(0, 1),
                "log_probs": log_probs.flatten(),
                "values": values.flatten(),
                "advantages": advantages.flatten(),
                "returns": (advantages + values).flatten(),
            }
            epochs = args.update_epochs
            if args.scale_epochs:
                epochs = max(epochs, epochs * batch_size // args.base_steps)
            network.train()
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size)
                for indices in shuffled.tensor_split(args.num_minibatches):
                    minibatch = {name: column[indices] for name, column in batch.items()}
                    loss, losses = ppo_loss(network, minibatch, args)
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1
            network.eval()

            # 3. ABS: measure how far the updates moved the policy, and adapt the rollout length.
            kl = None
            if is_measured:
                sample = torch.randperm(batch_size)[: args.reference_states]  # B_ref
                kl = policy_divergence(network, old_network, batch["obs"][sample])
                divergences.append(kl)
                if len(divergences) >= args.burn_in:
                    adaptive_length = rollout_length(
                        sum(divergences) / len(divergences),
                        adaptive_length,
                        rollout_min=args.rollout_min,
                        rollout_max=args.rollout_max,
                        delta_min=args.delta_min,
                        delta_max=args.delta_max,
                        beta=args.beta,
                    )

            # 4. Log and save. Losses are the last mini-batch's.
            row = {
                "global_step": global_step,
                "charts/updates": updates,
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "abs/rollout_length": batch_size,  # L counts the steps of all environments here
                "abs/batch_size": batch_size,
                "abs/kl_divergence": kl,
                "losses/grad_norm": grad_norm.item(),
            }
            for name, loss in losses.items():
                row[name] = loss.item()
            run.check_finite(network)
            run.log(row)
            done = global_step >= args.total_timesteps or run.interrupted
            if done or run.save_is_due():
                counters = {"global_step": global_step, "iteration": iteration, "updates": updates}
                counters["divergences"] = list(divergences)
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
        (1, 10**6, "num_steps rollout_min update_epochs"),
        (args.rollout_min, 10**6, "rollout_max"),
        (1, 10**9, "adapt_frequency reference_states divergence_window base_steps"),
        (0, args.divergence_window, "burn_in"),
        (1, shortest, "num_envs"),
        (1, shortest // 2, "num_minibatches"),  # rounding L / E may lose a third of L
        (0, 1, "gamma gae_lambda beta learning_rate"),
        (0, 1e9, "ent_coef vf_coef"),
        (1e-9, 1, "clip_coef"),
        (1e-9, 1e9, "max_grad_norm checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),  # above 0 and below delta_max
    ]
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
