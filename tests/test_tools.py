"""The tools read what a run writes, refuse what it does not, and count right."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import plot, speed, turns

ROOT = Path(__file__).resolve().parents[1]
HEADER = (
    "global_step,charts/seconds,charts/SPS,charts/epsilon,charts/episodic_return,abs/rollout_length,abs/batch_size,"
    "abs/behavioral_divergence,losses/td_loss,losses/q_values,losses/grad_norm\n"
)
ROWS = (
    "64,1.0,64,1.0,,32,64,0.9,0.5,0.1,2.0\n128,2.0,64,0.5,3.0,32,64,,0.4,0.1,2.0\n190,3.0,64,0.1,4.5,31,62,0.2,0,0,1\n"
)


def make_run(folder: Path, metrics: str | None = HEADER + ROWS, config: str | None = None, **args) -> Path:
    args = {"env_id": "ALE/Pong-v5", "seed": 7, "adapt_rollout": True, "num_steps": 32} | args
    folder.mkdir()
    (folder / "config.json").write_text(config or json.dumps({"script": "pqn_abs.py", "args": args}))
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics)
    return folder


def one_line_and_status_2(function, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        function()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and error.endswith("\n")
    return error


# --- tools/plot.py ---


def test_plot_writes_a_picture(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", HEADER + ROWS + "254,4.0,6", adapt_rollout=False)]
    command = [sys.executable, ROOT / "tools" / "plot.py", *runs, "--out", tmp_path / "runs.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    image = plot.plt.imread(tmp_path / "runs.png")
    assert image.shape[0] > 700 and image.shape[1] > 900
    colours = {tuple(pixel) for pixel in (image[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    for colour in plot.COLOURS[:2]:  # both runs are there
        assert tuple(round(255 * share) for share in plot.matplotlib.colors.to_rgb(colour)) in colours


def test_plot_draws_the_rows(tmp_path):
    figure = plot.draw([plot.read_run(make_run(tmp_path / "a"))])
    score, divergence, batch = (axes.lines[0].get_xydata().tolist() for axes in figure.axes)
    assert score == [[128, 3.0], [190, 4.5]]
    assert divergence == [[64, 0.9], [190, 0.2]]
    assert batch == [[64, 64], [128, 64], [190, 62]]


def test_plot_names_runs_and_ignores_a_torn_last_line(tmp_path):
    name, columns = plot.read_run(make_run(tmp_path / "a", HEADER + ROWS + "254,4.0,6"))
    assert name == "ALE/Pong-v5, pqn_abs, seed 7, adaptive L"
    assert columns["global_step"] == (64, 128, 190)
    name, _ = plot.read_run(make_run(tmp_path / "b", adapt_rollout=False))
    assert name == "ALE/Pong-v5, pqn_abs, seed 7, fixed L = 32"


SEEDS = [("a", 1), ("b", 2), ("c", 2)]


def test_plot_says_once_what_all_runs_share(tmp_path):
    runs = [plot.read_run(make_run(tmp_path / name, seed=seed, precision="float32")) for name, seed in SEEDS]
    (legend,) = plot.draw(runs[:2]).legends
    assert legend.get_title().get_text() == "ALE/Pong-v5, pqn_abs, float32, adaptive L"
    assert [text.get_text() for text in legend.get_texts()] == ["seed 1", "seed 2"]
    (legend,) = plot.draw(runs[1:]).legends  # equal runs keep their names
    assert {text.get_text() for text in legend.get_texts()} == {"ALE/Pong-v5, pqn_abs, seed 2, float32, adaptive L"}
    (legend,) = plot.draw(runs[:1]).legends
    assert [text.get_text() for text in legend.get_texts()] == ["ALE/Pong-v5, pqn_abs, seed 1, float32, adaptive L"]


def test_plot_draws_a_run_without_scores(tmp_path):
    run = make_run(tmp_path / "a", HEADER + ROWS.splitlines(keepends=True)[0])
    plot.main(plot.Args((run,), tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "metrics, config, says",
    [
        (None, None, "no metrics.csv"),
        ("", None, "no data"),
        (HEADER, None, "no data"),
        (HEADER + "64,1.0", None, "no data"),
        ("a,b\n1,2\n", None, "no column global_step"),
        (HEADER + ROWS + "254,4.0\n" + ROWS, None, "damaged"),
        (HEADER + ROWS.replace("0.9", "much"), None, "damaged"),
        (HEADER + "\n" + ROWS, None, "damaged"),
        (HEADER + ROWS, "{", "no run"),
        (HEADER + ROWS, "[]", "no run"),
        (HEADER + ROWS, '{"args": {}}', "no run"),
    ],
)
def test_plot_refuses_a_broken_run(tmp_path, capsys, metrics, config, says):
    runs = make_run(tmp_path / "good"), make_run(tmp_path / "bad", metrics, config)
    out = tmp_path / "plot.png"
    assert says in one_line_and_status_2(lambda: plot.main(plot.Args(runs, out)), capsys)
    assert not out.exists()


def test_plot_refuses_what_is_no_run(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    binary = make_run(tmp_path / "binary")
    (binary / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    for runs in [(), (tmp_path,), (tmp_path / "nowhere",), (file,), (binary,)]:
        one_line_and_status_2(lambda runs=runs: plot.main(plot.Args(runs, tmp_path / "plot.png")), capsys)
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize("out", ["nowhere/plot.png", "plot.txt", "plot", "folder.png"])
def test_plot_refuses_an_output_it_cannot_write(tmp_path, capsys, out):
    run = make_run(tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    one_line_and_status_2(lambda: plot.main(plot.Args((run,), tmp_path / out)), capsys)
    assert sorted(tmp_path.rglob("*")) == before


# --- tools/speed.py ---


def row(*samples, memory=None, failed=None) -> dict:
    return {"steps_per_second": list(samples), "peak_memory_mib": memory, "failed": failed}


def test_extra_steps_over_extra_seconds():
    assert speed.extra_speed((1000, 5000), (12.0, 20.0)) == 500  # ten seconds of start-up don't count
    with pytest.raises(RuntimeError, match="raise --steps"):
        speed.extra_speed((1000, 5000), (12.0, 12.0))


def test_ratios_are_taken_within_a_repeat():
    ours, theirs = row(100.0, 50.0, 300.0), row(50.0, 25.0, 100.0)  # the machine was slow in the second repeat
    assert speed.paired_ratio(ours, theirs) == 2
    assert speed.paired_ratio(row(None, 50.0, 300.0), theirs) == 2.5
    assert speed.paired_ratio(row(None, None, None), theirs) is None


def test_table_of_made_up_samples():
    rows = {"limit": row(4000.0, 5000.0), "ours": row(1000.0, 1500.0, memory=1234.5)}
    rows |= {"theirs": row(500.0, 500.0, memory=99.0), "broken": row(None, None, failed="no such thing")}
    speed.summarise(rows, ["limit", "theirs"])
    assert rows["ours"]["median"] == 1250
    assert rows["ours"]["times_as_fast_as"] == {"limit": 0.275, "theirs": 2.5}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in speed.table(rows).splitlines()]
    assert lines[0] == ["", "steps/s", "min to max", "× limit", "× theirs", "peak memory"]
    assert lines[2] == ["limit", "4,500", "4,000 to 5,000", "1.00", "9.00", ""]
    assert lines[3] == ["ours", "1,250", "1,000 to 1,500", "0.28", "2.50", "1,234 MiB"]
    assert lines[5] == ["broken", "", "", "", "", "failed: no such thing"]
    assert len({len(line) for line in speed.table(rows).splitlines()}) == 1


def test_results_name_no_folders():
    said = speed.without_folders(
        "python tools/speed.py --peer 'A=/home/me/venv/bin/python ~/x/y.py --env-id ALE/Pong-v5'"
    )
    assert said == "python tools/speed.py --peer 'A=python y.py --env-id ALE/Pong-v5'"
    assert speed.without_folders("No such file: '/a/b c.txt'") == "No such file: 'b c.txt'"


@pytest.mark.parametrize(
    "args, says",
    [
        ({"steps": "4096"}, "SHORT:LONG"),
        ({"steps": "8192:4096"}, "the second larger"),
        ({"steps": "4096:16384"}, "multiples of 128 x 64"),
        ({"peer": ("x=python y.py",)}, "{steps}"),
        ({"peer": ("python {steps}",)}, "NAME="),
        ({"peer": ("auto=python {steps}",)}, "no peer may have its name"),
        ({"modes": ("a=", "a=--compile")}, "each name once"),
        ({"modes": ("a='",)}, "quotation"),
        ({"modes": ()}, "at least one"),
        ({"repeats": 0}, "at least 1"),
        ({"sweep": (0,)}, "at least 1"),
    ],
)
def test_speed_refuses_bad_input(capsys, args, says):
    assert says in one_line_and_status_2(lambda: speed.check(speed.Args(**args)), capsys)


def test_speed_measures_everything_once(tmp_path):
    """On as few steps as can be: what comes out has the right shape; its figures mean nothing."""
    tiny = "--num-envs 2 --num-steps 2 --num-minibatches 1 --update-epochs 1 --steps 4:16 --repeats 1 --sweep 2"
    peers = ["--peer", "sleeper=python -c 'import time; time.sleep({steps} / 40)'"]
    peers += ["--peer", "broken=python -c 'import sys; sys.exit(\"/far/away.py: this is broken\")' {steps}"]
    command = [sys.executable, ROOT / "tools" / "speed.py", *tiny.split(), "--modes", "auto=", *peers]
    done = subprocess.run([*command, "--out", tmp_path / "new" / "s.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("bare emulator", "failed: away.py: this is broken", "Steps/s of auto by rollout length: L = 2: "):
        assert text in done.stdout

    text = (tmp_path / "new" / "s.json").read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text
    result = json.loads(text)
    assert set(result["rows"]) == {"bare emulator", "auto", "sleeper", "broken"}
    assert result["rows"]["broken"]["failed"] == "away.py: this is broken"
    assert all(len(row["steps_per_second"]) == 1 for row in result["rows"].values())
    assert len(result["rows"]["auto"]["seconds"][0]) == 2 and result["rows"]["auto"]["peak_memory_mib"] > 100
    assert set(result["machine"]) >= {"cpu", "cores", "gpu", "python", "torch", "ale_py"}
    assert result["breakdown"]["iterations"] == 3
    assert sum(result["breakdown"]["percent"].values()) == pytest.approx(100)
    assert all(result["breakdown"]["ms_per_iteration"][part] > 0 for part in speed.PARTS)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])


def test_speed_refuses_what_the_script_refuses(tmp_path):
    command = [sys.executable, ROOT / "tools" / "speed.py", "--env-id", "Pung", "--out", tmp_path / "speed.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert "--env-id Pung" in done.stderr
    assert not (tmp_path / "speed.json").exists()


def test_readme_quotes_the_measured_tables():
    """Its figures are those of the files under results/, as tools/speed.py prints them."""
    readme = (ROOT / "README.md").read_text()
    for path in ROOT.glob("results/speed-*.json"):
        assert speed.table(json.loads(path.read_text())["rows"]) in readme, path.name


# --- tools/turns.py ---

FAKE_RUN = """
import itertools, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--runs-dir") + 1], "run")
folder.mkdir()
with (folder / "metrics.csv").open("w", buffering=1) as file:
    file.write("global_step,charts/seconds\\n")
    for i in itertools.count(1):
        file.write(f"{i * 512},{SECONDS}\\n")
        time.sleep(0.01)
"""


def versions_of(tmp_path, **seconds) -> list[str]:
    for name, value in seconds.items():
        (tmp_path / f"{name}.py").write_text(FAKE_RUN.replace("SECONDS", value))
    return [f"{name}={sys.executable} {tmp_path / name}.py" for name in seconds]


def run_turns(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "tools" / "turns.py", *words], capture_output=True, text=True)


def test_turns_tell_the_time_per_step(tmp_path):
    """Rows 512 steps and 1 or 2 s apart, by what they say, make 8 and 16 s for 4,096 steps."""
    versions = versions_of(tmp_path, slow="i * 2", fast="i")
    done = run_turns(*versions, "--flags=--num-steps 7", "--rounds", "2", "--iterations", "1", "--out", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "round 1: slow 16.00 s, fast 8.00 s"
    assert done.stdout.splitlines()[-1] == "| fast | 8.00 | 8.00 to 8.00 | 0.500 | 0.500 to 0.500 |"
    rows = [
        f"--num-steps 7,{n},{name},{time}" for name, time in (("slow", "16.000"), ("fast", "8.000")) for n in (1, 2)
    ]
    assert (tmp_path / "t").read_text().splitlines() == ["setting,round,variant,seconds_per_4096_steps", *rows]


def test_a_turn_goes_on_leaves_out_its_first_row_and_stops(tmp_path):
    command = versions_of(tmp_path, a="i + (i > 20) * 1000")[0].partition("=")[2].split()
    version = turns.Version("a", command, tmp_path / "a")
    try:
        version.wait(1)
        version.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            before = settled(version)
            seconds = version.turn(25)  # the 21st row takes 1000 s more: seen if it counts, and only then
            assert settled(version) >= before + 26
            counts = before + 1 < 21 <= before + 26
            assert seconds == (1025 if counts else 25) / 25 * 8
    finally:
        version.process.kill()
        version.process.wait()


def settled(version) -> int:
    """The number of rows, when it grows no more."""
    counts = [-1]
    while len(counts) < 4 or len(set(counts[-4:])) > 1:
        assert len(counts) < 200, "it was not stopped"
        counts.append(len(version.rows()))
        time.sleep(0.05)
    return counts[-1]


@pytest.mark.parametrize(
    "words, says",
    [
        (["a=python"], "two or more versions"),
        (["a=python", "a=python"], "different names"),
        (["a=python", "python"], "NAME=COMMAND"),
        (["a=python '", "b=python"], "No closing quotation"),
        (["a=there/is/none", "b=python"], "there/is/none: No such file"),
        (["a=python", "b=python", "--rounds", "1"], "two rounds"),
        (["a=python", "b=python", "--out", "there/is/none"], "there/is/none: No such file"),
        ([f"a={sys.executable} -c 'import sys; sys.exit(\"--oh no\")'", "b=python"], "a ended: --oh no"),
    ],
)
def test_turns_refuse_bad_input(words, says):
    done = run_turns(*words)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert says in done.stderr
