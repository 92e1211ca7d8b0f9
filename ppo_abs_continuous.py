# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium[mujoco]>=1.4", "numpy>=2.0", "tyro>=1.0.17",
#     "wandb>=0.25", "tqdm>=4.67", "filelock>=3.24"]
# ///
"""PPO with Adaptive Batch Scaling (ABS), for continuous actions (MuJoCo), in one file.

PPO [arXiv 1707.06347] learns a Gaussian policy π_θ and its value function V. An iteration plays L
steps in all environments together, learns from these steps in several epochs, and discards them.
Its loss is clipped, so that the epochs do not carry π_θ far from π_θold, the policy that played.

ABS [arXiv 2605.21557] adapts L to the policy. In every K-th iteration it measures how far the
updates moved the policy: δ is the mean KL divergence in M sampled states of the rollout. θ_old is
the network before these updates, and θ the one after them. One δ is noisy, so L follows their mean:

    δ  = (1/M) Σ_i KL( π_θ(·|s_i) ‖ π_θold(·|s_i) )
    δ̄  = the mean of the last 20 δ
    α  = log(clip(δ̄, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)         0: stable, 1: volatile
    L' = L_max - α (L_max - L_min)                                                   (Eq. 4)
    L  ← (1 - β) L + β L'

The paper's idea: while the policy changes fast, small batches keep the network plastic. Once it is
stable, large batches converge more precisely. In main, "ABS" marks the lines that PPO alone does
not have.

The paper has no numbers for PPO. The defaults are its author's, but for a fifth of the steps.
docs/ppo_abs_continuous.md lists what else differs from that code.

HalfCheetah. The network is small, so PyTorch gets one thread:
    OMP_NUM_THREADS=1 python ppo_abs_continuous.py --env-id HalfCheetah-v5
Plain PPO, with L = 2,048 throughout:
    OMP_NUM_THREADS=1 python ppo_abs_continuous.py --no-adapt-rollout
Continue a run after Ctrl-C or a crash:
    OMP_NUM_THREADS=1 python ppo_abs_continuous.py --resume runs/...
Your own environment, network or rule for L: pass it to launch(); see examples/ and docs/usage.md.
"""

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import deque
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn as nn
import tyro
from filelock import FileLock
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.distributions import Independent, Normal, kl_divergence
from tqdm import tqdm


@dataclass
class Args:
    """PPO with ABS on MuJoCo. Symbols are in brackets, defaults are those of ABS's author."""

    env_id: str = "HalfCheetah-v5"  # a Gymnasium environment; observations and actions are vectors
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 1_000_000  # [T_total] steps in all environments; the author's: 5 million
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

    adapt_rollout: bool = True  # ABS: adapt L; --no-adapt-rollout is plain PPO with L = num_steps
    num_steps: int = 2048  # [L] of plain PPO, in all environments together
    rollout_min: int = 1024  # [L_min] L of a volatile policy, and of the first rollout
    rollout_max: int = 8192  # [L_max] L of a stable policy
    adapt_frequency: int = 10  # [K] measure δ in every K-th iteration
    delta_min: float = 0.01  # [δ_min] at this δ̄ or less, the policy counts as stable
    delta_max: float = 0.1  # [δ_max] at this δ̄ or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L
    reference_states: int = 2048  # [M] states of the rollout that δ is measured on; all, if fewer
    divergence_window: int = 20  # δ̄ is the mean of so many δ, or of all while fewer are measured
    burn_in: int = 10  # L stays as it is until so many δ are measured
    scale_epochs: bool = True  # where L > 2048, make N_epochs * L // 2048 passes

    runs_dir: str = "runs"  # where the run's folder is created
    run_name: str | None = None  # the folder's name; by default game, script, seed and time
    checkpoint_every: float = 300.0  # seconds between checkpoints
    resume: str | None = None  # continue the run in this folder; its arguments become the defaults
    track: bool = False  # also log to Weights & Biases (the project is $WANDB_PROJECT)

    def __post_init__(self):
        check_args(self)  # refuses values that would fail late


def layer_init(layer, gain: float = math.sqrt(2)):
    """Orthogonal weights, with CleanRL's gain, and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Observations (..., D) -> the Gaussian policy π, of actions (..., A), and values (...)."""

    def __init__(self, envs, args):
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
        self.log_std = nn.Parameter(torch.zeros(num_actions))  # log σ, the same in all states
        self.critic = nn.Sequential(
            layer_init(nn.Linear(inputs, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), 1.0),
        )

    def forward(self, obs):
        policy = Normal(self.actor(obs), self.log_std.exp(), validate_args=False)  # faster
        # Independent makes the A numbers one action, whose log probability is their sum.
        return Independent(policy, 1, validate_args=False), self.critic(obs).squeeze(-1)


def make_envs(args: Args):
    """A vector of args.num_envs copies of one of Gymnasium's environments.

    Autoreset is same-step: where a game ends, step() returns the next game's first observation, and
    info["final_obs"] has the last one of the game that ended. RecordEpisodeStatistics adds
    info["episode"], with the scores of whole games. Environments of your own must do both.
    """
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    if not isinstance(envs.single_action_space, gymnasium.spaces.Box):
        raise gymnasium.error.Error(f"{args.env_id}: its actions are not continuous")
    return RecordEpisodeStatistics(envs)


class RunningMoments(RunningMeanStd):
    """Mean and variance of all rows that update() has seen. A checkpoint has plain numbers only."""

    def state_dict(self):
        return {"mean": self.mean.tolist(), "var": self.var.tolist(), "count": self.count}

    def load_state_dict(self, state):
        self.mean = np.array(state["mean"])
        self.var = np.array(state["var"])
        self.count = state["count"]


class Normalizer(VectorWrapper):
    """Scales observations and rewards by their running moments, and clips them to ±10.

    Gymnasium's NormalizeObservation refuses same-step autoreset. Its NormalizeReward leaves an
    episode's earlier rewards out of the sum where the episode terminates.
    """

    def __init__(self, envs, gamma):
        super().__init__(envs)
        self.gamma = gamma
        self.observations = RunningMoments(shape=envs.single_observation_space.shape)
        self.returns = RunningMoments()

    def scale(self, obs):
        """Observations (N, D) as the network sees them, float32."""
        std = np.sqrt(self.observations.var + 1e-8)
        return ((obs - self.observations.mean) / std).clip(-10, 10).astype(np.float32)

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.observations.update(obs)
        self.discounted = np.zeros(self.num_envs)  # Σ_k γ^k r_{t-k} of the episodes in progress
        return self.scale(obs), info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        over = terminated | truncated
        following = np.array(obs, float)  # s_{t+1}, also where an episode ended
        if over.any():
            following[over] = np.stack(info["final_obs"][over])
        self.observations.update(following)
        info["final_obs"] = self.scale(following)
        next_obs = info["final_obs"].copy()
        if over.any():
            self.observations.update(obs[over])  # the next episodes' first
            next_obs[over] = self.scale(obs[over])
        self.discounted = self.gamma * self.discounted + rewards
        self.returns.update(self.discounted)
        self.discounted[over] = 0
        # As in CleanRL: returns of about the same scale in any task.
        rewards = (rewards / np.sqrt(self.returns.var + 1e-8)).clip(-10, 10)
        return next_obs, rewards, terminated, truncated, info


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimates, computed backwards [arXiv 1506.02438]. All are (L, E).

    d_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = d_t + γ λ (1 - terminated_t) (1 - truncated_t) A_{t+1}

    next_values[t] is V(s_{t+1}). Where a time limit truncated the episode, s_{t+1} is the episode's
    last state. There, and at the end of the rollout, A_{t+1} counts as 0.
    """
    td_errors = rewards + gamma * ~terminated * next_values - values  # d_t
    goes_on = ~(terminated | truncated)
    advantages = torch.empty_like(values)
    advantage = torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        advantage = td_errors[t] + gamma * gae_lambda * goes_on[t] * advantage
        advantages[t] = advantage
    return advantages


@torch.no_grad()
def mean_kl_divergence(network, old_network, states) -> float:
    """δ: the mean of KL( π_θ(·|s) ‖ π_θold(·|s) ) in the states (M, D) [ABS].

    The paper does not give the direction. This one is from its author's code.
    """
    return kl_divergence(network(states)[0], old_network(states)[0]).mean().item()


def rollout_length(divergence, length, *, rollout_min, rollout_max, delta_min, delta_max, beta):
    """The next L, a real number, from δ and the current L [ABS, Eq. 4].

    δ at or below delta_min asks for rollout_max, δ at or above delta_max for rollout_min.
    """
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * length + beta * target


def main(args, *, make_envs=make_envs, ActorCritic=ActorCritic, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own make_envs, network or rollout_length."""
    torch.manual_seed(args.seed)
    envs = Normalizer(make_envs(args), args.gamma)
    num_envs = args.num_envs
    network = ActorCritic(envs, args)
    old_network = ActorCritic(envs, args)  # ABS: θ_old, filled in the loop
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    zeros = torch.zeros(envs.observation_space.shape)
    check_policy(args, envs, *network(zeros))  # raises if they do not fit together
    # Run keeps the log and the checkpoints. It saves, and loads, what has a state_dict.
    parts = {"network": network, "optimizer": optimizer, "rollout_length": rollout_length}
    parts |= {"observations": envs.observations, "returns": envs.returns}
    with closing(envs), Run(args, parts) as run:
        iteration = run.saved.get("iteration", 0)  # saved is empty, unless the run is resumed
        global_step = run.saved.get("global_step", 0)
        updates = run.saved.get("updates", 0)  # gradient steps
        divergences = deque(run.saved.get("divergences", []), args.divergence_window)  # ABS
        adaptive_length = run.saved.get("adaptive_length", float(args.rollout_min))  # ABS
        next_obs, _ = envs.reset(seed=torch.randint(2**30, ()).item())  # env i gets this + i
        next_obs = torch.tensor(next_obs)  # scaled by moments that Run may have loaded
        while global_step < args.total_timesteps and not run.interrupted:
            iteration += 1
            # Each iteration has its own seed, so a resumed run goes on with new random numbers.
            torch.manual_seed(1_000_000 * args.seed + iteration)
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = learning_rate
            wanted_steps = adaptive_length if args.adapt_rollout else args.num_steps  # ABS
            length = round(wanted_steps / num_envs)  # steps in each environment
            batch_size = length * num_envs  # L
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ

            # 1. Collect L steps in the E environments, with actions drawn from π_θ.
            obs = torch.zeros((length, *next_obs.shape))
            actions = torch.zeros((length, *envs.action_space.shape))
            following = torch.zeros_like(obs)  # s_{t+1}, also where an episode ended
            rewards = torch.zeros((length, num_envs))
            terminated = torch.zeros((length, num_envs), dtype=torch.bool)
            truncated = torch.zeros((length, num_envs), dtype=torch.bool)
            with torch.no_grad():
                for t in range(length):
                    obs[t] = next_obs
                    actions[t] = network(next_obs)[0].sample()  # PPO learns from this one
                    allowed = actions[t].numpy().clip(envs.action_space.low, envs.action_space.high)
                    next_obs, reward, terminal, timeout, info = envs.step(allowed)
                    next_obs = torch.tensor(next_obs)
                    following[t] = torch.tensor(info["final_obs"])  # by Normalizer
                    rewards[t] = torch.tensor(reward)
                    terminated[t] = torch.tensor(terminal)
                    truncated[t] = torch.tensor(timeout)
                    if "episode" in info:  # "r" has scores, "_episode" says whose game is over
                        run.scores.extend(info["episode"]["r"][info["_episode"]].tolist())
                # The whole rollout at once is faster than a state at a time.
                policy, values = network(obs)  # V(s_t)
                log_probs = policy.log_prob(actions)  # log π_θold(a_t|s_t)
                _, next_values = network(following)  # V(s_{t+1})
            global_step += batch_size

            # 2. Minimize loss_π + c_v loss_V - c_e H(π_θ), in N_epochs passes of mini-batches.
            advantages = gae(
                rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda
            )
            b_obs = obs.flatten(0, 1)
            b_actions = actions.flatten(0, 1)
            b_log_probs = log_probs.flatten()
            b_values = values.flatten()
            b_advantages = advantages.flatten()
            b_returns = b_advantages + b_values  # R, the targets of V
            epochs = args.update_epochs
            if args.scale_epochs:  # ABS
                epochs = max(epochs, epochs * batch_size // 2048)  # 2048: the L of plain PPO
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size)
                for mb in shuffled.tensor_split(args.num_minibatches):  # indices of a mini-batch
                    policy, new_values = network(b_obs[mb])
                    # ρ = π_θ(a|s) / π_θold(a|s),   loss_π = -min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )
                    ratios = (policy.log_prob(b_actions[mb]) - b_log_probs[mb]).exp()
                    clipped_ratios = ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    adv = b_advantages[mb]
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # the same scale in any game
                    pg_loss = -torch.minimum(ratios * adv, clipped_ratios * adv).mean()
                    # loss_V = 1/2 max( (V - R)², (V_old + clip(V - V_old, -ε, ε) - R)² )
                    changes = (new_values - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    clipped_values = b_values[mb] + changes
                    errors = (new_values - b_returns[mb]).square()
                    clipped_errors = (clipped_values - b_returns[mb]).square()
                    v_loss = 0.5 * torch.maximum(errors, clipped_errors).mean()
                    entropy = policy.entropy().mean()
                    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1

            # 3. ABS: measure how far the updates moved the policy, and adapt L.
            divergence = None
            if is_measured:
                sample = torch.randperm(batch_size)[: args.reference_states]
                divergence = mean_kl_divergence(network, old_network, b_obs[sample])
                divergences.append(divergence)
                if args.adapt_rollout and len(divergences) >= args.burn_in:
                    adaptive_length = rollout_length(
                        sum(divergences) / len(divergences),  # δ̄
                        adaptive_length,
                        rollout_min=args.rollout_min,
                        rollout_max=args.rollout_max,
                        delta_min=args.delta_min,
                        delta_max=args.delta_max,
                        beta=args.beta,
                    )

            # 4. Log and save. Losses are those of the last mini-batch; Run adds return and speed.
            row = {
                "global_step": global_step,
                "charts/updates": updates,
                "charts/learning_rate": learning_rate,
                "abs/rollout_length": batch_size,  # L counts the steps of all environments here
                "abs/batch_size": batch_size,
                "abs/kl_divergence": divergence,
                "losses/policy_loss": pg_loss.item(),
                "losses/value_loss": v_loss.item(),
                "losses/entropy": entropy.item(),
                "losses/clipfrac": (ratios != clipped_ratios).float().mean().item(),
                "losses/grad_norm": grad_norm.item(),
            }
            run.log(row)
            run.checkpoint(
                iteration=iteration,
                global_step=global_step,
                updates=updates,
                divergences=list(divergences),
                adaptive_length=float(adaptive_length),
            )
    return run.folder


# --- From here on: checks, files, Ctrl-C and W&B. Nothing below is about the algorithm. ---


def check_args(args):
    """Refuse arguments that would fail late, or quietly train something else."""
    for name, value in vars(args).items():
        if isinstance(value, np.generic):  # a checkpoint cannot hold NumPy's numbers
            setattr(args, name, value.item())
    counts = "total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min"
    for name in [*counts.split(), "adapt_frequency", "reference_states", "divergence_window"]:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    for name in "gamma gae_lambda clip_coef beta".split():
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1")
    if not args.max_grad_norm > 0:
        raise ValueError("--max-grad-norm must be above 0")
    if not 0 < args.delta_min < args.delta_max:
        raise ValueError("--delta-min must be above 0, and below --delta-max")
    if args.rollout_min > args.rollout_max:
        raise ValueError("--rollout-min must be at most --rollout-max")
    if args.burn_in > args.divergence_window:  # L would never move
        raise ValueError("--burn-in must be at most --divergence-window")
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    if 2 * args.num_minibatches > round(shortest / args.num_envs) * args.num_envs:
        raise ValueError("--num-minibatches must be at most half the shortest rollout's samples")


def check_policy(args, envs, policy, values):
    """Refuse environments or a network of your own from which main would learn the wrong thing."""
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise ValueError("the environments' autoreset mode must be AutoresetMode.SAME_STEP")
    shapes = tuple(policy.batch_shape), tuple(policy.event_shape), tuple(values.shape)
    expected = (args.num_envs,), envs.single_action_space.shape, (args.num_envs,)
    if shapes != expected:  # others would be broadcast
        raise ValueError(f"policy and values must have the shapes {expected}, not {shapes}")


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
    except (OSError, gymnasium.error.Error) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    launch()
