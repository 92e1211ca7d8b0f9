"""Stable-Baselines3's PPO with Adaptive Batch Scaling: a subclass that imports ABS's two functions.

    python examples/sb3_abs.py

It needs `pip install stable-baselines3`. It serves Discrete actions, whose logits it compares, and
observations that are one array. Continuous or several actions, and dictionaries, are refused.

A callback would not do: after train(), learn() reads n_steps before it calls any hook. δ drives
n_steps, as in pqn_abs.py. PPO's δ is small, and pqn_abs.py's thresholds would let n_steps only
climb. The command above takes the 5% and 95% quantiles of two such runs, rounded, as its own.

load() goes on with the saved length and number of mini-batches. An n_steps that is given to it
holds until the next measurement, a batch_size not at all.
"""

import argparse
import copy
import math
import sys
from pathlib import Path

import torch
from gymnasium.spaces import Dict, Discrete
from stable_baselines3 import PPO

sys.path.append(str(Path(__file__).resolve().parents[1]))
from pqn_abs import behavioral_divergence, rollout_length


class PPOWithABS(PPO):
    """PPO whose n_steps follows the Behavioral Divergence.

    batch_size is that of the first rollout. Then the number of mini-batches stays, up to rounding.
    """

    def __init__(self, *args, adapt_frequency=10, abs_limits=None, **kwargs):
        self.adapt_frequency = adapt_frequency  # K
        self.abs_limits = abs_limits or {}
        self.train_calls = 0
        self.length = None  # L, a real number
        super().__init__(*args, **kwargs)

    def _setup_model(self):
        if not isinstance(self.action_space, Discrete):
            raise ValueError(f"needs one discrete action, not {self.action_space}")
        if isinstance(self.observation_space, Dict):
            raise ValueError(f"needs observations that are one array: {self.observation_space}")
        super()._setup_model()
        if self.length is None:
            self.length = float(self.n_steps)
            self.num_minibatches = math.ceil(self.n_steps * self.n_envs / self.batch_size)
        defaults = {"rollout_min": self.n_steps // 2, "rollout_max": 2 * self.n_steps}
        defaults |= {"delta_min": 0.05, "delta_max": 0.95, "beta": 0.1}
        self.abs_limits = defaults | self.abs_limits
        self.old_policy = copy.deepcopy(self.policy)  # θ_old; it can't be copied later

    def _excluded_save_params(self):
        return [*super()._excluded_save_params(), "old_policy"]

    def train(self):
        self.train_calls += 1
        is_measured = self.train_calls % self.adapt_frequency == 0
        if is_measured:
            self.old_policy.load_state_dict(self.policy.state_dict())
        # SB3 fixes the size of a mini-batch. With ABS, their number is fixed.
        self.batch_size = math.ceil(self.n_steps * self.n_envs / self.num_minibatches)
        # The last rollout overshoots, and would make a linear schedule negative.
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)
        super().train()
        if is_measured:
            self.adapt()

    @torch.no_grad()
    def adapt(self):
        """Measure δ on the rollout that was just learned from, and set the next one's length."""
        obs = self.rollout_buffer.observations  # flat after train(): (n_steps * n_envs, ...)
        sample = torch.randperm(len(obs))[:2048].numpy()
        states = torch.as_tensor(obs[sample], device=self.device)
        divergence = behavioral_divergence(
            lambda batch: self.policy.get_distribution(batch).distribution.logits,
            lambda batch: self.old_policy.get_distribution(batch).distribution.logits,
            states,
        )
        self.length = rollout_length(divergence, self.length, **self.abs_limits)
        self.n_steps = self.rollout_buffer.buffer_size = round(self.length)  # reset() allocates it
        self.logger.record("abs/behavioral_divergence", divergence)
        self.logger.record("abs/rollout_length", self.n_steps)


if __name__ == "__main__":
    plain = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=plain).parse_args()
    settings = {"n_steps": 256, "adapt_frequency": 2, "verbose": 1}
    settings["abs_limits"] = {"delta_min": 0.02, "delta_max": 0.1}
    model = PPOWithABS("MlpPolicy", "CartPole-v1", **settings)
    model.learn(50_000)
