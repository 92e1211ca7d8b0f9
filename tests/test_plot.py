"""tools/plot.py draws what a run writes, and refuses anything else in one line."""

import json

import numpy as np
import pytest
from helpers import ROOT, FakeEnvs, end_of, start, unpacked

from tools import plot

TOOL = ROOT / "tools" / "plot.py"
HEADER = "global_step,charts/episodic_return,abs/rollout_length,abs/behavioral_divergence\n"
ROWS = "64,,32,0.9\n128,3.0,32,\n190,4.5,31,0.2\n"
ARGS = {"env_id": "ALE/SpaceInvaders-v5", "seed": 7, "total_timesteps": 190, "num_steps": 32}
ARGS |= {"adapt_rollout": True, "rollout_min": 16, "rollout_max": 64, "update_epochs": 2}
ARGS |= {"num_minibatches": 4, "delta_min": 0.05, "delta_max": 0.95, "adapt_frequency": 7}
PPO = {"script": "ppo_abs.py", "delta_min": 0.01, "delta_max": 0.1}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plot.plt.close("all")


def make_run(folder, metrics=HEADER + ROWS, script="pqn_abs.py", **args):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"script": script, "args": ARGS | args}))
    (folder / "metrics.csv").write_text(metrics)
    return folder


def axes_of(folder, metrics, **args):
    """The panels of a run with these metrics, drawn as far as pixels."""
    figure = plot.draw([plot.read_run(make_run(folder, metrics, **args))])
    figure.canvas.draw()
    return figure.axes


def lines_of(axis):
    """The curves on an axis, without the limits."""
    return [line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() == "-"]


def limits_of(axis):
    return {line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"}


def words_in(axis):
    """What is written in a panel. The names of limits stand beside it, where no curve can be."""
    return [text.get_text() for text in axis.texts if text.get_position()[0] < 1]


def test_the_rows_are_drawn_and_the_limits(tmp_path):
    returns, divergence, length = axes_of(tmp_path / "a", HEADER + ROWS)
    assert lines_of(returns) == [[[128, 3.0], [190, 4.5]]]
    assert lines_of(divergence) == [[[64, 0.9], [190, 0.2]]]
    assert lines_of(length) == [[[64, 32], [128, 32], [190, 31]]]
    assert limits_of(divergence) == {0.05, 0.95} and limits_of(length) == {16, 64}
    assert length.get_ylim()[0] < 16 and length.get_ylim()[1] > 64
    assert not any(words_in(axis) for axis in (returns, divergence, length))
    for axis in (returns, divergence, length):
        low, high = axis.get_xlim()
        assert low == 0 and 190 < high < 200


def test_a_run_that_training_wrote_is_drawn(train):
    """Guards the names of files, options and columns that pqn_abs.py gives."""
    folder = train(FakeEnvs(4), total_timesteps=2000, num_minibatches=2, adapt_frequency=2)
    run = plot.read_run(folder)
    assert (run.arm, run.signal) == ("PQN with ABS", plot.DIVERGENCE)
    for axis in plot.draw([run]).axes:
        assert len(lines_of(axis)[0]) > 3 and not words_in(axis)


def test_more_columns_are_drawn_below(tmp_path):
    metrics = HEADER.replace("\n", ",losses/td_loss\n") + "64,,32,0.9,0.5\n128,3.0,32,,0.25\n"
    run = make_run(tmp_path / "a", metrics)
    panel = plot.draw([plot.read_run(run)], ("losses/td_loss",)).axes[3]
    assert (lines_of(panel), panel.get_ylabel()) == ([[[64, 0.5], [128, 0.25]]], "losses/td_loss")
    assert not limits_of(panel)
    with pytest.raises(ValueError, match=r"--also loss: .* has only global_step, "):
        plot.main(plot.Args((run,), also=("loss",)))


def test_kl_is_drawn_where_it_drives_l(tmp_path):
    metrics = (HEADER + ROWS).replace("abs/behavioral_divergence", "abs/kl_divergence")
    ppo = make_run(tmp_path / "ppo", metrics, **PPO)
    figure = plot.draw([plot.read_run(ppo)])
    assert figure.axes[1].get_ylabel().startswith("KL divergence")
    assert figure.axes[1].get_yscale() == "log"
    assert limits_of(figure.axes[1]) == {0.01, 0.1}
    figure = plot.draw([plot.read_run(ppo), plot.read_run(make_run(tmp_path / "pqn"))])
    assert [len(lines_of(axis)) for axis in figure.axes] == [2, 1, 1, 2]
    assert limits_of(figure.axes[1]) == {0.05, 0.95}


def test_where_noise_drives_l_delta_has_no_limits(tmp_path):
    figure = plot.draw([plot.read_run(make_run(tmp_path / "a", micro_batches=16))])
    assert not limits_of(figure.axes[1]) and limits_of(figure.axes[2]) == {16, 64}


def test_the_runs_of_results_are_read(tmp_path):
    """Also those of early versions, whose options were others."""
    for archive in ROOT.glob("results/*/*.tar.gz"):
        name = archive.relative_to(ROOT / "results").as_posix().removesuffix(".tar.gz")
        unpacked(name, tmp_path / archive.parent.name)
    runs = [path.parent for path in tmp_path.rglob("config.json") if "p3o_tokens" not in path.parts]
    assert len(runs) > 400
    for folder in runs:
        plot.read_run(folder)


def test_a_run_in_progress_is_drawn(tmp_path):
    run = make_run(tmp_path / "run")
    first = make_run(tmp_path / "first row", HEADER + ROWS.splitlines(keepends=True)[0])
    out = end_of(start(TOOL, run, first, "--out", tmp_path / "a.png"))
    assert out == (f"{tmp_path}/a.png\n", "")
    image = plot.plt.imread(tmp_path / "a.png")[..., :3]
    for colour in plot.COLOURS[:2]:  # both runs are there
        wanted = np.array(plot.matplotlib.colors.to_rgb(colour))
        assert (np.abs(image - wanted).max(axis=2) < 0.01).any()


@pytest.mark.parametrize(
    "script, args, arm",
    [
        ("pqn_abs", {}, "PQN with ABS"),
        ("pqn_abs.py", {"adapt_rollout": False, "num_steps": 48}, "PQN, L = 48"),
        ("ppo_abs", {"adapt_rollout": False}, "PPO, L = 32"),
        ("my_own_gns", {"micro_batches": 16}, "PQN with noise scale"),
        ("my_own_ppo", {}, "PPO with ABS"),
        ("minatar_abs", {}, "PQN with ABS"),
    ],
)
def test_arms_have_names_that_people_use(tmp_path, script, args, arm):
    metrics = (HEADER + ROWS).replace("behavioral", "kl" if "PPO" in arm else "behavioral")
    run = plot.read_run(make_run(tmp_path / "a", metrics, script=script, **args))
    assert (run.arm, run.game) == (arm, "Space Invaders")


def test_games_have_names_that_people_use():
    names = {"BreakoutNoFrameskip-v4": "Breakout", "ALE/MsPacman-v5": "Ms Pacman"}
    names |= {"space_invaders": "Space Invaders", "UpNDown-v4": "Up N Down"}
    assert {env_id: plot.title(env_id) for env_id in names} == names


@pytest.mark.parametrize("script, column", [("pqn_abs.py", "behavioral"), ("ppo_abs.py", "kl")])
def test_an_empty_panel_says_what_is_missing(script, column, tmp_path):
    metrics = HEADER.replace("behavioral", column) + "256,,32,\n512,,32,\n"
    returns, divergence, length = axes_of(tmp_path / "a", metrics, script=script)
    assert words_in(returns) == ["no episode has ended yet"]
    assert words_in(divergence) == ["not measured yet"]
    assert not words_in(length) and lines_of(length) == [[[256, 32], [512, 32]]]


@pytest.mark.parametrize(
    "bad, out, says",
    [
        ("empty", "plot.png", "No such file or directory"),
        ("header", "plot.png", "no data"),
        ("tokens", "plot.png", "results/p3o_tokens/figure.py"),
        ("good", "nowhere/plot.png", "No such file or directory"),
    ],
)
def test_bad_input_is_one_line(tmp_path, bad, out, says):
    make_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "header", HEADER)
    make_run(tmp_path / "tokens", script="p3o_tokens.py")
    words = tmp_path / "good", tmp_path / bad, "--out", tmp_path / out
    output, error = end_of(start(TOOL, *words), status=1)
    assert (output, error.count("\n")) == ("", 1)
    assert error.startswith("plot.py: ") and says in error
    assert not (tmp_path / out).exists()
