# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""PQN whose batch follows the gradient noise scale, on Atari, in one file: where signals compare.

PQN [arXiv 2407.04811] is Q-learning with many environments in parallel, LayerNorm, and neither a
replay buffer nor a target network. The gradient noise scale [GNS: arXiv 1812.06162] is the batch
size at which a gradient's noise is as large as the gradient. In every K-th iteration this script
estimates noise N and signal S (see gradient_noise) from the gradients of m micro-batches of the
rollout at θ_old, the network before the updates, and sets the batch to their ratio:

    N_avg ← (1 - β) N_avg + β N,    S_avg ← (1 - β) S_avg + β S
    B_new = clip(⌊N_avg / S_avg⌋, E L_min, E L_max),      L_adapt ← B_new / E

Where S_avg ≤ 0, noise drowns the signal, and the batch is the largest. The code of ABS's author
differs: m = 8 contiguous slices of the rollout, measured after the update; no averages; S ≤ 0 gives
the smallest batch; its learning rate anneals.

The same rows of metrics.csv have Behavioural Divergence (BD, see pqn_abs.py [ABS: 2605.21557]), the
entropy of the greedy policy and the variance of the values. With --signal bd, BD drives L as in
pqn_abs.py; with --no-adapt-rollout nothing does. All signals are measured all the same.

One GPU, the paper's settings:   python gns_baseline.py --env-id BreakoutNoFrameskip-v4
Driven by BD:                    python gns_baseline.py --signal bd
Plain PQN, L = 32 throughout:    python gns_baseline.py --no-adapt-rollout
After Ctrl-C or a crash:         python gns_baseline.py --resume runs/...
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
from typing import Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C while modules load
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: its idle threads soon free cores

import ale_py
import gymnasium
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
import wandb
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from tqdm import tqdm


@dataclass
class Args:
    """PQN with the noise scale. Defaults are the paper's; in brackets, its symbols."""

    env_id: str = "BreakoutNoFrameskip-v4"  # ...NoFrameskip-v4 (no sticky actions) or ALE/...-v5
    seed: int = 1  # seed of the network, the exploration and the environments
    total_timesteps: int = 20_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 128  # [E] environments in parallel
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

    signal: Literal["gns", "bd"] = "gns"  # what L follows: the noise scale, or BD as in pqn_abs.py
    adapt_rollout: bool = True  # let L follow it; --no-adapt-rollout is plain PQN, L = num_steps
    num_steps: int = 32  # [L] steps in each environment in the first rollout
    rollout_min: int = 16  # [L_min] shortest rollout
    rollout_max: int = 64  # [L_max] longest rollout
    adapt_frequency: int = 50  # [K] iterations from one measurement of all signals to the next
    micro_batches: int = 16  # [m] gradients of an estimate, in memory for 2m networks
    delta_min: float = 0.05  # [δ_min] no effect with gns: BD at and below which a policy is stable
    delta_max: float = 0.95  # [δ_max] no effect with gns: BD at and above which it is volatile
    beta: float = 0.1  # [β] smoothing of N_avg and S_avg, with bd of L_adapt; from ABS's own code
    reference_states: int = 2048  # [M] size of B_ref, at most the batch; from ABS's own code
    divergence_window: int = 1  # no effect with gns: BDs whose mean L follows; ABS's own code: 20
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


SIGNALS = """gns/noise gns/signal gns/noise_scale_raw gns/noise_scale
    abs/behavioral_divergence abs/policy_entropy abs/value_variance""".split()


def layer_init(layer, gain: float = math.sqrt(2)):
    """Orthogonal weights, by default with the gain for ReLU, and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ImageNorm(nn.LayerNorm):
    """LayerNorm of images (N, C, H, W), made with [H, W, C]: as channels_last keeps them."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class QNetwork(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 Q-values (N, A): Nature CNN with LayerNorm [PQN].

    LayerNorm after each layer keeps Q-learning stable without a target network.
    """

    def __init__(self, envs):
        super().__init__()
        self.conv1 = layer_init(nn.Conv2d(4, 32, 8, stride=4))
        self.body = nn.Sequential(
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
        # bfloat16 holds 0 to 255 exactly. Dividing the weights by 255 is less work than the pixels.
        x = frames.bfloat16().contiguous(memory_format=torch.channels_last)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride)
        x = self.body(x)
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


def gradient_noise(gradients, micro_batch_size):
    """Noise and signal in m gradients (m, P), each the mean over b samples [GNS].

    ḡ = (1/m) Σ g_i
    N = b · 1/(m - 1) · Σ ‖g_i - ḡ‖²          estimates tr Σ, the variance of a sample's gradient
    S = ‖ḡ‖² - N / B,   B = m · b             estimates ‖E g‖²; on a single batch maybe negative
    """
    batch_size = len(gradients) * micro_batch_size
    noise = micro_batch_size * gradients.var(dim=0).sum()
    signal = gradients.mean(dim=0).square().sum() - noise / batch_size
    return noise.item(), signal.item()


def noise_scale(noise, signal):
    """B_simple = N / S, in samples; None where S ≤ 0, as noise drowns the signal."""
    return noise / signal if signal > 0 else None


def noise_scale_batch(noise, signal, *, batch_min, batch_max) -> int:
    """B_new = clip(⌊N / S⌋, B_min, B_max), in samples; where S ≤ 0 it is B_max."""
    if not signal > 0:  # as NaN is not, either
        return batch_max
    batch_size = min(max(noise / signal, batch_min), batch_max)
    return math.floor(batch_size)


def measure_signals(args, q_network, old_network, autocast, obs, actions, returns) -> dict:
    """What a rollout's transitions (B, ...) tell of both networks."""
    shuffled = torch.randperm(len(obs), device=obs.device)
    reference = obs[shuffled[: args.reference_states]]
    with torch.no_grad(), autocast:
        divergence = behavioral_divergence(q_network, old_network, reference)
        greedy_actions = q_network(reference).argmax(-1)
    shares = greedy_actions.bincount() / len(reference)
    entropy = torch.special.entr(shares).sum()  # in nats

    # Shuffled transitions count as independent. They are not, which makes N / S too small.
    micro_batch_size = len(obs) // args.micro_batches  # the rest is left out
    parameters = [p for p in old_network.parameters() if p.requires_grad]
    gradients = []
    for micro_batch in shuffled.split(micro_batch_size)[: args.micro_batches]:
        with autocast:
            q_values = old_network(obs[micro_batch]).float()
        q_taken = q_values.gather(1, actions[micro_batch, None]).squeeze(1)
        td_loss = F.mse_loss(q_taken, returns[micro_batch])
        gradient = torch.autograd.grad(td_loss, parameters, materialize_grads=True)
        gradients.append(torch.cat([g.flatten() for g in gradient]))
    noise, signal = gradient_noise(torch.stack(gradients), micro_batch_size)
    return {
        "gns/noise": noise,
        "gns/signal": signal,
        "gns/noise_scale_raw": noise_scale(noise, signal),
        "abs/behavioral_divergence": divergence,
        "abs/policy_entropy": entropy.item(),
    }


def next_length(args, adaptive_length, divergence, noise_avg, signal_avg) -> float:
    """The next L_adapt, by the signal of --signal."""
    if args.signal == "bd":
        return rollout_length(
            divergence,
            adaptive_length,
            rollout_min=args.rollout_min,
            rollout_max=args.rollout_max,
            delta_min=args.delta_min,
            delta_max=args.delta_max,
            beta=args.beta,
        )
    batch_size = noise_scale_batch(
        noise_avg,
        signal_avg,
        batch_min=args.num_envs * args.rollout_min,
        batch_max=args.num_envs * args.rollout_max,
    )
    return batch_size / args.num_envs


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check(args)
    device, bfloat16 = pick_device(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    chunk_size = 512 if device.type == "cpu" else 10**6  # transitions in a pass (a CPU's cache)

    torch.manual_seed(fresh_seed(args.seed, 0))
    envs = make_envs(args)
    num_envs = args.num_envs
    num_actions = int(envs.single_action_space.n)
    q_network = QNetwork(envs).to(device)
    old_network = copy.deepcopy(q_network)  # θ_old, for BD
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate, foreach=True)
    saved = load_checkpoint(args, network=q_network, optimizer=optimizer)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    adaptive_length = saved.get("adaptive_length", float(args.num_steps))  # L_adapt
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)
    noise_avg = saved.get("noise_avg", 0.0)  # both start at 0: N_avg / S_avg is free of that bias
    signal_avg = saved.get("signal_avg", 0.0)

    first_obs, info = envs.reset(seed=fresh_seed(args.seed, iteration))
    next_obs = torch.from_numpy(first_obs).to(device)
    lives = info.get("lives")  # for --episodic-life
    lost_life = np.zeros(num_envs, bool)
    check_seams(args, envs, info, q_network(next_obs))
    run = Run(args, device, bfloat16, saved)

    while global_step < args.total_timesteps and not run.stopped:
        iteration += 1
        # Anew in each iteration: no RNG state needs saving, and measuring changes no later draw.
        torch.manual_seed(fresh_seed(args.seed, iteration))
        length = round(adaptive_length)
        batch_size = length * num_envs
        # K counts iterations: BD compares the policies before and after every K-th one's updates.
        measure = iteration % args.adapt_frequency == 0
        if measure:
            old_network.load_state_dict(q_network.state_dict())  # θ_old ← θ

        # 1. Collect L_adapt steps in each of the E environments, ε-greedily.
        explored = min(global_step / max(args.exploration_fraction * args.total_timesteps, 1), 1)
        epsilon = args.start_e + explored * (args.end_e - args.start_e)
        explore = torch.rand((length, num_envs), device=device) < epsilon
        random_actions = torch.randint(num_actions, (length, num_envs), device=device)
        obs = next_obs.new_zeros((length, *next_obs.shape))  # as they come: uint8 on Atari
        actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
        values = torch.zeros((length + 1, num_envs), device=device)  # max_a Q(s_t, a), up to t = L
        final_values, rewards = torch.zeros((2, length, num_envs), device=device)
        terminated, truncated = torch.zeros((2, length, num_envs), dtype=torch.bool, device=device)
        with torch.no_grad(), autocast:
            for t in range(length):
                obs[t] = next_obs
                values[t], greedy_actions = q_network(next_obs).float().max(-1)
                actions[t] = torch.where(explore[t], random_actions[t], greedy_actions)
                if lost_life.any():
                    actions[t, torch.from_numpy(lost_life)] = envs.fire_action
                frames, reward, ended, cut, info = envs.step(actions[t].numpy(force=True))
                next_obs = torch.from_numpy(frames).to(device)
                rewards[t] = torch.from_numpy(np.sign(reward))
                terminated[t] = torch.from_numpy(ended)
                truncated[t] = torch.from_numpy(cut)
                if cut.any():  # the target needs the cut episode's own last observation
                    final_obs = np.stack(info["final_obs"][cut])
                    final_q = q_network(torch.from_numpy(final_obs).to(device)).float()
                    final_values[t, truncated[t]] = final_q.max(-1).values
                if args.episodic_life:  # with fewer lives the game goes on, else this is a new one
                    lost_life = ended & (info["lives"] < lives)
                    lives = info["lives"]
                global_step += num_envs
                run.count_episodes(global_step, reward, (ended | cut) & ~lost_life)
            values[length] = q_network(next_obs).float().max(-1).values

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
                grad_norm = nn.utils.clip_grad_norm_(q_network.parameters(), args.max_grad_norm)
                optimizer.step()
                updates += 1

        # 3. Adapt: measure all signals, and let one of them set the length of the next rollouts.
        signals = dict.fromkeys(SIGNALS)  # empty cells
        if measure:
            signals |= measure_signals(
                args, q_network, old_network, autocast, b_obs, b_actions, b_returns
            )
            noise_avg += args.beta * (signals["gns/noise"] - noise_avg)
            signal_avg += args.beta * (signals["gns/signal"] - signal_avg)
            divergences.append(signals["abs/behavioral_divergence"])
            signals["gns/noise_scale"] = noise_scale(noise_avg, signal_avg)
            signals["abs/value_variance"] = values[:length].var(correction=0).item()
            if args.adapt_rollout and iteration // args.adapt_frequency >= args.burn_in:
                divergence = sum(divergences) / len(divergences)
                adaptive_length = next_length(
                    args, adaptive_length, divergence, noise_avg, signal_avg
                )

        # 4. Log and save. Losses are those of the last chunk.
        row = {
            "global_step": global_step,
            "charts/updates": updates,
            "charts/epsilon": epsilon,
            "abs/rollout_length": length,
            "abs/batch_size": batch_size,
            "losses/td_loss": td_loss.item(),
            "losses/q_values": q_taken.mean().item(),
            "losses/grad_norm": grad_norm.item(),
        }
        run.log(row | signals)
        run.save(
            network=q_network.state_dict(),
            optimizer=optimizer.state_dict(),
            global_step=global_step,
            iteration=iteration,
            updates=updates,
            adaptive_length=adaptive_length,
            divergences=list(divergences),
            noise_avg=noise_avg,
            signal_avg=signal_avg,
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
        (1, math.inf, "total_timesteps num_envs update_epochs num_steps rollout_min"),
        (1, math.inf, "adapt_frequency reference_states divergence_window base_steps"),
        (0, math.inf, "seed burn_in"),
        (0, 1, "gamma q_lambda start_e end_e exploration_fraction delta_max"),
        (1e-9, 1e9, "learning_rate max_grad_norm checkpoint_every"),
        (1e-9, 1, "beta"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),
        (1, args.num_envs * shortest, "num_minibatches"),
        (2, args.num_envs * shortest, "micro_batches"),
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, args.rollout_max, "num_steps"))
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
