"""examples/sb3_abs.py, checked from outside: Stable-Baselines3's PPO with ABS."""

import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from helpers import ROOT

sys.path.append(str(ROOT / "examples"))
pytest.importorskip("stable_baselines3")
import sb3_abs
from stable_baselines3 import PPO


class Recorder(sb3_abs.PPOWithABS):
    """Keeps what each train() sees and what each measurement gives."""

    def train(self):
        buffer = self.rollout_buffer
        sizes = (buffer.buffer_size, buffer.pos, len(buffer.observations))
        n_steps = self.n_steps
        super().train()
        self.seen.append((n_steps, self.batch_size, sizes))

    def adapt(self):
        super().adapt()
        self.measured.append(self.logger.name_to_value["abs/behavioral_divergence"])


def make(**options):
    defaults = {"n_steps": 64, "batch_size": 16, "adapt_frequency": 2}
    defaults |= {"device": "cpu", "seed": 1}
    model = Recorder("MlpPolicy", gymnasium.make("CartPole-v1"), **(defaults | options))
    model.seen, model.measured = [], []
    return model


def expected_lengths(measured, count, length=64.0, every=2):
    """Rollout lengths by Eq. 4, in another way: geometric interpolation by np.interp."""
    lengths = []
    given = iter(measured)
    for call in range(1, count + 1):
        lengths.append(round(length))
        if call % every == 0:
            clipped = np.log(np.clip(next(given), 0.05, 0.95))
            share = np.interp(clipped, np.log([0.05, 0.95]), [0, 1])
            length += 0.1 * ((128 - share * (128 - 32)) - length)
    return lengths


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
    assert model.num_timesteps == sum(lengths)


def test_save_and_load_go_on(tmp_path):
    """Guards L, the counter and the weights, and a second learn() after them."""
    model = make()
    model.learn(640)
    model.save(tmp_path / "model")
    loaded = Recorder.load(tmp_path / "model", env=gymnasium.make("CartPole-v1"))
    assert loaded.length == model.length and loaded.train_calls == model.train_calls
    assert loaded.n_steps == loaded.rollout_buffer.buffer_size == round(model.length)
    loaded.seen, loaded.measured = [], []
    loaded.learn(640)
    lengths = [n_steps for n_steps, *_ in loaded.seen]
    assert lengths == expected_lengths(loaded.measured, len(lengths), length=model.length)
    assert loaded.abs_limits == model.abs_limits
    assert loaded.num_minibatches == 4


def test_it_is_ppo_where_nothing_is_measured():
    """Guards the rest of PPO: without a measurement, the weights are Stable-Baselines3's own."""
    ours = make(adapt_frequency=10**6)
    ours.learn(300)
    plain = PPO(
        "MlpPolicy", gymnasium.make("CartPole-v1"), n_steps=64, batch_size=16, seed=1, device="cpu"
    )
    plain.learn(300)
    for name, weights in plain.policy.state_dict().items():
        assert weights.equal(ours.policy.state_dict()[name])


@pytest.mark.parametrize(
    "observations, actions, says",
    [
        (Box(-1, 1, (2,)), Box(-1, 1, (2,)), "one discrete action"),
        (Box(-1, 1, (2,)), MultiDiscrete([2, 3]), "one discrete action"),
        (Box(-1, 1, (2,)), MultiBinary(2), "one discrete action"),
        (Dict({"a": Box(-1, 1, (2,))}), Discrete(2), "one array"),
    ],
)
def test_what_it_does_not_serve_is_refused_at_construction(observations, actions, says):
    env = gymnasium.Env()
    env.observation_space, env.action_space = observations, actions
    policy = "MultiInputPolicy" if says == "one array" else "MlpPolicy"
    with pytest.raises(ValueError, match=says):
        sb3_abs.PPOWithABS(policy, env, device="cpu")
