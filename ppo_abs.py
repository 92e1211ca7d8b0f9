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
r"""PPO with Adaptive Batch Scaling (ABS), on Atari, in one file.

PPO [arXiv 1707.06347] learns a policy and its value from short rollouts of parallel environments, in several epochs
over each, and clips the objective where the policy has moved too far from the one that acted. ABS [arXiv 2605.21557]
lets its batch follow the policy: every K iterations it measures how far the updates moved the policy, here by the KL
divergence. A volatile policy gets short rollouts and small batches, a stable one long rollouts and large batches:

    delta    = (1/M) sum_i KL( pi_theta_old(.|s_i) || pi_theta(.|s_i) ),    s_i ~ B_ref
    alpha    = log(clip(delta, delta_min, delta_max) / delta_min) / log(delta_max / delta_min)
    L'       = L_max - alpha (L_max - L_min)                                                     (Eq. 4)
    L_adapt <- (1 - beta) L_adapt + beta L',       batch |B| = E L_adapt

The Behavioural Divergence of pqn_abs.py, the share of states in which the most likely action changed, is logged too.

One GPU or a laptop:             python ppo_abs.py --env-id BreakoutNoFrameskip-v4
A first impression on a laptop:  python ppo_abs.py --env-id BreakoutNoFrameskip-v4 --adapt-frequency 3 \
                                     --total-timesteps 300000
Several GPUs, L shared by all:   torchrun --nproc-per-node 4 ppo_abs.py --env-id BreakoutNoFrameskip-v4
Plain PPO, L = 128 throughout:   python ppo_abs.py --no-adapt-rollout
After Ctrl-C or a crash:         python ppo_abs.py --resume runs/.../checkpoint.pt
"""

import copy
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
    """PPO with Adaptive Batch Scaling. Defaults are the usual ones for Atari; symbols of the papers are in brackets."""

    env_id: str = "BreakoutNoFrameskip-v4"  # Atari game: ...NoFrameskip-v4 (no sticky actions) or ALE/...-v5 (sticky)
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 10_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 8  # [E] environments in parallel, in each process
    learning_rate: float = 2.5e-4  # learning rate of Adam at the start; it falls linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages; 0 is one-step, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch; each grows with the rollout, as their number is fixed
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.1  # [ε] the ratio of new to old probability is clipped to 1 ± this; values to ± this
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    episodic_life: bool = True
    """end the learner's episode at a lost life, and press FIRE after it whatever the policy chooses (scores still count
    whole games); usual for PPO on Atari"""

    adapt_rollout: bool = True  # let L follow the KL divergence; --no-adapt-rollout is plain PPO with L = num_steps
    num_steps: int = 128  # steps per environment in the first rollout, and in all with --no-adapt-rollout
    rollout_min: int = 64  # [L_min] rollout of a volatile policy; half and twice num_steps, as in PQN
    rollout_max: int = 256  # [L_max] rollout of a stable policy
    adapt_frequency: int = 50  # [K] iterations from one measurement of the KL divergence to the next
    delta_min: float = 1e-4  # [δ_min] KL at and below which the policy counts as stable
    delta_max: float = 3.5e-3  # [δ_max] KL at and above which it counts as volatile; measured, see the README
    beta: float = 0.1
    """[β] smoothing of L_adapt: 1 follows the KL at once, 0 never; the paper gives no value; 0.1 averages over about
    ten of its measurements"""
    reference_states: int = 2048  # [M] size of B_ref, or all states of a smaller rollout; the paper gives no value

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


class ActorCritic(nn.Module):
    """Nature CNN (32, 64, 64): uint8 frames (N, 4, 84, 84) -> float32 logits (N, A) of the policy and values (N,)."""

    def __init__(self, envs):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(envs.single_observation_space.shape[0], 32, 8, stride=4))
        self.conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2))
        self.conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1))
        self.hidden = layer_init(nn.Linear(7 * 7 * 64, 512))
        # Small weights: the first policy is nearly uniform, so that it tries everything.
        self.actor = layer_init(nn.Linear(512, int(envs.single_action_space.n)), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)
        # Images lie as (N, H, W, C) in memory, which a CPU prefers.
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        kind = frames.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        # An 8 x 8 convolution with stride 4 is a 2 x 2 one over blocks of 4 x 4 pixels: 9% faster on two cores.
        # (N, 4, 84, 84) -> (N, 21, 21, 64); the 4 pixels of a block's row move together, as one int32.
        blocks = frames.view(torch.int32).unflatten(2, (21, 4)).permute(0, 2, 4, 1, 3).flatten(3).view(torch.uint8)
        weight = F.pixel_unshuffle(self.conv1.weight / 255, 4)  # not frames / 255: that is slow (20% of a CPU pass)
        x = F.conv2d(blocks.to(dtype).permute(0, 3, 1, 2), weight, self.conv1.bias)
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(x)))))
        x = F.relu(self.hidden(x.flatten(1)))
        # what enters the ratio of two nearly equal policies is in float32
        with torch.autocast(kind, enabled=False):
            return self.actor(x.float()), self.critic(x.float()).squeeze(1)


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


def gae(rewards, values, next_values, terminated, truncated, gamma: float, gae_lambda: float):
    """Generalised advantage estimates of a rollout, computed backwards [arXiv 1506.02438]. All are (L, E).

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
    A_t = δ_t + γ λ (1 - terminated_t) (1 - truncated_t) A_{t+1}

    next_values[t] is V(s_{t+1}) of the state that truly followed, in the same episode (not used where terminated).
    Where the rollout ends or a time limit cuts the episode (truncated), this value stands in for all that follows.
    """
    deltas = rewards + gamma * ~terminated * next_values - values
    advantages, advantage = torch.empty_like(values), torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        advantage = advantages[t] = deltas[t] + gamma * gae_lambda * ~(terminated[t] | truncated[t]) * advantage
    return advantages


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_coef: float):
    """PPO's loss of the policy, to be minimised, of each sample. All tensors are (N,), the result too.

    L^CLIP = min( ρ A, clip(ρ, 1 - ε, 1 + ε) A ),   ρ = π_θ(a|s) / π_θold(a|s),   and the loss is -L^CLIP
    """
    ratios = (log_probs - old_log_probs).exp()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_coef, 1 + clip_coef) * advantages)


def clipped_value_loss(values, old_values, returns, clip_coef: float):
    """½ max( (V - R)², (clip(V, V_old ± ε) - R)² ) of each sample. All tensors are (N,), the result too."""
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)), exact, of each pair of distributions; log-probabilities (N, A)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.no_grad()
def mean_kl_divergence(policy, old_policy, states, chunk_size: int = 2048) -> float:
    """How far an update moved the policy, in nats [ABS]; policies map states (M, ...) to logits (M, A).

    δ = (1/M) Σ_i KL( π_θold(·|s_i) ‖ π_θ(·|s_i) )

    The paper does not give the direction. This one weighs the actions as the policy did that collected them. As both
    see the same chunks, equal policies give exactly 0.
    """
    chunks = states.split(chunk_size)
    kl = [kl_divergence(old_policy(chunk).log_softmax(-1), policy(chunk).log_softmax(-1)) for chunk in chunks]
    return torch.cat(kl).mean().item()


@torch.no_grad()
def behavioral_divergence(network, old_network, states, chunk_size: int = 2048) -> float:
    """Share of the states (M, ...) in which the greedy actions of two networks differ, in [0, 1] [ABS].

    δ_π = (1/M) Σ_i 1[ π_θ(s_i) ≠ π_θold(s_i) ],   π_θ(s) = argmax_a network(s)[a]

    Both networks see the same chunks, hence compute the same bits where they are equal: BD is then exactly 0.
    """
    changed = [network(chunk).argmax(-1) != old_network(chunk).argmax(-1) for chunk in states.split(chunk_size)]
    return torch.cat(changed).float().mean().item()


def rollout_length(divergence: float, current: float, thresholds: tuple, bounds: tuple, beta: float) -> float:
    """The next L_adapt, a real number of steps, from the divergence and the current L_adapt [ABS, Eq. 4].

    thresholds are (δ_min, δ_max), bounds (L_min, L_max), beta is the smoothing β:

    α = log(δ_clipped / δ_min) / log(δ_max / δ_min)          0: stable, 1: volatile
    L' = L_max - α (L_max - L_min)
    L_adapt ← (1 - β) L_adapt + β L'

    The paper calls the smoothing coefficient α too, but with the α of Eq. 4 the batch of a stable policy (α = 0) would
    never grow. So it is a constant of its own here, β.
    """
    clipped = min(max(divergence, thresholds[0]), thresholds[1])
    alpha = math.log(clipped / thresholds[0]) / math.log(thresholds[1] / thresholds[0])
    target = bounds[1] - alpha * (bounds[1] - bounds[0])
    return (1 - beta) * current + beta * target


def main(args: Args) -> Path | None:
    """Train; returns the run's folder (None in all but the first of several processes)."""
    rules = [
        ("delta_min", 0 < args.delta_min < args.delta_max, f"above 0 and below delta-max, {args.delta_max}"),
        ("delta_max", args.delta_max < math.inf, "finite"),
        ("gae_lambda", 0 <= args.gae_lambda <= 1, "between 0 and 1"),
        ("ent_coef", 0 <= args.ent_coef < math.inf, "at least 0 and finite"),
        ("vf_coef", 0 <= args.vf_coef < math.inf, "at least 0 and finite"),
        ("clip_coef", 0 < args.clip_coef < 1, "above 0 and below 1"),
    ]
    check_args(args, rules)
    device, dtype = pick_device(args)
    if device.type == "cuda":
        torch.set_num_threads(1)  # a copy to pinned memory must not wait for cores that the emulators hold
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    if checkpoint and checkpoint["world_size"] != world_size:
        fail(f"--resume {args.resume}: it takes {checkpoint['world_size']} processes, as before, not {world_size}")
    num_envs = args.num_envs
    # On a CPU, threads of ours play in a group of environments each; PyTorch's own would share each layer and wait for
    # one another. Not with --compile: what it makes belongs to one thread.
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    workers = 1 if args.compile else max(n for n in (1, 2, 3, 4) if cores % n == 0)
    num_groups = args.env_groups or min(num_envs, workers if device.type == "cpu" else 1 + (num_envs > os.cpu_count()))
    parts = [slice(num_envs * g // num_groups, num_envs * (g + 1) // num_groups) for g in range(num_groups)]
    groups = [make_envs(replace(args, num_envs=part.stop - part.start)) for part in parts]
    pool = ThreadPoolExecutor(num_groups, initializer=torch.set_num_threads, initargs=(max(1, cores // num_groups),))
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
    network = ActorCritic(groups[0]).to(device)
    old_network = copy.deepcopy(network)  # θ_old
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)

    global_step, iteration, adaptive_length, seconds = 0, 0, float(args.num_steps), 0.0
    recent_scores, kl = deque(maxlen=100), None
    if checkpoint:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        global_step, iteration = checkpoint["global_step"], checkpoint["iteration"]
        adaptive_length, seconds = checkpoint["adaptive_length"], checkpoint["seconds"]
        recent_scores.extend(checkpoint["recent_scores"])

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
        for tensor in network.state_dict().values():  # on processors of several kinds, the last bit may differ
            dist.broadcast(tensor, 0)

    def save_checkpoint():
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "args": asdict(args)}
        state |= {"global_step": global_step, "adaptive_length": adaptive_length, "recent_scores": list(recent_scores)}
        state |= {"iteration": iteration}  # each one seeds its random numbers anew: there is no RNG state to keep
        state |= {"script": Path(__file__).name, "world_size": world_size, "seconds": seconds}
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")  # at any moment, one whole file is there

    # Storage for the longest rollout. Observations are kept once, as they come: E · L_max · 28,224 bytes of uint8;
    # values[t] is V(s_t), up to t = L; final_values[t] that of the last state of an episode truncated at t.
    obs = torch.from_numpy(next_obs[0]).new_zeros((longest, num_envs, *next_obs[0].shape[1:]), device=device)
    actions = torch.zeros((longest, num_envs), dtype=torch.int64, device=device)
    old_log_probs = torch.zeros((longest, num_envs), device=device)  # log π_θold(a_t|s_t)
    values, final_values = torch.zeros((2, longest + 1, num_envs), device=device)
    rewards = np.zeros((longest, num_envs), dtype=np.float32)
    terminated, truncated = np.zeros((2, longest, num_envs), dtype=bool)
    scores, episode_steps = np.zeros((2, num_envs))
    lost_life = np.zeros(num_envs, dtype=bool)
    if args.episodic_life:
        lives = np.concatenate([info["lives"] for _, info in resets])

    act = network if num_groups == 1 else network.forward  # CUDA graphs, and so --compile, belong to one thread
    if args.compile:
        torch._functorch.config.backward_pass_autocast = "off"  # else the float32 head's gradient would be in bfloat16
        for compiled in (network, old_network):  # on a GPU "reduce-overhead" replays a CUDA graph, one a batch size
            compiled.compile(mode="reduce-overhead")
        try:
            with autocast:
                minibatch = obs.flatten(0, 1)[: args.num_steps * num_envs // args.num_minibatches]
                sum(output.sum() for output in network(minibatch)).backward()
                with torch.no_grad():
                    act(obs[0, parts[0]])
            optimizer.zero_grad()
        except Exception as error:  # no C++ compiler, no Triton, ...: torch has many ways to say it
            network._compiled_call_impl = old_network._compiled_call_impl = None
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
                logits, values[now] = act(frames)
            if t == length:  # of this state, the next rollout's first, only the value is needed
                return
            obs[now] = frames
            actions[now] = (logits + gumbel[now]).argmax(-1)
            old_log_probs[now] = logits.log_softmax(-1).gather(1, actions[t, part, None]).squeeze(1)
            chosen = actions[now].cpu().numpy()
            if lost_life[part].any():  # in the step before; as what follows is the same whatever was drawn,
                # the gradient of the draw is 0 in expectation, and FIRE, which was not drawn, needs no correction
                chosen = np.where(lost_life[part], envs.fire_action, chosen)
            next_obs[group], reward, terminated[now], truncated[now], info = envs.step(chosen)
            rewards[now] = np.sign(reward)
            scores[part] += reward
            episode_steps[part] += 1
            done, cut = terminated[now] | truncated[now], np.flatnonzero(truncated[now])
            if len(cut):  # the value of the cut episode's own last observation, not of the next one's first
                last_obs = torch.from_numpy(np.stack(info["final_obs"][cut])).to(device)
                with torch.no_grad(), autocast:  # .forward bypasses --compile: its batch size varies
                    final_values[t, part.start + cut] = network.forward(last_obs)[1]
            if args.episodic_life:
                lost_life[part] = (info["lives"] < lives[part]) & ~done  # where done, lives are the next episode's
                lives[part] = info["lives"]
                terminated[now] |= lost_life[part]
            for i in part.start + np.flatnonzero(done):
                ended.append((t, i, float(scores[i]), int(episode_steps[i])))
                scores[i] = episode_steps[i] = 0

    stop = False
    while global_step < args.total_timesteps and not stop:
        started = time.perf_counter()
        torch.manual_seed(fresh_seed())
        length = round(adaptive_length)
        batch_size = length * num_envs
        optimizer.param_groups[0]["lr"] = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, global_step)
        # K counts iterations: the KL divergence is that of one iteration's updates, every K-th.
        measure = iteration % args.adapt_frequency == 0
        if measure:
            old_network.load_state_dict(network.state_dict())  # θ_old ← θ

        # 1. Collect L_adapt steps in each of the E environments, with actions drawn from the policy: with Gumbel noise
        # on the logits, argmax is such a draw, and for any grouping of the environments the same one.
        gumbel = -torch.empty((length, num_envs, num_actions), device=device).exponential_().log()
        ended = []  # episodes
        list((map if num_groups == 1 else pool.map)(play, range(num_groups)))  # others act while one's emulators run
        for t, _, score, steps in sorted(ended):
            recent_scores.append(score)
            if rank == 0:
                step = global_step + (t + 1) * num_envs * world_size
                episodes.write({"global_step": step, "episodic_return": score, "episodic_length": steps})
        global_step += batch_size * world_size

        # 2. Update θ: several passes over the rollout in shuffled mini-batches.
        reward, term, trunc = (torch.from_numpy(x[:length]).to(device) for x in (rewards, terminated, truncated))
        next_values = torch.where(trunc, final_values[:length], values[1 : length + 1])
        advantages = gae(reward, values[:length], next_values, term, trunc, args.gamma, args.gae_lambda)
        b_obs, b_actions, b_advantages = obs[:length].flatten(0, 1), actions[:length].flatten(), advantages.flatten()
        b_values, b_log_probs = values[:length].flatten(), old_log_probs[:length].flatten()
        b_returns = b_advantages + b_values
        num_updates = args.update_epochs * args.num_minibatches
        means = torch.zeros(6, device=device)  # of what is logged below
        for _ in range(args.update_epochs):
            for minibatch in torch.randperm(batch_size, device=device).tensor_split(args.num_minibatches):
                with autocast:
                    logits, value = network(b_obs.index_select(0, minibatch))
                log_pi = logits.log_softmax(-1)
                log_probs = log_pi.gather(1, b_actions[minibatch, None]).squeeze(1)
                advantage = b_advantages[minibatch]
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                policy_loss = clipped_surrogate(log_probs, b_log_probs[minibatch], advantage, args.clip_coef).mean()
                value_loss = clipped_value_loss(value, b_values[minibatch], b_returns[minibatch], args.clip_coef).mean()
                entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
                # L = -L^CLIP + c_v L^VALUE - c_e H(π)
                (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
                clipped = ((log_probs - b_log_probs[minibatch]).exp() - 1).abs() > args.clip_coef
                if world_size > 1:
                    gradient = average(torch.cat([p.grad.flatten() for p in parameters]), world_size)
                    for p, g in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
                        p.grad.copy_(g.view_as(p.grad))
                grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                logged = (policy_loss, value_loss, entropy, clipped.float().mean(), value.mean(), grad_norm)
                means += torch.stack(logged).detach() / num_updates
        means = average(means, world_size).tolist()
        policy_loss, value_loss, entropy, clip_fraction, value, grad_norm = means
        if not math.isfinite(policy_loss + value_loss + grad_norm):
            progress.close()
            fail(f"the loss is not finite at step {global_step}; the last good checkpoint is {folder}/checkpoint.pt", 1)

        # 3. Adapt: measure how far the updates moved the policy, and let the next rollouts follow.
        if measure:
            sample = torch.randperm(batch_size, device=device)[: args.reference_states]
            reference = b_obs.index_select(0, sample)  # B_ref, from the rollout just learned from
            policy, old_policy = (lambda states, net=net: net(states)[0] for net in (network, old_network))
            with autocast:
                kl = mean_kl_divergence(policy, old_policy, reference)
                divergence = behavioral_divergence(policy, old_policy, reference)
            signals = torch.tensor([kl, divergence, values[:length].var(correction=0)], device=device)
            kl, divergence, value_variance = average(signals, world_size).tolist()
            if args.adapt_rollout:
                thresholds, bounds = (args.delta_min, args.delta_max), (args.rollout_min, args.rollout_max)
                adaptive_length = rollout_length(kl, adaptive_length, thresholds, bounds, args.beta)

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
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/episodic_return": score,  # mean of the last 100 episodes
                "abs/rollout_length": length,
                "abs/batch_size": world_size * batch_size,
                "abs/kl_divergence": kl if measure else None,
                "abs/behavioral_divergence": divergence if measure else None,
                "abs/value_variance": value_variance if measure else None,
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropy,
                "losses/clipfrac": clip_fraction,
                "losses/values": value,
                "losses/grad_norm": grad_norm,
            }
            metrics.write(row)
            shown = {"return": score, "KL": kl, "L": length, "batch": row["abs/batch_size"]}
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
