import signal
import sys

import pytest
import torch
from helpers import SmallNetwork, contents, started
from tqdm import tqdm

import pqn_abs

# Tests that were started in the background ignore these, and so would the runs that they start.
for name in ("SIGINT", "SIGHUP"):
    number = getattr(signal, name, signal.SIGTERM)  # Windows has no SIGHUP
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

torch.set_num_threads(1)  # the networks are small
PARTS = ("Args", "QNetwork", "make_envs", "SCRIPT")  # what an example replaces in pqn_abs
ORIGINALS = {name: getattr(pqn_abs, name) for name in PARTS}


def pytest_collection_finish():
    """Where a test file imports an example, pqn_abs.py stays itself for the others."""
    for name, part in ORIGINALS.items():
        setattr(pqn_abs, name, part)


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    """A test's signal handlers and processes end with it, and an example that it loaded."""
    signals = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    before = [signal.getsignal(number) for number in signals]
    yield
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)
    pytest_collection_finish()
    tqdm._instances.clear()  # bars of runs that failed would be drawn into the next test's lines
    while started:
        started.pop().kill()


@pytest.fixture
def example(monkeypatch):
    """example(module) puts an example's parts into pqn_abs, as its command line does."""

    def replace(module):
        for name in PARTS[:3]:
            monkeypatch.setattr(pqn_abs, name, getattr(module, name))
        monkeypatch.setattr(pqn_abs, "SCRIPT", f"{module.__name__.rpartition('.')[2]}.py")

    return replace


@pytest.fixture
def launch(monkeypatch, capsys):
    """launch(*arguments) is the command line in this process; returns the status and stderr.

    Without --total-timesteps, a run that should have been refused or stopped still ends soon.
    """

    def run(*arguments):
        short = [] if "--total-timesteps" in arguments else ["--total-timesteps", 5000]
        monkeypatch.setattr(sys, "argv", ["pqn_abs.py", *map(str, [*arguments, *short])])
        capsys.readouterr()
        status = 0
        try:
            pqn_abs.launch()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().err

    return run


@pytest.fixture
def refused(launch, tmp_path, monkeypatch):
    """refused(*arguments) expects status 2 and one line, which it returns, and untouched files."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        before = contents(tmp_path)
        status, errors = launch(*arguments)
        after = contents(tmp_path)
        assert status == 2, errors
        assert after == before
        (line,) = errors.splitlines()
        assert line.startswith(f"{pqn_abs.SCRIPT}: ")
        return line

    return run


@pytest.fixture
def seams(monkeypatch):
    """seams(envs, network) puts them in pqn_abs.py's place of the games and the network."""

    def replace(envs, network=SmallNetwork):
        monkeypatch.setattr(pqn_abs, "make_envs", lambda args: envs)
        monkeypatch.setattr(pqn_abs, "QNetwork", network)

    return replace


@pytest.fixture
def train(tmp_path, seams):
    """train(envs, network, **arguments) runs pqn_abs.py on envs and returns the run's folder."""
    count = iter(range(1000))

    def run(envs, network=SmallNetwork, **arguments):
        seams(envs, network)
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        return pqn_abs.main(pqn_abs.Args(**(names | defaults | arguments)))

    return run
