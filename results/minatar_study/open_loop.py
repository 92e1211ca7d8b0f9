"""PQN on MinAtar whose rollout follows schedule.csv, whatever the policy does: arm c of the study.

python results/minatar_study/open_loop.py --env-id breakout --seed 201
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import minatar_abs  # replaces parts of pqn_abs.py

import pqn_abs

SCHEDULE = np.loadtxt(Path(__file__).with_name("schedule.csv"), delimiter=",", skiprows=1)


class Run(pqn_abs.Run):
    """Remembers how far the run is, for the schedule."""

    step = 0

    def count_episodes(self, global_step, reward, ended):
        Run.step = global_step
        super().count_episodes(global_step, reward, ended)


def scheduled_length(divergence, adaptive_length, **limits):
    """L at this step, whatever the divergence was."""
    return float(np.interp(Run.step, SCHEDULE[:, 0], SCHEDULE[:, 1]))


pqn_abs.Run = Run
pqn_abs.rollout_length = scheduled_length
pqn_abs.SCRIPT = Path(__file__).name

if __name__ == "__main__":
    minatar_abs.pqn_abs.launch()
