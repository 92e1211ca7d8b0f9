"""ABS on an environment of your own: MinAtar, five small games in the style of Atari's, on a CPU.

    OMP_NUM_THREADS=1 python examples/minatar_abs.py --env-id space_invaders
    OMP_NUM_THREADS=1 python examples/minatar_abs.py --env-id space_invaders --no-adapt-rollout

It passes its own arguments, environments and network to pqn_abs.py's launch(). It needs MinAtar:
`pip install MinAtar`.
Networks as small as this one run faster on one thread than on two: run a seed on each core.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from minatar.gym import BaseEnv

sys.path.append(str(Path(__file__).resolve().parents[1]))
import pqn_abs

MAX_STEPS = 2501  # Freeway ends by itself after as many; the other games have no limit of their own


@dataclass
class Args(pqn_abs.Args):
    """PQN with Adaptive Batch Scaling on MinAtar."""

    env_id: Literal["asterix", "breakout", "freeway", "seaquest", "space_invaders"] = "breakout"
    """one of MinAtar's games"""
    total_timesteps: int = 1_000_000  # [T_total] steps in all environments
    num_envs: int = 32  # [E] environments in parallel
    learning_rate: float = 1e-3  # learning rate of RAdam
    num_minibatches: int = 16  # mini-batches per epoch
    end_e: float = 0.05  # [ε] share of random actions once ε has stopped falling
    adapt_frequency: int = 10  # [K] measure δ in every K-th iteration
    checkpoint_every: float = 60.0  # seconds between checkpoints; a run takes some minutes


class QNetwork(nn.Module):
    """PQN's network for MinAtar: bool images (N, 10, 10, C) -> float32 Q-values (N, A)."""

    def __init__(self, envs, args):
        super().__init__()
        channels = envs.single_observation_space.shape[2]
        self.conv = pqn_abs.layer_init(nn.Conv2d(channels, 16, 3))
        self.head = nn.Sequential(
            nn.LayerNorm(16),  # over the channels of each pixel, as in PQN's code
            nn.ReLU(),
            nn.Flatten(),
            pqn_abs.layer_init(nn.Linear(8 * 8 * 16, 128)),
            nn.LayerNorm(128),
            nn.ReLU(),
            pqn_abs.layer_init(nn.Linear(128, int(envs.single_action_space.n))),
        )

    def forward(self, images):
        features = self.conv(images.float().permute(0, 3, 1, 2))
        return self.head(features.permute(0, 2, 3, 1))


def make_envs(args: Args):
    """MinAtar's defaults: an action is repeated with probability 0.1, and games get harder."""

    def make_env():
        return TimeLimit(BaseEnv(args.env_id, use_minimal_action_set=True), MAX_STEPS)

    makers = [make_env] * args.num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    return RecordEpisodeStatistics(envs)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork)
