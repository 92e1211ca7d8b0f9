"""PQN on MinAtar whose L follows a recorded schedule, whatever the divergence is: arms R and X.

    python results/crossed_schedules/schedule.py --env-id breakout --schedule high_asterix

--schedule names a column of schedules.csv, which make_schedules.py writes.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import minatar_abs
from minatar_abs import QNetwork, pqn_abs

__all__ = ["Args", "QNetwork", "make_envs"]
TABLE = Path(__file__).with_name("schedules.csv")


@dataclass
class Args(minatar_abs.Args):
    """PQN on MinAtar with a recorded schedule of L."""

    schedule: str = "high_breakout"  # a column of schedules.csv


class Schedule:
    """Takes the place of rollout_length. It counts the environment steps itself."""

    def __init__(self):
        self.steps_done = 0

    def start(self, args):
        with TABLE.open() as file:
            rows = list(csv.DictReader(file))
        self.steps = [float(row["global_step"]) for row in rows]
        self.lengths = [float(row[args.schedule]) for row in rows]
        self.steps_a_unit = args.adapt_frequency * args.num_envs  # K iterations, for L = 1

    def __call__(self, divergence, adaptive_length, **limits):
        """L at the present step. It is called after every K-th iteration, as rollout_length is."""
        self.steps_done += self.steps_a_unit * round(adaptive_length)
        return float(np.interp(self.steps_done, self.steps, self.lengths))

    def state_dict(self):
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state):
        self.steps_done = state["steps_done"]


schedule = Schedule()


def make_envs(args):
    """Those of minatar_abs.py. The schedule reads its column here, where args first arrive."""
    schedule.start(args)
    return minatar_abs.make_envs(args)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork, rollout_length=schedule)
