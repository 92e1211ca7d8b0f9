"""pqn_abs_xl.py on small environments, with or without torchrun:  xl_run.py [its arguments]

At its end, each process writes what it saw to <rank>.pt, in the folder that SEEN names. With EVENT
in the environment, for example "hold 0 1", the processes of these ranks do in step 40, which is
amid a rollout:

    hold RANKS   make <rank>.held in this folder, and go on once the file hold is gone from there
    break RANKS  return an observation that is not finite
    kill RANKS   die at once
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from helpers import FakeEnvs, SmallNetwork, stacked

import pqn_abs_xl

FOLDER = Path(os.environ["SEEN"])
RANK = os.environ.get("RANK", "0")
PARENT = os.getppid()
seen = {"lengths": [], "divergences": [], "weights": []}


def end_with_parent():
    """A test that fails kills torchrun, which cannot pass it on."""
    if os.getppid() != PARENT:
        os._exit(1)


class SmallEnvs(FakeEnvs):
    """float32 observations, and EVENT in step 40."""

    count = 0

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float32), info

    def step(self, actions):
        end_with_parent()
        obs, *rest = super().step(actions)
        obs = obs.astype(np.float32)
        self.count += 1
        event, *ranks = os.environ.get("EVENT", "none").split()
        if self.count == 40 and RANK in ranks:
            if event == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "break":
                obs[-1] = np.inf
            if event == "hold":
                (FOLDER / f"{RANK}.held").touch()
                while (FOLDER / "hold").exists():
                    end_with_parent()
                    time.sleep(0.01)
        return obs, *rest


class Network(SmallNetwork):
    """It has a parameter that no gradient reaches, and one that is frozen."""

    def __init__(self, envs, size):
        super().__init__(envs)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        seen["size"] = size
        self.note_weights()

    def note_weights(self):
        weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        seen["weights"].append(weights)


def make_envs(args):
    global envs
    envs = SmallEnvs(args.num_envs)
    return envs


def make_network(envs, size):
    global network
    network = Network(envs, size)
    return network


def rollout_length(divergence, adaptive_length, **options):
    """pqn_abs_xl.py's, which is called after each measured update."""
    network.note_weights()
    seen["divergences"].append(divergence)
    seen["lengths"].append(pqn_abs_xl.rollout_length(divergence, adaptive_length, **options))
    return seen["lengths"][-1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    pqn_abs_xl.launch(make_envs=make_envs, QNetwork=make_network, rollout_length=rollout_length)
    network.note_weights()
    seen["seed"] = envs.seed
    seen["steps"] = {name: stacked(envs.steps, name) for name in vars(envs.steps[0])}
    torch.save(seen, FOLDER / f"{RANK}.pt")
