"""What several test files share: an environment and a network that take no time, and processes."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from pqn_abs import EpisodicLife

ROOT = Path(__file__).parents[1]
SMALL_RUN = ROOT / "tests" / "small_run.py"
LIMIT = 600  # seconds after which a process counts as hung; no test waits for it where all is well


class FakeEnvs(gymnasium.vector.VectorEnv):
    """Six random bytes as observation, four actions, and every way in which an episode ends.

    A game begins with 1 to this many lives, as info says, and ends with the last one, or sooner:
    won, or truncated. What step() took and gave is kept in steps.
    """

    def __init__(self, num_envs, terminate=0.1, truncate=0.1, lives=1):
        self.num_envs = num_envs
        self.terminate = terminate
        self.truncate = truncate
        self.most_lives = lives
        self.steps = []
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.obs = self.frames()
        self.lives = self.first_lives()
        return self.obs, {"lives": self.lives}

    def step(self, actions):
        step = SimpleNamespace(obs=self.obs, action=np.array(actions), executed=np.array(actions))
        died = self.rng.random(self.num_envs) < self.terminate
        won = self.rng.random(self.num_envs) < self.terminate / 10
        lives = self.lives - died
        step.terminated = won | (lives == 0)
        step.truncated = self.rng.random(self.num_envs) < self.truncate
        step.over = step.terminated | step.truncated
        step.lost_life = died & ~step.over
        step.reward = self.rng.choice([-5.0, 0.0, 0.5, 7.0], size=self.num_envs)
        final_obs = self.frames()
        self.obs = self.frames()
        step.true_next = np.where(step.over[:, None], final_obs, self.obs)  # of the same episode
        self.lives = np.where(step.over, self.first_lives(), lives)
        self.steps.append(step)
        info = {"final_obs": final_obs, "lives": self.lives}
        return self.obs, step.reward.copy(), step.terminated, step.truncated, info

    def first_lives(self):
        return self.rng.integers(1, self.most_lives, size=self.num_envs, endpoint=True)

    def frames(self):
        return self.rng.integers(256, size=(self.num_envs, 6), dtype=np.uint8)


class Played(EpisodicLife):
    """Keeps the actions that the agent chose; FakeEnvs keeps those that the game got."""

    def step(self, actions):
        result = super().step(actions)
        self.unwrapped.steps[-1].action = np.array(actions)
        return result


class SmallNetwork(nn.Module):
    """Smooth, so that float32 and float64 agree."""

    def __init__(self, envs, args):
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.hidden = nn.Linear(inputs, 16)
        self.head = nn.Linear(16, int(envs.single_action_space.n))

    def forward(self, frames):
        x = frames.flatten(1).to(self.hidden.weight.dtype) / 255
        return self.head(torch.tanh(self.hidden(x)))


def on(envs, network=SmallNetwork):
    """The parts of pqn_abs.py's main and launch that make it train a network on FakeEnvs."""

    def make_envs(args):
        counted = RecordEpisodeStatistics(envs)
        if envs.most_lives > 1 and args.episodic_life:
            return Played(counted, fire_action=2)
        return counted

    return {"make_envs": make_envs, "QNetwork": network}


def stacked(steps, name):
    """One of the arrays of FakeEnvs.steps over time: (L, E, ...)."""
    return np.stack([getattr(step, name) for step in steps])


def expected_episodes(steps):
    """(global_step, score) of each whole game in what FakeEnvs recorded."""
    num_envs = len(steps[0].reward)
    score = np.zeros(num_envs)
    episodes = []
    for t, step in enumerate(steps, 1):
        score += step.reward
        for i in np.flatnonzero(step.over):
            episodes.append((num_envs * t, score[i]))
            score[i] = 0
    return episodes


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def column(path, name, kind=float):
    """One column of a CSV file, without its empty cells."""
    return [kind(row[name]) for row in rows(path) if row[name]]


def load(folder):
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)


def config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def same_weights(one, other):
    """Equal bit for bit; takes state dicts."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def contents(folder):
    """Each file under a folder with its bytes, each folder with None."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def unpacked(name, folder):
    """The folder of runs in results/<name>.tar.gz, unpacked below another folder."""
    shutil.unpack_archive(ROOT / "results" / f"{name}.tar.gz", folder, filter="data")
    return folder / Path(name).name


started = []  # processes; conftest.py ends what a test leaves running


def start(*command, env=(), **options):
    """A Python process of its own; its output can be read from communicate()."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(env)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, command)]
    started.append(subprocess.Popen(command, env=env, **(pipes | options)))
    return started[-1]


def end_of(process, status=0):
    """Wait until a process ends, with this status; returns its output and errors."""
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == status, errors
    return output, errors


def wait_for(condition, process):
    """Wait until condition() holds, while the process lives."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
