"""examples/sb3_abs.py, checked from outside: Stable-Baselines3's PPO with ABS."""

import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from helpers import ROOT, same_weights

sys.path.append(str(ROOT / "examples"))
pytest.importorskip("stable_baselines3")
import sb3_abs
from stable_baselines3 import PPO


class Recorder(sb3_abs.PPOWithABS):
    def train(self):
        buffer = self.rollout_buffer
        sizes = (buffer.buffer_size, buffer.pos, len(buffer.observations))
        n_steps = self.n_steps
        super().train()
        self.seen.append((n_steps, self.batch_size, sizes))

    def adapt(self):
        super().adapt()
        self.measured.append(self.logger.name_to_value["abs/behavioral_divergence"])


def make(every=2):
    options = {"n_steps": 64, "batch_size": 16, "device": "cpu", "seed": 1}
    model = Recorder("MlpPolicy", "CartPole-v1", adapt_frequency=every, **options)
    model.seen, model.measured = [], []
    return model


def expected_lengths(measured, count, length=64.0):
    """Rollout lengths by Eq. 4, in another way: geometric interpolation by np.interp."""
    lengths = []
    for divergence in [*measured, None]:
        lengths += 2 * [round(length)]  # K is 2
        if divergence is not None:
            share = np.interp(np.log(max(divergence, 0.05)), np.log([0.05, 0.95]), [0, 1])
            length += 0.1 * ((128 - share * (128 - 32)) - length)
    return lengths[:count]


def test_rollouts_follow_equation_4():
    """Guards each rollout's length and number of mini-batches, and that all its rows count."""
    model = make()
    model.learn(3000)
    lengths = [n_steps for n_steps, *_ in model.seen]
    assert len(set(lengths)) > 3
    assert lengths == expected_lengths(model.measured, len(lengths))
    for n_steps, batch_size, sizes in model.seen:
        assert sizes == (n_steps, n_steps, n_steps)
        assert np.ceil(n_steps / batch_size) == 4  # no remainder makes a fifth mini-batch


def test_save_and_load_go_on(tmp_path):
    """L, and the number of mini-batches. An n_steps given to load() holds for K rollouts: 2."""
    model = make()
    model.learn(640)
    model.save(tmp_path / "model")
    for given in ({}, {"n_steps": 99, "batch_size": 99}):
        loaded = Recorder.load(tmp_path / "model", gymnasium.make("CartPole-v1"), **given)
        loaded.seen, loaded.measured = [], []
        loaded.learn(640)
        lengths = [n_steps for n_steps, *_ in loaded.seen]
        expected = expected_lengths(loaded.measured, len(lengths), model.length)
        assert lengths[:2] == ([99, 99] if given else expected[:2]) and lengths[2:] == expected[2:]
        assert loaded.seen[-1][1] == np.ceil(lengths[-1] / 4)


def test_it_is_ppo_where_nothing_is_measured():
    """Guards the rest of PPO: without a measurement, the weights are Stable-Baselines3's own."""
    ours = make(every=10**6)
    ours.learn(300)
    plain = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=16, seed=1, device="cpu")
    plain.learn(300)
    assert same_weights(plain.policy.state_dict(), ours.policy.state_dict())


@pytest.mark.parametrize(
    "policy, observations, actions, says",
    [
        ("MlpPolicy", Box(-1, 1, (2,)), Box(-1, 1, (2,)), "one discrete action"),
        ("MultiInputPolicy", Dict({"a": Box(-1, 1, (2,))}), Discrete(2), "one array"),
    ],
)
def test_what_it_does_not_serve_is_refused_at_construction(policy, observations, actions, says):
    env = gymnasium.Env()
    env.observation_space, env.action_space = observations, actions
    with pytest.raises(ValueError, match=says):
        sb3_abs.PPOWithABS(policy, env, device="cpu")
