"""The example for MinAtar: its games are MinAtar's own, its network PQN's, and it learns."""

import minatar
import numpy as np
import pytest
import torch
from helpers import ROOT, config, end_of, start

from examples import minatar_abs

SCRIPT = ROOT / "examples" / "minatar_abs.py"
PARTS = {name: getattr(minatar_abs, name) for name in ("Args", "make_envs", "QNetwork")}


@pytest.mark.parametrize("game", minatar_abs.GAMES)
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
    endings = 0
    for _ in range(minatar_abs.MAX_STEPS + 10):
        actions = rng.integers(envs.single_action_space.n, size=count)
        observations, rewards, terminated, truncated, info = envs.step(actions)
        for i, one in enumerate(plain):
            reward, over = one.act(one.minimal_action_set()[actions[i]])
            assert (reward, over) == (rewards[i], terminated[i])
            assert not truncated[i] or over  # Freeway ends by itself as the time limit does
            if over:
                assert np.array_equal(info["final_obs"][i], one.state())
                one.reset()
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
    envs = minatar_abs.make_envs(minatar_abs.Args(env_id="seaquest", num_envs=5))
    network = minatar_abs.QNetwork(envs)
    shapes = [tuple(parameter.shape) for parameter in network.parameters()]
    hidden = [(128, 1024), (128,), (128,), (128,)]
    assert shapes == [(16, 10, 3, 3), (16,), (16,), (16,), *hidden, (6, 128), (6,)]
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


def test_an_unknown_game_is_refused(refused):
    """Guards --env-id: the line has all games."""
    line = refused("--env-id", "pong", **PARTS)
    assert "--env-id pong" in line and all(known in line for known in minatar_abs.GAMES)


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its folder carries its name."""
    small = ["--env-id", "freeway", "--num-envs", 4, "--num-minibatches", 2]
    process = start(SCRIPT, *small, "--total-timesteps", 1000, "--runs-dir", tmp_path)
    _, errors = end_of(process)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("freeway__minatar_abs__1__")
    assert f"--resume '{folder}'" in errors
    assert config(folder)["script"] == "minatar_abs.py"
    assert config(folder)["args"]["learning_rate"] == minatar_abs.Args().learning_rate
