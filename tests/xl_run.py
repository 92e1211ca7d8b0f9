"""pqn_abs_xl.py on small environments, with or without torchrun:  xl_run.py [its arguments]

At its end, each process writes what it saw to <rank>.pt, in the folder that SEEN names. EVENT in
the environment, for example "SIGINT 1", tells what this process does in step 40, which is amid a
rollout: it sends this signal to itself, or for "break" returns an observation that is not finite.
"""

import os
import signal
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import FakeEnvs, SmallNetwork, stacked

import pqn_abs_xl

FOLDER = Path(os.environ["SEEN"])
RANK = os.environ.get("RANK", "0")
PARENT = os.getppid()
EVENT, _, WHERE = os.environ.get("EVENT", "").partition(" ")
seen = {"lengths": [], "divergences": [], "weights": []}
networks = []  # θ and θ_old


def note_weights():
    seen["weights"].append({name: t.clone() for name, t in networks[0].state_dict().items()})


class SmallEnvs(FakeEnvs):
    """float32 observations, and EVENT in step 40."""

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float32), info

    def step(self, actions):
        if os.getppid() != PARENT:  # a test that failed has killed torchrun
            os._exit(1)
        if len(self.steps) == 0:
            note_weights()
        obs, *rest = super().step(actions)
        obs = obs.astype(np.float32)
        if len(self.steps) == 40 and RANK == WHERE:
            if EVENT == "break":
                obs[-1] = np.inf
            else:
                os.kill(os.getpid(), signal.Signals[EVENT])
        return obs, *rest


class Network(SmallNetwork):
    """It has an unused and a frozen parameter, and other first weights in each process."""

    def __init__(self, envs, args):
        super().__init__(envs, args)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        nn.init.constant_(self.hidden.bias, int(RANK))
        networks.append(self)


def make_envs(args):
    seen["envs"] = SmallEnvs(args.num_envs)
    return RecordEpisodeStatistics(seen["envs"])


def rollout_length(divergence, length, **options):
    """pqn_abs_xl.py's, which is called after each measured update."""
    note_weights()
    seen["divergences"].append(divergence)
    seen["lengths"].append(pqn_abs_xl.rollout_length(divergence, length, **options))
    return seen["lengths"][-1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    pqn_abs_xl.launch(make_envs=make_envs, QNetwork=Network, rollout_length=rollout_length)
    note_weights()
    envs = seen.pop("envs")
    seen["seed"] = envs.seed
    seen["steps"] = {name: stacked(envs.steps, name) for name in vars(envs.steps[0])}
    torch.save(seen, FOLDER / f"{RANK}.pt")
