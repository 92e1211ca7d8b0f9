"""The suite runs what is left, once, goes on after any end, and refuses what is no suite."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import SMALL_RUN, config, end_of, start, wait_for

from tools import suite

# A script that keeps the contract of a training script: 10 steps an iteration, 30 by default. While
# the file "hold" exists, its second iteration lasts until a signal comes.
FAKE = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in "--env-id --seed --runs-dir --run-name --resume".split():
    parser.add_argument(name)
parser.add_argument("--total-timesteps", type=int, default=30)
args = vars(parser.parse_args())
stopped = []
def stop(*received):
    print("got signal", flush=True)
    if args["env_id"] != "stubborn":
        stopped.append(received)
signal.signal(signal.SIGTERM, stop)
if args["env_id"] == "broken":
    print("fake.py: the game is broken", file=sys.stderr)
    sys.exit(3)
if args["resume"]:
    folder = Path(args["resume"])
    step, args = json.loads((folder / "checkpoint.pt").read_text())
else:
    folder = Path(args["runs_dir"], args["run_name"])
    folder.mkdir()
    step = 0
print("threads", os.environ["OMP_NUM_THREADS"], "from", step)
(folder / "config.json").write_text(json.dumps({"script": "fake.py", "args": args}))
metrics = (folder / "metrics.csv").open("a", buffering=1)
if not step:
    metrics.write("charts/SPS,global_step\\n")
while step < args["total_timesteps"] and not stopped:
    while step and os.path.exists("hold") and not stopped:
        time.sleep(0.01)
    step += 10
    metrics.write(f"1.5,{step}\\n")
    (folder / "checkpoint.pt").write_text(json.dumps([step, args]))
"""


@pytest.fixture(autouse=True)
def fake(tmp_path, monkeypatch):
    """A working directory with the script, where the suite's own folder is runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "")  # so that it is put back in the end
        monkeypatch.delenv(name)
    Path("fake.py").write_text(FAKE)
    Path("other.py").write_text(FAKE)
    yield
    Path("hold").unlink(missing_ok=True)  # what a killed suite left runs to its end


def run(*games, **changes):
    """The suite's exit status, in this process."""
    args = {"scripts": ("fake.py",), "seeds": (1,), "runs_dir": Path("runs")}
    return suite.main(suite.Args(games, **(args | changes)))


def steps(folder):
    lines = Path("runs", folder, "metrics.csv").read_text().splitlines()
    return [int(line.split(",")[1]) for line in lines[1:]]


def launch(*words):
    """The suite in a process of its own."""
    command = [suite.__file__, "--scripts", "fake.py", "--runs-dir", "runs", *words]
    return start(*command, process_group=0, env={"OMP_NUM_THREADS": "1"})


def wait_for_checkpoints(process, *names):
    paths = [Path("runs", name, "checkpoint.pt") for name in names]
    wait_for(lambda: all(path.exists() for path in paths), process)


# --- What is run ---


def test_every_combination_is_a_run():
    arms = ("a=", "b=--gamma 0.9 --track", "c=other.py --lr 1")
    args = suite.Args(("Pong", "A/B-v0"), ("fake.py",), (1, 2), arms, Path("runs"))
    runs = suite.list_runs(args)
    assert len(runs) == 2 * 2 * 3
    words = runs[Path("runs/b__PongNoFrameskip-v4__2")]
    start = ["fake.py", "--env-id", "PongNoFrameskip-v4", "--seed", "2"]
    assert words == [*start, "--gamma", "0.9", "--track"]
    words = runs[Path("runs/c__A-B-v0__1")]
    assert words == ["other.py", "--env-id", "A/B-v0", "--seed", "1", "--lr", "1"]
    several = suite.list_runs(suite.Args(("g",), ("fake.py", "other.py"), (1,)))
    assert [path.name for path in several] == ["abs-fake__g__1", "abs-other__g__1"]


def test_a_real_script_is_run_to_its_end_and_not_again():
    """Guards the options that the suite sets, and the files that it looks at."""
    arm = "a=--num-envs 4 --num-minibatches 2 --device cpu --total-timesteps 300"
    words = ["--scripts", SMALL_RUN, "--games", "x/y", "--seeds", "7", "--arms", arm]
    for left in (1, 0):
        out, _ = end_of(start(suite.__file__, *words, "--runs-dir", "runs"))
        assert out.startswith(f"runs: 1, left: {left}, at once: 1\n")
    args = config("runs/a__x-y__7")["args"]
    assert (args["env_id"], args["seed"], args["run_name"]) == ("x/y", 7, "a__x-y__7")
    config_path = Path("runs/a__x-y__7/config.json")
    config_path.write_text(config_path.read_text().replace(": 300,", ": 3000,"))
    assert not suite.is_done(Path("runs/a__x-y__7"))


@pytest.mark.parametrize("own, says", [(None, max(1, os.cpu_count() // 2)), ("7", 7)])
def test_runs_at_once_share_the_cores(own, says, monkeypatch):
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert run("g", jobs=2) == 0
    assert Path("runs/abs__g__1.log").read_text() == f"threads {says} from 0\n"


def test_a_failing_run_does_not_stop_the_others(capsys):
    assert run("broken", "g") == 1
    out = capsys.readouterr().out
    assert "abs__broken__1: failed with status 3, see runs/abs__broken__1.log" in out
    assert "abs__g__1: done" in out
    assert "the game is broken" in Path("runs/abs__broken__1.log").read_text()


# --- Going on ---


@pytest.mark.parametrize(
    "step, checkpoint, expected",
    [(30, False, [10, 30]), (20, True, [10, 20, 30]), (20, False, [10, 20, 30])],
)
def test_a_run_is_left_alone_or_resumes_or_starts_anew(step, checkpoint, expected):
    """A complete run is left alone, even without its checkpoint."""
    folder = Path("runs/abs__g__1")
    folder.mkdir(parents=True)
    args = {"total_timesteps": 30, "env_id": "g"}
    (folder / "config.json").write_text(json.dumps({"args": args}))
    (folder / "metrics.csv").write_text(f"charts/SPS,global_step\n1.5,10\n1.5,{step}\n")
    if checkpoint:
        (folder / "checkpoint.pt").write_text(json.dumps([step, args]))
    assert run("g") == 0
    assert steps("abs__g__1") == expected
    came_from = 20 if checkpoint else 0
    log = Path("runs/abs__g__1.log")
    assert log.exists() == (step < 30)
    if step < 30:
        assert log.read_text().endswith(f"from {came_from}\n")


# --- Being stopped ---


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_runs_save_and_the_same_command_goes_on(signum):
    words = ["--games", "g", "h", "i", "--seeds", "1", "--jobs", "2"]
    Path("hold").touch()
    process = launch(*words)
    wait_for_checkpoints(process, "abs__g__1", "abs__h__1")
    os.killpg(process.pid, signum)  # as a terminal does
    out, error = end_of(process, status=1)
    assert error == ""
    for name in ("abs__g__1", "abs__h__1"):
        assert f"{name}: interrupted" in out
        assert Path(f"runs/{name}.log").read_text().count("got signal") == 1
        assert steps(name) == [10, 20]
    assert not Path("runs/abs__i__1").exists()
    Path("hold").unlink()
    end_of(launch(*words))
    for game in "ghi":
        assert steps(f"abs__{game}__1") == [10, 20, 30]


def test_a_second_signal_ends_at_once():
    Path("hold").touch()
    process = launch("--games", "stubborn", "--seeds", "1")
    wait_for_checkpoints(process, "abs__stubborn__1")
    process.send_signal(signal.SIGINT)
    log = Path("runs/abs__stubborn__1.log")
    wait_for(lambda: "got signal" in log.read_text(), process)  # it ignores the first one
    process.send_signal(signal.SIGINT)
    out, _ = end_of(process, status=1)
    assert "abs__stubborn__1: interrupted" in out and steps("abs__stubborn__1") == [10]


def test_a_run_that_outlives_a_killed_suite_is_not_started_twice():
    words = ["--games", "g", "--seeds", "1"]
    Path("hold").touch()
    process = launch(*words)
    wait_for_checkpoints(process, "abs__g__1")
    process.kill()
    process.wait()
    second = launch(*words)
    out, _ = end_of(second, status=1)
    assert "abs__g__1: another process is at work on it" in out
    Path("hold").unlink()
    bystander = start("-c", "import time; time.sleep(1000)")
    wait_for(lambda: launch(*words).wait() == 0, bystander)
    assert steps("abs__g__1") == [10, 20, 30]


# --- What is refused ---


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"scripts": ("nowhere.py",)}, "there is no script nowhere.py"),
        ({"arms": ("a=nowhere.py --x",)}, "there is no script nowhere.py"),
        ({"arms": ("abs",)}, "NAME=FLAGS"),
        ({"arms": ("a/b=",)}, "NAME=FLAGS"),
        ({"arms": ("a=--seed 3",)}, "--seed is for the suite to set"),
        ({"arms": ("a=--run_name=x",)}, "--run_name=x is for the suite to set"),
        ({"seeds": (1, 1)}, "abs__g__1 comes twice"),
        ({"jobs": 0}, "--jobs 0: it must be at least 1"),
    ],
)
def test_what_makes_no_suite_is_refused(changes, says):
    """Guards bad input: one line, before anything is written."""
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        run("g", **changes)
    assert "\n" not in str(refusal.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [["--arms", "a='"], ["--runs-dir", "fake.py/runs"]])
def test_bad_input_on_the_command_line_is_one_line(words):
    out, error = end_of(launch("--games", "g", *words), status=2)
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("suite.py: ")
