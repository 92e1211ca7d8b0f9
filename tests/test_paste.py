"""docs/paste.md, pasted into loops in CleanRL's style, whose L is computed again here."""

import inspect
import re
from textwrap import dedent, indent
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import ROOT, FakeEnvs, stacked
from torch.distributions import Categorical

import ppo_abs
import pqn_abs

BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "docs" / "paste.md").read_text())
Q_FUNCTIONS, Q_LOOP, PPO_FUNCTIONS, FORWARD, PPO_LOOP = BLOCKS

# What stands at each `...` of a recipe, in its order.
STORAGE = """
    before = weights(policy)
    obs = torch.zeros((args.num_steps, args.num_envs, 6))
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64)
    rewards, dones, values = (torch.zeros(actions.shape) for _ in range(3))
    updates = []"""
ROLLOUT = """
    for step in range(0, args.num_steps):
        global_step += args.num_envs
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            actions[step], values[step] = act(policy, next_obs)
        frames, reward, terminations, truncations, infos = envs.step(actions[step].numpy())
        next_obs, rewards[step] = torch.Tensor(frames), torch.tensor(reward)
        next_done = torch.Tensor(terminations | truncations)
    with torch.no_grad():
        next_values = torch.stack([*values[1:], act(policy, next_obs)[1]])
        goes_on = 1 - torch.stack([*dones[1:], next_done])
    returns = rewards + 0.5 * goes_on * next_values
    b_obs, b_actions, b_returns = obs.reshape(-1, 6), actions.reshape(-1), returns.reshape(-1)"""
Q_LOSS = """
    old_val = q_network(b_obs[mb_inds]).gather(1, b_actions[mb_inds, None])[:, 0]
    loss = (old_val - b_returns[mb_inds]).square().mean()"""
PPO_LOSS = """
    logits, new_values = agent(b_obs[mb_inds])
    log_probs = Categorical(logits=logits).log_prob(b_actions[mb_inds])
    errors = b_returns[mb_inds] - new_values[:, 0]
    loss = 0.25 * errors.square().mean() - (log_probs * errors.detach()).mean()"""
STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    updates.append(len(mb_inds))"""
LOG = """
    lr = optimizer.param_groups[0]["lr"]
    log.append((global_step, lr, updates, before, weights(policy), adaptive_length))"""
Q_PARTS = [STORAGE, ROLLOUT, Q_LOSS + STEP, LOG]
PPO_PARTS = [STORAGE, ROLLOUT, PPO_LOSS + STEP, "\n    pass", LOG]
Q = ("q_network", Q_LOOP, Q_PARTS, 0.05, 0.95, 3e-2)  # thresholds and learning rate
PPO = ("agent", PPO_LOOP, PPO_PARTS, 1e-4, 3.5e-3, 1e-2)


class QNetwork(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.network(x / 255.0)


class Agent(nn.Module):
    exec(FORWARD)  # the page's

    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.actor = nn.Linear(16, 4)
        self.critic = nn.Linear(16, 1)


def act(policy, states):
    if isinstance(policy, QNetwork):  # half of the actions are random
        values, greedy = policy(states).max(1)
        explore = torch.rand(len(states)) < 0.5
        return torch.where(explore, torch.randint(4, greedy.shape), greedy), values
    logits, values = policy(states)
    return Categorical(logits=logits).sample(), values[:, 0]


def weights(policy):
    return [x.detach().double().numpy().copy() for x in [*policy.parameters()][:4]]  # the actor's


def divergence(before, after, states, is_kl):
    old, new = (np.tanh(states @ w.T + b) @ w2.T + b2 for w, b, w2, b2 in (before, after))
    if not is_kl:
        return np.mean(old.argmax(1) != new.argmax(1))
    old, new = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (old, new))
    return np.mean(np.sum(old * np.log(old / new), 1))


def test_pasted_functions_are_the_scripts():
    for function in (pqn_abs.behavioral_divergence, pqn_abs.rollout_length):
        assert inspect.getsource(function) in Q_FUNCTIONS
    assert inspect.getsource(ppo_abs.policy_divergence) in PPO_FUNCTIONS


@pytest.mark.parametrize("name, loop, parts, low, high, rate", [Q, PPO], ids=["pqn", "ppo"])
def test_pasted_recipe_adapts_the_rollout(name, loop, parts, low, high, rate):
    """Guards the order of copy, updates and measurement, the thresholds, and each use of L."""
    torch.manual_seed(1)
    np.random.seed(1)
    envs, log, total, device = FakeEnvs(8), [], 13_000, "cpu"  # steps, so that K is 2
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(8)
    policy = Agent(envs) if name == "agent" else QNetwork(envs)
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
        assert (global_step, len(updates), sum(updates)) == (played * 8, 3, len(states))
        if iteration % 2 == 0:
            delta = divergence(before, after, states, name == "agent")
            inside += low < delta < high
            alpha = np.log(np.clip(delta, low, high) / low) / np.log(high / low)
            length = 0.9 * length + 0.1 * (8 - alpha * (8 - 2))
        assert adaptive_length == pytest.approx(length, abs=0.01)
    assert played == len(envs.steps) and total <= played * 8
    assert inside > 20  # elsewhere a wrong threshold would not show
