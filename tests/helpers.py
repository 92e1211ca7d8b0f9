"""What several test files share: small environments, a small network, one iteration computed a second time."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "pqn_abs.py"

# --- Environments and a network that take no time ---


class SmallEnvs(gymnasium.vector.VectorEnv):
    """The frame of both environments below: observations of 6 bytes, 4 actions, same-step autoreset."""

    fire_action = 2

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)


class Noise(SmallEnvs):
    """Everything is drawn at random: nothing to learn, but each kind of ending comes up, and rewards of all sizes."""

    def __init__(self, num_envs: int, terminate=0.1, truncate=0.1, full_lives=1, lose_life=0.0):
        super().__init__(num_envs)
        self.terminate, self.truncate, self.full_lives, self.lose_life = terminate, truncate, full_lives, lose_life

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.lives = np.full(self.num_envs, self.full_lives)
        return self.frames(), {"lives": self.lives.copy()}

    def step(self, actions):
        change = [1 - 1.5 * self.lose_life, self.lose_life, 0.5 * self.lose_life]  # some games give bonus lives
        self.lives += self.rng.choice([0, -1, 1], p=change, size=self.num_envs)
        terminated = (self.rng.random(self.num_envs) < self.terminate) | (self.lives == 0)
        truncated = self.rng.random(self.num_envs) < self.truncate
        self.lives[terminated | truncated] = self.full_lives
        reward = self.rng.choice([-5.0, 0.0, 0.5, 7.0], size=self.num_envs)
        info = {"final_obs": self.frames(), "lives": self.lives.copy()}
        return self.frames(), reward, terminated, truncated, info

    def frames(self):
        return self.rng.integers(256, size=(self.num_envs, 6), dtype=np.uint8)


class Bandit(SmallEnvs):
    """Without memory: each environment shows its own picture for ever, and each step is an episode."""

    def reset(self, *, seed=None, options=None):
        return self.frames(), {}

    def step(self, actions):
        reward = (actions == np.arange(self.num_envs) % 4).astype(float)
        done = np.full(self.num_envs, True)
        return self.frames(), reward, done, ~done, {"final_obs": self.frames()}

    def frames(self):
        return np.random.default_rng(0).integers(256, size=(self.num_envs, 6), dtype=np.uint8)


class SmallNetwork(nn.Module):
    """Smooth, so that float32 and float64 agree."""

    def __init__(self, envs, *sizes):
        super().__init__()
        inputs, outputs = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))

    def forward(self, frames):
        return self.layers(frames.to(self.layers[1].weight.dtype) / 255)


class SmallActorCritic(nn.Module):
    """The same for a policy and its value."""

    def __init__(self, envs):
        super().__init__()
        self.layers = SmallNetwork(envs).layers
        self.layers[3] = nn.Linear(16, int(envs.single_action_space.n) + 1)

    def forward(self, frames):
        outputs = self.layers(frames.to(self.layers[1].weight.dtype) / 255)
        return outputs[:, :-1], outputs[:, -1]


def record(envs):
    """Keep the seed that envs.reset gets and what goes through envs.step, in envs.seed and envs.steps."""
    reset, step, envs.steps = envs.reset, envs.step, []

    def recorded_reset(**options):
        envs.seed, (envs.now, info) = options["seed"], reset(**options)
        envs.lives_now = info.get("lives", np.zeros(envs.num_envs))
        return envs.now, info

    def recorded_step(actions):
        transition = {"obs": envs.now.copy(), "action": actions.copy(), "lives_before": envs.lives_now}
        envs.now, reward, terminated, truncated, info = step(actions)
        true_next = envs.now.copy()  # of the same episode
        for i in np.flatnonzero(truncated):
            true_next[i] = info["final_obs"][i]
        transition |= {"reward": reward.copy(), "terminated": terminated.copy(), "truncated": truncated.copy()}
        envs.lives_now = info.get("lives", 0 * actions)
        envs.steps.append(transition | {"true_next": true_next, "lives": envs.lives_now})
        return envs.now, reward, terminated, truncated, info

    envs.reset, envs.step = recorded_reset, recorded_step
    return envs


# --- What the script should compute, once more: from the definitions, slowly, in float64 ---


def forward_view(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """The λ-return by its definition: n-step returns, weighted with (1-λ) λ^(n-1), the last one with what is left."""
    returns = np.empty(rewards.shape)
    for start, env in np.ndindex(rewards.shape):
        n_step_returns, rewards_so_far = [], 0.0
        for t in range(start, len(rewards)):
            rewards_so_far += gamma ** (t - start) * rewards[t, env]
            bootstrap = 0.0 if terminated[t, env] else gamma ** (t - start + 1) * next_values[t, env]
            n_step_returns.append(rewards_so_far + bootstrap)
            if terminated[t, env] or truncated[t, env]:
                break
        weights = (1 - q_lambda) * q_lambda ** np.arange(len(n_step_returns), dtype=float)
        weights[-1] = q_lambda ** (len(n_step_returns) - 1)
        returns[start, env] = weights @ n_step_returns
    return returns


class PlainRAdam:
    """RAdam (Liu et al., 2020, Algorithm 2), with PyTorch's default constants."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m = [torch.zeros_like(p) for p in parameters]
        self.v = [torch.zeros_like(p) for p in parameters]

    def step(self, gradients, b1=0.9, b2=0.999, eps=1e-8):
        self.t += 1
        longest = 2 / (1 - b2) - 1
        rho = longest - 2 * self.t * b2**self.t / (1 - b2**self.t)
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            update = m / (1 - b1**self.t)
            if rho > 5:
                r = ((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)) ** 0.5
                update = update * r * (1 - b2**self.t) ** 0.5 / (v.sqrt() + eps)
            p.data -= self.lr * update


def targets(steps, network, args):
    """The Q(λ) targets (L, E) of a recorded rollout."""
    names = "reward true_next terminated truncated lives lives_before".split()
    reward, true_next, terminated, truncated, lives, before = (np.stack([step[n] for step in steps]) for n in names)
    if args.episodic_life:
        terminated |= (lives < before) & ~terminated & ~truncated
    with torch.no_grad():
        next_values = network(torch.from_numpy(true_next).flatten(0, 1)).max(1).values.numpy().reshape(reward.shape)
    return forward_view(np.sign(reward), next_values, terminated, truncated, args.gamma, args.q_lambda)


def second_computation(network, rollouts, orders, args):
    """Updates network (float64) as one iteration should; returns the means of loss, Q and gradient norm.

    rollouts holds a recorded rollout, and orders its shuffled indices of each epoch; with several processes, those of
    each: together they are one batch.
    """
    obs = [torch.from_numpy(np.concatenate([step["obs"] for step in steps])) for steps in rollouts]
    actions = [torch.from_numpy(np.concatenate([step["action"] for step in steps])) for steps in rollouts]
    returns = [torch.from_numpy(targets(steps, network, args).flatten()) for steps in rollouts]
    parameters, logged = list(network.parameters()), []
    optimizer = PlainRAdam(parameters, args.learning_rate)
    for epoch in range(args.update_epochs):
        minibatches = [np.array_split(order[epoch], args.num_minibatches) for order in orders]
        for parts in zip(*minibatches, strict=True):
            q = [network(o[i])[range(len(i)), a[i]] for o, a, i in zip(obs, actions, parts, strict=True)]
            g = [r[i] for r, i in zip(returns, parts, strict=True)]
            loss = ((torch.cat(q) - torch.cat(g)) ** 2).mean()
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            optimizer.step([g * min(1.0, args.max_grad_norm / norm) for g in gradients])
            logged.append([loss.item(), torch.cat(q).mean().item(), norm.item()])
    return np.mean(logged, axis=0)


# --- Files and processes ---


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def column(path, name, kind=float):
    """One column of a CSV file, without its empty cells."""
    return [kind(row[name]) for row in rows(path) if row[name]]


def without_clock(path):
    """The table without the columns that hold the time of day's work."""
    return [{name: v for name, v in row.items() if name not in ("charts/seconds", "charts/SPS")} for row in rows(path)]


def load(folder):
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)


def same(a, b):
    """Equal, down to the last bit of each tensor."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


started = []  # processes; conftest.py ends what a test leaves running


def start(*command, **environment):
    """A Python process of its own, with its own process group; its output can be read from .communicate()."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, command)]
    started.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
    return started[-1]


def wait_for(condition, process=None, seconds=60):
    """Wait until condition() is truthy, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found
