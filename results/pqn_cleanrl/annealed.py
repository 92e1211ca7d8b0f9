"""pqn_abs.py with CleanRL's learning rate, which falls linearly to 0 at total_timesteps.

python results/pqn_cleanrl/annealed.py --env-id PongNoFrameskip-v4 --no-adapt-rollout
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import pqn_abs


class Run(pqn_abs.Run):
    """Remembers which share of the steps is left."""

    left = 1.0

    def count_episodes(self, global_step, reward, ended):
        Run.left = max(1 - global_step / self.args.total_timesteps, 0)
        super().count_episodes(global_step, reward, ended)


class AnnealedRAdam(torch.optim.RAdam):
    """RAdam, its learning rate times the share of the steps that is left."""

    def step(self):
        self.param_groups[0]["lr"] = self.defaults["lr"] * Run.left
        return super().step()


pqn_abs.Run = Run
torch.optim.RAdam = AnnealedRAdam
pqn_abs.SCRIPT = Path(__file__).name

if __name__ == "__main__":
    pqn_abs.launch()
