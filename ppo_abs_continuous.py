# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium[mujoco]>=1.4", "numpy>=2.0", "tyro>=1.0",
#     "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PPO with Adaptive Batch Scaling (ABS), for continuous actions (MuJoCo), in one file.

PPO [arXiv 1707.06347] learns a Gaussian policy π and its value V. An iteration plays L steps,
learns from these steps in several epochs, and discards them. PPO's loss is clipped, so that the
epochs do not carry π far from the policy that played.

ABS [arXiv 2605.21557] adapts L to the policy. In every K-th iteration it measures how far the
updates have moved π in M states of the rollout, B_ref. The measure is the mean KL divergence δ. It
scatters, so L follows the mean of the last measurements. With θ_old, the network before these
updates, and θ, the network after them:

    δ   = (1/M) Σ_i KL( π_θ(·|s_i) ‖ π_θold(·|s_i) )
    δ̄   = the mean of the last 20 δ
    α   = log(clip(δ̄, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)      0: stable, 1: volatile
    L'  = L_max - α (L_max - L_min)                                                  (Eq. 4)
    L_adapt ← (1 - β) L_adapt + β L',    L = E round(L_adapt / E)

L counts the steps of all E environments together, so it is the batch. A volatile policy gets small
batches. A stable policy gets large batches. "ABS" marks the lines for it in main.

The paper has no numbers for PPO. The defaults are those of its author's code, but for the number of
steps. Where this file differs from that code is listed in docs/ppo_abs_continuous.md.

Install MuJoCo:
    pip install "gymnasium[mujoco]"
HalfCheetah, on one core:
    python ppo_abs_continuous.py --env-id HalfCheetah-v5
Plain PPO, with L = 2,048 throughout:
    python ppo_abs_continuous.py --no-adapt-rollout
Continue a run after Ctrl-C or a crash:
    python ppo_abs_continuous.py --resume runs/...
Your own environment, network or rule for L: pass make_envs, ActorCritic or rollout_length to
launch().
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
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: more threads gain nothing here

import gymnasium
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tqdm import tqdm


@dataclass
class Args:
    """PPO with ABS on MuJoCo. Defaults are those of ABS's author; symbols are in brackets."""

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
    reference_states: int = 2048  # [M] states in B_ref, or all L if there are fewer
    divergence_window: int = 20  # L follows the mean of the last measurements, up to this many
    burn_in: int = 10  # L_adapt stays as it is until there are this many measurements
    scale_epochs: bool = True  # N_epochs * L // 2048 epochs where L > 2048

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
    """Observations (..., D) -> means (..., A) of the Gaussian policy π, and values (...).

    A network of your own needs .actor, which gives the means alone, and .log_std (A,).
    """

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
        self.log_std = nn.Parameter(torch.zeros(num_actions))  # log σ, the same in all states

    def forward(self, obs):
        return self.actor(obs), self.critic(obs).squeeze(-1)


def make_envs(args: Args):
    """A vector of args.num_envs copies of one of Gymnasium's environments.

    Your own make_envs may return any Gymnasium VectorEnv with actions Box (A,) and same-step
    autoreset: where an episode ends, step() returns the next one's first observation, and
    info["final_obs"] holds the last one of the episode that ended. A vector wrapper that transforms
    observations must transform both. Actions should range over about -1 to 1, because the policy
    starts with mean 0 and standard deviation 1: see gymnasium.wrappers.RescaleAction.
    """
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    try:
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except (gymnasium.error.Error, ImportError) as error:  # mistyped, or MuJoCo is missing
        raise UsageError(f"--env-id {args.env_id}: {error}") from error
    for space in (envs.single_observation_space, envs.single_action_space):
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise UsageError(f"--env-id {args.env_id}: needs vectors (Box), not {space}")
    return envs


class RunningMoments:
    """Mean and variance, in float64, of all rows (N, *shape) that update() has seen [Welford 1962].

    With d, a row's deviation from the mean before the update, and d', from the mean after it, the
    sum of the squared deviations grows by Σ d d'.
    """

    def __init__(self, shape):
        self.count = 1e-4  # as if so many rows had been seen, with mean 0 and variance 1
        self.mean = np.zeros(shape)
        self.squares = np.full(shape, 1e-4)  # Σ (row - mean)²

    def update(self, rows):
        deviations = rows - self.mean
        self.count += len(rows)
        self.mean += deviations.sum(0) / self.count
        self.squares += (deviations * (rows - self.mean)).sum(0)

    def std(self):
        return np.sqrt(self.squares / self.count + 1e-8)

    def state_dict(self):
        """Plain numbers, which torch.load(weights_only=True) reads."""
        state = {"count": self.count}
        state["mean"] = self.mean.tolist()
        state["squares"] = self.squares.tolist()
        return state

    def load_state_dict(self, state):
        self.count = state["count"]
        self.mean = np.array(state["mean"])
        self.squares = np.array(state["squares"])


class Normalizer:
    """Scales observations and rewards by their running moments, and clips them to ±10.

    Gymnasium has vector wrappers for it. But NormalizeObservation refuses same-step autoreset, and
    NormalizeReward begins the next sum one step too early, with an episode's last reward.
    """

    def __init__(self, envs, gamma):
        self.observations = RunningMoments(envs.single_observation_space.shape)
        self.returns = RunningMoments([])
        self.gamma = gamma
        self.discounted = np.zeros(envs.num_envs)  # Σ_k γ^k r_{t-k} of the episodes in progress

    def scale(self, obs):
        """Observations (N, D) as the network sees them, float32."""
        scaled = (obs - self.observations.mean) / self.observations.std()
        return scaled.clip(-10, 10).astype(np.float32)

    def count_and_scale(self, obs):
        """Scale observations (N, D), after the moments have counted them."""
        self.observations.update(obs)
        return self.scale(obs)

    def scale_rewards(self, rewards, over):
        """Divide rewards (E,) by the standard deviation of all discounted sums of rewards so far.

        over (E,) says where the episode ended: the next sum starts at 0.
        """
        self.discounted = self.gamma * self.discounted + rewards
        self.returns.update(self.discounted)
        self.discounted[over] = 0
        return (rewards / self.returns.std()).clip(-10, 10)


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimates, computed backwards [arXiv 1506.02438]. All are (L, E).

    d_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = d_t + γ λ (1 - terminated_t) (1 - truncated_t) A_{t+1}

    next_values[t] is V of the state that followed s_t in its episode, never of the next episode's
    first. At the end of the rollout and of a truncated episode it stands in for all that follows.
    Where the episode terminated it is ignored.
    """
    errors = rewards + gamma * ~terminated * next_values - values
    goes_on = ~(terminated | truncated)
    advantages = torch.empty_like(values)
    advantage = torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        advantage = errors[t] + gamma * gae_lambda * goes_on[t] * advantage
        advantages[t] = advantage
    return advantages


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's policy loss (N,) of N samples. old_log_probs are those of π_b, the policy that played.

    ρ = π_θ(a|s) / π_b(a|s),    L_π = -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
    """
    ratios = (log_probs - old_log_probs).exp()
    clipped_ratios = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.minimum(ratios * advantages, clipped_ratios * advantages)


def clipped_value_loss(values, old_values, returns, clip_coef):
    """PPO's value loss (N,) of N samples. old_values are V_b, from when the states were visited.

    L_V = 1/2 max( (V - R)², (V_b + clip(V - V_b, -ε, ε) - R)² )
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
    """KL(p ‖ q) (N,) in nats, with r = σ_p / σ_q:

    Σ_j [ ½ (r² + (μ_p - μ_q)² / σ_q² - 1) - log r ]
    """
    log_ratio = log_std_p - log_std_q
    shift = (mean_p - mean_q) / log_std_q.exp()
    kl = 0.5 * ((2 * log_ratio).exp() + shift.square() - 1) - log_ratio
    return kl.sum(-1)


def ppo_loss(network, batch, args):
    """PPO's loss of a mini-batch, and the terms whose means are logged, by name.

    loss = mean_i[ L_π + c_v L_V - c_e H(π_θ) ]

    The mini-batch has obs (N, D), actions (N, A), advantages (N,), returns (N,), and log_probs (N,)
    and values (N,) from when it was collected.
    """
    means, values = network(batch["obs"])
    log_probs = gaussian_log_prob(means, network.log_std, batch["actions"])
    advantages = normalize(batch["advantages"])
    policy_loss = clipped_surrogate(log_probs, batch["log_probs"], advantages, args.clip_coef)
    value_loss = clipped_value_loss(values, batch["values"], batch["returns"], args.clip_coef)
    entropy = gaussian_entropy(network.log_std)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    ratios = (log_probs - batch["log_probs"]).detach().exp()
    logged = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/clipfrac": (ratios - 1).abs() > args.clip_coef,
    }
    return loss.mean(), logged


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

    The paper calls β α, too. Raises ValueError if the limits are not positive and in order.
    """
    if not (0 < delta_min < delta_max and 0 < rollout_min <= rollout_max):
        raise ValueError("needs 0 < delta_min < delta_max and 0 < rollout_min <= rollout_max")
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * adaptive_length + beta * target


def main(args, *, make_envs=make_envs, ActorCritic=ActorCritic, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own make_envs, network or rollout_length."""
    check_args(args)
    folder, saved = run_folder(args)  # saved is what a checkpoint holds; empty in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)  # ABS
    adaptive_length = saved.get("adaptive_length", float(args.rollout_min))  # ABS: L_adapt
    # --resume may bring new limits.
    adaptive_length = min(max(adaptive_length, args.rollout_min), args.rollout_max)

    env_seed = seed_all(args.seed, iteration)  # a resumed run starts new episodes
    envs = make_envs(args)
    num_envs = args.num_envs
    space = envs.single_action_space
    network = ActorCritic(envs).eval()  # dropout, if any, is off while acting
    old_network = copy.deepcopy(network)  # ABS: θ_old, filled in the loop
    normalizer = Normalizer(envs, args.gamma)
    optimizer = torch.optim.Adam(network.parameters(), args.learning_rate, eps=1e-5, foreach=True)
    modules = {"network": network, "optimizer": optimizer}  # whose states a checkpoint stores
    modules |= {"observations": normalizer.observations, "returns": normalizer.returns}
    if hasattr(rollout_length, "state_dict"):  # your own may be an object with a state
        modules["rollout_length"] = rollout_length
    if saved:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    next_obs = normalizer.count_and_scale(envs.reset(seed=env_seed)[0])
    check_policy(args, envs, network(torch.from_numpy(next_obs)))
    score = np.zeros(num_envs)  # of the episodes in progress
    with closing(envs), Run(args, folder, device="cpu", bfloat16=False, saved=saved) as run:
        finished = False
        while not finished:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed_all(args.seed, iteration)
            all_steps = adaptive_length if args.adapt_rollout else args.num_steps  # ABS
            length = round(all_steps / num_envs)  # steps in each environment
            batch_size = length * num_envs  # ABS: L
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = learning_rate

            # 1. Collect L steps in all, with actions drawn from π_θ.
            noise = torch.randn((length, num_envs, *space.shape)).numpy()
            obs = np.zeros((length, *next_obs.shape), np.float32)  # s_t, scaled
            following = np.zeros_like(obs)  # s_{t+1} of the same episode, scaled
            actions = np.zeros_like(noise)
            rewards = np.zeros((length, num_envs), np.float32)
            terminated = np.zeros((length, num_envs), bool)
            truncated = np.zeros_like(terminated)
            with torch.no_grad():
                std = network.log_std.exp().numpy()
                for t in range(length):
                    obs[t] = next_obs
                    means = network.actor(torch.from_numpy(next_obs)).numpy()
                    actions[t] = means + std * noise[t]  # π learns from these, unclipped
                    allowed = actions[t].clip(space.low, space.high)
                    raw_obs, reward, terminated[t], truncated[t], info = envs.step(allowed)
                    over = terminated[t] | truncated[t]
                    # Where an episode ended, raw_obs is the next one's first observation, and
                    # final_obs holds the one that followed.
                    raw_following = np.array(raw_obs, float)
                    if over.any():
                        raw_following[over] = np.stack(info["final_obs"][over])
                    following[t] = normalizer.count_and_scale(raw_following)
                    next_obs = following[t].copy()
                    if over.any():
                        next_obs[over] = normalizer.count_and_scale(raw_obs[over])
                    rewards[t] = normalizer.scale_rewards(reward, over)
                    score += reward
                    run.scores.extend(score[over].tolist())
                    score[over] = 0
                    global_step += num_envs
                arrays = (obs, following, actions, rewards, terminated, truncated)
                obs, following, actions, rewards, terminated, truncated = map(torch.tensor, arrays)
                means, values = network(obs)
                log_probs = gaussian_log_prob(means, network.log_std, actions)
                _, next_values = network(following)

            # 2. Minimize PPO's loss: N_epochs passes in shuffled mini-batches.
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
                base_steps = 2048  # plain PPO's L on MuJoCo
                epochs = max(epochs, epochs * batch_size // base_steps)
            network.train()
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size)
                for indices in shuffled.tensor_split(args.num_minibatches):
                    minibatch = {name: column[indices] for name, column in batch.items()}
                    loss, logged = ppo_loss(network, minibatch, args)
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1
            network.eval()
            # A NaN in an observation, a reward or a weight spreads to this last gradient.
            if not grad_norm.isfinite():
                raise FloatingPointError(f"the gradient is not finite at step {global_step:,}")

            # 3. ABS: measure how far the updates moved the policy, and adapt the rollout length.
            divergence = None
            if is_measured:
                sample = torch.randperm(batch_size)[: args.reference_states]  # B_ref
                divergence = policy_divergence(network, old_network, batch["obs"][sample])
                divergences.append(divergence)
                if len(divergences) >= args.burn_in:
                    adaptive_length = rollout_length(
                        sum(divergences) / len(divergences),  # δ̄
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
                "charts/learning_rate": learning_rate,
                "abs/rollout_length": batch_size,  # L counts the steps of all environments here
                "abs/batch_size": batch_size,
                "abs/kl_divergence": divergence,
                "losses/grad_norm": grad_norm.item(),
            }
            for name, samples in logged.items():
                row[name] = samples.float().mean().item()
            run.log(row)
            finished = global_step >= args.total_timesteps or run.interrupted
            if finished or time.perf_counter() >= run.save_at:
                counters = {"global_step": global_step, "iteration": iteration, "updates": updates}
                counters["divergences"] = list(divergences)
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
        (0, math.inf, "seed ent_coef vf_coef"),
        (1, math.inf, "total_timesteps num_steps rollout_min update_epochs"),
        (1, math.inf, "adapt_frequency reference_states divergence_window"),
        (1e-9, math.inf, "clip_coef max_grad_norm checkpoint_every delta_min"),
        (0, 1, "gamma gae_lambda beta learning_rate"),
        (args.delta_min * 1.001, math.inf, "delta_max"),
        (args.rollout_min, math.inf, "rollout_max"),
        (0, args.divergence_window, "burn_in"),
        (1, shortest, "num_envs"),
        (1, shortest // 2, "num_minibatches"),  # rounding L / E may lose a third of L
    ]
    for low, high, names in limits:
        for name in names.split():
            if not low <= getattr(args, name) <= high:  # refuses NaN, too
                raise UsageError(f"--{name.replace('_', '-')} must be from {low} to {high}")


def check_policy(args, envs, outputs):
    """Refuse environments or a network that main would learn something wrong from."""
    space = envs.single_action_space
    is_same_step = envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
    if not is_same_step or not isinstance(space, Box) or len(space.shape) != 1:
        raise UsageError("make_envs must return actions Box (A,) and autoreset_mode SAME_STEP")
    shapes = [tuple(output.shape) for output in outputs]
    expected = [(args.num_envs, *space.shape), (args.num_envs,)]
    if shapes != expected:  # others would be broadcast
        raise UsageError(f"the network must return means and values {expected}, not {shapes}")


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
