# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.14", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""P3O with Adaptive Batch Scaling (ABS), on Atari, in one file: the batch sets its trust region.

P3O [arXiv 2605.12380] is a policy gradient without a clip range, for data that an earlier policy
π_b collected: in this rollout or, with --replay-rollouts, in one of the last. What such data is
worth is told by the ratios ρ of the two policies in a mini-batch of N samples: their effective
sample size e_B caps each sample's weight, and 1 - e_B weighs a pull back to π_b.

    ρ_i = π_θ(a_i|s_i) / π_b(a_i|s_i)
    e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²),                                               from 1/N to 1
    L   = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) KL( π_θ ‖ π_b )

sg stops the gradient. Fresh data has e_B = 1: the plain policy gradient. A capped sample keeps a
gradient, where PPO's clip leaves none. --adapt-rollout adds ABS [arXiv 2605.21557], as explained in
ppo_abs.py: L follows the KL divergence of updates. Nobody has published this. Lines of ABS are
marked. For an environment or a network of your own, replace make_envs or ActorCritic.

One GPU or a laptop:             python p3o_abs.py --env-id BreakoutNoFrameskip-v4
With the last 4 rollouts, too:   python p3o_abs.py --replay-rollouts 4
P3O with ABS:                    python p3o_abs.py --adapt-rollout
After Ctrl-C or a crash:         python p3o_abs.py --resume runs/...
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
    """P3O with Adaptive Batch Scaling. Defaults are PPO's on Atari; in brackets, symbols."""

    env_id: str = "BreakoutNoFrameskip-v4"  # ...NoFrameskip-v4 (no sticky actions) or ALE/...-v5
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 10_000_000  # [T_total] environment steps, of 4 frames each
    num_envs: int = 8  # [E] environments in parallel
    learning_rate: float = 2.5e-4  # of Adam at the start; falls linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages: 0 is one-step, 1 Monte Carlo
    num_minibatches: int = 4  # mini-batches an epoch; their number is fixed, their size follows L
    update_epochs: int = 4  # [N_epochs] passes over each rollout and those replayed
    replay_rollouts: int = 0  # earlier rollouts to learn from, too; mini-batches grow with them
    ent_coef: float = 0.01  # [c_e] weight of the entropy bonus
    vf_coef: float = 0.5  # [c_v] weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    episodic_life: bool = True  # a lost life ends an episode, and FIRE follows; scores count games

    adapt_rollout: bool = False  # let L follow the KL; else this is plain P3O with L = num_steps
    num_steps: int = 128  # [L] steps in each environment in the first rollout
    rollout_min: int = 64  # [L_min] rollout of a volatile policy; half of num_steps, as in PQN
    rollout_max: int = 256  # [L_max] rollout of a stable policy; twice num_steps, as in PQN
    adapt_frequency: int = 50  # [K] iterations from one measurement of the KL to the next
    delta_min: float = 1e-4  # [δ_min] KL at and below which the policy counts as stable
    delta_max: float = 3.5e-3  # [δ_max] KL at and above which it counts as volatile; both measured
    beta: float = 0.1  # [β] smoothing of L_adapt; from ABS's own code, not in the paper
    reference_states: int = 2048  # [M] size of B_ref, at most the batch; from ABS's own code
    divergence_window: int = 1  # measurements whose mean L follows; ABS's own code: 20
    burn_in: int = 0  # measurement with which L begins to move; ABS's own code: 10
    scale_epochs: bool = False  # max(N_epochs, N_epochs · L // base_steps) passes, as in that code
    base_steps: int = 128  # L above which --scale-epochs adds passes

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


class ActorCritic(nn.Module):
    """Nature CNN: uint8 frames (N, 4, 84, 84) -> float32 logits (N, A) of π, and values (N,)."""

    def __init__(self, envs):
        super().__init__()
        num_actions = int(envs.single_action_space.n)
        self.conv1 = layer_init(nn.Conv2d(4, 32, 8, stride=4))
        self.body = nn.Sequential(
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(7 * 7 * 64, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)  # π starts nearly uniform
        self.critic = layer_init(nn.Linear(512, 1), 1.0)
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        # bfloat16 holds 0 to 255 exactly. Dividing the weights by 255 is less work than the pixels.
        x = frames.bfloat16().contiguous(memory_format=torch.channels_last)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.float()
        x = F.conv2d(x, self.conv1.weight / 255, self.conv1.bias, self.conv1.stride)
        x = self.body(x)
        # The ratio of two nearly equal policies would drown in bfloat16's rounding.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            values = self.critic(x).squeeze(1)
            return self.actor(x), values


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


def effective_sample_size(log_ratios):
    """e_B = (Σ ρ_i)² / (N Σ ρ_i²) of log ρ (N,): from 1/N (one dominates) to 1 (all are equal)."""
    ratios = (log_ratios - log_ratios.max()).exp()  # e_B stays the same, and nothing overflows
    squared_sum = ratios.sum().square()
    return squared_sum / (len(ratios) * ratios.square().sum())


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)), in nats: log-probabilities (N, A) -> (N,)."""
    log_ratios = log_p - log_q
    return (log_p.exp() * log_ratios).sum(-1)


def p3o_loss(log_pi, log_behavior, actions, advantages):
    """P3O's loss of the policy, to be minimised; e_B; the KL; the share of capped ratios [P3O].

    L = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) mean_i KL( π_θ ‖ π_b )(s_i)

    log_pi and log_behavior are log π_θ(·|s) and log π_b(·|s) of all actions, (N, A); actions (N,)
    int64, advantages (N,). Gradients flow through log π_θ and the KL only.
    """
    log_probs = log_prob_of(log_pi, actions)
    behavior_log_probs = log_prob_of(log_behavior, actions)
    log_ratios = (log_probs - behavior_log_probs).detach()
    ratios = log_ratios.exp()
    ess = effective_sample_size(log_ratios)
    weights = torch.minimum(ratios, ess)
    kl = kl_divergence(log_pi, log_behavior).mean()
    policy_gradient = -(weights * log_probs * advantages).mean()
    loss = policy_gradient + (1 - ess) * kl
    capped = (ratios > ess).float().mean()
    return loss, ess, kl.detach(), capped


@torch.no_grad()
def mean_kl_divergence(network, old_network, states) -> float:
    """How far two networks' policies lie apart in the states (M, ...), in nats [ABS].

    δ = (1/M) Σ_i KL( π_θold(·|s_i) ‖ π_θ(·|s_i) ),   π_θ(·|s) = softmax(network(s))

    The paper does not give the direction. This one weighs the actions as the policy did that
    collected them; ABS's own code, on MuJoCo, has the other one.
    """
    log_pi = network(states).float().log_softmax(-1)
    old_log_pi = old_network(states).float().log_softmax(-1)
    return kl_divergence(old_log_pi, log_pi).mean().item()


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


def evaluate(network, states):
    """log π(·|s) (N, A) and V(s) (N,), both float32 whatever the network computes in."""
    logits, values = network(states)
    log_pi = logits.float().log_softmax(-1)
    return log_pi, values.float()


def log_prob_of(log_pi, actions):
    """log π(a|s) (N,) of the actions (N,), from log π(·|s) (N, A)."""
    return log_pi.gather(1, actions[:, None]).squeeze(1)


def policy_of(network):
    """The half of an ActorCritic that acts: a function from states (N, ...) to logits (N, A)."""
    return lambda states: network(states)[0]


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check(args)
    device, bfloat16 = pick_device(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    torch.manual_seed(fresh_seed(args.seed, 0))
    envs = make_envs(args)
    num_envs = args.num_envs
    network = ActorCritic(envs).to(device)
    old_network = copy.deepcopy(network)  # ABS: θ_old
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5, fused=True)  # lr: below
    saved = load_checkpoint(args, network=network, optimizer=optimizer)  # {} in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    adaptive_length = saved.get("adaptive_length", float(args.num_steps))  # ABS: L_adapt
    divergences = deque(saved.get("divergences", []), maxlen=args.divergence_window)  # ABS
    rollouts = deque(maxlen=args.replay_rollouts + 1)  # newest first
    first_obs, info = envs.reset(seed=fresh_seed(args.seed, iteration))
    next_obs = torch.from_numpy(first_obs).to(device)
    lives = info.get("lives")  # for --episodic-life
    lost_life = np.zeros(num_envs, bool)
    check_promises(args, envs, info, network(next_obs))
    run = Run(args, device, bfloat16, saved)

    while global_step < args.total_timesteps and not run.stopped:
        iteration += 1
        # Anew in each iteration: no RNG state needs saving, and measuring changes no later draw.
        torch.manual_seed(fresh_seed(args.seed, iteration))
        length = round(adaptive_length)  # ABS: L
        batch_size = length * num_envs
        learning_rate = args.learning_rate * (1 - global_step / args.total_timesteps)
        optimizer.param_groups[0]["lr"] = learning_rate
        # K counts iterations: the KL compares the policies before and after a K-th one's updates.
        measure = iteration % args.adapt_frequency == 0  # ABS
        if measure:
            old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ

        # 1. Collect L_adapt steps in each of the E environments, with actions drawn from π_θ.
        obs = next_obs.new_zeros((length, *next_obs.shape))  # as they come: uint8 on Atari
        actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
        values = torch.zeros((length + 1, num_envs), device=device)  # V(s_t), up to t = L
        log_behavior = []  # log π_b(·|s_t) of all actions, (E, A) each
        final_values, rewards = torch.zeros((2, length, num_envs), device=device)
        terminated, truncated = torch.zeros((2, length, num_envs), dtype=torch.bool, device=device)
        with torch.no_grad(), autocast:
            for t in range(length):
                obs[t] = next_obs
                log_pi, values[t] = evaluate(network, next_obs)
                actions[t] = torch.multinomial(log_pi.exp(), 1).squeeze(1)
                log_behavior.append(log_pi)
                pressed = actions[t].numpy(force=True)
                if lost_life.any():  # the policy learns from its own choice all the same
                    pressed = np.where(lost_life, envs.fire_action, pressed)
                frames, reward, ended, cut, info = envs.step(pressed)
                next_obs = torch.from_numpy(frames).to(device)
                rewards[t] = torch.from_numpy(np.sign(reward))
                terminated[t] = torch.from_numpy(ended)
                truncated[t] = torch.from_numpy(cut)
                if cut.any():  # the advantage needs the cut episode's own last observation
                    final_obs = np.stack(info["final_obs"][cut])
                    final_obs = torch.from_numpy(final_obs).to(device)
                    final_values[t, truncated[t]] = evaluate(network, final_obs)[1]
                if args.episodic_life:  # with fewer lives the game goes on, else this is a new one
                    lost_life = ended & (info["lives"] < lives)
                    lives = info["lives"]
                global_step += num_envs
                run.count_episodes(global_step, reward, (ended | cut) & ~lost_life)
            values[length] = evaluate(network, next_obs)[1]

        # 2. Update θ by P3O's loss: N_epochs passes in shuffled mini-batches.
        next_values = torch.where(truncated, final_values, values[1:])
        advantages = gae(
            rewards, values[:-1], next_values, terminated, truncated, args.gamma, args.gae_lambda
        )
        rollout = obs, actions, torch.stack(log_behavior), advantages, advantages + values[:-1]
        rollouts.appendleft([tensor.flatten(0, 1) for tensor in rollout])
        batch = [torch.cat(tensors) for tensors in zip(*rollouts, strict=True)]
        epochs = args.update_epochs
        if args.scale_epochs:
            epochs = max(epochs, epochs * length // args.base_steps)
        for _ in range(epochs):
            shuffled = torch.randperm(len(batch[0]), device=device)
            for minibatch in shuffled.tensor_split(args.num_minibatches):
                sampled = [tensor.index_select(0, minibatch) for tensor in batch]
                states, action, behavior, advantage, target = sampled
                with autocast:
                    log_pi, value = evaluate(network, states)
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                policy_loss, ess, pull, capped = p3o_loss(log_pi, behavior, action, advantage)
                value_loss = F.mse_loss(value, target) / 2
                entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                optimizer.step()
                updates += 1

        # 3. ABS: measure how far the updates moved the policy, and let the next rollouts follow.
        kl = divergence = None
        if measure:
            sample = torch.randperm(batch_size, device=device)[: args.reference_states]  # B_ref
            policy = policy_of(network)
            old_policy = policy_of(old_network)
            with autocast:
                kl = mean_kl_divergence(policy, old_policy, batch[0][sample])
                divergence = behavioral_divergence(policy, old_policy, batch[0][sample])
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
        row = {
            "global_step": global_step,
            "charts/updates": updates,
            "charts/learning_rate": learning_rate,
            "abs/rollout_length": length,
            "abs/batch_size": batch_size,
            "abs/kl_divergence": kl,
            "abs/behavioral_divergence": divergence,
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": entropy.item(),
            "losses/grad_norm": grad_norm.item(),
            "p3o/ess": ess.item(),
            "p3o/kl": pull.item(),
            "p3o/capped": capped.item(),
        }
        run.log(row)
        run.save(
            network=network.state_dict(),
            optimizer=optimizer.state_dict(),
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
        (1, math.inf, "total_timesteps num_envs update_epochs num_steps rollout_min"),
        (1, math.inf, "adapt_frequency reference_states divergence_window base_steps"),
        (0, math.inf, "seed burn_in replay_rollouts"),
        (0, 1, "gamma gae_lambda beta"),
        (0, 1e9, "ent_coef vf_coef"),
        (1e-9, 1e9, "learning_rate max_grad_norm checkpoint_every delta_max"),
        (1e-9, args.delta_max - 1e-9, "delta_min"),
        (1, args.num_envs * shortest, "num_minibatches"),
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


def check_promises(args, envs, info, outputs):
    """Do what make_envs and the network class return keep their promises?"""
    if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
        fail("make_envs must return environments with autoreset_mode=AutoresetMode.SAME_STEP")
    shapes = [tuple(output.shape) for output in outputs]
    num_actions = envs.single_action_space.n
    if shapes != [(args.num_envs, num_actions), (args.num_envs,)]:
        fail("the network must give logits (num_envs, actions) and values (num_envs,)")
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
