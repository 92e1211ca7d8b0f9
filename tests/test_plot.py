"""tools/plot.py draws what a run writes, and refuses anything else in one line."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import FakeEnvs, end_of, start, unpacked

from tools import plot

ROOT = Path(__file__).resolve().parents[1]
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


def make_run(folder, metrics=HEADER + ROWS, config=None, script="pqn_abs.py", **args):
    folder.mkdir()
    config = config or json.dumps({"script": script, "args": ARGS | args})
    (folder / "config.json").write_text(config)
    if metrics is not None:
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
    """What is written in a panel, but for the names of limits."""
    return [text.get_text() for text in axis.texts if "$" not in text.get_text()]


def visible_markers(axis):
    """How many of a panel's points are inside it and have a marker."""
    count = 0
    for line in axis.lines:
        if line.get_marker() != "None":
            first, every = line.get_markevery()
            points = axis.transData.transform(line.get_xydata()[first::every])
            count += sum(axis.bbox.contains(*point) for point in points)
    return count


def ticks_of(axis):
    """The numbers that stand along the axis of steps."""
    low, high = axis.get_xlim()
    ticks = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
    return [label.get_text() for place, label in ticks if low <= place <= high]


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


def test_fixed_runs_have_no_limits(tmp_path):
    _, divergence, length = axes_of(tmp_path / "a", HEADER + ROWS, adapt_rollout=False)
    assert not limits_of(divergence) and not limits_of(length)


# --- Little data: what a new user draws first ---

NO_EPISODE = "no episode has ended yet"
NOT_MEASURED = "not measured yet: it is measured every 7 iterations"


@pytest.mark.parametrize("nothing", ["", "nan"])
@pytest.mark.parametrize("script", ["pqn_abs.py", "ppo_abs.py", "p3o_abs.py"])
def test_an_empty_panel_says_what_is_missing(script, nothing, tmp_path):
    """A run in whose time no episode has ended and nothing was measured."""
    name = "behavioral" if script == "pqn_abs.py" else "kl"
    rows = "".join(f"{step},{nothing},32,{nothing}\n" for step in (256, 512))
    metrics = HEADER.replace("behavioral", name) + rows
    returns, divergence, length = axes_of(tmp_path / "a", metrics, script=script)
    assert words_in(returns) == [NO_EPISODE] and words_in(divergence) == [NOT_MEASURED]
    for axis in (returns, divergence):  # no numbers that nothing stands behind
        assert not any(label.get_visible() for label in axis.get_yticklabels())
        assert not limits_of(axis)
    assert not words_in(length) and visible_markers(length) == 2
    assert ticks_of(length)[:2] in (["0", "200"], ["0", "250"])
    assert length.get_xlim()[0] == 0 and 512 < length.get_xlim()[1] < 550


def test_a_panel_without_data_waits_for_the_runs_that_it_is_about(tmp_path):
    """PPO measures every 50, PQN every 7 iterations."""
    kl = HEADER.replace("behavioral", "kl") + "64,,32,\n"
    ppo = make_run(tmp_path / "ppo", kl, **PPO, adapt_frequency=50)
    pqn = make_run(tmp_path / "pqn", HEADER + "64,,32,\n")
    figure = plot.draw([plot.read_run(ppo), plot.read_run(pqn)])
    assert words_in(figure.axes[1]) == [NOT_MEASURED]
    assert words_in(figure.axes[2]) == [NOT_MEASURED.replace("7", "50")]


@pytest.mark.parametrize("name", ["behavioral", "kl"])
def test_one_point_can_be_seen(name, tmp_path):
    metrics = HEADER.replace("behavioral", name) + "64,3,32,0.5\n"
    for axis in axes_of(tmp_path / "a", metrics):
        assert visible_markers(axis) == 1 and not words_in(axis)


@pytest.mark.parametrize("level", [0, -21, 7])
def test_constants_have_an_axis_that_is_wider_than_rounding(level, tmp_path):
    metrics = HEADER + f"64,{level},32,0\n128,{level},32,0\n"
    returns, _, length = axes_of(tmp_path / "a", metrics, adapt_rollout=False)
    assert returns.get_ylim() == (level - 1, level + 1)
    ticks = [label.get_text() for label in length.get_yticklabels()]
    assert "32" in ticks and not any("." in tick for tick in ticks)


def test_a_kl_of_zero_has_no_logarithm(tmp_path):
    kl = HEADER.replace("behavioral", "kl")
    low = {"script": "ppo_abs.py", "delta_min": 0.0001, "delta_max": 0.0035}
    zero = axes_of(tmp_path / "a", kl + "64,1,32,0\n128,2,32,0\n", **low)[1]
    assert zero.get_yscale() == "linear" and visible_markers(zero) == 2
    bottom, top = zero.get_ylim()
    assert bottom < 0 and 0.0035 < top < 0.005  # the limits are apart
    mixed = axes_of(tmp_path / "b", kl + "64,1,32,0\n128,2,32,0.02\n", **PPO)[1]
    assert mixed.get_yscale() == "log" and visible_markers(mixed) == 1


def test_a_run_of_one_step_has_whole_steps_on_its_axis(tmp_path):
    *_, length = axes_of(tmp_path / "a", HEADER + "1,,1,\n")
    assert ticks_of(length) == ["0", "1"]


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
    run = make_run(tmp_path / "run", HEADER + ROWS + "254,4.0,6")
    assert plot.read_run(run).columns["global_step"].tolist() == [64, 128, 190]
    first = make_run(tmp_path / "first row", HEADER + ROWS.splitlines(keepends=True)[0])
    out = end_of(start(TOOL, run, first, "--out", tmp_path / "a.png"))
    assert out == (f"{tmp_path}/a.png\n", "")
    image = plot.plt.imread(tmp_path / "a.png")[..., :3]
    for colour in plot.COLOURS[:2]:  # both runs are there
        wanted = np.array(plot.matplotlib.colors.to_rgb(colour))
        assert (np.abs(image - wanted).max(axis=2) < 0.01).any()


# --- Names ---


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
        ("author_rules.py", {}, "PQN with ABS"),
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


def legend_of(folders):
    (legend,) = plot.draw([plot.read_run(folder) for folder in folders]).legends
    return legend.get_texts()


def test_the_legend_names_each_run(tmp_path):
    runs = []
    for name, seed in (("a", 1), ("b", 2), ("c", 2)):
        runs.append(make_run(tmp_path / name, seed=seed))
    names = [text.get_text() for text in legend_of(runs[:2])]
    assert names == [f"Space Invaders, PQN with ABS, seed {seed}" for seed in (1, 2)]
    assert [text.get_text() for text in legend_of(runs[1:])] == ["b", "c"]  # equal but for these
    (tmp_path / "d").mkdir()
    other = make_run(tmp_path / "d" / "c", seed=2)
    assert [text.get_text() for text in legend_of([runs[2], other])] == [str(runs[2]), str(other)]


def test_names_are_written_as_they_are(tmp_path):
    """To matplotlib, _ in front means that a line has no name, and $...$ is a formula."""
    names = ["_a", "$b$", "c$^d$", "__"]
    texts = legend_of([make_run(tmp_path / name) for name in names])
    assert [text.get_text() for text in texts] == names
    assert not any(text.get_parse_math() for text in texts)
    odd = tmp_path / "\udcff"  # a folder whose name is no text, but a byte
    names = [text.get_text() for text in legend_of([make_run(odd), tmp_path / "_a"])]
    assert names == ["?", "_a"]
    texts = legend_of([make_run(tmp_path / "x", env_id="_$5$")])
    assert texts[0].get_text().startswith(" $5$, ") and not texts[0].get_parse_math()


def test_curves_differ_in_grey_too(tmp_path):
    """Guards the markers: lines that lie on each other, in one colour."""
    rows = "".join(f"{step},1,32,0.5\n" for step in range(10, 1000, 10))
    runs = [plot.read_run(make_run(tmp_path / name, HEADER + rows)) for name in "abc"]
    for axis in plot.draw(runs).axes:
        lines = [line for line in axis.lines if line.get_linestyle() == "-"]
        assert len({line.get_marker() for line in lines}) == 3
        marked = []
        for line in lines:
            first, every = line.get_markevery()
            marked.append(set(range(99)[first::every]))
        assert not marked[0] & marked[1] and not marked[1] & marked[2]
        assert all(8 < len(points) < 13 for points in marked)


# --- What is refused ---

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
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"env_id": None}}), "not a run's"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"num_steps": None}}), "not a run's"),
        (HEADER + ROWS, json.dumps(CONFIG | {"args": ARGS | {"delta_max": 1e999}}), "not a run's"),
        (HEADER + ROWS, json.dumps({"script": "p3o_tokens.py", "args": {}}), "p3o_tokens"),
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


def refusal(*words, **options):
    """The one line of a command that is refused."""
    out, error = end_of(start(TOOL, *words, **options), status=2)
    assert (out, error.count("\n")) == ("", 1), error
    assert error.startswith("plot.py: ")
    return error


def test_a_run_of_p3o_tokens_has_no_episodes(tmp_path):
    config = json.dumps({"script": "p3o_tokens.py", "args": {"loss": "p3o", "seed": 1}})
    line = refusal(make_run(tmp_path / "tokens", HEADER + ROWS, config))
    assert "p3o_tokens.py, which has no episodes" in line
    assert "results/p3o_tokens/figure.py" in line


def small_files():
    """For a process that is about to start: no file may have more than 10,000 bytes."""
    import resource  # Windows has none

    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_full_disk_is_one_line(suffix, tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / f"full.{suffix}").symlink_to("/dev/full")
    assert "No space left" in refusal(run, "--out", tmp_path / f"full.{suffix}")
    assert Path("/dev/full").exists()
    out = tmp_path / f"half.{suffix}"
    assert "File too large" in refusal(run, "--out", out, preexec_fn=small_files)
    assert not out.exists()


@pytest.mark.parametrize("out", ["nowhere/plot.png", "plot.txt", "plot", "plot.jpg", "folder.png"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, out):
    run = make_run(tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    refusal(run, "--out", tmp_path / out)


def test_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name at least one"):
        plot.main(plot.Args((), tmp_path / "plot.png"))


def without(package, tool, *words):
    """The one line of a tool where a package is not installed."""
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    out, error = end_of(start("-c", code, ROOT / "tools" / tool, *words), status=2)
    assert (out, error.count("\n")) == ("", 1), error
    assert error.startswith(f"{tool}: ")
    return error


@pytest.mark.parametrize(
    "package, tool",
    [
        ("matplotlib", "plot.py"),
        ("matplotlib", "report.py"),
        ("scipy", "report.py"),
        ("PIL", "watch.py"),
    ],
)
def test_a_missing_package_is_one_line(package, tool, tmp_path):
    words = ["--video", tmp_path / "a.gif"] if package == "PIL" else []
    line = without(package, tool, make_run(tmp_path / "run"), *words)
    file = (
        "requirements-dev.txt" if tool == "report.py" and package == "scipy" else "requirements.txt"
    )
    assert package in line and line.endswith(f"pip install -r {file}\n")


def test_default_outputs_are_ignored_by_git():
    """But not the reports of results/."""
    names = ["runs/a/plot.png", "report/headline.png", "results/minatar_study/report/headline.png"]
    done = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("no git repository")
    assert done.stdout.split() == names[:2]


def test_the_tool_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    process = start(TOOL, "run", env={"PYTHONPATH": ""})
    assert end_of(process)[0] == "run/plot.png\n" and Path("run/plot.png").exists()
