"""The ruler gives known speeds of scripts whose speed is known, in both of its ways."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import speed

# Starting takes START seconds and a step 1 ms. As a training script, an iteration has 20 steps.
FAKE = """
import os, sys, time
from pathlib import Path

seconds = float(os.environ.get("START", 0))
time.sleep(seconds)
words = [word for word in sys.argv[1:] if word != "--no-adapt-rollout"]
words = dict(zip(words[::2], words[1::2]))
slower = float(words.get("--slower", 1))
if "--runs-dir" in words:
    folder = Path(words["--runs-dir"], str(time.time()))
    folder.mkdir()
    metrics = (folder / "metrics.csv").open("a", buffering=1)
    metrics.write("global_step,charts/seconds\\n")
for step in range(20, int(words["--total-timesteps"]) + 1, 20):
    started = time.perf_counter()
    time.sleep(0.02 * slower)
    seconds += time.perf_counter() - started
    if "--runs-dir" in words:
        metrics.write(f"{step},{seconds}\\n")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The words that start it."""
    monkeypatch.chdir(tmp_path)
    Path("fake.py").write_text(FAKE)
    return f"{sys.executable} {tmp_path}/fake.py"


def command_line(*words):
    command = [sys.executable, speed.__file__, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def refuses(*words):
    done = command_line(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("speed.py: ")
    return done.stderr


def test_speed_leaves_out_what_starting_takes(fake, tmp_path, monkeypatch):
    """1 ms a step and 2 s to start: 1,000 steps/s, where steps over seconds would be 285."""
    monkeypatch.setenv("START", "2")
    words = f"{fake} --total-timesteps {{steps}}"
    args = speed.Args(short=100, long=800, repeats=1)
    ((name, steps_per_second),) = speed.measure({"a": words.split()}, args)
    assert name == "a" and 500 < steps_per_second < 1300


def test_the_table_compares_within_a_repeat(monkeypatch, capsys):
    """Guards the ratios: of a repeat's two speeds, not of the medians."""
    ours, theirs = [100, 400, 300], [50, 100, 50]
    samples = [("ours", speed) for speed in ours] + [("theirs", speed) for speed in theirs]
    monkeypatch.setattr(speed, "take_turns", lambda *arguments: samples)
    speed.main(speed.Args(turns=("ours=a", "theirs=b")))
    lines = capsys.readouterr().err.splitlines()
    assert lines[2] == "| ours | 300 | 1.00 (1.00 to 1.00) |"
    assert lines[3] == "| theirs | 50 | 4.00 (2.00 to 6.00) |"


def test_turns_of_two_versions(fake, tmp_path):
    done = command_line("--turns", f"a={fake}", f"b={fake} --slower 3", "--repeats", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "name,steps_per_second"
    assert sorted(line[0] for line in lines[1:]) == ["a", "a", "a", "b", "b", "b"]
    row = done.stderr.splitlines()[-1].split("|")
    assert row[1] == " b "
    assert 2 < float(row[3].split()[0]) < 4


def test_waiting_versions_stand_still(fake, tmp_path):
    """Neither works between turns, and no turn counts the time between them."""
    commands = {"a": fake.split(), "b": fake.split()}
    turns = speed.take_turns(commands, speed.Args(repeats=2), tmp_path)
    for _, steps_per_second in turns:
        assert 500 < steps_per_second < 1300
        time.sleep(0.1)
        before = [path.stat().st_size for path in tmp_path.glob("*/*/metrics.csv")]
        time.sleep(0.5)
        after = [path.stat().st_size for path in tmp_path.glob("*/*/metrics.csv")]
        assert len(before) == 2 and before == after


@pytest.mark.parametrize(
    "words, says",
    [
        (["--peer", "a"], "it must be NAME=COMMAND"),
        (["--turns", "a=python -c 1/0"], "ZeroDivisionError"),
        (["--turns", "a=x", "a=y"], "each name once"),
        (["--turns", "a=no-such-command"], "no-such-command"),
        (["--turns", "a='"], "No closing quotation"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--short", "100", "--long", "100"], "--short less than --long"),
    ],
)
def test_bad_input_is_one_line(words, says):
    assert says in refuses(*words)


def test_own_script_and_peers_are_measured_together(fake, monkeypatch, capsys):
    monkeypatch.setattr(speed, "SCRIPT", Path("fake.py").resolve())
    peer = f"a peer={fake} --total-timesteps {{steps}} --slower 2"
    speed.main(speed.Args(peer=(peer,), short=20, long=200, repeats=1))
    out, error = capsys.readouterr()
    assert len(out.splitlines()) == 3
    names = [line.split("|")[1].strip() for line in error.splitlines()[2:]]
    assert names == ["pqn_abs.py", "a peer"]
    assert 1.3 < float(error.splitlines()[-1].split("|")[3].split()[0]) < 2.7
