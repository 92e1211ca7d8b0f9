"""The example for MinAtar: its games are MinAtar's own, its network PQN's, and it learns."""

import minatar
import numpy as np
import pytest
import torch
from helpers import ROOT, end_of, start

from examples import minatar_abs

SCRIPT = ROOT / "examples" / "minatar_abs.py"
GAMES = ["asterix", "breakout", "freeway", "seaquest", "space_invaders"]


@pytest.mark.parametrize("game", GAMES)
def test_games_are_minatars_own(game):
    """Guards make_envs step by step, against MinAtar's own interface with its own defaults."""
    count = 3
    rng = np.random.default_rng(1)
    envs = minatar_abs.make_envs(minatar_abs.Args(env_id=game, num_envs=count))
    plain = [minatar.Environment(game) for _ in range(count)]
    for i, one in enumerate(plain):
        one.seed(7 + i)
        one.reset()
    observations, _ = envs.reset(seed=7)
    assert observations.dtype == bool
    assert np.array_equal(observations, [one.state() for one in plain])
    scores = [0] * count
    endings = 0
    for _ in range(minatar_abs.MAX_STEPS + 10):
        actions = rng.integers(envs.single_action_space.n, size=count)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        for i, one in enumerate(plain):
            reward, over = one.act(one.minimal_action_set()[actions[i]])
            assert (reward, over) == (rewards[i], terminated[i])
            scores[i] += reward
            assert not truncated[i] or over  # Freeway ends by itself as the time limit does
            if over:
                assert np.array_equal(info["final_obs"][i], one.state())
                assert info["_episode"][i] and info["episode"]["r"][i] == scores[i]
                one.reset()
                scores[i] = 0
                endings += 1
        assert np.array_equal(observations, [one.state() for one in plain])
    assert endings >= count


def test_an_endless_game_is_cut_off(monkeypatch):
    """Guards against a greedy policy that never ends a game: it is truncated, not terminated."""
    monkeypatch.setattr(minatar.environments.breakout.Env, "act", lambda self, action: (0, False))
    envs = minatar_abs.make_envs(minatar_abs.Args(num_envs=1))
    envs.reset(seed=1)
    endings = [envs.step([0])[2:4] for _ in range(minatar_abs.MAX_STEPS)]
    assert not np.any(endings[:-1])
    terminated, truncated = endings[-1]
    assert truncated.all() and not terminated.any()


def test_network_is_pqns():
    """Guards the layers: once more with numpy, convolution and 128 units, a norm after each."""
    args = minatar_abs.Args(env_id="seaquest", num_envs=5)
    network = minatar_abs.QNetwork(minatar_abs.make_envs(args), args)
    shapes = [tuple(parameter.shape) for parameter in network.parameters()]
    assert shapes[::4] == [(16, 10, 3, 3), (128, 1024), (6, 128)] and len(shapes) == 10
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    images = torch.rand((5, 10, 10, 10), generator=generator) < 0.2
    weights = [parameter.detach().double().numpy() for parameter in network.parameters()]
    kernel, bias, scale1, shift1, w2, b2, scale2, shift2, w3, b3 = weights

    def norm_relu(x, scale, shift):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return np.maximum(x * scale + shift, 0)

    pixels = images.numpy().astype(float)
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (3, 3), axis=(1, 2))
    x = norm_relu(np.einsum("nyxcij,ocij->nyxo", windows, kernel) + bias, scale1, shift1)
    x = norm_relu(x.reshape(5, -1) @ w2.T + b2, scale2, shift2)
    q_values = network(images)
    assert q_values.dtype == torch.float32
    np.testing.assert_allclose(q_values.detach().numpy(), x @ w3.T + b3, rtol=1e-4, atol=1e-5)


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its folder carries its name."""
    small = ["--env-id", "freeway", "--num-envs", 4, "--total-timesteps", 1000]
    end_of(start(SCRIPT, *small, "--runs-dir", tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("freeway__minatar_abs__1__")
