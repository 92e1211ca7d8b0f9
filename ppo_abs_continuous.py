# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "gymnasium[mujoco]>=1.4", "numpy>=2.0", "tyro>=1.0",
#     "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PPO with Adaptive Batch Scaling (ABS), for continuous actions (MuJoCo), in one file.

PPO [arXiv 1707.06347] plays L steps, learns from them in several epochs, and starts anew. ABS
[arXiv 2605.21557] lets L follow the policy. Every K-th iteration copies the network to θ_old before
it updates θ, and then measures in a sample B_ref of its states how far the policy has moved: here
by the KL divergence δ of two Gaussians. A volatile policy gets small batches, a stable one large:

    δ   = (1/M) Σ_i KL( π_θ(·|s_i) ‖ π_θold(·|s_i) ),    s_i ~ B_ref
    δ̄   = mean of the last 20 δ; L moves from the 10th δ on
    α   = log(clip(δ̄, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)
    L'  = L_max - α (L_max - L_min)                                                  (Eq. 4)
    L_adapt ← (1 - β) L_adapt + β L'

L counts the steps of all E environments: each makes L / E, rounded. The numbers are those of ABS's
own code; the paper has none. That code differs in four points: 5M steps; L is rounded down to a
multiple of 32; once L has moved, epochs are N_epochs · L // 2048, even where fewer than N_epochs; a
time limit ends an episode, as for CleanRL: here the value of the last observation stands in.

What turns PPO into PPO with ABS is marked "ABS". It runs on the CPU. For your own environment or
network, replace make_envs or ActorCritic, which has .actor (the means) and .log_std.

Installation of MuJoCo:          pip install "gymnasium[mujoco]"
HalfCheetah on one core:         python ppo_abs_continuous.py --env-id HalfCheetah-v5
Plain PPO, L = 2,048 throughout: python ppo_abs_continuous.py --no-adapt-rollout
After Ctrl-C or a crash:         python ppo_abs_continuous.py --resume runs/...
"""

import copy
import csv
import json
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while modules load
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small networks gain nothing by more

import gymnasium
import numpy as np
import torch
import torch.nn as nn
import tyro
import wandb
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tqdm import tqdm


@dataclass
class Args:
    """PPO with Adaptive Batch Scaling on MuJoCo. In brackets, symbols."""

    env_id: str = "HalfCheetah-v5"  # any of Gymnasium's with numbers as observations and actions
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 1_000_000  # [T_total] environment steps
    num_envs: int = 1  # [E] environments, one after the other; each makes L / E steps of a rollout
    learning_rate: float = 3e-4  # of Adam at the start
    anneal_lr: bool = True  # the learning rate falls linearly to 0, and the KL with it
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages: 0 is one-step, 1 Monte Carlo
    num_minibatches: int = 32  # mini-batches an epoch; their number is fixed, their size follows L
    update_epochs: int = 10  # [N_epochs] passes over each rollout
    clip_coef: float = 0.2  # [ε] probability ratios are clipped to 1 ± ε, changes of values to ± ε
    ent_coef: float = 0.0  # [c_e] weight of the entropy bonus
    vf_coef: float = 0.5  # [c_v] weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm

    adapt_rollout: bool = True  # let L follow the KL, from L_min on; --no-adapt-rollout: plain PPO
    num_steps: int = 2048  # [L] plain PPO's rollout, steps of all environments together
    rollout_min: int = 1024  # [L_min] rollout of a volatile policy, and the first one
    rollout_max: int = 8192  # [L_max] rollout of a stable policy
    adapt_frequency: int = 10  # [K] iterations from one measurement of the KL to the next
    delta_min: float = 0.01  # [δ_min] KL at and below which the policy counts as stable
    delta_max: float = 0.1  # [δ_max] KL at and above which it counts as volatile
    beta: float = 0.1  # [β] smoothing of L_adapt
    reference_states: int = 2048  # [M] size of B_ref, at most the batch
    divergence_window: int = 20  # measurements whose mean L follows
    burn_in: int = 10  # measurement with which L begins to move
    scale_epochs: bool = True  # max(N_epochs, N_epochs · L // base_steps) passes
    base_steps: int = 2048  # L above which --scale-epochs adds passes

    runs_dir: str = "runs"  # where the run's folder is made
    run_name: str | None = None  # its name; by default game, script, seed and time
    checkpoint_every: float = 300.0  # seconds from one checkpoint to the next
    resume: str | None = None  # folder of a run to go on with; its arguments are the defaults then
    track: bool = False  # send the metrics to Weights & Biases too (project: $WANDB_PROJECT)


def layer_init(layer, gain: float = math.sqrt(2)):
    """Orthogonal weights, by default with the gain for ReLU, and zero biases."""
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
    """args.num_envs copies of one of Gymnasium's environments, as one vector.

    Your own may be any Gymnasium VectorEnv with observations (E, D) and actions (E, A) that are Box
    spaces, and same-step autoreset: where an episode ends, step() gives the next one's first
    observation, and the last observation of the ended one in info["final_obs"].
    """
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    try:
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    except (gymnasium.error.Error, ImportError) as error:  # without MuJoCo, it says how to get it
        fail(f"--env-id {args.env_id}: {str(error).splitlines()[0]}")
    for space in (envs.single_observation_space, envs.single_action_space):
        if not isinstance(space, Box) or len(space.shape) != 1:
            fail(f"--env-id {args.env_id}: one-dimensional Box spaces are needed, not {space}")
    return envs


class RunningMoments:
    """Mean and variance, in float64, of all rows (N, *shape) that update() has seen."""

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
        self.count = state["count"]
        self.mean = np.array(state["mean"])
        self.squares = np.array(state["squares"])


class Normalizer:
    """What learning sees of observations and rewards: scaled by running moments, clipped to ±10.

    Of Gymnasium's own vector wrappers, NormalizeObservation refuses same-step autoreset, and
    NormalizeReward drops an episode's earlier rewards from the return of its terminal step.
    """

    def __init__(self, envs, gamma):
        self.observations = RunningMoments(envs.single_observation_space.shape)
        self.returns = RunningMoments([])
        self.gamma = gamma
        self.discounted = np.zeros(envs.num_envs)  # Σ γ^k r_{t-k} of the episodes under way

    def scale(self, obs):
        """Observations (N, D) as the network sees them, float32, by the moments up to now."""
        scaled = (obs - self.observations.mean) / self.observations.std()
        return scaled.clip(-10, 10).astype(np.float32)

    def observe(self, obs):
        """The same, after counting them."""
        self.observations.update(obs)
        return self.scale(obs)

    def observe_step(self, obs, over, info):
        """What step() gives -> observations of the same episodes, and those to act on; (E, D).

        They differ where an episode is over (E,): its last observation, and the next one's first.
        """
        if not over.any():
            scaled = self.observe(obs)
            return scaled, scaled
        same_episode = obs.copy()
        same_episode[over] = np.stack(info["final_obs"][over])
        following = self.observe(same_episode)
        next_obs = following.copy()
        next_obs[over] = self.observe(obs[over])
        return following, next_obs

    def reward(self, rewards, over):
        """Rewards (E,) over the standard deviation of discounted returns; not centred."""
        self.discounted = self.gamma * self.discounted + rewards
        self.returns.update(self.discounted)
        self.discounted[over] = 0
        return (rewards / self.returns.std()).clip(-10, 10)


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimates, computed backwards [arXiv 1506.02438]. All are (L, E).

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = δ_t + γ λ (1 - terminated_t) (1 - truncated_t) A_{t+1}

    next_values[t] is V(s_{t+1}) of the state that truly followed, in the same episode. Where the
    rollout ends or a time limit cuts the episode (truncated) there is no A_{t+1}, and this value
    stands in for all that follows.
    """
    targets = rewards + gamma * ~terminated * next_values
    deltas = targets - values
    goes_on = ~(terminated | truncated)
    advantages = torch.empty_like(values)
    advantage = torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + gamma * gae_lambda * goes_on[t] * advantage
        advantages[t] = advantage
    return advantages


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef):
    """PPO's loss of the policy, to be minimised, of each sample. All are (N,), the result too.

    ρ = π_θ(a|s) / π_θold(a|s),   L^CLIP = min( ρ A, clip(ρ, 1 - ε, 1 + ε) A ),   loss = -L^CLIP
    """
    ratios = (log_probs - old_log_probs).exp()
    objective = ratios * advantages
    clipped_objective = ratios.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    return -torch.minimum(objective, clipped_objective)


def clipped_value_loss(values, old_values, returns, clip_coef):
    """½ max( (V - R)², (clip(V, V_old ± ε) - R)² ) of each sample. All are (N,), the result too."""
    clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    errors = (values - returns).square()
    clipped_errors = (clipped_values - returns).square()
    return 0.5 * torch.maximum(errors, clipped_errors)


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


@torch.no_grad()
def policy_divergence(network, old_network, states) -> float:
    """δ, how far two networks' policies lie apart in the states (M, D), in nats [ABS].

    The paper does not give the direction of the KL divergence; this is that of ABS's own code.
    """
    mean, old_mean = network.actor(states), old_network.actor(states)
    return gaussian_kl(mean, network.log_std, old_mean, old_network.log_std).mean().item()


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
    torch.manual_seed(fresh_seed(args.seed, 0))
    envs = make_envs(args)
    num_envs = args.num_envs
    space = envs.single_action_space
    network = ActorCritic(envs)
    old_network = copy.deepcopy(network)  # ABS: θ_old
    normalizer = Normalizer(envs, args.gamma)
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5, fused=True)  # lr: below
    moments = {"observations": normalizer.observations, "returns": normalizer.returns}
    saved = load_checkpoint(args, network=network, optimizer=optimizer, **moments)  # {}: a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    first_length = args.rollout_min if args.adapt_rollout else args.num_steps
    adaptive_length = saved.get("adaptive_length", float(first_length))  # ABS: L_adapt
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)  # ABS
    first_obs, _ = envs.reset(seed=fresh_seed(args.seed, iteration))
    next_obs = normalizer.observe(first_obs)
    check_parts(envs, network, torch.from_numpy(next_obs))
    run = Run(args, torch.device("cpu"), False, saved)

    while global_step < args.total_timesteps and not run.stopped:
        iteration += 1
        # Anew in each iteration: no RNG state needs saving, and measuring changes no later draw.
        torch.manual_seed(fresh_seed(args.seed, iteration))
        length = round(adaptive_length / num_envs)  # ABS: L / E
        batch_size = length * num_envs
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - global_step / args.total_timesteps
        optimizer.param_groups[0]["lr"] = learning_rate
        # K counts iterations: the KL compares the policies before and after a K-th one's updates.
        measure = iteration % args.adapt_frequency == 0  # ABS
        if measure:
            old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ

        # 1. Collect a rollout with actions drawn from π_θ, in NumPy: rows are written faster.
        obs, following = np.zeros((2, length, *next_obs.shape), np.float32)
        actions = torch.randn((length, num_envs, *space.shape)).numpy()  # standard normal as yet
        rewards = np.zeros((length, num_envs), np.float32)
        terminated, truncated = np.zeros((2, length, num_envs), bool)
        with torch.no_grad():
            std = network.log_std.exp().numpy()
            for t in range(length):
                obs[t] = next_obs
                means = network.actor(torch.from_numpy(next_obs)).numpy()
                actions[t] = means + std * actions[t]
                clipped = actions[t].clip(space.low, space.high)  # PPO learns from what was drawn
                raw_obs, reward, terminated[t], truncated[t], info = envs.step(clipped)
                over = terminated[t] | truncated[t]
                following[t], next_obs = normalizer.observe_step(raw_obs, over, info)
                rewards[t] = normalizer.reward(reward, over)
                global_step += num_envs
                run.count_episodes(global_step, reward, over)
            obs = torch.from_numpy(obs)
            actions = torch.from_numpy(actions)
            means, values = network(obs)
            log_probs = gaussian_log_prob(means, network.log_std, actions)
            next_values = network(torch.from_numpy(following))[1]

        # 2. Update θ by PPO's loss: N_epochs passes in shuffled mini-batches.
        ends = torch.from_numpy(terminated), torch.from_numpy(truncated)
        rewards = torch.from_numpy(rewards)
        advantages = gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
        b_obs = obs.flatten(0, 1)
        b_actions = actions.flatten(0, 1)
        b_log_probs = log_probs.flatten()
        b_values = values.flatten()
        b_advantages = advantages.flatten()
        b_returns = b_advantages + b_values
        epochs = args.update_epochs
        if args.scale_epochs:
            epochs = max(epochs, epochs * batch_size // args.base_steps)
        for _ in range(epochs):
            shuffled = torch.randperm(batch_size)
            for minibatch in shuffled.tensor_split(args.num_minibatches):
                means, value = network(b_obs[minibatch])
                log_prob = gaussian_log_prob(means, network.log_std, b_actions[minibatch])
                old_log_prob, old_value = b_log_probs[minibatch], b_values[minibatch]
                advantage, target = b_advantages[minibatch], b_returns[minibatch]
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                policy_loss = clipped_surrogate(log_prob, old_log_prob, advantage, args.clip_coef)
                value_loss = clipped_value_loss(value, old_value, target, args.clip_coef)
                entropy = gaussian_entropy(network.log_std)
                loss = (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).mean()
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                optimizer.step()
                updates += 1

        # 3. ABS: measure how far the updates moved the policy, and let the next rollouts follow.
        kl = None
        if measure:
            sample = torch.randperm(batch_size)[: args.reference_states]  # B_ref
            kl = policy_divergence(network, old_network, b_obs[sample])
            divergences.append(kl)
            if args.adapt_rollout and iteration // args.adapt_frequency >= args.burn_in:
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
        outside = (log_prob - old_log_prob).expm1().abs() > args.clip_coef
        row = {
            "global_step": global_step,
            "charts/updates": updates,
            "charts/learning_rate": learning_rate,
            "abs/rollout_length": batch_size,  # of all environments
            "abs/batch_size": batch_size,
            "abs/kl_divergence": kl,
            "losses/policy_loss": policy_loss.mean().item(),
            "losses/value_loss": value_loss.mean().item(),
            "losses/entropy": entropy.item(),
            "losses/clipfrac": outside.float().mean().item(),
            "losses/grad_norm": grad_norm.item(),
        }
        run.log(row)
        run.save(
            network=network.state_dict(),
            optimizer=optimizer.state_dict(),
            observations=normalizer.observations.state_dict(),
            returns=normalizer.returns.state_dict(),
            global_step=global_step,
            iteration=iteration,
            updates=updates,
            adaptive_length=adaptive_length,
            divergences=list(divergences),
        )
    envs.close()
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
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    limits = [
        (1, math.inf, "total_timesteps update_epochs num_steps rollout_min"),
        (1, math.inf, "adapt_frequency reference_states divergence_window base_steps"),
        (0, math.inf, "seed burn_in"),
        (0, 1, "gamma gae_lambda beta"),
        (0, 1e9, "ent_coef vf_coef"),
        (1e-9, 1, "clip_coef"),
        (1e-9, 1e9, "learning_rate max_grad_norm checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),
        (1, shortest, "num_envs"),
        (1, shortest // 2, "num_minibatches"),  # rounding L / E may halve the batch
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, math.inf, "rollout_max"))
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
    game = args.env_id.replace("/", "-")
    name = f"{game}__{Path(SCRIPT).stem}__{args.seed}__{int(time.time())}"
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
        for name in ("global_step", "iteration", "updates", "metrics_size", "episodes_size"):
            checkpoint[name].bit_length()  # an error where it is no integer, and below no number
        sum(checkpoint["scores"] + checkpoint["divergences"], checkpoint["seconds"])
        length = min(max(checkpoint["adaptive_length"], args.rollout_min), args.rollout_max)
        checkpoint["adaptive_length"] = length if args.adapt_rollout else float(args.num_steps)
        checkpoint["optimizer"]["param_groups"][0]["lr"] = args.learning_rate
        for name, module in modules.items():
            module.load_state_dict(checkpoint[name])
    except Exception as error:  # torn, foreign and wrong files have about ten ways to show it
        reason = str(error).partition("\n")[0]
        fail(f"--resume {args.resume}: no checkpoint of this version of {SCRIPT} ({reason})")
    return checkpoint


def check_parts(envs, network, obs):
    """Do what make_envs and the network class return keep their promises?"""
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return environments with autoreset_mode=AutoresetMode.SAME_STEP")
    actions = (envs.num_envs, *envs.single_action_space.shape)
    means, values = network(obs)
    if means.shape != actions or values.shape != actions[:1]:
        fail("the network must give means (num_envs, actions) and values (num_envs,)")


class Run:
    """A run's folder with its four files, the progress bar, W&B, and the signals that end it."""

    def __init__(self, args, device, bfloat16, saved):
        self.args = args
        self.interrupted = self.stopped = False
        self.scores = deque(saved.get("scores", []), maxlen=100)  # of the last episodes
        self.score = np.zeros(args.num_envs)  # of the episodes under way
        self.steps = np.zeros(args.num_envs, int)
        self.seconds = saved.get("seconds", 0.0)
        self.folder = run_folder(args)
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(saved))
        except OSError as error:
            fail(f"{self.folder}: {error.strerror}; choose another --runs-dir or --run-name")
        config = {"script": SCRIPT, "args": asdict(args), "args_before": saved.get("args")}
        config |= {"device": str(device), "bfloat16": bfloat16, "torch": torch.__version__}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.metrics = (self.folder / "metrics.csv").open("a", buffering=1)
        self.episodes = (self.folder / "episodes.csv").open("a", buffering=1)
        if saved:  # rows that came after the checkpoint are going to be written again
            self.metrics.truncate(min(saved["metrics_size"], self.metrics.tell()))
            self.episodes.truncate(min(saved["episodes_size"], self.episodes.tell()))
        if self.episodes.tell() == 0:
            self.episodes.write("global_step,episodic_return,episodic_length\n")
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

    def count_episodes(self, global_step, reward, ended):
        """Add a step's rewards (E,) to the scores, and write those of the episodes that ended."""
        self.score += reward
        self.steps += 1
        for score, steps in zip(self.score[ended], self.steps[ended], strict=True):
            self.scores.append(float(score))
            self.episodes.write(f"{global_step},{score},{steps}\n")
        self.score[ended] = 0
        self.steps[ended] = 0

    def log(self, row):
        """Write, show and send an iteration's numbers, with its time and the mean score."""
        now = time.perf_counter()
        self.seconds += now - self.row_at
        row["charts/seconds"] = self.seconds
        row["charts/SPS"] = row["abs/batch_size"] / (now - self.row_at)
        row["charts/episodic_return"] = np.mean(self.scores) if self.scores else None
        self.row_at = now
        table = csv.DictWriter(self.metrics, row, lineterminator="\n")
        if self.metrics.tell() == 0:
            table.writeheader()
        table.writerow(row)
        if self.args.track:
            sent = {name: value for name, value in row.items() if value is not None}
            wandb.log(sent, step=row["global_step"])
        shown = {"return": row["charts/episodic_return"], "L": row["abs/rollout_length"]}
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
        state["scores"] = list(self.scores)
        state["seconds"] = self.seconds
        state["metrics_size"] = self.metrics.seek(0, os.SEEK_END)
        state["episodes_size"] = self.episodes.seek(0, os.SEEK_END)
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
