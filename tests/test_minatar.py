"""The example plays MinAtar as MinAtar plays it, trains and resumes through pqn_abs.py, and learns."""

import inspect

import minatar
import numpy as np
import pytest
import torch
from helpers import ROOT, column, load, rows, same, start, without_clock

import pqn_abs
from examples import minatar_abs

SCRIPT = ROOT / "examples" / "minatar_abs.py"


def run(folder, *options):
    """The example's exit status, and the lines it writes on stderr without the progress bar's."""
    process = start(SCRIPT, *options, "--runs-dir", folder)
    _, errors = process.communicate(timeout=120)
    return process.returncode, [line for line in errors.splitlines() if "step/s" not in line and line]


# --- The environments ---


@pytest.mark.parametrize("game", minatar_abs.GAMES)
def test_games_are_minatars_own(game):
    """Step by step, against MinAtar's own interface with its own defaults."""
    count, rng = 3, np.random.default_rng(1)
    envs = minatar_abs.make_envs(minatar_abs.Args(env_id=game, num_envs=count))
    plain = [minatar.Environment(game) for _ in range(count)]
    for i, one in enumerate(plain):
        one.seed(7 + i)
        one.reset()
    observations, _ = envs.reset(seed=7)
    assert observations.dtype == bool and observations.shape == (count, 10, 10, plain[0].n_channels)
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


def test_an_endless_game_is_truncated(monkeypatch):
    monkeypatch.setattr(minatar.environments.breakout.Env, "act", lambda self, action: (0, False))
    envs = minatar_abs.make_envs(minatar_abs.Args(num_envs=1))
    envs.reset(seed=1)
    endings = [envs.step([0])[2:4] for _ in range(minatar_abs.MAX_STEPS)]
    assert not np.any(endings[:-1]) and not np.any([terminated for terminated, _ in endings])
    assert endings[-1][1].all()


def test_help_names_all_games():
    line = next(line for line in inspect.getsource(minatar_abs.Args).splitlines() if "env_id" in line)
    assert len(minatar_abs.GAMES) == 5 and all(game in line for game in minatar_abs.GAMES)


# --- The network ---


def test_network_is_pqns():
    """Computed a second time with numpy: convolution, LayerNorm over channels, 128 hidden units, LayerNorm."""
    envs = minatar_abs.make_envs(minatar_abs.Args(env_id="seaquest", num_envs=5))
    network = minatar_abs.QNetwork(envs)
    assert [tuple(p.shape) for p in network.parameters()] == [
        *[(16, 10, 3, 3), (16,), (16,), (16,), (128, 1024), (128,), (128,), (128,), (6, 128), (6,)]
    ]
    generator = torch.Generator().manual_seed(1)
    for p in network.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 10
    images = torch.rand((5, 10, 10, 10), generator=generator) < 0.2
    kernel, *rest = (p.detach().double().numpy() for p in network.parameters())
    bias, scale1, shift1, w2, b2, scale2, shift2, w3, b3 = rest

    def norm_relu(x, scale, shift):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return np.maximum(x * scale + shift, 0)

    windows = np.lib.stride_tricks.sliding_window_view(images.numpy().astype(float), (3, 3), axis=(1, 2))
    x = norm_relu(np.einsum("nyxcij,ocij->nyxo", windows, kernel) + bias, scale1, shift1)
    x = norm_relu(x.reshape(5, -1) @ w2.T + b2, scale2, shift2)
    assert network(images).dtype == torch.float32
    np.testing.assert_allclose(network(images).detach().numpy(), x @ w3.T + b3, rtol=1e-4, atol=1e-5)


# --- Runs ---


@pytest.mark.parametrize("game", ["Breakout", "pong", "", "../breakout"])
def test_unknown_game_gets_one_line(tmp_path, monkeypatch, capsys, game):
    monkeypatch.chdir(tmp_path)
    for name in ("make_envs", "QNetwork", "Args"):
        monkeypatch.setattr(pqn_abs, name, getattr(minatar_abs, name))
    with pytest.raises(SystemExit) as ended:
        pqn_abs.main(pqn_abs.parse_args(["--env-id", game]))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f"--env-id {game} is no MinAtar game" in line
    assert all(known in line for known in minatar_abs.GAMES)
    assert not list(tmp_path.iterdir())


def test_a_run_learns_and_goes_on(tmp_path):
    """Breakout in 40,000 steps; a random policy scores 0.4."""
    status, errors = run(tmp_path, "--total-timesteps", 40_000, "--adapt-frequency", 4)
    assert (status, errors) == (0, [])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("breakout__pqn_abs__1__")
    scores = column(folder / "metrics.csv", "charts/episodic_return")
    assert scores[0] < 0.8 and max(scores) > 1.0
    assert len(set(column(folder / "metrics.csv", "abs/rollout_length"))) > 1

    before, count = load(folder), len(rows(folder / "metrics.csv"))
    assert run(tmp_path, "--resume", folder / "checkpoint.pt", "--total-timesteps", 42_000) == (0, [])
    assert len(rows(folder / "metrics.csv")) > count
    assert load(folder)["global_step"] >= 42_000 > before["global_step"]
    assert list(tmp_path.iterdir()) == [folder]


def test_same_seed_same_numbers(train, tmp_path):
    folders = []
    for seed in (1, 1, 2):
        sizes = {"num_envs": 4, "num_minibatches": 2, "adapt_frequency": 2, "total_timesteps": 1500}
        options = {"env_id": "asterix", "seed": seed, "runs_dir": str(tmp_path / str(len(folders)))}
        folders.append(train(minatar_abs.make_envs, minatar_abs.QNetwork, **sizes, **options))
    one, again, other = folders
    assert without_clock(one / "metrics.csv") == without_clock(again / "metrics.csv")
    assert same(load(one)["network"], load(again)["network"]) and not same(load(one)["network"], load(other)["network"])


def test_arguments_come_from_the_checkpoint(train, monkeypatch, capsys):
    """parse_args takes the example's options, and refuses those that contradict the checkpoint."""
    folder = train(minatar_abs.make_envs, minatar_abs.QNetwork, env_id="freeway", num_envs=4, total_timesteps=100)
    monkeypatch.setattr(pqn_abs, "Args", minatar_abs.Args)
    args = pqn_abs.parse_args(["--resume", str(folder / "checkpoint.pt"), "--total-timesteps", "200"])
    assert (args.env_id, args.num_envs, args.learning_rate, args.total_timesteps) == ("freeway", 4, 2.5e-4, 200)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        pqn_abs.parse_args(["--resume", str(folder / "checkpoint.pt"), "--env-id", "breakout"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
