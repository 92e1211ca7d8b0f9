"""tools/plot.py draws what a run writes, and refuses anything else in one line."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools import plot

ROOT = Path(__file__).resolve().parents[1]
HEADER = "global_step,charts/episodic_return,abs/rollout_length,abs/behavioral_divergence\n"
ROWS = "64,,32,0.9\n128,3.0,32,\n190,4.5,31,0.2\n"
ARGS = {"env_id": "ALE/SpaceInvaders-v5", "seed": 7, "total_timesteps": 190, "num_steps": 32}
ARGS |= {"adapt_rollout": True, "rollout_min": 16, "rollout_max": 64, "update_epochs": 2}
ARGS |= {"num_minibatches": 4, "delta_min": 0.05, "delta_max": 0.95}


def make_run(folder, metrics=HEADER + ROWS, config=None, script="pqn_abs.py", **args):
    folder.mkdir()
    config = config or json.dumps({"script": script, "args": ARGS | args})
    (folder / "config.json").write_text(config)
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics)
    return folder


def lines_of(axis):
    """The curves on an axis, without the limits."""
    return [line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() == "-"]


def limits_of(axis):
    return {line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"}


def test_the_rows_are_drawn_and_the_limits(tmp_path):
    figure = plot.draw([plot.read_run(make_run(tmp_path / "a"))])
    returns, divergence, length = figure.axes
    assert lines_of(returns) == [[[128, 3.0], [190, 4.5]]]
    assert lines_of(divergence) == [[[64, 0.9], [190, 0.2]]]
    assert lines_of(length) == [[[64, 32], [128, 32], [190, 31]]]
    assert limits_of(divergence) == {0.05, 0.95} and limits_of(length) == {16, 64}
    assert length.get_ylim()[0] < 16 and length.get_ylim()[1] > 64


def test_kl_is_drawn_where_it_drives_l(tmp_path):
    metrics = (HEADER + ROWS).replace("abs/behavioral_divergence", "abs/kl_divergence")
    ppo = make_run(tmp_path / "ppo", metrics, script="ppo_abs.py", delta_min=0.01, delta_max=0.1)
    figure = plot.draw([plot.read_run(ppo)])
    assert [axis.get_ylabel() for axis in figure.axes][1] == "KL\ndivergence"
    assert limits_of(figure.axes[1]) == {0.01, 0.1}
    figure = plot.draw([plot.read_run(ppo), plot.read_run(make_run(tmp_path / "pqn"))])
    assert [len(lines_of(axis)) for axis in figure.axes] == [2, 1, 1, 2]
    assert limits_of(figure.axes[1]) == {0.05, 0.95}


def test_fixed_runs_have_no_limits(tmp_path):
    figure = plot.draw([plot.read_run(make_run(tmp_path / "a", adapt_rollout=False))])
    assert not limits_of(figure.axes[1]) and not limits_of(figure.axes[2])


@pytest.mark.parametrize(
    "script, args, arm",
    [
        ("pqn_abs.py", {}, "PQN with ABS"),
        ("pqn_abs.py", {"adapt_rollout": False, "num_steps": 48}, "PQN, L = 48"),
        ("pqn_abs_xl.py", {}, "PQN with ABS"),
        ("p3o_abs.py", {"adapt_rollout": False}, "P3O, L = 32"),
        ("gns_baseline.py", {"delta_min": None, "delta_max": None}, "PQN with noise scale"),
        ("gns_baseline.py", {"signal": "bd"}, "PQN with ABS"),
        ("ppo_abs_continuous.py", {}, "PPO with ABS"),
        ("minatar_abs.py", {}, "PQN with ABS"),
    ],
)
def test_arms_have_names_that_people_use(tmp_path, script, args, arm):
    run = plot.read_run(make_run(tmp_path / "a", script=script, **args))
    assert (run.arm, run.game) == (arm, "Space Invaders")


def test_games_have_names_that_people_use():
    names = {"BreakoutNoFrameskip-v4": "Breakout", "ALE/MsPacman-v5": "Ms Pacman"}
    names |= {"space_invaders": "Space Invaders", "MinAtar/SpaceInvaders-v1": "Space Invaders"}
    names |= {"HalfCheetah-v5": "Half Cheetah", "UpNDown-v4": "Up N Down"}
    assert {env_id: plot.title(env_id) for env_id in names} == names


def test_the_legend_names_each_run(tmp_path):
    runs = []
    for name, seed in (("a", 1), ("b", 2), ("c", 2)):
        runs.append(plot.read_run(make_run(tmp_path / name, seed=seed)))
    (legend,) = plot.draw(runs[:2]).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [f"Space Invaders, PQN with ABS, seed {seed}" for seed in (1, 2)]
    (legend,) = plot.draw(runs[1:]).legends  # equal runs go by their folders
    assert [text.get_text() for text in legend.get_texts()] == ["b", "c"]


def test_a_run_in_progress_is_drawn(tmp_path):
    run = make_run(tmp_path / "run", HEADER + ROWS + "254,4.0,6")
    assert plot.read_run(run).columns["global_step"].tolist() == [64, 128, 190]
    first = make_run(tmp_path / "first row", HEADER + ROWS.splitlines(keepends=True)[0])
    command = [sys.executable, ROOT / "tools" / "plot.py", run, first, "--out", tmp_path / "a.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/a.png\n", "")
    image = plot.plt.imread(tmp_path / "a.png")[..., :3]
    for colour in plot.COLOURS[:2]:  # both runs are there
        wanted = np.array(plot.matplotlib.colors.to_rgb(colour))
        assert (np.abs(image - wanted).max(axis=2) < 0.01).any()


CONFIG = {"script": "pqn_abs.py", "args": ARGS}


@pytest.mark.parametrize(
    "metrics, config, says",
    [
        (None, None, "No such file"),
        ("", None, "no data"),
        (HEADER, None, "no data"),
        (HEADER + "64,1.0", None, "no data"),
        ("a,b\n1,2\n", None, "damaged"),
        (HEADER + ROWS + "254,4.0\n" + ROWS, None, "damaged"),
        (HEADER + ROWS.replace("0.9", "much"), None, "damaged"),
        (HEADER + ROWS.replace("3.0", "1e308"), None, "beyond 1e+30"),
        (HEADER + ROWS.replace("31", "-inf"), None, "beyond 1e+30"),
        (HEADER + ROWS.replace("128", "nan"), None, "doesn't rise"),
        (HEADER + ROWS + ROWS, None, "doesn't rise"),
        (HEADER + ROWS, "{", "damaged, or not a run's"),
        (HEADER + ROWS, "[" * 100_000, "damaged, or not a run's"),
        (HEADER + ROWS, "[]", "not a run's"),
        (HEADER + ROWS, json.dumps({"args": ARGS}), "not a run's"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": None}), "not a run's"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"env_id": None}}), "env_id is None"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"seed": True}}), "seed is True"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"num_steps": 3.5}}), "num_steps"),
        (
            HEADER + ROWS,
            json.dumps(CONFIG | {"args": ARGS | {"delta_max": 1e999}}),
            "delta_max is inf",
        ),
    ],
)
def test_a_broken_run_is_refused(tmp_path, metrics, config, says):
    """Guards bad input: one line that names the file."""
    runs = make_run(tmp_path / "good"), make_run(tmp_path / "bad", metrics, config)
    with pytest.raises((OSError, ValueError)) as refusal:
        plot.main(plot.Args(runs, tmp_path / "plot.png"))
    line = str(refusal.value)
    assert says in line and "bad" in line and "\n" not in line
    assert not (tmp_path / "plot.png").exists()


def small_files():
    """For a process that is about to start: no file may have more than 10,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


@pytest.mark.parametrize("out", ["nowhere/plot.png", "plot.txt", "plot", "folder.png", "full.png"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, out):
    """Guards the last resort of the command line; full.png is a full disk."""
    run = make_run(tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    limit = small_files if out == "full.png" else None
    command = [sys.executable, ROOT / "tools" / "plot.py", run, "--out", tmp_path / out]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("plot.py: ")


def test_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name at least one"):
        plot.main(plot.Args((), tmp_path / "plot.png"))
