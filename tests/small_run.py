"""pqn_abs.py on small environments in a process of its own:  small_run.py [its arguments]

Each step ends an episode. While the file that HOLD names exists, no step ends; HOLD.reached tells
that one has begun.
"""

import os
import time
from pathlib import Path

import torch
from helpers import FakeEnvs, on

import pqn_abs


class HeldEnvs(FakeEnvs):
    def step(self, actions):
        path = os.environ.get("HOLD", "")
        while os.path.exists(path):
            Path(f"{path}.reached").touch()
            time.sleep(0.01)
        self.steps.clear()
        return super().step(actions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pqn_abs.launch(**on(HeldEnvs(4, terminate=1)))
