"""The suite runs what is left, once, goes on after any end, and refuses what is no suite."""

import os
import signal
from pathlib import Path

import pytest
from helpers import SMALL_RUN, config, end_of, start, wait_for

from tools import suite

# What the suite needs of a training script: three iterations of 10 steps. While the file "hold"
# exists, the second one lasts until a signal comes.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path

args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if args.get("--env-id") == "broken":
    sys.exit(3)
stopped = []
def stop(*received):
    print("got signal", flush=True)
    if args["--env-id"] != "stubborn":
        stopped.append(received)
signal.signal(signal.SIGTERM, stop)
folder = Path(args.get("--resume") or Path(args["--runs-dir"], args["--run-name"]))
folder.mkdir(exist_ok="--resume" in args)
checkpoint = folder / "checkpoint.pt"
step = int(checkpoint.read_text()) if "--resume" in args else 0
print("threads", os.environ["OMP_NUM_THREADS"], "from", step)
(folder / "config.json").write_text('{"script": "fake", "args": {"total_timesteps": 30}}')
metrics = (folder / "metrics.csv").open("a", buffering=1)
if not step:
    metrics.write("charts/SPS,global_step\\n")
while step < 30 and not stopped:
    while step and os.path.exists("hold") and not stopped:
        time.sleep(0.01)
    step += 10
    metrics.write(f"1.5,{step}\\n")
    checkpoint.write_text(str(step))
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
    words = ["--scripts", "fake.py", "--runs-dir", "runs", *words]
    return start(suite.__file__, *words, process_group=0)


def wait_for_checkpoint(process, name):
    wait_for(Path("runs", name, "checkpoint.pt").exists, process)


def test_every_combination_is_a_run():
    arms = ("a=", "b=--gamma 0.9 --track", "c=other.py --lr 1")
    args = suite.Args(("Pong", "A/B-v0"), ("fake.py",), (1, 2), arms, Path("runs"))
    runs = suite.list_runs(args)
    assert len(runs) == 2 * 2 * 3
    words = runs[Path("runs/b__PongNoFrameskip-v4__2")]
    assert " ".join(words) == "fake.py --env-id PongNoFrameskip-v4 --seed 2 --gamma 0.9 --track"
    words = runs[Path("runs/c__A-B-v0__1")]
    assert " ".join(words) == "other.py --env-id A/B-v0 --seed 1 --lr 1"
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


def test_runs_at_once_share_the_cores(monkeypatch):
    assert run("g", jobs=2) == 0
    threads = max(1, os.cpu_count() // 2)
    assert Path("runs/abs__g__1.log").read_text() == f"threads {threads} from 0\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run("h", jobs=2) == 0
    assert Path("runs/abs__h__1.log").read_text() == "threads 7 from 0\n"


def test_a_failing_run_does_not_stop_the_others(capsys):
    assert run("broken", "g") == 1
    assert "abs__broken__1: failed with status 3, see" in capsys.readouterr().out
    assert steps("abs__g__1") == [10, 20, 30]


@pytest.mark.parametrize(
    "step, checkpoint, expected",
    [(30, False, [10, 30]), (20, True, [10, 20, 30]), (20, False, [10, 20, 30])],
)
def test_a_run_is_left_alone_or_resumes_or_starts_anew(step, checkpoint, expected):
    """A complete run is left alone, even without its checkpoint."""
    folder = Path("runs/abs__g__1")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"args": {"total_timesteps": 30}}')
    (folder / "metrics.csv").write_text(f"charts/SPS,global_step\n1.5,10\n1.5,{step}\n")
    if checkpoint:
        (folder / "checkpoint.pt").write_text(str(step))
    assert run("g") == 0
    assert steps("abs__g__1") == expected
    log = Path("runs/abs__g__1.log")
    assert log.exists() == (step < 30)
    if step < 30:
        assert log.read_text().endswith("from 20\n" if checkpoint else "from 0\n")


def test_a_signal_lets_runs_save_and_the_same_command_goes_on():
    words = ["--games", "g", "h", "i", "--seeds", "1", "--jobs", "2"]
    Path("hold").touch()
    process = launch(*words)
    wait_for_checkpoint(process, "abs__g__1")
    wait_for_checkpoint(process, "abs__h__1")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, error = end_of(process, status=1)
    assert error == ""
    for name in ("abs__g__1", "abs__h__1"):
        assert f"{name}: interrupted" in out and steps(name) == [10, 20]
        assert Path(f"runs/{name}.log").read_text().count("got signal") == 1
    assert not Path("runs/abs__i__1").exists()
    Path("hold").unlink()
    end_of(launch(*words))
    for game in "ghi":
        assert steps(f"abs__{game}__1") == [10, 20, 30]


def test_a_second_signal_ends_at_once():
    Path("hold").touch()
    process = launch("--games", "stubborn", "--seeds", "1")
    wait_for_checkpoint(process, "abs__stubborn__1")
    process.send_signal(signal.SIGTERM)
    log = Path("runs/abs__stubborn__1.log")
    wait_for(lambda: "got signal" in log.read_text(), process)  # which it ignores
    process.send_signal(signal.SIGINT)
    out, _ = end_of(process, status=1)
    assert "abs__stubborn__1: interrupted" in out and steps("abs__stubborn__1") == [10]


def test_a_run_that_outlives_a_killed_suite_is_not_started_twice():
    words = ["--games", "g", "--seeds", "1"]
    Path("hold").touch()
    process = launch(*words)
    wait_for_checkpoint(process, "abs__g__1")
    process.kill()
    process.wait()
    out, _ = end_of(launch(*words), status=1)
    assert "abs__g__1: another process is at work on it" in out and steps("abs__g__1") == [10]


REFUSED = {
    "a=nowhere.py --x": "there is no script nowhere.py",
    "a/b=": "NAME=FLAGS",
    "a=--run_name=x": "--run_name=x is for the suite to set",
}


@pytest.mark.parametrize("arm", REFUSED)
def test_what_makes_no_suite_is_refused(arm):
    """Before anything is written."""
    with pytest.raises(ValueError, match=REFUSED[arm]):
        run("g", arms=(arm,))
    with pytest.raises(ValueError, match="abs__g__1 comes twice"):
        run("g", seeds=(1, 1))
    assert not Path("runs").exists()


def test_bad_input_on_the_command_line_is_one_line():
    out, error = end_of(launch("--games", "g", "--arms", "a='"), status=1)
    assert (out, error) == ("", "suite.py: No closing quotation\n")
