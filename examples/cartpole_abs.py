"""The shortest example with its own environment: PQN with ABS on CartPole, a minute on one core.

OMP_NUM_THREADS=1 python examples/cartpole_abs.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

sys.path.append(str(Path(__file__).resolve().parents[1]))
import pqn_abs


@dataclass
class Args(pqn_abs.Args):
    """PQN with Adaptive Batch Scaling on CartPole."""

    env_id: str = "CartPole-v1"  # any of Gymnasium's with a vector of numbers and discrete actions
    total_timesteps: int = 500_000  # [T_total] steps in all environments
    num_envs: int = 32  # [E] environments in parallel
    num_minibatches: int = 16  # mini-batches per epoch
    update_epochs: int = 4  # [N_epochs] passes over each rollout
    q_lambda: float = 0.95  # [λ] of the Q(λ) targets: 0 is one-step Q-learning, 1 is Monte Carlo
    end_e: float = 0.05  # [ε] share of random actions once ε has stopped falling
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which ε falls
    adapt_frequency: int = 10  # [K] measure δ in every K-th iteration


class QNetwork(nn.Module):
    """Observations (N, D) -> float32 Q-values (N, A)."""

    def __init__(self, envs, args):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(envs.single_observation_space.shape[0], 128),
            nn.LayerNorm(128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.LayerNorm(128),
            nn.ReLU(),
            nn.Linear(128, int(envs.single_action_space.n)),
        )

    def forward(self, observations):
        return self.layers(observations.float())


def make_envs(args: Args):
    makers = [lambda: gymnasium.make(args.env_id)] * args.num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    return RecordEpisodeStatistics(envs)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork)
