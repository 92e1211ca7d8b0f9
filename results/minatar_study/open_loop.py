"""PQN on MinAtar whose rollout follows schedule.csv, whatever the policy does: arm c of the study.

python results/minatar_study/open_loop.py --env-id breakout --seed 201
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import minatar_abs
from minatar_abs import Args, QNetwork, pqn_abs


class OpenLoop:
    """Takes the place of rollout_length: L at this step, whatever the divergence is."""

    def __init__(self, steps, lengths):
        self.schedule = steps, lengths
        self.step = 0  # environment steps so far
        self.steps_a_unit = None  # those of K iterations with L = 1: K E, which make_envs knows

    def __call__(self, divergence, adaptive_length, **limits):
        self.step += self.steps_a_unit * round(adaptive_length)  # L was the same in K iterations
        return float(np.interp(self.step, *self.schedule))

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


SCHEDULE = np.loadtxt(Path(__file__).with_name("schedule.csv"), delimiter=",", skiprows=1)
open_loop = OpenLoop(*SCHEDULE.T)


def make_envs(args):
    open_loop.steps_a_unit = args.adapt_frequency * args.num_envs
    return minatar_abs.make_envs(args)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork, rollout_length=open_loop)
