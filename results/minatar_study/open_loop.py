"""PQN on MinAtar whose rollout follows schedule.csv, whatever the policy does: arm c of the study.

python results/minatar_study/open_loop.py --env-id breakout --seed 201
"""

import sys
from pathlib import Path

import numpy as np
from gymnasium.vector import VectorWrapper

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import minatar_abs
from minatar_abs import Args, QNetwork, pqn_abs

STEPS, LENGTHS = np.loadtxt(Path(__file__).with_name("schedule.csv"), delimiter=",", skiprows=1).T


class OpenLoop:
    """Takes the place of rollout_length: L at this step, whatever the divergence is."""

    def __init__(self):
        self.step = 0  # of the environments together; CountedEnvs counts them

    def __call__(self, divergence, adaptive_length, **limits):
        return float(np.interp(self.step, STEPS, LENGTHS))

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


open_loop = OpenLoop()


class CountedEnvs(VectorWrapper):
    def step(self, actions):
        open_loop.step += self.num_envs
        return super().step(actions)


def make_envs(args):
    return CountedEnvs(minatar_abs.make_envs(args))


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork, rollout_length=open_loop)
