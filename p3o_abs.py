# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11,<2.15", "gymnasium>=1.4", "ale-py>=0.12.1", "numpy>=2.0",
#     "tyro>=1.0", "wandb>=0.25", "tqdm>=4.67"]
# ///
"""P3O on Atari, in one file: the batch sets its trust region. ABS is an option.

P3O [arXiv 2605.12380] is a policy gradient without a clip range. An iteration plays L steps in each
of E environments and learns from them in several epochs. So the policy π_θ moves away from π_b, the
policy that played. With --replay-rollouts, π_b is older still. The ratios ρ of the two policies in
a mini-batch of N samples give e_B, its effective sample size as a share of N:

    ρ_i = π_θ(a_i|s_i) / π_b(a_i|s_i)
    e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²)                 1: all ratios are equal, 1/N: one outweighs all
    L_π = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) mean_i KL( π_θ ‖ π_b )(s_i)

sg(x) is the number x, without its gradient; e_B has no gradient either. While both policies are
equal, e_B is 1, and this is the plain policy gradient. The more unequal the ratios are, the lower
the cap e_B on them becomes, and the more strongly π_θ is pulled back to π_b. A capped sample keeps
a gradient, where PPO's clip leaves none. Cap and pull have no number to tune.

--adapt-rollout adds ABS [arXiv 2605.21557], which adapts L to the policy: a volatile policy gets
short rollouts, and so small batches; a stable policy gets long rollouts and large batches. The
equations stand at mean_kl_divergence and rollout_length, and "ABS" marks the lines in main. It is
off by default, because nobody has published P3O with ABS. L_min, L_max, δ_min and δ_max are those
of ppo_abs.py, not tuned for P3O.

One GPU:
    python p3o_abs.py --env-id BreakoutNoFrameskip-v4
A laptop without a GPU, on one thread:
    OMP_NUM_THREADS=1 python p3o_abs.py --total-timesteps 300000
Learn from the last 4 rollouts, too:
    python p3o_abs.py --replay-rollouts 4
P3O with ABS:
    python p3o_abs.py --adapt-rollout
Continue a run after Ctrl-C or a crash (it starts without rollouts to replay):
    python p3o_abs.py --resume runs/...
Your own environment, network or rule for L: pass make_envs, ActorCritic or rollout_length to
launch().
"""

import copy
import ctypes
import difflib
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
from typing import Literal

import ale_py
import gymnasium
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorWrapper
from tqdm import tqdm


@dataclass
class Args:
    """P3O on Atari. Defaults are PPO's, but for the learning rate; symbols are in brackets."""

    env_id: str = "BreakoutNoFrameskip-v4"  # an Atari game; ALE/Breakout-v5 has sticky actions
    seed: int = 1  # seed of the network, the sampled actions and the environments
    total_timesteps: int = 10_000_000  # [T_total] steps, of 4 frames each; 1_000_000, not 1e6
    num_envs: int = 8  # [E] environments in parallel
    learning_rate: float = 5e-4  # learning rate of Adam, twice PPO's: results/p3o_minatar
    anneal_lr: bool = True  # lower the learning rate linearly to 0 at total_timesteps
    gamma: float = 0.99  # [γ] discount
    gae_lambda: float = 0.95  # [λ] of the advantages: 0 is one-step, 1 is Monte Carlo
    num_minibatches: int = 4  # mini-batches per epoch
    update_epochs: int = 4  # [N_epochs] passes over the new rollout and the replayed ones
    replay_rollouts: int = 0  # learn from this many earlier rollouts, too: larger mini-batches
    ent_coef: float = 0.01  # [c_e] weight of the entropy bonus
    vf_coef: float = 0.5  # [c_v] weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    episodic_life: bool = True  # a lost life ends an episode, but not the game

    adapt_rollout: bool = False  # ABS: adapt L; without it, this is plain P3O with L = num_steps
    num_steps: int = 128  # [L] steps in each environment in the first rollout
    rollout_min: int = 64  # [L_min] rollout length of a volatile policy
    rollout_max: int = 256  # [L_max] rollout length of a stable policy
    adapt_frequency: int = 50  # [K] measure the KL divergence in every K-th iteration
    delta_min: float = 1e-4  # [δ_min] at this KL divergence or less, the policy counts as stable
    delta_max: float = 3.5e-3  # [δ_max] at this KL divergence or more, it counts as volatile
    beta: float = 0.1  # [β] step size of L_adapt; the value is from its author's code
    reference_states: int = 2048  # [M] states that δ_π is measured in, or all of a smaller batch
    scale_epochs: bool = False  # if L > 128, N_epochs * L // 128 epochs, as in the author's code

    device: str = "auto"  # auto (CUDA if there is one, else the CPU), cpu, cuda:1, mps, ...
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of all layers but the last; auto is bfloat16 where the hardware supports it"""
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


class PixelConv(nn.Conv2d):
    """A convolution of pixels / 255. Dividing the weights is cheaper than dividing the pixels."""

    def forward(self, pixels):
        return F.conv2d(pixels, self.weight / 255, self.bias, self.stride)


class ActorCritic(nn.Module):
    """uint8 frames (N, 4, 84, 84) -> float32 logits (N, A) of π, and values (N,): Nature CNN.

    A network of your own may return bfloat16 under autocast: policy_and_value makes it float32. To
    mask an action in some states, return -inf as its logit there.
    """

    def __init__(self, envs):
        super().__init__()
        self.body = nn.Sequential(
            layer_init(PixelConv(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(7 * 7 * 64, 512)),
            nn.ReLU(),
        )
        num_actions = int(envs.single_action_space.n)
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)  # π starts nearly uniform
        self.critic = layer_init(nn.Linear(512, 1), 1.0)
        # Images in the order N, H, W, C make learning 1.4 times as fast on a CPU, in float32.
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        # Under autocast the layers compute in bfloat16. It represents every byte exactly, so the
        # frames become bfloat16 at once.
        is_bfloat16 = torch.is_autocast_enabled(frames.device.type)
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        x = self.body(frames.to(dtype, memory_format=torch.channels_last))
        # The ratio of two nearly equal policies needs more digits than bfloat16 has.
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            return self.actor(x), self.critic(x).squeeze(1)


class EpisodicLife(VectorWrapper):
    """A lost life ends the learner's episode ("terminated"), but the game goes on without a reset.

    Then the next action is fire_action instead of the agent's: games like Breakout wait for FIRE.
    The environments must report info["lives"]. The wrapper adds to info where a whole game ended,
    and which actions were executed. All are arrays (E,).
    """

    def __init__(self, envs, fire_action):
        super().__init__(envs)
        self.fire_action = fire_action

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.lives = np.array(info["lives"])
        self.lost_life = np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions):
        actions = np.where(self.lost_life, self.fire_action, actions)
        obs, rewards, terminated, truncated, info = super().step(actions)
        game_over = terminated | truncated
        # Where a game is over, these lives are the next game's, which may begin with fewer.
        self.lost_life = (info["lives"] < self.lives) & ~game_over
        self.lives = np.array(info["lives"])
        info = info | {"game_over": game_over, "executed_actions": actions}
        return obs, rewards, terminated | self.lost_life, truncated, info


def make_envs(args: Args):
    """A vector of args.num_envs copies of an Atari game.

    Observations are uint8 (E, 4, 84, 84): the last 4 grey frames. A step is 4 emulator frames, and
    the last two of them are max-pooled. Rewards are points in the game. AtariVectorEnv starts a
    game with FIRE and 0 to 28 no-ops, and truncates it after 108,000 emulator frames.

    Your own make_envs may return any Gymnasium VectorEnv with actions Discrete(A) and same-step
    autoreset: where an episode ends, step() returns the next one's first observation, and
    info["final_obs"] holds the last one of the episode that ended. A vector wrapper that transforms
    observations must transform info["final_obs"], too.
    """
    gymnasium.register_envs(ale_py)
    spec = gymnasium.registry.get(args.env_id)
    is_atari = spec is not None and spec.entry_point == "ale_py.env:AtariEnv"
    # AtariVectorEnv always skips 4 frames. Breakout-v4 would skip 2 to 4 at random.
    if not is_atari or isinstance(spec.kwargs["frameskip"], tuple):
        games = [name for name in gymnasium.registry if name.endswith("NoFrameskip-v4")]
        (near,) = difflib.get_close_matches(args.env_id, games, n=1, cutoff=0)
        why = "not an Atari game, or it skips frames at random"
        raise UsageError(f"--env-id {args.env_id}: {why}; did you mean {near}?")
    tqdm.write(f"loading {args.num_envs} x {args.env_id}", sys.stderr)  # about 0.2 s each
    envs = AtariVectorEnv(
        spec.kwargs["game"],
        args.num_envs,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],  # sticky actions
        reward_clipping=False,  # main takes the sign
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    if not args.episodic_life:
        return envs
    buttons = [button.name for button in envs.ale.get_action_set()]
    return EpisodicLife(envs, buttons.index("FIRE") if "FIRE" in buttons else 0)  # 0 is NOOP


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


def normalize(advantages):
    """Advantages (N,) of a mini-batch, shifted and scaled to mean 0 and standard deviation 1."""
    # With correction=1, a mini-batch of one sample would become NaN.
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def log_policy(logits):
    """log π(·|s) (N, A) in float32, from logits (N, A)."""
    # A masked action has -inf. In Σ_a π log π, 0 times -inf would be a NaN.
    return logits.float().log_softmax(-1).clamp(min=-1e9)


def policy_and_value(network, states):
    """An ActorCritic's log π(·|s) (N, A) and V(s) (N,) in the states (N, ...), in float32."""
    logits, values = network(states)
    return log_policy(logits), values.float()


def sampled_actions(log_pi):
    """Actions a ~ π(·|s) (N,), from log π(·|s) (N, A)."""
    probabilities = log_pi.exp().nan_to_num(1)  # main ends the run after a NaN, and says so
    return torch.multinomial(probabilities, 1).squeeze(1)


def log_prob_of(log_pi, actions):
    """log π(a|s) (N,) of the actions a (N,), from log π(·|s) (N, A)."""
    return log_pi.gather(1, actions[:, None]).squeeze(1)


def kl_divergence(log_p, log_q):
    """KL(p ‖ q) = Σ_a p(a) (log p(a) - log q(a)): log-probabilities (N, A) -> (N,)."""
    log_ratios = log_p - log_q
    return (log_p.exp() * log_ratios).sum(-1)


def effective_sample_size(log_ratios):
    """e_B = (Σ_i ρ_i)² / (N Σ_i ρ_i²), from log ρ (N,): 1 if all ρ are equal, 1/N if one dominates.

    Dividing all ρ by the largest changes nothing, and keeps exp from overflowing.
    """
    ratios = (log_ratios - log_ratios.max()).exp()
    return ratios.sum().square() / (len(ratios) * ratios.square().sum())


def p3o_loss(log_pi, log_behavior, actions, advantages):
    """Returns P3O's policy loss, e_B, the mean KL divergence, and the share of ratios above e_B.

    L_π = mean_i[ -sg(min(ρ_i, e_B)) log π_θ(a_i|s_i) A_i ] + (1 - e_B) mean_i KL( π_θ ‖ π_b )(s_i)

    log_pi and log_behavior are log π_θ(·|s) and log π_b(·|s), (N, A). actions are (N,), advantages
    too. No gradient flows through e_B.
    """
    log_probs = log_prob_of(log_pi, actions)
    log_ratios = (log_probs - log_prob_of(log_behavior, actions)).detach()  # sg
    ratios = log_ratios.exp()
    e_b = effective_sample_size(log_ratios)
    weights = torch.minimum(ratios, e_b)
    policy_gradient = -(weights * log_probs * advantages).mean()
    kl = kl_divergence(log_pi, log_behavior).mean()
    loss = policy_gradient + (1 - e_b) * kl
    capped_share = (ratios > e_b).float().mean()
    return loss, e_b, kl.detach(), capped_share


def joined(rollouts):
    """One batch of several rollouts: under each name, their tensors (L, E, ...) as one (N, ...)."""
    batch = {}
    for name in rollouts[0]:
        parts = [rollout[name] for rollout in rollouts]
        batch[name] = torch.cat(parts).flatten(0, 1)
    return batch


def mean_kl_divergence(logits, old_logits) -> float:
    """How far apart two policies are, from the logits (M, A) of both in the same M states [ABS].

    δ_π = (1/M) Σ_i KL( π_θold(·|s_i) ‖ π_θ(·|s_i) )

    The paper does not give the direction. Here, the old policy weighs the actions, because it is
    the one that played. The code of ABS's author, which is for MuJoCo, has the other direction.
    """
    kl = kl_divergence(log_policy(old_logits), log_policy(logits))
    return kl.mean().item()


@torch.no_grad()
def policy_divergences(network, old_network, states):
    """Mean KL divergence, and share of the states (M, ...) whose most likely action has changed."""
    logits, _ = network(states)
    old_logits, _ = old_network(states)
    changed = logits.argmax(1) != old_logits.argmax(1)
    kl = mean_kl_divergence(logits, old_logits)
    return kl, changed.float().mean().item()


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
    device, bfloat16 = pick_device(args)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
    folder, saved = run_folder(args)  # saved is what a checkpoint holds; empty in a new run
    global_step = saved.get("global_step", 0)
    iteration = saved.get("iteration", 0)
    updates = saved.get("updates", 0)  # gradient steps
    adaptive_length = saved.get("adaptive_length", float(args.num_steps))  # ABS: L_adapt
    # --resume may bring new limits.
    adaptive_length = min(max(adaptive_length, args.rollout_min), args.rollout_max)
    env_seed = seed_all(args.seed, iteration)  # a resumed run plays new games
    envs = make_envs(args)
    num_envs = args.num_envs
    network = ActorCritic(envs).to(device).eval()  # dropout, if any, is off while acting
    old_network = copy.deepcopy(network)  # ABS: θ_old, filled in the loop
    optimizer = torch.optim.Adam(network.parameters(), args.learning_rate, eps=1e-5, foreach=True)
    modules = {"network": network, "optimizer": optimizer}  # whose states a checkpoint stores
    if hasattr(rollout_length, "state_dict"):  # your own may be an object with a state
        modules["rollout_length"] = rollout_length
    if saved:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    next_obs = torch.tensor(envs.reset(seed=env_seed)[0], device=device)
    check_policy(args, envs, network(next_obs))
    score = np.zeros(num_envs)  # points so far in each environment's game
    rollouts = deque(maxlen=1 + args.replay_rollouts)  # the oldest one falls out
    with closing(envs), Run(args, folder, device, bfloat16, saved) as run:
        finished = False
        while not finished:
            iteration += 1
            # Seed each iteration anew, so that a resumed run needs no saved generator states.
            seed_all(args.seed, iteration)
            length = round(adaptive_length) if args.adapt_rollout else args.num_steps  # ABS: L
            batch_size = length * num_envs
            is_measured = iteration % args.adapt_frequency == 0  # ABS
            if is_measured:
                old_network.load_state_dict(network.state_dict())  # ABS: θ_old ← θ
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / args.total_timesteps
            optimizer.param_groups[0]["lr"] = learning_rate

            # 1. Collect L steps in each of the E environments. For the updates, this policy is π_b.
            obs = torch.zeros((length, *next_obs.shape), dtype=next_obs.dtype, device=device)
            actions = torch.zeros((length, num_envs), dtype=torch.int64, device=device)
            log_behavior = []  # log π_b(·|s_t) (E, A), t = 0..L-1
            rewards = torch.zeros_like(actions, dtype=torch.float32)
            terminated = torch.zeros_like(actions, dtype=torch.bool)
            truncated = torch.zeros_like(terminated)
            values = torch.zeros((length + 1, num_envs), device=device)  # V(s_t), t = 0..L
            final_values = torch.zeros_like(rewards)  # where a time limit truncated the episode
            with torch.no_grad(), autocast:
                for t in range(length):
                    obs[t] = next_obs
                    log_pi, values[t] = policy_and_value(network, next_obs)
                    actions[t] = sampled_actions(log_pi)
                    log_behavior.append(log_pi)
                    frames, reward, terminal, timeout, info = envs.step(actions[t].cpu().numpy())
                    next_obs = torch.tensor(frames, device=device)  # a copy: frames may be reused
                    if "executed_actions" in info:  # learn from what EpisodicLife really pressed
                        actions[t] = torch.tensor(info["executed_actions"])
                    rewards[t] = torch.tensor(np.sign(reward))  # the learner sees only the sign
                    terminated[t] = torch.tensor(terminal)
                    truncated[t] = torch.tensor(timeout)
                    if timeout.any():
                        # frames are the next episode's. The last ones of this episode are here,
                        # in an array of arrays.
                        final_obs = np.stack(info["final_obs"][timeout])
                        final_obs = torch.tensor(final_obs, dtype=next_obs.dtype, device=device)
                        final_values[t, truncated[t]] = policy_and_value(network, final_obs)[1]
                    score += reward  # of a whole game, also where a lost life ends an episode
                    game_over = info.get("game_over", terminal | timeout)
                    run.scores.extend(score[game_over].tolist())
                    score[game_over] = 0
                    global_step += num_envs
                values[length] = policy_and_value(network, next_obs)[1]

            # 2. Minimize L_π + c_v L_V - c_e H(π_θ): N_epochs passes in shuffled mini-batches.
            old_values = values[:-1]
            next_values = torch.where(truncated, final_values, values[1:])
            advantages = gae(
                rewards, old_values, next_values, terminated, truncated, args.gamma, args.gae_lambda
            )
            rollout = {"obs": obs, "actions": actions, "log_behavior": torch.stack(log_behavior)}
            rollout |= {"advantages": advantages, "returns": advantages + old_values}
            rollouts.appendleft(rollout)  # the advantages of replayed ones stay as they were
            batch = joined(rollouts)
            epochs = args.update_epochs
            if args.scale_epochs:
                base_steps = 128  # PPO's usual rollout length
                epochs = max(epochs, epochs * length // base_steps)
            network.train()
            for _ in range(epochs):
                shuffled = torch.randperm(len(batch["obs"]), device=device)
                for indices in shuffled.tensor_split(args.num_minibatches):
                    mb = {name: tensor[indices] for name, tensor in batch.items()}
                    with autocast:
                        log_pi, new_values = policy_and_value(network, mb["obs"])
                    pg_loss, e_b, behavior_kl, capped_share = p3o_loss(
                        log_pi, mb["log_behavior"], mb["actions"], normalize(mb["advantages"])
                    )
                    v_loss = F.mse_loss(new_values, mb["returns"]) / 2
                    entropy = -(log_pi.exp() * log_pi).sum(1).mean()  # H = -Σ_a π(a|s) log π(a|s)
                    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
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
            kl = bd = None
            if is_measured:
                sample = torch.randperm(batch_size, device=device)[: args.reference_states]
                with autocast:
                    kl, bd = policy_divergences(network, old_network, obs.flatten(0, 1)[sample])
                adaptive_length = rollout_length(  # without --adapt-rollout, L ignores it
                    kl,
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
                "abs/rollout_length": length,
                "abs/batch_size": batch_size,
                "abs/kl_divergence": kl,
                "abs/behavioral_divergence": bd,
                "losses/policy_loss": pg_loss.item(),
                "losses/value_loss": v_loss.item(),
                "losses/entropy": entropy.item(),
                "losses/grad_norm": grad_norm.item(),
                "p3o/ess": e_b.item(),
                "p3o/kl": behavior_kl.item(),
                "p3o/capped": capped_share.item(),
            }
            run.log(row)
            finished = global_step >= args.total_timesteps or run.interrupted
            if finished or time.perf_counter() >= run.save_at:
                counters = {"global_step": global_step, "iteration": iteration, "updates": updates}
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
        (0, math.inf, "seed ent_coef vf_coef replay_rollouts"),
        (1, math.inf, "total_timesteps num_envs num_steps rollout_min update_epochs"),
        (1, math.inf, "adapt_frequency reference_states num_minibatches"),
        (1e-9, math.inf, "max_grad_norm checkpoint_every delta_min"),
        (0, 1, "gamma gae_lambda beta learning_rate"),
        (args.delta_min * 1.001, 1000, "delta_max"),
        (args.rollout_min, math.inf, "rollout_max"),
    ]
    if args.adapt_rollout:
        limits.append((args.rollout_min, args.rollout_max, "num_steps"))
    for low, high, names in limits:
        for name in names.split():
            if not low <= getattr(args, name) <= high:  # refuses NaN, too
                raise UsageError(f"--{name.replace('_', '-')} must be from {low} to {high}")
    if args.num_minibatches > args.num_envs * shortest:
        raise UsageError("--num-minibatches must be at most the samples of the shortest rollout")


def check_policy(args, envs, outputs):
    """Refuse environments or a network that main would learn something wrong from."""
    space = envs.single_action_space
    is_same_step = envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
    if not is_same_step or space.start != 0:
        raise UsageError("make_envs must return actions from 0 up and autoreset_mode SAME_STEP")
    shapes = [tuple(output.shape) for output in outputs]
    expected = [(args.num_envs, int(space.n)), (args.num_envs,)]
    if shapes != expected:  # others would be broadcast, and a wrong action can hang an emulator
        raise UsageError(f"the network must return logits and values {expected}, not {shapes}")


def pick_device(args):
    """The device, and whether all layers but the last use bfloat16 there."""
    name = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {error}") from error
    if args.precision != "auto":
        return device, {"float32": False, "bfloat16": True}[args.precision]
    # Only where the hardware multiplies bfloat16.
    if device.type == "cuda":
        return device, torch.cuda.is_bf16_supported(including_emulation=False)
    cpu = torch.cpu.get_capabilities()
    is_fast = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
    return device, device.type == "cpu" and is_fast


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
