"""P3O on MinAtar, for the sweep of PROTOCOL.md.

OMP_NUM_THREADS=1 python results/p3o_minatar/p3o_minatar.py --env-id breakout
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.nn as nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from minatar_abs import make_envs

import p3o_abs


@dataclass
class Args(p3o_abs.Args):
    """P3O on MinAtar."""

    env_id: str = "breakout"
    total_timesteps: int = 300_000
    precision: Literal["auto", "float32", "bfloat16"] = "float32"


class ActorCritic(nn.Module):
    """Bool images (N, 10, 10, C) -> logits (N, A) and values (N,)."""

    def __init__(self, envs):
        super().__init__()
        channels = envs.single_observation_space.shape[2]
        num_actions = int(envs.single_action_space.n)
        self.body = nn.Sequential(
            p3o_abs.layer_init(nn.Conv2d(channels, 16, 3)),
            nn.ReLU(),
            nn.Flatten(),
            p3o_abs.layer_init(nn.Linear(8 * 8 * 16, 128)),
            nn.ReLU(),
        )
        self.actor = p3o_abs.layer_init(nn.Linear(128, num_actions), 0.01)
        self.critic = p3o_abs.layer_init(nn.Linear(128, 1), 1.0)

    def forward(self, images):
        x = self.body(images.float().permute(0, 3, 1, 2))
        return self.actor(x), self.critic(x).squeeze(1)


if __name__ == "__main__":
    p3o_abs.launch(Args, make_envs=make_envs, ActorCritic=ActorCritic)
