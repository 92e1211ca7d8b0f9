"""The shortest example with its own environment: PQN with ABS on CartPole, a minute on one core.

OMP_NUM_THREADS=1 python examples/cartpole_abs.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import torch.nn as nn
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

sys.path.append(str(Path(__file__).resolve().parents[1]))
import pqn_abs


@dataclass
class Args(pqn_abs.Args):
    """PQN with Adaptive Batch Scaling on CartPole."""

    env_id: str = "CartPole-v1"  # any of Gymnasium's with a vector of numbers and discrete actions
    total_timesteps: int = 500_000  # [T_total] environment steps
    num_envs: int = 32  # [E] environments in parallel
    num_minibatches: int = 16  # mini-batches an epoch; their number is fixed, their size follows L
    update_epochs: int = 4  # [N_epochs] passes over each rollout
    q_lambda: float = 0.95  # [λ] of the Q(λ) targets: 0 is one-step Q-learning, 1 Monte Carlo
    end_e: float = 0.05  # [ε] share of random actions after exploration
    exploration_fraction: float = 0.5  # share of the steps in which ε goes from start to end
    adapt_frequency: int = 10  # [K] iterations from one measurement of BD to the next
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # of all layers


class QNetwork(nn.Module):
    """Observations (N, D) -> float32 Q-values (N, A)."""

    def __init__(self, envs):
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


def make_envs(args: Args) -> SyncVectorEnv:
    def make_env():
        return gymnasium.make(args.env_id)

    try:
        env = make_env()
    except (gymnasium.error.Error, ImportError) as error:
        raise pqn_abs.UsageError(f"--env-id {args.env_id}: {error}") from error
    if not isinstance(env.observation_space, Box) or len(env.observation_space.shape) != 1:
        raise pqn_abs.UsageError(f"--env-id {args.env_id}: observations must be vectors of numbers")
    if not isinstance(env.action_space, Discrete):
        raise pqn_abs.UsageError(f"--env-id {args.env_id}: actions must be discrete")
    return SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


if __name__ == "__main__":
    pqn_abs.launch(Args, make_envs=make_envs, QNetwork=QNetwork)
