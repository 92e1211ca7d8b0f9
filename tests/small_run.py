"""pqn_abs.py on the fake environments in a process of its own:  small_run.py [its arguments]

Each step ends an episode. STEP_SECONDS in the environment is the time that a step takes.
"""

import os
import time

import torch
from helpers import FakeEnvs, SmallNetwork

import pqn_abs


class SlowEnvs(FakeEnvs):
    def step(self, actions):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        self.steps.clear()
        return super().step(actions)


torch.set_num_threads(1)
pqn_abs.make_envs = lambda args: SlowEnvs(args.num_envs, terminate=1)
pqn_abs.QNetwork = SmallNetwork
pqn_abs.launch()
