# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<=2.13.0",
#     "gymnasium>=1.4",
#     "ale-py>=0.12.1",
#     "numpy>=2.0",
#     "tyro>=1.0",
#     "wandb>=0.25",
#     "tqdm>=4.67",
# ]
# ///
r"""PQN whose batch follows the Gradient Noise Scale, on Atari, in one file: the rival of pqn_abs.py's signal.

PQN [arXiv 2407.04811] is Q-learning with many environments in parallel, LayerNorm, and neither a replay buffer nor a
target network. The gradient noise scale [GNS: arXiv 1812.06162] is the batch size at which a gradient's noise is as
large as the gradient: smaller batches learn from noise, larger ones waste samples. Every K iterations this script
measures it in m micro-batches of b samples of the rollout, with gradients g_i, and sets the batch to it:

    g       = (1/m) sum_i g_i
    N       = b 1/(m - 1) sum_i |g_i - g|^2                          noise: estimates tr(Sigma), per sample
    S       = |g|^2 - N / B,      B = m b                            signal: estimates |E g|^2, its bias removed
    N_avg  <- (1 - beta) N_avg + beta N,      S_avg likewise
    B_new   = clip(floor(N_avg / S_avg), E L_min, E L_max),          L_adapt <- B_new / E

Everything else is pqn_abs.py's: K, E, range, network. On a single batch S can be negative, hence the averages of N and
S apart, as in [GNS], instead of smoothing L; they start with the second measurement. Where S_avg <= 0 noise drowns the
signal, and the batch is the largest. Behavioural Divergence is logged beside.

One GPU, the paper's settings:   python gns_baseline.py --env-id BreakoutNoFrameskip-v4
A laptop without a GPU:          python gns_baseline.py --env-id BreakoutNoFrameskip-v4 --episodic-life --num-envs 32 \
                                     --num-minibatches 16 --adapt-frequency 10 --exploration-fraction 0.2 \
                                     --end-e 0.01 --total-timesteps 500000
Several GPUs, L shared by all:   torchrun --nproc-per-node 4 gns_baseline.py --env-id BreakoutNoFrameskip-v4
The baseline, L = 32 throughout: python gns_baseline.py --no-adapt-rollout
After Ctrl-C or a crash:         python gns_baseline.py --resume runs/.../checkpoint.pt
"""

import copy
import ctypes
import difflib
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# PyTorch's idle threads spin before they sleep: shorter, so that others get the cores (PQN's small batches: 15% faster)
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import ale_py
import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from tqdm import tqdm


@dataclass
class Args:
    """PQN with the noise scale. Defaults are the paper's where it gives them; so are the symbols in brackets."""

    env_id: str = "BreakoutNoFrameskip-v4"  # Atari game: ...NoFrameskip-v4 (no sticky actions) or ALE/...-v5 (sticky)
    seed: int = 1  # seed of the network, the exploration and the environments
    total_timesteps: int = 20_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 128  # [E] environments in parallel, in each process
    learning_rate: float = 2.5e-4  # learning rate of RAdam, constant
    gamma: float = 0.99  # [γ] discount
    q_lambda: float = 0.65  # [λ] of the Q(λ) targets; 0 is one-step Q-learning, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch; each grows with the rollout, as their number is fixed
    update_epochs: int = 2  # [N_epochs] passes over each rollout
    max_grad_norm: float = 10.0  # gradients are clipped to this norm
    start_e: float = 1.0  # [ε] share of random actions at the start
    end_e: float = 0.001  # [ε] share of random actions after exploration
    exploration_fraction: float = 0.10  # fraction of total_timesteps in which ε goes from start_e to end_e
    episodic_life: bool = False
    """end the learner's episode at a lost life and press FIRE after it (scores still count whole games); off in the
    paper, but Breakout waits for FIRE after each lost life, and a greedy policy that never fires freezes there until
    the frame limit"""

    adapt_rollout: bool = True  # let L follow the noise scale; --no-adapt-rollout is plain PQN with L = num_steps
    num_steps: int = 32  # steps per environment in the first rollout, and in all with --no-adapt-rollout
    rollout_min: int = 16  # [L_min] shortest rollout
    rollout_max: int = 64  # [L_max] longest rollout
    adapt_frequency: int = 50  # [K] iterations from one measurement to the next
    beta: float = 0.1
    """[β] weight of a new measurement in N_avg and S_avg: 1 keeps none of the earlier ones; pqn_abs.py smooths its
    rollout length by as much"""
    micro_batches: int = 16  # [m] gradients that one estimate takes, and memory for 2m of them
    reference_states: int = 2048
    """[M] size of B_ref, or all states of a smaller rollout; the paper gives no value; 2048 = 128 x 16 is its smallest
    batch, and would put the standard error of BD under 0.012 if its states were independent"""

    device: str = "auto"  # auto (CUDA where there is one), cpu, cuda or cuda:N
    precision: str = "auto"  # of all layers but the last: float32, bfloat16 or auto (bfloat16 in hardware, or float32)
    env_groups: int | None = None
    """groups of environments, each with a thread: while one group's emulators run, the network acts for another; by
    default up to 4 on a CPU, and on a GPU 2 if they outnumber the cores; no more than 1 gains if they are in Python"""
    compile: bool = False  # torch.compile the network (actions only with one group); goes on without, if that fails
    runs_dir: str = "runs"  # where the run's folder is made
    checkpoint_every: float = 300.0  # seconds from one checkpoint to the next
    resume: str | None = None  # a checkpoint.pt to go on from; the other arguments come from it
    track: bool = False  # send the metrics to Weights & Biases too
    wandb_project_name: str = "adaptive-batch-scaling"  # its project
    wandb_entity: str | None = None  # its team
    wandb_group: str | None = None  # its group


RESUME_MAY_CHANGE = """total_timesteps device env_groups compile checkpoint_every resume track wandb_project_name
    wandb_entity wandb_group"""


def layer_init(layer, gain: float = math.sqrt(2)):
    """Orthogonal weights, by default with the gain for ReLU, and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class QNetwork(nn.Module):
    """Nature CNN (32, 64, 64), LayerNorm after each layer: uint8 frames (N, 4, 84, 84) -> float32 Q-values (N, A).

    LayerNorm keeps Q-learning stable without a target network [PQN].
    """

    def __init__(self, envs):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(envs.single_observation_space.shape[0], 32, 8, stride=4))
        self.conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        self.conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1))
        self.hidden = layer_init(nn.Linear(7 * 7 * 64, 512))
        self.norm1, self.norm2 = nn.LayerNorm([20, 20, 32]), nn.LayerNorm([9, 9, 64])
        self.norm3, self.norm4 = nn.LayerNorm([7, 7, 64]), nn.LayerNorm(512)
        self.head = layer_init(nn.Linear(512, int(envs.single_action_space.n)))
        # Images lie as (N, H, W, C) in memory: a forward and backward pass takes 4% less time on a CPU.
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        def norm_relu(norm, x):  # (N, C, H, W) in and out; LayerNorm sees (N, H, W, C), as it lies in memory
            return F.relu(norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

        # uint8 / 255 is slow (20% of a CPU pass): cast to conv1's type, and divide its weights instead of the pixels
        kind = frames.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        x = frames.to(dtype).contiguous(memory_format=torch.channels_last)
        x = norm_relu(self.norm1, F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride))
        x = norm_relu(self.norm2, self.conv2(x))
        x = norm_relu(self.norm3, self.conv3(x))
        x = F.relu(self.norm4(self.hidden(x.permute(0, 2, 3, 1).flatten(1))))
        # Atari's action gaps are under 1% of Q: a bfloat16 head ties them, and argmax then takes the lower index
        with torch.autocast(kind, enabled=False):
            return self.head(x.float())


def make_envs(args: Args):
    """A vector environment of args.num_envs copies of the Atari game args.env_id, as Gymnasium's registry describes it.

    Observations are uint8 (E, 4, 84, 84), the last 4 grey frames; a step is 4 frames, the last two max-pooled; rewards
    are score points, of which learning sees the sign. To train on something else, return any Gymnasium VectorEnv here
    that has discrete actions and same-step autoreset: its step() gives the next episode's first observation when an
    episode ends, and the ended one's last observation in info["final_obs"]. --episodic-life needs info["lives"] too and
    an attribute fire_action, the action to press then.
    """
    gymnasium.register_envs(ale_py)
    games = {k: spec.kwargs for k, spec in gymnasium.registry.items() if spec.entry_point == "ale_py.env:AtariEnv"}
    playable = {name.lower(): name for name, game in games.items() if isinstance(game["frameskip"], int)}
    if args.env_id not in playable.values():
        problem = "is no Atari game (make_envs can be replaced)" if args.env_id in gymnasium.registry else "is unknown"
        problem = "skips frames at random" if args.env_id in games else problem
        near = [playable[name] for name in difflib.get_close_matches(args.env_id.lower(), playable, cutoff=0.5)]
        fail(f"--env-id {args.env_id} {problem}; try {' or '.join(near or ['BreakoutNoFrameskip-v4', 'ALE/Pong-v5'])}")
    game = games[args.env_id]
    print(f"starting {args.num_envs} x {args.env_id}")  # takes a core about a second per dozen
    envs = AtariVectorEnv(
        game["game"],
        args.num_envs,
        repeat_action_probability=game["repeat_action_probability"],  # sticky actions: 0 in -v4, 0.25 in ALE/...-v5
        max_num_frames_per_episode=108_000,
        autoreset_mode=AutoresetMode.SAME_STEP,
        reward_clipping=False,  # learning sees the sign of the reward, users see the score
        frameskip=4,
        noop_max=30,
        use_fire_reset=True,
    )
    buttons = [button.name for button in envs.ale.get_action_set()]
    envs.fire_action = buttons.index("FIRE") if "FIRE" in buttons else 0  # for --episodic-life
    return envs


def linear_schedule(start: float, end: float, duration: float, t: int) -> float:
    """A straight line from start at t = 0 to end at t = duration, and end from there on."""
    return end if t >= duration else start + (end - start) * t / duration


def lambda_returns(rewards, next_values, terminated, truncated, gamma: float, q_lambda: float):
    """Peng's Q(λ) targets of a rollout, computed backwards [PQN]. All tensors are (L, E), the result too.

    G_t = r_t + γ (1 - terminated_t) [ λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a) ]

    next_values[t] is max_a Q(s_{t+1}, a) of the state that truly followed, in the same episode (not used where
    terminated). Where the rollout ends or a time limit cuts the episode (truncated) there is no G_{t+1}, and this value
    stands in for it.
    """
    returns = torch.empty_like(next_values)
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        next_return = torch.where(truncated[t], next_values[t], next_return)
        mixed = q_lambda * next_return + (1 - q_lambda) * next_values[t]
        next_return = returns[t] = rewards[t] + gamma * ~terminated[t] * mixed
    return returns


@torch.no_grad()
def behavioral_divergence(network, old_network, states, chunk_size: int = 2048) -> float:
    """Share of the states (M, ...) in which the greedy actions of two networks differ, in [0, 1] [ABS].

    δ_π = (1/M) Σ_i 1[ π_θ(s_i) ≠ π_θold(s_i) ],   π_θ(s) = argmax_a network(s)[a]

    Both networks see the same chunks, hence compute the same bits where they are equal: BD is then exactly 0.
    """
    changed = [network(chunk).argmax(-1) != old_network(chunk).argmax(-1) for chunk in states.split(chunk_size)]
    return torch.cat(changed).float().mean().item()


def gradient_noise(gradients, micro_batch_size: int) -> tuple[float, float]:
    """Noise and signal in m gradients (m, P), each the mean over b = micro_batch_size samples [GNS: arXiv 1812.06162].

    ḡ = (1/m) Σ g_i
    N = b · 1/(m - 1) · Σ ‖g_i - ḡ‖²             estimates tr Σ, the variance of one sample's gradient
    S = ‖ḡ‖² - N / B,   B = m · b                estimates ‖E g‖²; on a single batch it can be negative

    The noise scale is B_simple = N / S, the batch at which noise and signal are equally large.
    """
    noise = micro_batch_size * gradients.var(dim=0, unbiased=True).sum().item()
    signal = gradients.mean(dim=0).square().sum().item() - noise / (len(gradients) * micro_batch_size)
    return noise, signal


def noise_scale_batch(noise: float, signal: float, bounds: tuple) -> int:
    """B_new = clip(⌊N / S⌋, B_min, B_max), bounds being (B_min, B_max); where S ≤ 0 noise drowns the signal: B_max."""
    return math.floor(min(max(noise / signal, bounds[0]), bounds[1])) if signal > 0 else bounds[1]


def main(args: Args) -> Path | None:
    """Train; returns the run's folder (None in all but the first of several processes)."""
    shares = "q_lambda start_e end_e exploration_fraction"
    rules = [(name, 0 <= getattr(args, name) <= 1, "between 0 and 1") for name in shares.split()]
    smallest_batch = args.num_envs * min(args.rollout_min, args.num_steps)
    rules += [("micro_batches", 2 <= args.micro_batches <= smallest_batch, f"from 2 to a batch, {smallest_batch}")]
    check_args(args, rules)
    device, dtype = pick_device(args)
    if device.type == "cuda":
        torch.set_num_threads(1)  # a copy to pinned memory must not wait for cores that the emulators hold
    elif platform.libc_ver()[0] == "glibc":  # keep freed memory: PQN 6% faster at the paper's settings
        # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (older glibc refuses more than 32 MiB), both in bytes
        for option, value in ((-1, 2**31 - 1), (-3, 2**25), (-3, 2**30)):
            ctypes.CDLL(None).mallopt(option, value)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    if checkpoint and checkpoint["world_size"] != world_size:
        fail(f"--resume {args.resume}: it takes {checkpoint['world_size']} processes, as before, not {world_size}")
    num_envs = args.num_envs
    # On a CPU, threads of ours play in a group of environments each, and then take a share of a mini-batch each.
    # PyTorch's own would share each layer and wait for one another in loops: two runs on the same two cores then make a
    # sixth of the steps/s. Not with --compile: the switch that it needs below holds for one thread.
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    # Of more than 4, Python's lock would hold up some; this is not measured.
    workers = 1 if args.compile else max(n for n in (1, 2, 3, 4) if cores % n == 0)
    num_groups = args.env_groups or min(num_envs, workers if device.type == "cpu" else 1 + (num_envs > os.cpu_count()))
    parts = [slice(num_envs * g // num_groups, num_envs * (g + 1) // num_groups) for g in range(num_groups)]
    groups = [make_envs(replace(args, num_envs=part.stop - part.start)) for part in parts]
    pool = ThreadPoolExecutor(max(num_groups, workers), initializer=torch.set_num_threads, initargs=(cores // workers,))
    interrupted = False

    def finish_iteration(signum, frame):
        nonlocal interrupted
        interrupted = True
        if world_size == 1:  # torchrun may pass a signal on twice, and kills what is left after 30 s
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends at once

    handlers = {signum: signal.signal(signum, finish_iteration) for signum in (signal.SIGINT, signal.SIGTERM)}
    if groups[0].metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return an environment with autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP")
    if any(envs.num_envs != part.stop - part.start for envs, part in zip(groups, parts, strict=True)):
        fail("make_envs(args) must return args.num_envs environments; it is called for each of --env-groups")
    num_actions = int(groups[0].single_action_space.n)
    longest = args.rollout_max if args.adapt_rollout else args.num_steps  # rollout, in steps

    torch.manual_seed(args.seed)
    q_network = QNetwork(groups[0]).to(device)
    old_network = copy.deepcopy(q_network)  # θ_old
    parameters = [p for p in q_network.parameters() if p.requires_grad]  # a network of yours may have frozen ones
    optimizer = torch.optim.RAdam(parameters, lr=args.learning_rate, foreach=True)
    # Without a cache, as threads can't share it: its entries belong to the graph of the thread that made them.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False)
    # Transitions in a forward pass: few on a CPU, to save memory, all on a GPU, where --compile needs gradients of one.
    chunk_size = 512 // dtype.itemsize if device.type == "cpu" else longest * num_envs

    global_step, iteration, adaptive_length, seconds = 0, 0, float(args.num_steps), 0.0
    recent_scores, divergence = deque(maxlen=100), None
    noise_avg, signal_avg, drowned = 0.0, 0.0, 0  # drowned counts the measurements that found S_avg ≤ 0
    if checkpoint:
        q_network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        global_step, iteration = checkpoint["global_step"], checkpoint["iteration"]
        adaptive_length, seconds = checkpoint["adaptive_length"], checkpoint["seconds"]
        recent_scores.extend(checkpoint["recent_scores"])
        noise_avg, signal_avg, drowned = checkpoint["noise_scale"]

    def fresh_seed() -> int:
        """31 bits that differ with the run's seed, the process and the iteration."""
        sequence = np.random.SeedSequence(args.seed, spawn_key=(rank, iteration))
        return int(sequence.generate_state(1)[0]) >> 1

    # Environment i gets this seed + i, which must stay below 2^31.
    resets = [envs.reset(seed=fresh_seed() // 2 + part.start) for envs, part in zip(groups, parts, strict=True)]
    next_obs = [observations for observations, _ in resets]  # of each group
    if args.episodic_life and "lives" not in resets[0][1]:
        fail(f"--episodic-life: {args.env_id} does not tell the number of lives; take --no-episodic-life")

    folder = None
    if rank == 0:
        folder, metrics, episodes = open_run(args, device, dtype, global_step)
        print(f"{sum(p.numel() for p in parameters):,} parameters, {device}, {dtype}; this run is in {folder}")
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        for tensor in q_network.state_dict().values():  # on processors of several kinds, the last bit may differ
            dist.broadcast(tensor, 0)

    def save_checkpoint():
        state = {"network": q_network.state_dict(), "optimizer": optimizer.state_dict(), "args": asdict(args)}
        state |= {"global_step": global_step, "adaptive_length": adaptive_length, "recent_scores": list(recent_scores)}
        state |= {"noise_scale": (noise_avg, signal_avg, drowned)}
        state |= {"iteration": iteration}  # each one seeds its random numbers anew: there is no RNG state to keep
        state |= {"script": Path(__file__).name, "world_size": world_size, "seconds": seconds}
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")  # at any moment, one whole file is there

    # Storage for the longest rollout. Observations are kept once, as they come: E · L_max · 28,224 bytes of uint8;
    # values[t] is max_a Q(s_t, a), up to t = L; final_values[t] that of the last state of an episode truncated at t.
    obs = torch.from_numpy(next_obs[0]).new_zeros((longest, num_envs, *next_obs[0].shape[1:]), device=device)
    values, final_values = torch.zeros((2, longest + 1, num_envs), device=device)
    rewards, actions = np.zeros((longest, num_envs), dtype=np.float32), np.zeros((longest, num_envs), dtype=np.int64)
    terminated, truncated = np.zeros((2, longest, num_envs), dtype=bool)
    scores, episode_steps = np.zeros((2, num_envs))
    lost_life = np.zeros(num_envs, dtype=bool)
    if args.episodic_life:
        lives = np.concatenate([info["lives"] for _, info in resets])

    act = q_network if num_groups == 1 else q_network.forward  # CUDA graphs, and so --compile, belong to one thread
    if args.compile:
        torch._functorch.config.backward_pass_autocast = "off"  # else the float32 head's gradient would be in bfloat16
        for network in (q_network, old_network):  # on a GPU "reduce-overhead" replays a CUDA graph, one a batch size
            network.compile(mode="reduce-overhead")
        size = min(chunk_size, args.num_steps * num_envs // args.num_minibatches)
        try:
            with autocast:
                q_network(obs.flatten(0, 1)[:size]).sum().backward()
                with torch.no_grad():
                    act(obs[0, parts[0]])
            optimizer.zero_grad()
        except Exception as error:  # no C++ compiler, no Triton, ...: torch has many ways to say it
            q_network._compiled_call_impl = old_network._compiled_call_impl = None
            print(f"--compile: {type(error).__name__}, so this run goes on without", file=sys.stderr)
    if rank == 0:
        save_checkpoint()
    saved_at = time.perf_counter()
    progress = tqdm(total=args.total_timesteps, initial=global_step, unit="step", unit_scale=True, disable=rank > 0)

    def play(group):
        """Collects the rollout of one group of environments."""
        envs, part = groups[group], parts[group]
        for t in range(length + 1):
            now = t, part
            frames = torch.from_numpy(next_obs[group])
            if device.type == "cuda":  # crosses once, as uint8, from pinned memory
                frames = frames.pin_memory().to(device, non_blocking=True)
            with torch.no_grad(), autocast:
                values[now], greedy_actions = act(frames).max(-1)
            if t == length:  # of this state, the next rollout's first, only the value is needed
                return
            obs[now] = frames
            chosen = torch.where(explore[now], random_actions[now], greedy_actions).cpu().numpy()
            if lost_life[part].any():  # in the step before: press FIRE, or Breakout never goes on
                chosen[lost_life[part]] = envs.fire_action
            actions[now] = chosen
            next_obs[group], reward, terminated[now], truncated[now], info = envs.step(chosen)
            rewards[now] = np.sign(reward)
            scores[part] += reward
            episode_steps[part] += 1
            done, cut = terminated[now] | truncated[now], np.flatnonzero(truncated[now])
            if len(cut):  # the value of the cut episode's own last observation, not of the next one's first
                last_obs = torch.from_numpy(np.stack(info["final_obs"][cut])).to(device)
                with torch.no_grad(), autocast:  # .forward bypasses --compile: its batch size varies
                    final_values[t, part.start + cut] = q_network.forward(last_obs).max(-1).values.float()
            if args.episodic_life:
                lost_life[part] = (info["lives"] < lives[part]) & ~done  # where done, lives are the next episode's
                lives[part] = info["lives"]
                terminated[now] |= lost_life[part]
            for i in part.start + np.flatnonzero(done):
                ended.append((t, i, float(scores[i]), int(episode_steps[i])))
                scores[i] = episode_steps[i] = 0

    def backward(indices):
        """Adds the gradient of mean_i (Q(s_i, a_i) - G_i)² over these transitions to .grad; returns loss and mean Q."""

        def gradient(share):
            means, gradients = torch.zeros(2, device=device), None
            for chunk in share.tensor_split(-(-len(share) // chunk_size)):
                with autocast:
                    q = q_network(b_obs.index_select(0, chunk)).gather(1, b_actions[chunk, None]).squeeze(1)
                loss = (q - b_returns[chunk]).square().sum() / len(indices)
                means += torch.stack([loss.detach(), q.detach().sum() / len(indices)])
                more = torch.autograd.grad(loss, parameters, materialize_grads=True)
                gradients = more if gradients is None else [g.add_(m) for g, m in zip(gradients, more, strict=True)]
            return means, gradients

        means = torch.zeros(2, device=device)
        shares = indices.tensor_split(min(len(indices), workers))
        for share_means, gradients in (map if workers == 1 else pool.map)(gradient, shares):  # in the shares' order
            means += share_means
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
        return means

    stop = False
    while global_step < args.total_timesteps and not stop:
        started = time.perf_counter()
        torch.manual_seed(fresh_seed())
        length = round(adaptive_length)
        batch_size = length * num_envs
        # K counts iterations: BD compares the policies before and after the updates of one iteration, every K-th.
        measure = iteration % args.adapt_frequency == 0
        if measure:
            old_network.load_state_dict(q_network.state_dict())  # θ_old ← θ

        # 1. Collect L_adapt steps in each of the E environments, ε-greedily.
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step)
        explore = torch.rand((length, num_envs), device=device) < epsilon
        random_actions = torch.randint(num_actions, (length, num_envs), device=device)
        ended = []  # episodes
        list((map if num_groups == 1 else pool.map)(play, range(num_groups)))  # others act while one's emulators run
        for t, _, score, steps in sorted(ended):
            recent_scores.append(score)
            if rank == 0:
                step = global_step + (t + 1) * num_envs * world_size
                episodes.write({"global_step": step, "episodic_return": score, "episodic_length": steps})
        global_step += batch_size * world_size

        # 2. Update θ towards the Q(λ) targets: N_epochs passes over the rollout in shuffled mini-batches.
        on_device = (torch.from_numpy(x[:length]).to(device) for x in (rewards, terminated, truncated, actions))
        reward, term, trunc, action = on_device
        next_values = torch.where(trunc, final_values[:length], values[1 : length + 1])
        returns = lambda_returns(reward, next_values, term, trunc, args.gamma, args.q_lambda)
        b_obs, b_actions, b_returns = obs[:length].flatten(0, 1), action.flatten(), returns.flatten()
        gns_noise = gns_signal = None
        if measure:  # before the updates
            b, gradients = batch_size // args.micro_batches, []
            # drawn as if transitions were independent, which makes N / S too small; what m does not divide is left out
            order = torch.randperm(batch_size, generator=torch.Generator().manual_seed(fresh_seed() + 1)).to(device)
            for indices in order.split(b)[: args.micro_batches]:
                backward(indices)
                gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
                optimizer.zero_grad()
            estimates = torch.tensor(gradient_noise(torch.stack(gradients), b), device=device)
            gns_noise, gns_signal = average(estimates, world_size).tolist()
        num_updates = args.update_epochs * args.num_minibatches
        means = torch.zeros(3, device=device)  # of the loss, Q(s, a) and the gradient norm
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(batch_size, device=device).tensor_split(args.num_minibatches):
                means[:2] += backward(minibatch) / num_updates
                if world_size > 1:
                    gradient = average(torch.cat([p.grad.flatten() for p in parameters]), world_size)
                    for p, g in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
                        p.grad.copy_(g.view_as(p.grad))
                means[2] += nn.utils.clip_grad_norm_(parameters, args.max_grad_norm) / num_updates
                optimizer.step()
                optimizer.zero_grad()
        td_loss, q_values, grad_norm = average(means, world_size).tolist()
        if not math.isfinite(td_loss + grad_norm):
            progress.close()
            fail(f"the loss is not finite at step {global_step}; the last good checkpoint is {folder}/checkpoint.pt", 1)

        # 3. Adapt: average noise and signal, and let the next rollouts follow. BD is only logged.
        if measure:
            sample = torch.randperm(batch_size, device=device)[: args.reference_states]
            reference = b_obs.index_select(0, sample)  # B_ref, from the rollout just learned from
            with torch.no_grad(), autocast:
                divergence = behavioral_divergence(q_network, old_network, reference, chunk_size)
                greedy = torch.cat([q_network(chunk).argmax(-1) for chunk in reference.split(chunk_size)])
            # Signals to compare BD with: how evenly the greedy policy uses its actions, how much values differ.
            entropy = torch.special.entr(torch.bincount(greedy, minlength=num_actions) / len(greedy)).sum()
            signals = torch.stack([torch.tensor(divergence, device=device), entropy, values[:length].var(correction=0)])
            divergence, policy_entropy, value_variance = average(signals, world_size).tolist()
            if iteration > 0:  # the untrained network's are over 100 times larger (Breakout), and would rule for long
                weight = args.beta if noise_avg else 1.0  # the first one counts in full
                noise_avg += weight * (gns_noise - noise_avg)
                signal_avg += weight * (gns_signal - signal_avg)
                drowned += signal_avg <= 0
                if args.adapt_rollout:
                    all_envs = world_size * num_envs  # E of all processes
                    bounds = (all_envs * args.rollout_min, all_envs * args.rollout_max)
                    adaptive_length = noise_scale_batch(noise_avg, signal_avg, bounds) / all_envs

        # 4. Log, save, and let the processes agree on whether to stop.
        iteration += 1
        took = time.perf_counter() - started
        seconds += took
        if rank == 0:
            score = np.mean(recent_scores).item() if recent_scores else None
            row = {
                "global_step": global_step,
                "charts/seconds": seconds,
                "charts/SPS": world_size * batch_size / took,
                "charts/epsilon": epsilon,
                "charts/episodic_return": score,  # mean of the last 100 episodes
                "abs/rollout_length": length,
                "abs/batch_size": world_size * batch_size,
                "abs/behavioral_divergence": divergence if measure else None,
                "abs/policy_entropy": policy_entropy if measure else None,
                "abs/value_variance": value_variance if measure else None,
                "losses/td_loss": td_loss,
                "losses/q_values": q_values,
                "losses/grad_norm": grad_norm,
            }
            raw = gns_noise / gns_signal if measure and gns_signal > 0 else None
            row |= {"gns/noise": gns_noise, "gns/signal": gns_signal, "gns/noise_scale_raw": raw}
            averaged = noise_avg / signal_avg if measure and signal_avg > 0 else None
            row |= {"gns/noise_scale": averaged, "gns/signal_drowned": drowned}
            metrics.write(row)
            shown = {"return": score, "BD": divergence, "L": length, "batch": row["abs/batch_size"]}
            progress.set_postfix(shown, refresh=False)
            progress.update(world_size * batch_size)
            if time.perf_counter() - saved_at > args.checkpoint_every:
                save_checkpoint()
                saved_at = time.perf_counter()
        stop = average(torch.tensor(float(interrupted), device=device), world_size).item() > 0

    progress.close()
    if rank == 0:
        save_checkpoint()
        result = f"mean return {np.mean(recent_scores):.2f}" if recent_scores else "no episode has ended yet"
        print(f"step {global_step:,}: {result}, L = {adaptive_length:.1f}")
        print(f"metrics and checkpoint: {folder}")
        if args.track:
            metrics.wandb.finish()
    pool.shutdown()
    for envs in groups:
        envs.close()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    if world_size > 1:
        dist.destroy_process_group()
    return folder


# --- Input checks, files and processes: nothing from here on is about the algorithm. ---


def fail(message: str, status: int = 2):
    """End with one line on stderr. Status 2: the input is wrong, nothing was done; 1: the run went wrong."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes on a machine, one speaks
        print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(status)


def check_args(args: Args, rules: list[tuple[str, bool, str]] | tuple = ()) -> None:
    """Refuse arguments that make no run, before any work starts. Every comparison is such that NaN fails it.

    Rules are an argument's name, whether it is fine, and what it must be; some are the script's own.
    """
    counts = "total_timesteps num_envs num_minibatches update_epochs num_steps adapt_frequency reference_states"
    rules = [*((name, getattr(args, name) >= 1, "at least 1") for name in [*counts.split(), "rollout_min"]), *rules]
    rules += [(name, 0 <= getattr(args, name) <= 1, "between 0 and 1") for name in ("gamma", "beta")]
    positives = "learning_rate max_grad_norm checkpoint_every"
    rules += [(name, 0 < getattr(args, name) < math.inf, "positive and finite") for name in positives.split()]
    shortest, longest = (args.rollout_min, args.rollout_max) if args.adapt_rollout else (args.num_steps, args.num_steps)
    rules += [
        ("seed", 0 <= args.seed < 2**63, "at least 0 and below 2^63"),
        ("rollout_max", args.rollout_max >= args.rollout_min, f"at least rollout-min, {args.rollout_min}"),
        ("num_steps", shortest <= args.num_steps <= longest, f"in the rollout range, {shortest} to {longest}"),
        ("num_minibatches", args.num_minibatches <= args.num_envs * shortest, "at most the transitions of a rollout"),
        ("env_groups", args.env_groups is None or 1 <= args.env_groups <= args.num_envs, "from 1 to num-envs"),
        ("precision", args.precision in ("auto", "bfloat16", "float32"), "auto, bfloat16 or float32"),
    ]
    for name, fine, need in rules:
        if not fine:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {need}")


def pick_device(args: Args) -> tuple[torch.device, torch.dtype]:
    """The device, and the precision of the network's body: bfloat16 where the hardware multiplies it natively."""
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "cpu":
        device, capabilities = torch.device("cpu"), torch.cpu.get_capabilities()
        native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    elif not re.fullmatch(r"cuda(:\d+)?", name) or (processes > 1 and ":" in name):
        fail(f"--device {name}: it must be auto, cpu, cuda or, for a single process, cuda:N")
    else:
        device = torch.device(name if ":" in name else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        if max(processes, device.index + 1) > torch.cuda.device_count():
            fail(f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices here; try --device cpu")
        torch.cuda.set_device(device)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    precision = args.precision.replace("auto", "bfloat16" if native else "float32")
    return device, torch.bfloat16 if precision == "bfloat16" else torch.float32


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint of this script. With weights_only=True a file from a stranger can't run code."""
    try:
        with warnings.catch_warnings(action="ignore"):  # a foreign file gets our one line, not torch's as well
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            script, same_flags = checkpoint["script"], checkpoint["args"].keys() == asdict(Args()).keys()
    except FileNotFoundError:
        fail(f"--resume {path}: there is no such file")
    except Exception:  # torch.load has about ten ways to say it of torn and foreign files
        fail(f"--resume {path}: this is no checkpoint, or not a whole one")
    if script != Path(__file__).name:
        fail(f"--resume {path}: this checkpoint is from {script}; resume it there")
    if not same_flags:
        fail(f"--resume {path}: this checkpoint is from a version of {script} that has other options")
    return checkpoint


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line. With --resume the checkpoint's arguments are the defaults, and few may be changed."""
    args = tyro.cli(Args, args=argv)
    if args.resume:
        saved = load_checkpoint(args.resume)["args"]
        args = tyro.cli(Args, args=argv, default=Args(**saved))
        for name, value in asdict(args).items():
            if name not in RESUME_MAY_CHANGE.split() and value != saved[name]:
                fail(f"--{name.replace('_', '-')} {value} contradicts the checkpoint's {saved[name]}: leave it out")
    return args


class Table:
    """A CSV file, one dict a row, written line by line; rows after last_step are cut off when it is opened."""

    wandb = None  # gets each row too, with --track

    def __init__(self, path: Path, last_step: int):
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # a killed process may leave a torn one
        kept = lines[:1] + [line for line in lines[1:] if int(line.split(",")[0]) <= last_step]
        path.with_suffix(".tmp").write_text("".join(kept))
        os.replace(path.with_suffix(".tmp"), path)
        self.file, self.empty = path.open("a", buffering=1), not kept

    def write(self, row: dict) -> None:
        if self.empty:
            self.file.write(",".join(row) + "\n")
        self.empty = False
        self.file.write(",".join("" if value is None else str(value) for value in row.values()) + "\n")
        if self.wandb:
            self.wandb.log({name: value for name, value in row.items() if value is not None})


def open_run(args: Args, device: torch.device, dtype: torch.dtype, last_step: int):
    """The folder <runs_dir>/<env>__<script>__<seed>__<time>, or the checkpoint's, with config.json, and its tables."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "-q", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {module.__name__: str(module.__version__) for module in (torch, gymnasium, ale_py, np)}
    config = {"script": Path(__file__).name, "args": asdict(args), "python": platform.python_version()} | versions
    config |= {"device": f"{device} ({processor}), {dtype}", "git_commit": commit or None}
    game = re.sub(r"[^\w.-]", "-", args.env_id)
    names = (f"{game}__{Path(__file__).stem}__{args.seed}__{second}" for second in itertools.count(int(time.time())))
    new = (Path(args.runs_dir, name) for name in names)
    folder = Path(args.resume).parent if args.resume else next(path for path in new if not os.path.exists(path))
    if args.track:
        import wandb

        where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "group": args.wandb_group}
        try:
            wandb.init(**where, name=folder.name, id=folder.name, resume="allow", config=config)
        except wandb.Error as error:
            fail(f"--track: {str(error).splitlines()[0]} (or set WANDB_MODE=offline)")
        wandb.define_metric("*", step_metric="global_step")
    try:
        folder.mkdir(parents=True, exist_ok=bool(args.resume))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        metrics, episodes = (Table(folder / name, last_step) for name in ("metrics.csv", "episodes.csv"))
    except OSError as error:
        fail(f"can't write to {folder}: {error.strerror}")
    metrics.wandb = episodes.wandb = wandb if args.track else None
    return folder, metrics, episodes


def average(tensor, world_size: int):
    """The mean over all processes, in place; with one process, the tensor as it is.

    Where another process is gone, gloo raises an error at once; NCCL waits, and torchrun ends the run.
    """
    if world_size > 1:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            message = f"another process is gone, so this one ends; --resume goes on ({reason})"
            tqdm.write(f"{Path(__file__).name}: {message}", file=sys.stderr)  # not into the progress bar's line
            raise SystemExit(1) from None
        tensor /= world_size
    return tensor


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while games are loaded ends at once, without a traceback
    main(parse_args())
