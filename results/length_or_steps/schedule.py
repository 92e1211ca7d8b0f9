"""PQN on MinAtar whose L, and whose gradient steps, follow two recorded schedules.

    python results/length_or_steps/schedule.py --env-id breakout --learning-rate 5e-4 \
        --length own --steps mirror

The schedules are columns of schedules.csv, which make_schedules.py writes: <rate>_<game>_<name>.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import minatar_abs
from minatar_abs import QNetwork, pqn_abs

TABLE = Path(__file__).with_name("schedules.csv")


@dataclass
class Args(minatar_abs.Args):
    """PQN on MinAtar with recorded schedules."""

    length: str = "own"  # own or mirror: the schedule of L
    steps: str = "own"  # own or mirror: the schedule that sets the gradient steps


class Schedules:
    """Takes the place of rollout_length, and sets the number of mini-batches."""

    def start(self, args):
        with TABLE.open() as file:
            rows = list(csv.DictReader(file))
        prefix = f"{args.learning_rate:g}_{args.env_id}_"
        self.grid = [float(row["global_step"]) for row in rows]
        self.lengths = [float(row[prefix + args.length]) for row in rows]
        self.step_lengths = [float(row[prefix + args.steps]) for row in rows]
        self.args = args
        self.base = args.num_minibatches
        self.done = 0  # environment steps
        self.carried = 0.0  # mini-batches that rounding left over

    def __call__(self, divergence, adaptive_length, **limits):
        """L at the present step. It is called after every K-th iteration, as rollout_length is."""
        self.done += self.args.adapt_frequency * self.args.num_envs * round(adaptive_length)
        length = float(np.interp(self.done, self.grid, self.lengths))
        step_length = float(np.interp(self.done, self.grid, self.step_lengths))
        exact = self.base * round(length) / round(step_length) + self.carried
        self.args.num_minibatches = max(1, round(exact))  # main reads it in each iteration
        self.carried = exact - self.args.num_minibatches
        return length

    def state_dict(self):
        minibatches = self.args.num_minibatches
        return {"done": self.done, "carried": self.carried, "minibatches": minibatches}

    def load_state_dict(self, state):
        self.done = state["done"]
        self.carried = state["carried"]
        self.base = Args.num_minibatches
        self.args.num_minibatches = state["minibatches"]


schedules = Schedules()


def make_envs(args):
    """Those of minatar_abs.py. The schedules are read here, where args first arrive."""
    schedules.start(args)
    return minatar_abs.make_envs(args)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork, rollout_length=schedules)
