"""ppo_abs_continuous.py as CleanRL has it: a time limit ends an episode, and no value follows it.

python results/mujoco/truncation_as_end.py --env-id HalfCheetah-v5 --no-adapt-rollout
"""

import sys
from pathlib import Path

from gymnasium.vector import VectorWrapper

sys.path.append(str(Path(__file__).resolve().parents[2]))
import ppo_abs_continuous


class TruncationAsEnd(VectorWrapper):
    """A truncated episode counts as terminated, too."""

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        return obs, rewards, terminated | truncated, truncated, info


def envs_whose_limits_end(args):
    return TruncationAsEnd(ppo_abs_continuous.make_envs(args))


if __name__ == "__main__":
    ppo_abs_continuous.launch(make_envs=envs_whose_limits_end)
