"""The ruler gives known speeds of scripts whose speed is known."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import tyro
from helpers import end_of, start

import pqn_abs
from tools import speed


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


def test_speed_leaves_out_what_starting_takes(clock):
    """1 ms a step and 2 s to start: 1,000 steps/s, where steps over seconds would be 285."""
    words = "python fake.py --total-timesteps {steps}"
    args = speed.Args(short=100, long=800, repeats=2)
    (name, first), (_, second) = speed.measure({"a": words.split()}, args)
    assert (name, first, second) == ("a", pytest.approx(1000), pytest.approx(1000))


def test_own_script_and_peers_are_measured_together(clock, capsys):
    peer = f"a peer='{sys.executable}' fake.py --total-timesteps {{steps}} --slower 2"
    speed.main(speed.Args(peer=(peer,), short=20, long=200, repeats=1))
    out, error = capsys.readouterr()
    assert sorted(out.splitlines()[1:]) == ["a peer,500.0", "pqn_abs.py,1000.0"]
    assert error.splitlines()[2] == "| pqn_abs.py | 1,000 | 1.00 (1.00 to 1.00) |"
    assert error.splitlines()[3] == "| a peer | 500 | 2.00 (2.00 to 2.00) |"


def test_the_own_command_is_one_that_pqn_abs_takes(clock, capsys):
    """Plain PQN: the options exist, and their values are allowed."""
    speed.main(speed.Args(short=20_000, long=80_000, repeats=1))
    capsys.readouterr()
    for python, script, *words in clock.commands:
        assert (python, script) == (sys.executable, pqn_abs.__file__)
        args = tyro.cli(pqn_abs.Args, args=words)
        assert not args.adapt_rollout and args.total_timesteps in (20_000, 80_000)


@pytest.mark.parametrize(
    "peer, says",
    [
        ("a", "it must be NAME=COMMAND"),
        ("a=python x.py", "with {steps} in COMMAND"),
        ("a=' {steps}", "No closing quotation"),
    ],
)
def test_bad_input_is_one_line(peer, says):
    out, error = end_of(start(speed.__file__, "--peer", peer), status=1)
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("speed.py: ") and says in error


def test_a_command_that_fails_says_why():
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        speed.run_once([sys.executable, "-c", "1 / 0"], 1)
