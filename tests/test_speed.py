"""The ruler gives known speeds of scripts whose speed is known, in both of its ways."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
from helpers import end_of, start

import pqn_abs
from tools import speed

# A training script by its own account: an iteration has 20 steps and takes 0.02 s, or --slower.
FAKE = """
import sys, time
from pathlib import Path

words = [word for word in sys.argv[1:] if word != "--no-adapt-rollout"]
words = dict(zip(words[::2], words[1::2]))
folder = Path(words["--runs-dir"], str(time.time()))
folder.mkdir()
metrics = (folder / "metrics.csv").open("a", buffering=1)
metrics.write(words.get("--header", "global_step,charts/seconds") + "\\n")
seconds = 0.0
for step in range(20, int(words["--total-timesteps"]) + 1, 20):
    time.sleep(0.002)
    seconds += 0.02 * float(words.get("--slower", 1))
    metrics.write(f"{step},{seconds:.2f}\\n")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The words that start it."""
    monkeypatch.chdir(tmp_path)
    Path("fake.py").write_text(FAKE)
    return f"{sys.executable} {tmp_path}/fake.py"


@pytest.fixture
def clock(monkeypatch):
    """A clock that only commands move: 2 s to start, 1 ms a step, or as many as they say."""
    state = SimpleNamespace(seconds=0.0, commands=[])

    def run(words, **options):
        state.commands.append(words)
        factor = float(words[words.index("--slower") + 1]) if "--slower" in words else 1
        steps = int(words[words.index("--total-timesteps") + 1])
        state.seconds += 2 + 0.001 * factor * steps
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(speed.time, "perf_counter", lambda: state.seconds)
    monkeypatch.setattr(speed.subprocess, "run", run)
    return state


def refuses(*words):
    out, error = end_of(start(speed.__file__, *words), status=2)
    assert error.count("\n") == 1, error
    assert error.startswith("speed.py: ")
    assert "steps_per_second" in out or not out
    return error


def test_speed_leaves_out_what_starting_takes(clock):
    """1 ms a step and 2 s to start: 1,000 steps/s, where steps over seconds would be 285."""
    words = "python fake.py --total-timesteps {steps}"
    args = speed.Args(short=100, long=800, repeats=2)
    samples = list(speed.measure({"a": words.split()}, args))
    assert [name for name, _ in samples] == ["a", "a"]
    assert [speed for _, speed in samples] == pytest.approx([1000, 1000])


def test_own_script_and_peers_are_measured_together(clock, capsys):
    peer = "a peer=fake.py --total-timesteps {steps} --slower 2"
    speed.main(speed.Args(peer=(peer,), short=20, long=200, repeats=1))
    out, error = capsys.readouterr()
    assert sorted(out.splitlines()[1:]) == ["a peer,500.0", "pqn_abs.py,1000.0"]
    assert error.splitlines()[2:] == [
        "| pqn_abs.py | 1,000 | 1.00 (1.00 to 1.00) |",
        "| a peer | 500 | 2.00 (2.00 to 2.00) |",
    ]


def test_the_own_command_is_one_that_pqn_abs_takes(clock, capsys):
    """Plain PQN: the options exist, and their values are allowed."""
    speed.main(speed.Args(short=20_000, long=80_000, repeats=1))
    capsys.readouterr()
    for python, script, *words in clock.commands:
        assert (python, script) == (sys.executable, pqn_abs.__file__)
        args = tyro.cli(pqn_abs.Args, args=words)
        pqn_abs.check_args(args)
        assert not args.adapt_rollout and args.total_timesteps in (20_000, 80_000)


def test_the_options_of_a_turn_are_ones_that_pqn_abs_takes(monkeypatch, tmp_path):
    class Started(Exception):
        pass

    def popen(words, **options):
        pqn_abs.check_args(tyro.cli(pqn_abs.Args, args=words[1:]))
        raise Started

    monkeypatch.setattr(speed.subprocess, "Popen", popen)
    with pytest.raises(Started):
        next(speed.take_turns({"a": ["pqn_abs.py"]}, speed.Args(), tmp_path))


def test_turns_of_two_versions(fake):
    words = ["--turns", f"a={fake}", f"b={fake} --slower 4", "--repeats", "3"]
    out, error = end_of(start(speed.__file__, *words))
    assert out.splitlines()[0] == "name,steps_per_second"
    assert sorted(out.splitlines()[1:]) == ["a,1000.0"] * 3 + ["b,250.0"] * 3
    assert error.splitlines()[-1] == "| b | 250 | 4.00 (4.00 to 4.00) |"


@pytest.mark.parametrize(
    "words, says",
    [
        (["--peer", "a"], "it must be NAME=COMMAND"),
        (["--peer", "pqn_abs.py=x"], "each name once"),
        (["--turns", "a=python -c 1/0"], "ZeroDivisionError"),
        (["--turns", "a=no-such-command"], "no-such-command"),
        (["--turns", "a='"], "No closing quotation"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--short", "100", "--long", "100"], "--short less than --long"),
    ],
)
def test_bad_input_is_one_line(words, says):
    assert says in refuses(*words)
