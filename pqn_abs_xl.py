# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PQN with Adaptive Batch Scaling (ABS) at scale: larger networks and batches, several processes.

The algorithm is that of pqn_abs.py, where it is explained: the length L of the rollouts in E
environments follows the Behavioural Divergence (BD) of the policy. ABS [arXiv 2605.21557] reports
that larger networks gain more from larger batches; so L goes up to 128 here, E L to 16,384.

The network is a wider CNN and a multi-skip residual MLP [SG: arXiv 2506.15544] of n blocks f_k:

    x_{k+1} = x_k + f_k(x_k) + x_0,      hence      x_n = (n + 1) x_0 + Σ_k f_k(x_k)

x_0, the first layer's output, is added after every block: a direct path for the gradient, however
deep the stack. PQN-L and PQN-XL, --size l and xl, have 5 and 10 blocks, as in the code of the
paper's author, and --size s is the network of pqn_abs.py.

Each process has two vectors of E/2 environments: while the emulators of one play, the network acts
for the other. It is meant for a GPU; on a CPU alone both share the cores. Several processes,
started by torchrun, have E environments each; gradients and BD are averaged over them, so that all
have the same network and the same L.

One GPU, the paper's settings:   python pqn_abs_xl.py --env-id BreakoutNoFrameskip-v4
PQN-XL:                          python pqn_abs_xl.py --size xl
Several GPUs:                    torchrun --nproc-per-node 4 pqn_abs_xl.py
Plain PQN-L, L = 32 throughout:  python pqn_abs_xl.py --no-adapt-rollout
After Ctrl-C or a crash:         python pqn_abs_xl.py --resume runs/...   (with as many processes)
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while modules load
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: its idle threads soon free cores

import ale_py
import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
import wandb
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from tqdm import tqdm


@dataclass
class Args:
    """PQN with Adaptive Batch Scaling. Defaults are the paper's; in brackets, its symbols."""

    env_id: str = "BreakoutNoFrameskip-v4"  # ...NoFrameskip-v4 (no sticky actions) or ALE/...-v5
    seed: int = 1  # seed of the network, the exploration and the environments
    total_timesteps: int = 20_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 128  # [E] environments in parallel, in each process; an even number
    learning_rate: float = 2.5e-4  # of RAdam, constant
    gamma: float = 0.99  # [γ] discount
    q_lambda: float = 0.65  # [λ] of the Q(λ) targets: 0 is one-step Q-learning, 1 Monte Carlo
    num_minibatches: int = 4  # mini-batches an epoch; their number is fixed, their size follows L
    update_epochs: int = 2  # [N_epochs] passes over each rollout
    max_grad_norm: float = 10.0  # gradients are clipped to this norm
    start_e: float = 1.0  # [ε] share of random actions at the start
    end_e: float = 0.001  # [ε] share of random actions after exploration
    exploration_fraction: float = 0.10  # share of the steps in which ε goes from start to end
    episodic_life: bool = False  # a lost life ends an episode, FIRE follows; on in ABS's own code

    size: Literal["s", "l", "xl"] = "l"  # of the network: pqn_abs.py's, 5 blocks, 10 blocks
    adapt_rollout: bool = True  # let L follow BD; --no-adapt-rollout is plain PQN, L = num_steps
    num_steps: int = 32  # [L] steps in each environment in the first rollout
    rollout_min: int = 16  # [L_min] rollout of a volatile policy
    rollout_max: int = 128  # [L_max] rollout of a stable policy
    adapt_frequency: int = 50  # [K] iterations from one measurement of BD to the next
    delta_min: float = 0.05  # [δ_min] BD at and below which the policy counts as stable
    delta_max: float = 0.95  # [δ_max] BD at and above which it counts as volatile
    beta: float = 0.1  # [β] smoothing of L_adapt; from ABS's own code, not in the paper
    reference_states: int = 2048  # [M] size of B_ref, at most the batch; from ABS's own code
    divergence_window: int = 1  # measurements whose mean L follows; ABS's own code: 20
    burn_in: int = 0  # measurement with which L begins to move; ABS's own code: 10
    scale_epochs: bool = False  # max(N_epochs, N_epochs · L // base_steps) passes, as in that code
    base_steps: int = 32  # L above which --scale-epochs adds passes

    device: str = "auto"  # auto (CUDA where there is one, else the CPU), cpu, cuda:1, mps, ...
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of all layers but the last
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


class ImageNorm(nn.LayerNorm):
    """LayerNorm of images (N, C, H, W), made with [H, W, C]: as channels_last keeps them."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


SIZES = {  # channels of the three convolutions, number of residual blocks
    "s": (32, 64, 64, 0),
    "l": (64, 128, 128, 5),
    "xl": (64, 128, 128, 10),
}


class QNetwork(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 Q-values (N, A): CNN, then a multi-skip MLP [SG].

    LayerNorm after each layer keeps Q-learning stable without a target network.
    """

    def __init__(self, envs, size="l"):
        super().__init__()
        c1, c2, c3, num_blocks = SIZES[size]
        self.conv1 = layer_init(nn.Conv2d(4, c1, 8, stride=4))
        self.body = nn.Sequential(
            ImageNorm([20, 20, c1]),
            nn.ReLU(),
            layer_init(nn.Conv2d(c1, c2, 4, stride=2)),
            ImageNorm([9, 9, c2]),
            nn.ReLU(),
            layer_init(nn.Conv2d(c2, c3, 3, stride=1)),
            ImageNorm([7, 7, c3]),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(7 * 7 * c3, 512)),
            nn.LayerNorm(512),
        )
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            block = nn.Sequential(
                nn.ReLU(),
                layer_init(nn.Linear(512, 512)),
                nn.LayerNorm(512),
                nn.ReLU(),
                layer_init(nn.Linear(512, 512)),
                nn.LayerNorm(512),
            )
            self.blocks.append(block)
        self.last = nn.Sequential()
        if num_blocks > 0:
            self.last.append(layer_init(nn.Linear(512, 512)))
            self.last.append(nn.LayerNorm(512))
        self.head = layer_init(nn.Linear(512, int(envs.single_action_space.n)))
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        # bfloat16 holds 0 to 255 exactly. Dividing the weights by 255 is less work than the pixels.
        x = frames.bfloat16().contiguous(memory_format=torch.channels_last)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride)
        global_skip = self.body(x).float()  # x_0; sums are in float32
        x = global_skip
        for block in self.blocks:
            x = x + block(x) + global_skip
        x = F.relu(self.last(x))
        # Atari's action gaps are under 1% of Q: in bfloat16 many actions would tie.
        with torch.autocast(x.device.type, enabled=False):
            return self.head(x.float())


def make_envs(args: Args):
    """args.num_envs copies of an Atari game, as Gymnasium's registry describes it, as one vector.

    Observations are uint8 (E, 4, 84, 84), the last 4 grey frames; a step is 4 frames, the last two
    max-pooled; rewards are score points, of which learning sees the sign. An episode starts with
    FIRE and 0 to 28 no-ops, and is cut off after 108,000 frames.

    Your own may be any Gymnasium VectorEnv with discrete actions and same-step autoreset: where an
    episode ends, step() gives the next one's first observation, and the last observation of the
    ended one in info["final_obs"]. For --episodic-life it terminates at lost lives without a reset,
    tells info["lives"], and has an attribute fire_action.
    """
    gymnasium.register_envs(ale_py)
    spec = gymnasium.registry.get(args.env_id)
    is_atari = spec is not None and spec.entry_point == "ale_py.env:AtariEnv"
    if not is_atari or isinstance(spec.kwargs["frameskip"], tuple):  # at random from 2 to 4
        fail(f"--env-id {args.env_id} is no game here; try BreakoutNoFrameskip-v4 or ALE/Pong-v5")
    print(f"loading {args.num_envs} x {args.env_id}")  # takes a core about 0.2 s for each
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # sticky actions
        life_loss_info=args.episodic_life,  # a lost life is "terminated", and the game goes on
        reward_clipping=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    buttons = [button.name for button in envs.ale.get_action_set()]
    envs.fire_action = buttons.index("FIRE") if "FIRE" in buttons else 0
    return envs


class Half:
    """Half of the environments: while they play, the network acts for the other half."""

    def __init__(self, args, first):
        self.part = slice(first, first + args.num_envs // 2)  # its place among all environments
        self.args = replace(args, num_envs=args.num_envs // 2)
        self.envs = make_envs(self.args)

    def reset(self, seed, device, q_network):
        """Start anew; environment i of all gets seed + i."""
        frames, info = self.envs.reset(seed=seed + self.part.start)
        self.next_obs = torch.from_numpy(frames).to(device)
        self.lives = info.get("lives")  # for --episodic-life
        self.lost_life = np.zeros(self.args.num_envs, bool)
        check_seams(self.args, self.envs, info, q_network(self.next_obs))

    def send(self, actions):
        """Start a step with actions (E/2,), FIRE after a lost life; returns the actions taken."""
        if self.lost_life.any():
            actions[torch.from_numpy(self.lost_life)] = self.envs.fire_action
        if hasattr(self.envs, "send"):
            self.envs.send(actions.numpy(force=True))
        else:  # environments of your own may not have it, and play at once
            self.outcome = self.envs.step(actions.numpy(force=True))
        return actions

    def recv(self):
        """Wait for the step's end; returns rewards, terminated, truncated, last observations."""
        if hasattr(self.envs, "recv"):
            self.outcome = self.envs.recv()
        frames, reward, ended, cut, info = self.outcome
        self.next_obs = torch.from_numpy(frames).to(self.next_obs.device)
        if self.args.episodic_life:  # with fewer lives the game goes on, else this is a new one
            self.lost_life = ended & (info["lives"] < self.lives)
            self.lives = info["lives"]
        if not cut.any():
            return reward, ended, cut, None
        final_obs = torch.from_numpy(np.stack(info["final_obs"][cut]))
        return reward, ended, cut, final_obs.to(self.next_obs.device)


def lambda_returns(rewards, next_values, terminated, truncated, gamma: float, q_lambda: float):
    """Peng's Q(λ) targets of a rollout, computed backwards [PQN]. All tensors are (L, E).

    G_t = r_t + γ (1 - terminated_t) [ λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a) ]

    next_values[t] is max_a Q(s_{t+1}, a) of the state that truly followed, in the same episode.
    Where the rollout ends or a time limit cuts the episode (truncated), this value stands in for
    G_{t+1}; where the episode terminated, it does not count.
    """
    returns = torch.empty_like(next_values)
    next_return = next_values[-1]
    for t in reversed(range(len(rewards))):
        next_return = torch.where(truncated[t], next_values[t], next_return)
        bootstrap = q_lambda * next_return + (1 - q_lambda) * next_values[t]
        next_return = rewards[t] + gamma * ~terminated[t] * bootstrap
        returns[t] = next_return
    return returns


@torch.no_grad()
def behavioral_divergence(network, old_network, states) -> float:
    """Share of the states (M, ...) in which two networks' greedy actions differ, in [0, 1] [ABS].

    δ_π = (1/M) Σ_i 1[ π_θ(s_i) ≠ π_θold(s_i) ],   π_θ(s) = argmax_a network(s)[a]
    """
    changed = network(states).argmax(-1) != old_network(states).argmax(-1)
    return changed.float().mean().item()


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


def average(tensor):
    """The mean over all processes, in place."""
    if WORLD_SIZE > 1:
        together(dist.all_reduce, tensor)
        tensor /= WORLD_SIZE
    return tensor


def average_gradients(network):
    """Average .grad over all processes; what took no part in the loss of one counts as 0."""
    if WORLD_SIZE > 1:
        for parameter in network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            average(parameter.grad)


def main(args: Args) -> Path | None:
    """Train; returns the run's folder, in all processes but the first None."""
    check(args)
    device, bfloat16 = join_processes(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    chunk_size = 512 if device.type == "cpu" else 10**6  # transitions in a pass (a CPU's cache)

    torch.manual_seed(fresh_seed(args.seed, 0))
    num_envs = args.num_envs
    halves = [Half(args, 0), Half(args, num_envs // 2)]
    num_actions = int(halves[0].envs.single_action_space.n)
    q_network = QNetwork(halves[0].envs, args.size).to(device)
    old_network = copy.deepcopy(q_network)  # ABS: θ_old
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate, foreach=True)
    saved = load_together(args, network=q_network, optimizer=optimizer)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    adaptive_length = saved.get("adaptive_length", float(args.num_steps))  # ABS: L_adapt
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)  # ABS

    for half in halves:
        half.reset(fresh_seed(args.seed, iteration * WORLD_SIZE + RANK), device, q_network)
    reward = np.zeros(num_envs)  # of a step of both halves
    episode_ended = np.zeros(num_envs, bool)
    run = Run(args, device, bfloat16, saved) if RANK == 0 else Follower()

    while global_step < args.total_timesteps and not run.stopped:
        iteration += 1
        # Anew in each iteration: no RNG state needs saving, and measuring changes no later draw.
        torch.manual_seed(fresh_seed(args.seed, iteration * WORLD_SIZE + RANK))
        length = round(adaptive_length)  # ABS: L
        batch_size = length * num_envs
        # K counts iterations: BD compares the policies before and after every K-th one's updates.
        measure = iteration % args.adapt_frequency == 0  # ABS
        if measure:
            old_network.load_state_dict(q_network.state_dict())  # ABS: θ_old ← θ

        # 1. Collect L_adapt steps in each of the E environments, ε-greedily.
        explored = min(global_step / max(args.exploration_fraction * args.total_timesteps, 1), 1)
        epsilon = args.start_e + explored * (args.end_e - args.start_e)
        explore = torch.rand((length, num_envs), device=device) < epsilon
        random_actions = torch.randint(num_actions, (length, num_envs), device=device)
        obs_shape = halves[0].next_obs.shape[1:]
        obs = halves[0].next_obs.new_zeros((length, num_envs, *obs_shape))  # uint8 on Atari
        actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
        values = torch.zeros((length + 1, num_envs), device=device)  # max_a Q(s_t, a), up to t = L
        final_values, rewards = torch.zeros((2, length, num_envs), device=device)
        terminated, truncated = torch.zeros((2, length, num_envs), dtype=torch.bool, device=device)
        with torch.no_grad(), autocast:
            for t in range(length + 1):
                for half in halves:
                    now = t, half.part
                    if t > 0:
                        last = t - 1, half.part
                        reward[half.part], ended, cut, final_obs = half.recv()
                        episode_ended[half.part] = (ended | cut) & ~half.lost_life
                        terminated[last] = torch.from_numpy(ended)
                        truncated[last] = torch.from_numpy(cut)
                        if cut.any():  # the target needs the cut episode's own last observation
                            final_value = q_network(final_obs).float().max(-1).values
                            final_values[last][truncated[last]] = final_value
                    values[now], greedy_actions = q_network(half.next_obs).float().max(-1)
                    if t < length:
                        obs[now] = half.next_obs
                        chosen = torch.where(explore[now], random_actions[now], greedy_actions)
                        actions[now] = half.send(chosen)
                if t > 0:
                    rewards[t - 1] = torch.from_numpy(np.sign(reward))
                    global_step += num_envs * WORLD_SIZE
                    run.count_episodes(global_step, reward, episode_ended)

        # 2. Update θ towards the Q(λ) targets: N_epochs passes in shuffled mini-batches.
        next_values = torch.where(truncated, final_values, values[1:])
        returns = lambda_returns(
            rewards, next_values, terminated, truncated, args.gamma, args.q_lambda
        )
        b_obs = obs.flatten(0, 1)
        b_actions = actions.flatten()
        b_returns = returns.flatten()
        epochs = args.update_epochs
        if args.scale_epochs:
            epochs = max(epochs, epochs * length // args.base_steps)
        for _ in range(epochs):
            shuffled = torch.randperm(batch_size, device=device)
            for minibatch in shuffled.tensor_split(args.num_minibatches):
                optimizer.zero_grad()
                for chunk in minibatch.tensor_split(math.ceil(len(minibatch) / chunk_size)):
                    with autocast:
                        q_values = q_network(b_obs.index_select(0, chunk)).float()
                    q_taken = q_values.gather(1, b_actions[chunk, None]).squeeze(1)
                    td_loss = F.mse_loss(q_taken, b_returns[chunk])
                    loss = td_loss * len(chunk) / len(minibatch)
                    loss.backward()  # the chunks' gradients add up
                average_gradients(q_network)
                grad_norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
                optimizer.step()
                updates += 1

        # 3. ABS: measure how far the updates moved the policy, and let the next rollouts follow.
        divergence = None
        if measure:
            sample = torch.randperm(batch_size, device=device)[: args.reference_states]  # B_ref
            with autocast:
                divergence = behavioral_divergence(q_network, old_network, b_obs[sample])
            divergence = average(torch.tensor(divergence, device=device)).item()
            divergences.append(divergence)
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

        # 4. Log and save. Losses are those of the last chunk.
        row = {
            "global_step": global_step,
            "charts/updates": updates,
            "charts/epsilon": epsilon,
            "abs/rollout_length": length,
            "abs/batch_size": batch_size * WORLD_SIZE,
            "abs/behavioral_divergence": divergence,
            "losses/td_loss": td_loss.item(),
            "losses/q_values": q_taken.mean().item(),
            "losses/grad_norm": grad_norm.item(),
        }
        run.log(row)
        run.save(
            world_size=WORLD_SIZE,
            network=q_network.state_dict(),
            optimizer=optimizer.state_dict(),
            global_step=global_step,
            iteration=iteration,
            updates=updates,
            adaptive_length=adaptive_length,
            divergences=list(divergences),
        )
        run.stopped = average(torch.tensor(float(run.stopped), device=device)).item() > 0

    for half in halves:
        half.envs.close()
    run.close()
    return run.folder


# --- From here on: checks, files, signals, W&B. Nothing of it is about the algorithm. ---

RANK = int(os.environ.get("RANK", "0"))  # of this process among those that torchrun started
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # how many they are
SCRIPT = Path(__file__).name  # a file that replaces parts of this one puts its own name here


def fail(message, status=2):
    """End with one line on stderr. Status 2: the input is wrong; 1: the run went wrong."""
    if status == 1 or RANK == 0:  # a wrong input is wrong in all processes: one speaks
        tqdm.write(f"{SCRIPT}: {message}", file=sys.stderr)  # not into the progress bar
    raise SystemExit(status)


def check(args):
    """Refuse arguments that make no run, before any work starts."""
    shortest = args.rollout_min if args.adapt_rollout else args.num_steps
    limits = [
        (1, math.inf, "total_timesteps num_envs update_epochs num_steps rollout_min"),
        (1, math.inf, "adapt_frequency reference_states divergence_window base_steps"),
        (0, math.inf, "seed burn_in"),
        (0, 1, "gamma q_lambda start_e end_e exploration_fraction delta_max beta"),
        (1e-9, 1e9, "learning_rate max_grad_norm checkpoint_every"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),
        (1, args.num_envs * shortest, "num_minibatches"),
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, args.rollout_max, "num_steps"))
    if args.num_envs % 2 == 1:
        fail(f"--num-envs {args.num_envs}: it must be even, as half of them play at a time")
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if not low <= value <= high:  # as NaN is not, either
                fail(f"--{name.replace('_', '-')} {value}: it must be from {low} to {high}")
    if args.resume is None:
        folder = run_folder(args)
        if os.path.exists(folder):
            fail(f"{folder} is there already: choose another --run-name, or --resume it")


def pick_device(args):
    """The device, and whether the network's body works in bfloat16 there."""
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # PyTorch says it in several ways
        fail(f"--device {name}: {str(error).splitlines()[0]}")
    if args.precision != "auto":
        return device, args.precision == "bfloat16"
    if device.type == "cuda":  # emulated, it would be slower than float32
        return device, torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return device, False
    cpu = torch.cpu.get_capabilities()
    return device, bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))


def join_processes(args):
    """What pick_device returns; the processes that torchrun started become a group."""
    if WORLD_SIZE == 1:
        return pick_device(args)
    if args.device in ("auto", "cuda") and torch.cuda.is_available():  # each takes a GPU
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            fail(f"--nproc-per-node: there are {torch.cuda.device_count()} GPUs, a process each")
        args = replace(args, device=f"cuda:{os.environ['LOCAL_RANK']}")
    device, bfloat16 = pick_device(args)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, bfloat16


def load_together(args, **modules):
    """load_checkpoint, after which all processes have the first one's weights, to the last bit."""
    saved = load_checkpoint(args, **modules)
    if saved.get("world_size", WORLD_SIZE) != WORLD_SIZE:
        fail(f"--resume {args.resume}: start {saved['world_size']} processes, as before")
    if WORLD_SIZE > 1:
        for tensor in modules["network"].state_dict().values():
            together(dist.broadcast, tensor, 0)
    return saved


def together(operation, *values):
    """An operation of all processes. Where one is gone, the others end with a line."""
    try:
        operation(*values)
    except RuntimeError:  # from gloo; with NCCL, torchrun ends what waits
        fail("another process is gone, so this one ends; --resume goes on from its checkpoint", 1)


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


def check_seams(args, envs, info, q_values):
    """Do what make_envs and the network class return keep their promises?"""
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return environments with autoreset_mode=AutoresetMode.SAME_STEP")
    if q_values.shape != (args.num_envs, envs.single_action_space.n):
        fail("the network must give (num_envs, actions) Q-values for the first observations")
    if args.episodic_life and "lives" not in info:
        fail(f"--episodic-life: {args.env_id} does not tell lives; take --no-episodic-life")


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


class Follower:
    """What Run is to the first process, to the others: they stop with it, and write nothing."""

    def __init__(self):
        self.stopped = False
        self.folder = None
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name, signal.SIGTERM), signal.SIG_IGN)

    def leave_it(self, *values, **state):
        """The first process does it."""

    count_episodes = log = save = close = leave_it


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
