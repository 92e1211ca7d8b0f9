"""docs/paste.md, pasted into loops in CleanRL's style, whose L is computed again here."""

import inspect
import re
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import FakeEnvs, stacked
from torch.distributions import Categorical

import ppo_abs
import pqn_abs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "paste.md"
Q_FUNCTIONS, Q_LOOP, PPO_FUNCTIONS, PPO_LOOP = re.findall(
    r"(?ms)^```python\n(.*?)^```", PAGE.read_text()
)

# What stands at each `...` of a recipe, in its order.
STORAGE = """
    before = weights(policy)
    obs = torch.zeros((args.num_steps, args.num_envs, 6))
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64)
    rewards, dones, values, logprobs = (torch.zeros(actions.shape) for _ in range(4))
    updates = []"""
ROLLOUT = """
    for step in range(0, args.num_steps):
        global_step += args.num_envs
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            actions[step], values[step], logprobs[step] = act(policy, next_obs)
        frames, reward, terminations, truncations, infos = envs.step(actions[step].numpy())
        next_obs, rewards[step] = torch.Tensor(frames / 255), torch.tensor(reward)
        next_done = torch.Tensor(terminations | truncations)
    with torch.no_grad():
        next_values = torch.stack([*values[1:], act(policy, next_obs)[1]])
        goes_on = 1 - torch.stack([*dones[1:], next_done])
    b_obs, b_actions, b_logprobs = obs.reshape(-1, 6), actions.reshape(-1), logprobs.reshape(-1)"""
Q_TARGETS = """
    returns = torch.zeros_like(rewards)
    for t in reversed(range(args.num_steps)):
        later = returns[t + 1] if t < args.num_steps - 1 else next_values[t]
        returns[t] = rewards[t] + 0.5 * goes_on[t] * (0.65 * later + 0.35 * next_values[t])
    b_returns = returns.reshape(-1)"""
PPO_TARGETS = """
    advantages, later = torch.zeros_like(rewards), 0
    for t in reversed(range(args.num_steps)):
        delta = rewards[t] + 0.99 * goes_on[t] * next_values[t] - values[t]
        later = advantages[t] = delta + 0.99 * 0.95 * goes_on[t] * later
    b_advantages, b_returns = advantages.reshape(-1), (advantages + values).reshape(-1)"""
Q_LOSS = """
    old_val = q_network(b_obs[mb_inds]).gather(1, b_actions[mb_inds, None])[:, 0]
    loss = (old_val - b_returns[mb_inds]).square().mean()"""
PPO_LOSS = """
    probs = Categorical(logits=agent.actor(b_obs[mb_inds]))
    ratio = (probs.log_prob(b_actions[mb_inds]) - b_logprobs[mb_inds]).exp()
    adv = (b_advantages[mb_inds] - b_advantages.mean()) / (b_advantages.std() + 1e-8)
    v_loss = (agent.critic(b_obs[mb_inds])[:, 0] - b_returns[mb_inds]).square().mean()
    pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
    loss = pg_loss - 0.1 * probs.entropy().mean() + 0.25 * v_loss"""
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    updates.append(len(mb_inds))"""
LOG = """
    lr = optimizer.param_groups[0]["lr"]
    log.append((global_step, lr, updates, before, weights(policy), adaptive_length))"""
Q_PARTS = [STORAGE, ROLLOUT + Q_TARGETS, Q_LOSS + STEP, LOG]
PPO_PARTS = [STORAGE, ROLLOUT + PPO_TARGETS, PPO_LOSS + STEP, "\n    pass", LOG]
Q = ("q_network", Q_LOOP, Q_PARTS, 0.05, 0.95, 3e-2)  # thresholds and learning rate
PPO = ("agent", PPO_LOOP, PPO_PARTS, 1e-4, 3.5e-3, 2e-2)


def act(policy, states):
    if isinstance(policy, nn.Sequential):  # PQN: half of the actions are random
        values, greedy = policy(states).max(1)
        explore = torch.rand(len(states)) < 0.5
        return torch.where(explore, torch.randint(4, greedy.shape), greedy), values, 0
    probs, values = Categorical(logits=policy.actor(states)), policy.critic(states)[:, 0]
    return (action := probs.sample()), values, probs.log_prob(action)


def network(outputs):
    """With dropout, which looks like a change of policy unless it is off while δ is measured."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, outputs))


def weights(policy):
    return [x.detach().double().numpy().copy() for x in [*policy.parameters()][:4]]  # the actor's


def divergence(before, after, states, is_kl):
    old, new = (np.tanh(states @ w.T + b) @ w2.T + b2 for w, b, w2, b2 in (before, after))
    if not is_kl:
        return np.mean(old.argmax(1) != new.argmax(1))
    old, new = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (old, new))
    return np.mean(np.sum(old * np.log(old / new), 1))


def test_pasted_functions_are_the_scripts():
    """Who pastes from the page gets what the scripts run; a logit of -inf masks an action."""
    for function in (pqn_abs.behavioral_divergence, pqn_abs.rollout_length):
        assert inspect.getsource(function) in Q_FUNCTIONS
    exec(Q_FUNCTIONS + PPO_FUNCTIONS, names := {})
    logits = torch.randn((2, 50, 4), generator=torch.Generator().manual_seed(1))
    logits[:, :, 3] = -torch.inf
    policies = [SimpleNamespace(actor=lambda states, x=x: x) for x in logits]
    expected = ppo_abs.mean_kl_divergence(*logits)
    assert names["policy_kl"](*policies, None) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name, loop, parts, low, high, rate", [Q, PPO], ids=["pqn", "ppo"])
def test_pasted_recipe_adapts_the_rollout(name, loop, parts, low, high, rate):
    """Guards the order of copy, updates and measurement, the thresholds, and each use of L."""
    torch.manual_seed(1)
    np.random.seed(1)
    envs, policy, log, total = FakeEnvs(8), network(4), [], 13_000  # steps, so that K is 2
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0] / 255), torch.zeros(8)
    if name == "agent":
        policy = nn.ModuleDict({"actor": network(4), "critic": network(1)})
    args = SimpleNamespace(num_envs=8, num_steps=4, num_minibatches=3, update_epochs=1)
    args.total_timesteps, args.anneal_lr, args.learning_rate = total, True, rate
    optimizer, global_step = torch.optim.Adam(policy.parameters(), rate), 0
    left = iter(parts)
    loop = re.sub(r"(?m)^( +)\.\.\. .*", lambda gap: indent(dedent(next(left)[1:]), gap[1]), loop)
    exec(Q_FUNCTIONS + PPO_FUNCTIONS + loop, globals() | locals() | {name: policy})
    assert not list(left)

    frames, length, played, inside = stacked(envs.steps, "obs") / 255, 4.0, 0, 0
    for iteration, (global_step, lr, updates, before, after, adaptive_length) in enumerate(log, 1):
        assert played * 8 < total
        assert lr == pytest.approx(rate * (1 - played * 8 / total))
        states = frames[played : played + round(length)].reshape(-1, 6)
        played += round(length)
        assert global_step == played * 8
        assert len(updates) == 3 and sum(updates) == len(states)
        if iteration % 2 == 0:
            delta = divergence(before, after, states, name == "agent")
            inside += low < delta < high
            alpha = np.log(np.clip(delta, low, high) / low) / np.log(high / low)
            length = 0.9 * length + 0.1 * (8 - alpha * (8 - 2))
        assert adaptive_length == pytest.approx(length, abs=0.01)
    assert played == len(envs.steps) and total <= played * 8
    assert inside > 20  # elsewhere a wrong threshold would not show
