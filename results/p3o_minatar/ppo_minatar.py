"""PPO on MinAtar with the network of p3o_minatar.py, beside the sweep of PROTOCOL.md.

OMP_NUM_THREADS=1 python results/p3o_minatar/ppo_minatar.py --env-id breakout --no-adapt-rollout
"""

from dataclasses import dataclass
from typing import Literal

from p3o_minatar import ActorCritic, make_envs

import ppo_abs


@dataclass
class Args(ppo_abs.Args):
    """PPO on MinAtar."""

    env_id: str = "breakout"
    total_timesteps: int = 300_000
    precision: Literal["auto", "float32", "bfloat16"] = "float32"


if __name__ == "__main__":
    ppo_abs.launch(Args, make_envs=make_envs, ActorCritic=ActorCritic)
