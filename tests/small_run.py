"""pqn_abs.py on small environments in a process of its own:  small_run.py [its arguments]

Each step ends an episode. With ASYNC in the environment, they are CartPoles in processes of their
own. While the file that HOLD names exists, no step ends; HOLD.reached tells that one has begun.
"""

import os
import time
from pathlib import Path

import gymnasium
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from helpers import FakeEnvs, SmallNetwork

import pqn_abs


def hold():
    path = os.environ.get("HOLD", "")
    while os.path.exists(path):
        Path(f"{path}.reached").touch()
        time.sleep(0.01)


class HeldEnvs(FakeEnvs):
    def step(self, actions):
        hold()
        self.steps.clear()
        return super().step(actions)


class HeldCartPoles(AsyncVectorEnv):
    def step(self, actions):
        hold()
        return super().step(actions)


def make_envs(args):
    if "ASYNC" not in os.environ:
        return HeldEnvs(args.num_envs, terminate=1)
    games = [lambda: gymnasium.make("CartPole-v1")] * args.num_envs
    return HeldCartPoles(games, context="fork", autoreset_mode=AutoresetMode.SAME_STEP)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pqn_abs.launch(make_envs=make_envs, QNetwork=SmallNetwork)
