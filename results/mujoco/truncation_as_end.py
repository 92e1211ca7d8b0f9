"""ppo_abs_continuous.py as CleanRL has it: a time limit ends an episode, and no value follows it.

python results/mujoco/truncation_as_end.py --env-id HalfCheetah-v5 --no-adapt-rollout
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import ppo_abs_continuous


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """ppo_abs_continuous.gae, in which a truncated episode counts as terminated."""
    ended = terminated | truncated
    return ppo_abs_continuous.gae(rewards, values, next_values, ended, truncated, gamma, gae_lambda)


if __name__ == "__main__":
    ppo_abs_continuous.launch(gae=gae)
