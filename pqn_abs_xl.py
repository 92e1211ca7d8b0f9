# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0.17", "wandb>=0.25", "tqdm>=4.67", "filelock>=3.24"]
# ///
"""PQN with Adaptive Batch Scaling (ABS) for larger networks and batches, and several GPUs.

PQN [arXiv 2407.04811] is Q-learning with many parallel environments and LayerNorm, but no replay
buffer and no target network. An iteration plays L steps in each of E environments, learns from
these steps in a fixed number of mini-batches, and discards them.

ABS [arXiv 2605.21557] adapts L to the policy. In every K-th iteration it measures the Behavioral
Divergence δ: the share of M states of the rollout in which this iteration's updates changed the
greedy action. θ_old is the network before these updates, and θ the one after them:

    δ  = (1/M) Σ_i 1[ argmax_a Q_θ(s_i, a) ≠ argmax_a Q_θold(s_i, a) ]
    α  = log(clip(δ, δ_min, δ_max) / δ_min) / log(δ_max / δ_min)         0: stable, 1: volatile
    L' = L_max - α (L_max - L_min)                                                   (Eq. 4)
    L  ← (1 - β) L + β L'

The network is a CNN and a linear layer, whose output is x_0. Then come n residual blocks f_k, each
of which adds x_0 again. One more linear layer follows, and then the one that gives the Q-values
[SG, Stable Gradients: arXiv 2506.15544]:

    x_{k+1} = x_k + f_k(x_k) + x_0

Started by torchrun, each process plays in E environments of its own. Gradients and δ are averaged
over the processes, so all have the same network and L. In main, "ABS" marks what PQN alone does not
have, "torchrun" what several processes need.

PQN-L, with 5 blocks, on one GPU; the ABS paper's settings, but a lost life ends an episode:
    python pqn_abs_xl.py --env-id BreakoutNoFrameskip-v4
Four GPUs, each with its own 128 environments:
    torchrun --nproc-per-node 4 pqn_abs_xl.py
Continue a run after Ctrl-C or a crash, with torchrun if it was started so:
    python pqn_abs_xl.py --resume runs/...
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
from typing import Literal

import ale_py
import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from filelock import FileLock
from gymnasium.vector import AutoresetMode, VectorWrapper
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm


@dataclass
class Args:
    """PQN with Adaptive Batch Scaling. Symbols and, unless noted, defaults are the ABS paper's."""

    env_id: str = "BreakoutNoFrameskip-v4"  # an Atari game; ALE/Breakout-v5 has sticky actions
    seed: int = 1  # seed of the network, the exploration and the environments
    total_timesteps: int = 20_000_000  # [T_total] steps of 4 frames, of all processes together
    num_envs: int = 128  # [E] environments in parallel, in each process
    episodic_life: bool = True  # a lost life ends an episode; not so in the ABS paper
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    anneal_lr: bool = False  # lower the learning rate linearly to 0
    gamma: float = 0.99  # [γ] discount
    q_lambda: float = 0.65  # [λ] of the Q(λ) targets: 0 is one-step Q-learning, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch
    update_epochs: int = 2  # [N_epochs] passes over each rollout
    max_grad_norm: float = 10.0  # gradients are clipped to this norm
    start_e: float = 1.0  # [ε] share of random actions at the start
    end_e: float = 0.001  # [ε] share of random actions once ε has stopped falling
    exploration_fraction: float = 0.10  # fraction of total_timesteps over which ε falls

    size: Literal["s", "l", "xl"] = "l"  # network: that of pqn_abs.py, 5 blocks, or 10 blocks
    adapt_rollout: bool = True  # ABS: adapt L; --no-adapt-rollout is plain PQN with L = num_steps
    num_steps: int = 32  # [L] steps in each environment in the first rollout
    rollout_min: int = 16  # [L_min] rollout length of a volatile policy
    rollout_max: int = 128  # [L_max] rollout length of a stable policy; 64 in pqn_abs.py
    adapt_frequency: int = 50  # [K] measure δ in every K-th iteration
    delta_min: float = 0.05  # [δ_min] at this δ or less, the policy counts as stable
    delta_max: float = 0.95  # [δ_max] at this δ or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L; the value is from the ABS author's code
    reference_states: int = 2048  # [M] states of each process to measure δ on; author's code
    scale_epochs: bool = False  # where L > 32, make N_epochs * L // 32 passes

    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1 ...
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of all layers but the last; auto: bfloat16 where the hardware supports it"""
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


def dense(inputs: int) -> list:
    """A linear layer with 512 outputs, and its LayerNorm."""
    return [layer_init(nn.Linear(inputs, 512)), nn.LayerNorm(512)]


class QNetwork(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 Q-values (N, A): a CNN, then a multi-skip MLP [SG].

    LayerNorm after each layer keeps Q-learning stable without a target network.
    """

    def __init__(self, envs, args):
        super().__init__()
        self.bfloat16 = uses_bfloat16(args)  # as --precision says
        # Channels of the three convolutions, and the number of residual blocks.
        sizes = {"s": (32, 64, 64, 0), "l": (64, 128, 128, 5), "xl": (64, 128, 128, 10)}
        c1, c2, c3, num_blocks = sizes[args.size]
        self.body = nn.Sequential(
            layer_init(nn.Conv2d(4, c1, 8, stride=4)),
            nn.LayerNorm([c1, 20, 20]),
            nn.ReLU(),
            layer_init(nn.Conv2d(c1, c2, 4, stride=2)),
            nn.LayerNorm([c2, 9, 9]),
            nn.ReLU(),
            layer_init(nn.Conv2d(c2, c3, 3, stride=1)),
            nn.LayerNorm([c3, 7, 7]),
            nn.ReLU(),
            nn.Flatten(),
            *dense(c3 * 7 * 7),
        )
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            block = nn.Sequential(nn.ReLU(), *dense(512), nn.ReLU(), *dense(512))
            self.blocks.append(block)
        last = dense(512) if num_blocks > 0 else []  # --size s is pqn_abs.py's network
        self.before_head = nn.Sequential(*last, nn.ReLU())
        self.head = layer_init(nn.Linear(512, int(envs.single_action_space.n)))

    def forward(self, frames):
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32  # both hold 0 to 255 exactly
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=self.bfloat16):
            x_0 = self.body(frames.to(dtype) / 255).float()  # so the blocks add up in float32
            x = x_0
            for block in self.blocks:
                x = x + block(x) + x_0
            x = self.before_head(x)
        # Q-values of two actions often differ by under 1%: in bfloat16 they would tie.
        return self.head(x.float())


class EpisodicLife(VectorWrapper):
    """A lost life ends the learner's episode ("terminated"), but the game goes on.

    Games like Breakout then wait for FIRE, for ever if the policy does not press it. So in the step
    after a lost life, fire_action is played. The agent learns from the action that it chose.
    """

    def __init__(self, envs, fire_action):
        super().__init__(envs)
        self.fire_action = fire_action

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.lives = info["lives"].copy()
        self.lost_life = np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions):
        actions = np.where(self.lost_life, self.fire_action, actions)
        obs, rewards, terminated, truncated, info = super().step(actions)
        # Where the whole game ended, info["lives"] counts the lives of the next game.
        self.lost_life = (info["lives"] < self.lives) & ~(terminated | truncated)
        self.lives = info["lives"].copy()
        return obs, rewards, terminated | self.lost_life, truncated, info


def make_envs(args: Args):
    """A vector of args.num_envs copies of an Atari game; a step is 4 frames of the game.

    Observations are uint8 (E, 4, 84, 84): the last 4 steps' grey frames. Rewards are points.
    AtariVectorEnv starts a game with FIRE, if it has it, and a random number of no-ops, so that
    games differ. It truncates a game after 108,000 frames.

    Autoreset is same-step: where a game ends, step() returns the next game's first observation, and
    info["final_obs"] has the last one of the game that ended. RecordEpisodeStatistics adds
    info["episode"], with the scores of whole games. Environments of your own need these two, too.
    """
    gymnasium.register_envs(ale_py)
    spec = gymnasium.spec(args.env_id)
    # AtariVectorEnv skips 4 frames, always. Breakout-v4 stands for a random number of them.
    if not isinstance(spec.kwargs.get("frameskip"), int):
        raise gymnasium.error.Error(f"{args.env_id}: use ALE/Breakout-v5 or BreakoutNoFrameskip-v4")
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # sticky actions
        reward_clipping=False,  # main takes the sign
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    buttons = [button.name for button in envs.ale.get_action_set()]
    fire_action = buttons.index("FIRE") if "FIRE" in buttons else 0  # NOOP, which is harmless
    envs = RecordEpisodeStatistics(envs)
    return EpisodicLife(envs, fire_action) if args.episodic_life else envs


def lambda_returns(rewards, next_values, terminated, truncated, gamma: float, q_lambda: float):
    """Peng's Q(λ) targets of a rollout, computed backwards [PQN]. All tensors are (L, E).

    G_t = r_t + γ (1 - terminated_t) [ λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a) ]

    next_values[t] is max_a Q(s_{t+1}, a). Where a time limit truncated the episode, s_{t+1} is the
    episode's last state. There, and at the end of the rollout, G_{t+1} is not known, and
    next_values[t] takes its place, so that it is all that stands in the brackets.
    """
    returns = torch.empty_like(next_values)
    goes_on = (~terminated).float()  # 1 - terminated_t
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        # After a truncation, G_{t+1} belongs to the next episode.
        next_return = torch.where(truncated[t], next_values[t], next_return)
        bootstrap = q_lambda * next_return + (1 - q_lambda) * next_values[t]
        returns[t] = rewards[t] + gamma * goes_on[t] * bootstrap
        next_return = returns[t]
    return returns


@torch.no_grad()
def behavioral_divergence(network, old_network, states) -> float:
    """δ: the share of the states (M, ...) in which two networks' greedy actions differ [ABS].

    A network returns one score per action, (M, A).
    """
    changed = network(states).argmax(1) != old_network(states).argmax(1)
    return changed.float().mean().item()


def rollout_length(divergence, length, *, rollout_min, rollout_max, delta_min, delta_max, beta):
    """The next L, a real number, from δ and the current L [ABS, Eq. 4].

    δ at or below delta_min asks for rollout_max, δ at or above delta_max for rollout_min.
    """
    clipped = min(max(divergence, delta_min), delta_max)
    alpha = math.log(clipped / delta_min) / math.log(delta_max / delta_min)
    target = rollout_max - alpha * (rollout_max - rollout_min)
    return (1 - beta) * length + beta * target


RANK = int(os.environ.get("RANK", "0"))  # which of torchrun's processes this is
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # how many processes play and learn


def average(value) -> float:
    """The mean of a number over all processes."""
    total = torch.tensor(value, dtype=torch.float64)  # on the CPU, where gloo adds up
    if WORLD_SIZE > 1:
        dist.all_reduce(total)
    return total.item() / WORLD_SIZE


def main(args, *, make_envs=make_envs, QNetwork=QNetwork, rollout_length=rollout_length):
    """Train, and return the run's folder. Pass your own make_envs, QNetwork or rollout_length."""
    if WORLD_SIZE > 1:  # torchrun
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    envs = make_envs(args)
    num_envs = args.num_envs
    num_actions = int(envs.single_action_space.n)
    q_network = QNetwork(envs, args).to(device)
    old_network = QNetwork(envs, args).to(device)  # ABS: θ_old, filled in the loop
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate)
    learner = q_network
    if WORLD_SIZE > 1:  # torchrun: equal weights at the start, and the mean of the gradients
        learner = DistributedDataParallel(q_network, static_graph=True)
    next_obs, _ = envs.reset(seed=torch.randint(2**30, ()).item() + RANK * num_envs)  # torchrun
    next_obs = torch.tensor(next_obs, device=device)
    check_parts(args, envs, q_network(next_obs))  # raises if they do not fit together
    # Run keeps the log and the checkpoints. It saves, and loads, what has a state_dict.
    parts = {"network": q_network, "optimizer": optimizer, "rollout_length": rollout_length}
    run = Run(args, parts) if RANK == 0 else Follower()  # torchrun: only the first has files
    with closing(envs), run:
        share(run, parts)  # torchrun
        iteration = run.saved.get("iteration", 0)  # saved is empty, unless the run is resumed
        global_step = run.saved.get("global_step", 0)
        updates = run.saved.get("updates", 0)  # gradient steps
        adaptive_length = run.saved.get("adaptive_length", float(args.num_steps))  # ABS
        # A resumed run's games begin together. Learning while they are alike has spoilt networks.
        with torch.no_grad():
            for t in range(3000 if run.saved else 0):  # so first play until they differ
                action = q_network(next_obs).argmax(1)
                action[t % num_envs].random_(num_actions)  # in turn, one game gets a random action
                next_obs = torch.tensor(envs.step(action.cpu().numpy())[0], device=device)
        # torchrun: where one process is interrupted, all stop after the same iteration.
        while global_step < args.total_timesteps and average(run.interrupted) == 0:
            iteration += 1
            # Each iteration has its own seed, so a resumed run goes on with new random numbers.
            torch.manual_seed(1_000_000 * args.seed + iteration * WORLD_SIZE + RANK)  # torchrun
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = learning_rate
            length = round(adaptive_length) if args.adapt_rollout else args.num_steps  # ABS: L
            batch_size = length * num_envs
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(q_network.state_dict())  # ABS: θ_old ← θ

            # 1. Collect L steps in each of the E environments, ε-greedily.
            exploration_steps = args.exploration_fraction * args.total_timesteps
            fraction = min(global_step / max(exploration_steps, 1), 1)
            epsilon = args.start_e + fraction * (args.end_e - args.start_e)
            explore = torch.rand((length, num_envs), device=device) < epsilon
            random_actions = torch.randint(num_actions, (length, num_envs), device=device)
            obs = torch.zeros((length, *next_obs.shape), dtype=next_obs.dtype, device=device)
            actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
            rewards = torch.zeros((length, num_envs), device=device)
            next_values = torch.zeros((length, num_envs), device=device)  # max_a Q(s_{t+1}, a)
            terminated = torch.zeros((length, num_envs), dtype=torch.bool, device=device)
            truncated = torch.zeros((length, num_envs), dtype=torch.bool, device=device)
            with torch.no_grad():
                q_values = q_network(next_obs)  # of the next state to act in
                for t in range(length):
                    obs[t] = next_obs
                    actions[t] = torch.where(explore[t], random_actions[t], q_values.argmax(1))
                    next_obs, reward, terminal, timeout, info = envs.step(actions[t].cpu().numpy())
                    next_obs = torch.tensor(next_obs, device=device)
                    rewards[t] = torch.tensor(np.sign(reward))  # games' points differ in scale
                    terminated[t] = torch.tensor(terminal)
                    truncated[t] = torch.tensor(timeout)
                    q_values = q_network(next_obs)
                    next_values[t] = q_values.amax(1)
                    if timeout.any():  # there, next_obs is the next game's: take the last one's
                        final_obs = np.stack(info["final_obs"][timeout])
                        final_obs = torch.tensor(final_obs, dtype=next_obs.dtype, device=device)
                        next_values[t, truncated[t]] = q_network(final_obs).amax(1)
                    if "episode" in info:  # "r" has scores, "_episode" says whose game is over
                        run.scores.extend(info["episode"]["r"][info["_episode"]].tolist())
            global_step += batch_size * WORLD_SIZE  # torchrun

            # 2. Update θ towards the Q(λ) targets: N_epochs passes in shuffled mini-batches.
            returns = lambda_returns(
                rewards, next_values, terminated, truncated, args.gamma, args.q_lambda
            )
            b_obs = obs.flatten(0, 1)
            b_actions = actions.flatten()
            b_returns = returns.flatten()
            epochs = args.update_epochs
            if args.scale_epochs:  # ABS
                epochs = max(epochs, epochs * length // 32)  # 32: the L of plain PQN in the paper
            for _ in range(epochs):
                shuffled = torch.randperm(batch_size, device=device)
                for minibatch in shuffled.tensor_split(args.num_minibatches):
                    q_values = learner(b_obs[minibatch])  # torchrun
                    q_taken = q_values.gather(1, b_actions[minibatch, None]).squeeze(1)
                    loss = F.mse_loss(q_taken, b_returns[minibatch])
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
                    optimizer.step()
                    updates += 1

            # 3. ABS: measure how much the updates changed the policy, and adapt L.
            divergence = None
            if is_measured:
                sample = torch.randperm(batch_size, device=device)[: args.reference_states]
                divergence = behavioral_divergence(q_network, old_network, b_obs[sample])
                divergence = average(divergence)  # torchrun
                if args.adapt_rollout:
                    adaptive_length = rollout_length(
                        divergence,
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
                "charts/epsilon": epsilon,
                "abs/rollout_length": length,
                "abs/batch_size": batch_size * WORLD_SIZE,  # torchrun
                "abs/behavioral_divergence": divergence,
                "losses/td_loss": loss.item(),
                "losses/q_values": q_taken.mean().item(),
                "losses/grad_norm": grad_norm.item(),
            }
            run.log(row)
            run.checkpoint(
                iteration=iteration,
                global_step=global_step,
                updates=updates,
                adaptive_length=float(adaptive_length),
            )
    if WORLD_SIZE > 1:  # torchrun; after a failure, this could wait for the others
        dist.destroy_process_group()
    return run.folder


# --- From here on: checks, files, Ctrl-C and W&B. Nothing below is about the algorithm. ---


def check_args(args):
    """Refuse arguments that would fail late, or quietly train something else."""
    for name, value in vars(args).items():
        if isinstance(value, np.generic):  # a checkpoint cannot hold NumPy's numbers
            setattr(args, name, value.item())
    counts = "total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min"
    for name in [*counts.split(), "adapt_frequency", "reference_states"]:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    for name in "gamma q_lambda start_e end_e exploration_fraction beta".split():
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1")
    if not args.max_grad_norm > 0:
        raise ValueError("--max-grad-norm must be above 0")
    if not 0 < args.delta_min < args.delta_max:
        raise ValueError("--delta-min must be above 0, and below --delta-max")
    if args.adapt_rollout and not args.rollout_min <= args.num_steps <= args.rollout_max:
        raise ValueError("--num-steps must be from --rollout-min to --rollout-max")
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    if args.num_minibatches > args.num_envs * shortest:
        raise ValueError("--num-minibatches must be at most the samples of the shortest rollout")


def check_parts(args, envs, outputs):
    """Refuse environments or a network of your own from which main would learn the wrong thing."""
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        raise ValueError("the environments' autoreset mode must be AutoresetMode.SAME_STEP")
    expected = (args.num_envs, int(envs.single_action_space.n))
    if outputs.shape != expected:  # an action that does not exist would hang Atari
        raise ValueError(f"the network must return {expected}, not {tuple(outputs.shape)}")


def uses_bfloat16(args) -> bool:
    """Whether the network computes in bfloat16; auto: only where the hardware multiplies it."""
    if args.precision != "auto":
        return {"float32": False, "bfloat16": True}[args.precision]
    if args.device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


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


class Follower(AbstractContextManager):
    """Run's place in all processes but the first, which alone has files."""

    def __init__(self):
        self.scores = deque(maxlen=0)  # only the first process logs
        self.interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)

    def interrupt(self, number, frame):
        self.interrupted = True

    def skip(self, *args, **kwargs):
        """The first process does it."""

    log = checkpoint = __exit__ = skip


def share(run, parts):
    """Give all processes the first one's folder, and what it has loaded to resume."""
    if WORLD_SIZE > 1:
        message = [run.folder, run.saved] if RANK == 0 else [None, None]
        dist.broadcast_object_list(message)
        run.folder, run.saved = message
        for name in parts.keys() & run.saved.keys():
            parts[name].load_state_dict(run.saved[name])


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
