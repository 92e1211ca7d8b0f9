"""ppo_abs_continuous.py as CleanRL has it: a time limit ends an episode, and no value follows it.

python results/mujoco/truncation_as_end.py --env-id HalfCheetah-v5 --no-adapt-rollout
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import ppo_abs_continuous

gae = ppo_abs_continuous.gae


def gae_without_time_limits(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """gae, in which what was cut counts as terminated."""
    ended = terminated | truncated
    return gae(rewards, values, next_values, ended, truncated, gamma, gae_lambda)


ppo_abs_continuous.gae = gae_without_time_limits
ppo_abs_continuous.SCRIPT = Path(__file__).name

if __name__ == "__main__":
    ppo_abs_continuous.launch()
