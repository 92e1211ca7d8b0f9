"""tools/plot.py draws what a run writes, and refuses anything else in one line."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools import plot, scores

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


def refusal(capsys, *runs, out):
    """The line on stderr with which plot.py ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        plot.main(plot.Args(runs, out))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


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
        ("pqn_abs_xl.py", {"size": "xl"}, "PQN-XL with ABS"),
        ("pqn_abs_xl.py", {"size": "s"}, "PQN with ABS"),
        ("gns_baseline.py", {"delta_min": None, "delta_max": None}, "PQN with noise scale"),
        ("ppo_abs_continuous.py", {}, "PPO with ABS"),
        ("open_loop.py", {}, "open_loop with ABS"),
    ],
)
def test_arms_have_names_that_people_use(tmp_path, script, args, arm):
    run = plot.read_run(make_run(tmp_path / "a", script=script, **args))
    assert (run.arm, run.game) == (arm, "Space Invaders")


def test_games_have_names_that_people_use():
    names = {"BreakoutNoFrameskip-v4": "Breakout", "ALE/MsPacman-v5": "Ms Pacman"}
    names |= {"space_invaders": "Space Invaders", "MinAtar/SpaceInvaders-v1": "Space Invaders"}
    names |= {"HalfCheetah-v5": "Half Cheetah", "UpNDown-v4": "Up N Down"}
    assert {env_id: scores.title(env_id) for env_id in names} == names


def test_the_legend_says_once_what_all_runs_share(tmp_path):
    runs = []
    for name, seed in (("a", 1), ("b", 2), ("c", 2)):
        folder = make_run(tmp_path / name, seed=seed, precision="float32")
        runs.append(plot.read_run(folder))
    (legend,) = plot.draw(runs[:2]).legends
    assert legend.get_title().get_text() == "Space Invaders, PQN with ABS, float32"
    assert [text.get_text() for text in legend.get_texts()] == ["seed 1", "seed 2"]
    (legend,) = plot.draw(runs[1:]).legends  # equal runs go by their folders
    assert [text.get_text() for text in legend.get_texts()] == ["b", "c"]


def test_a_run_in_progress_is_drawn(tmp_path):
    run = make_run(tmp_path / "$^$", HEADER + ROWS + "254,4.0,6")  # nor is that a formula
    assert plot.read_run(run).columns["global_step"].tolist() == [64, 128, 190]
    first = make_run(tmp_path / "first row", HEADER + ROWS.splitlines(keepends=True)[0])
    command = [sys.executable, ROOT / "tools" / "plot.py", run, first, "--out", tmp_path / "a.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    image = plot.plt.imread(tmp_path / "a.png")[..., :3]
    for colour in plot.COLOURS[:2]:  # both runs are there
        wanted = np.array(plot.matplotlib.colors.to_rgb(colour))
        assert (np.abs(image - wanted).max(axis=2) < 0.01).any()


CONFIG = {"script": "pqn_abs.py", "args": ARGS}


@pytest.mark.parametrize(
    "metrics, config, says",
    [
        (None, None, "metrics.csv: No such file"),
        ("", None, "no data"),
        (HEADER, None, "no data"),
        (HEADER + "64,1.0", None, "no data"),
        ("a,b\n1,2\n", None, "no column global_step"),
        (HEADER + ROWS + "254,4.0\n" + ROWS, None, "damaged"),
        (HEADER + ROWS.replace("0.9", "much"), None, "damaged"),
        (HEADER + ROWS.replace("3.0", "1e308"), None, "beyond 1e30"),
        (HEADER + ROWS.replace("31", "-inf"), None, "beyond 1e30"),
        (HEADER + ROWS.replace("128", "nan"), None, "does not rise"),
        (HEADER + ROWS + ROWS, None, "does not rise"),
        (HEADER + ROWS, "{", "not JSON"),
        (HEADER + ROWS, "[" * 100_000, "not JSON"),
        (HEADER + ROWS, "[]", "names no script"),
        (HEADER + ROWS, json.dumps({"args": ARGS}), "names no script"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": None}), "no args"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"env_id": None}}), "env_id is null"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"seed": True}}), "seed is true"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"num_steps": 3.5}}), "num_steps"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"seed": -1}}), "out of range"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"delta_max": 1e999}}), "range"),
    ],
)
def test_a_broken_run_is_refused(tmp_path, capsys, metrics, config, says):
    runs = make_run(tmp_path / "good"), make_run(tmp_path / "bad", metrics, config)
    line = refusal(capsys, *runs, out=tmp_path / "plot.png")
    assert says in line and "bad" in line
    assert not (tmp_path / "plot.png").exists()


def test_what_is_no_run_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    binary = make_run(tmp_path / "binary")
    (binary / "metrics.csv").write_bytes(b"\xff\xfe\x00\n\xff\n")
    for runs in [(), (tmp_path,), (tmp_path / "nowhere",), (file,), (binary,)]:
        refusal(capsys, *runs, out=tmp_path / "plot.png")


@pytest.mark.parametrize("out", ["nowhere/plot.png", "plot.txt", "plot", "folder.png"])
def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys, out):
    run = make_run(tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    refusal(capsys, run, out=tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before


def small_files():
    """For a process that is about to start: no file may have more than 10,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


def test_a_full_disk_leaves_the_earlier_picture(tmp_path):
    run, out = make_run(tmp_path / "run"), tmp_path / "plot.png"
    out.write_text("earlier")
    command = [sys.executable, ROOT / "tools" / "plot.py", run, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert out.read_text() == "earlier" and sorted(tmp_path.iterdir()) == [out, run]
