"""What several test files share: an environment and a network that take no time, and processes."""

import csv
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

ROOT = Path(__file__).parents[1]
SMALL_RUN = ROOT / "tests" / "small_run.py"
LIMIT = 600  # seconds after which a process counts as hung; no test waits for it where all is well


class FakeEnvs(gymnasium.vector.VectorEnv):
    """Six random bytes as observation, four actions, and every way in which an episode ends.

    With lives, a game begins with 1 to this many of them, as info says, and ends with the last one,
    or sooner: won, or truncated. What step() took and gave is kept in steps.
    """

    def __init__(self, num_envs, terminate=0.1, truncate=0.1, lives=0):
        self.num_envs = num_envs
        self.terminate = terminate
        self.truncate = truncate
        self.most_lives = lives
        self.steps = []
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.obs = self.frames()
        self.lives = self.first_lives()
        return self.obs, self.info()

    def step(self, actions):
        died = self.rng.random(self.num_envs) < self.terminate
        truncated = self.rng.random(self.num_envs) < self.truncate
        terminated = died
        if self.most_lives:
            self.lives = self.lives - died  # a new array: the old one was handed out
            won = self.rng.random(self.num_envs) < self.terminate / 10
            terminated = died & (self.lives == 0) | won
        over = terminated | truncated
        self.lives = np.where(over, self.first_lives(), self.lives)
        reward = self.rng.choice([-5.0, 0.0, 0.5, 7.0], size=self.num_envs)
        final_obs = self.frames()
        step = SimpleNamespace(obs=self.obs, action=np.array(actions), reward=reward.copy())
        self.obs = self.frames()
        step.true_next = np.where(over[:, None], final_obs, self.obs)  # of the same episode
        step.terminated, step.truncated, step.over = terminated.copy(), truncated.copy(), over
        step.lost_life = died & ~over
        self.steps.append(step)
        info = {"final_obs": final_obs} | self.info()
        return self.obs, reward, terminated, truncated, info

    def first_lives(self):
        fewest = min(1, self.most_lives)
        return self.rng.integers(fewest, self.most_lives, size=self.num_envs, endpoint=True)

    def info(self):
        return {"lives": self.lives.copy()} if self.most_lives else {}

    def frames(self):
        return self.rng.integers(256, size=(self.num_envs, 6), dtype=np.uint8)


class ReusedArrays(FakeEnvs):
    """Writes each step's results into the arrays that it returned before."""

    def reset(self, **options):
        self.returned = {}
        obs, info = super().reset(**options)
        values = self.reused({"obs": obs} | info)
        return values.pop("obs"), values

    def step(self, actions):
        names = ["obs", "reward", "terminated", "truncated"]
        *arrays, info = super().step(actions)
        values = self.reused(dict(zip(names, arrays, strict=True)) | info)
        return *(values.pop(name) for name in names), values

    def reused(self, values):
        for name, array in values.items():
            values[name] = self.returned.setdefault(name, array.copy())
            values[name][...] = array
        return values


class SmallNetwork(nn.Module):
    """Smooth, so that float32 and float64 agree; its head is no float32 one under autocast."""

    def __init__(self, envs):
        super().__init__()
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.hidden = nn.Linear(inputs, 16)
        self.head = nn.Linear(16, int(envs.single_action_space.n))

    def forward(self, frames):
        x = frames.flatten(1).to(self.hidden.weight.dtype) / 255
        return self.head(torch.tanh(self.hidden(x)))


def on(envs, network=SmallNetwork):
    """The parts of pqn_abs.py's main and launch that make it train a network on envs."""
    return {"make_envs": lambda args: envs, "QNetwork": network}


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
    with tarfile.open(ROOT / "results" / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / Path(name).name


started = []  # processes; conftest.py ends what a test leaves running


def start(*command, **options):
    """A Python process of its own; its output can be read from communicate()."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, command)]
    started.append(subprocess.Popen(command, env=environment, **(pipes | options)))
    return started[-1]


def end_of(process, status=0):
    """Wait until a process ends, with this status; returns its output and errors."""
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == status, errors
    return output, errors


def next_line(process):
    """Wait for the next line of a process's errors."""
    alarm = threading.Timer(LIMIT, process.kill)
    alarm.start()
    line = process.stderr.readline()
    alarm.cancel()
    return line


def wait_for(condition, process):
    """Wait until condition() holds, while the process lives."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
