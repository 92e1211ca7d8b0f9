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


def refuses(*words, status=2):
    done = command_line(*words)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert done.stderr.startswith("speed.py: ")
    return done.stderr


def test_speed_leaves_out_what_starting_takes(fake, tmp_path, monkeypatch):
    """1 ms a step and 2 s to start: 1,000 steps/s, where steps over seconds would be 285."""
    monkeypatch.setenv("START", "2")
    words = f"{fake} --total-timesteps {{steps}}"
    args = speed.Args(short=100, long=800, repeats=1)
    samples = list(speed.measure({"a": words.split()}, args, tmp_path))
    assert [name for name, _, _ in samples] == ["a"]
    _, steps_per_second, memory = samples[0]
    assert 500 < steps_per_second < 1050
    assert memory > 2


def test_table_compares_within_a_repeat():
    table = speed.table({"ours": [100, 400, 300], "theirs": [50, 100, 50]})
    assert table.splitlines()[2] == "| ours | 300 | 1.00 | 1.00 | 1.00 |"
    assert table.splitlines()[3] == "| theirs | 50 | 4.00 | 2.00 | 6.00 |"


def test_turns_of_two_versions(fake, tmp_path):
    done = command_line("--turns", f"a={fake}", f"b={fake} --slower 3", "--repeats", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "name,steps_per_second,peak_memory_mib"
    assert sorted(line[0] for line in lines[1:]) == ["a", "a", "a", "b", "b", "b"]
    row = done.stderr.splitlines()[-1].split("|")
    assert row[1] == " b "
    assert 2 < float(row[3]) < 4


def test_waiting_versions_stand_still(fake, tmp_path):
    """Neither works between turns, and no turn counts the time between them."""
    commands = {"a": fake.split(), "b": fake.split()}
    turns = speed.take_turns(commands, speed.Args(repeats=2), tmp_path)
    for _, steps_per_second, _ in turns:
        assert 500 < steps_per_second < 1050
        time.sleep(0.1)
        before = [path.stat().st_size for path in tmp_path.glob("*/*/metrics.csv")]
        time.sleep(0.5)
        after = [path.stat().st_size for path in tmp_path.glob("*/*/metrics.csv")]
        assert len(before) == 2 and before == after


@pytest.mark.parametrize(
    "words, says",
    [
        (["--peer", "a"], "it must be NAME=COMMAND"),
        (["--peer", "a=python x.py"], "{steps} must stand where"),
        (["--turns", "a=x", "a=y"], "each name once"),
        (["--turns", "a=no-such-command"], "no-such-command"),
        (["--turns", "a='"], "No closing quotation"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--short", "100", "--long", "100"], "--short less than --long"),
    ],
)
def test_bad_input_is_one_line(words, says):
    assert says in refuses(*words)


def test_a_script_that_fails_is_one_line(fake):
    refusal = refuses("--turns", f"a={sys.executable} -c 1/0", status=1)
    assert "a ended: ZeroDivisionError" in refusal


def test_own_script_emulator_and_peer_are_measured_together(fake, monkeypatch, capsys):
    monkeypatch.setattr(speed, "SCRIPT", Path("fake.py").resolve())
    monkeypatch.setattr(speed, "PLAY", FAKE)
    peer = f"a peer={fake} --total-timesteps {{steps}} --slower 4"
    speed.main(speed.Args(peer=(peer,), short=20, long=200, repeats=1, flags="--slower 2"))
    out, error = capsys.readouterr()
    assert len(out.splitlines()) == 4
    names = [line.split("|")[1].strip() for line in error.splitlines()[2:]]
    assert names == ["pqn_abs.py", "bare emulator", "a peer"]
    assert 1.3 < float(error.splitlines()[-1].split("|")[3]) < 2.7


def test_the_emulator_alone(tmp_path):
    flags = ["--env-id", "PongNoFrameskip-v4", "--num-envs", "2", "--total-timesteps", "{steps}"]
    seconds, memory = speed.run_once([sys.executable, "-c", speed.PLAY, *flags], 20, tmp_path)
    assert seconds > 0.1 and memory > 50
