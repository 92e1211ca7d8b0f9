import signal
import sys

import pytest
import torch
from helpers import SmallNetwork, on, started

import pqn_abs

# Tests that were started in the background ignore Ctrl-C, and so would the runs that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # the networks are small


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    """A test's signal handlers and processes end with it."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    yield
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)
    while started:
        process = started.pop()
        process.kill()
        process.wait()


@pytest.fixture
def launch(monkeypatch, capsys):
    """launch(*arguments, **parts) is pqn_abs.py's command line in this process: (status, stderr).

    Without --total-timesteps, a run that should have been refused or stopped still ends soon.
    """

    def run(*arguments, **parts):
        short = [] if "--total-timesteps" in arguments else ["--total-timesteps", 5000]
        monkeypatch.setattr(sys, "argv", ["pqn_abs.py", *map(str, [*arguments, *short])])
        capsys.readouterr()
        status = 0
        try:
            pqn_abs.launch(**parts)
        except SystemExit as ended:
            status = ended.code
        errors = capsys.readouterr().err
        if isinstance(status, str):  # Python prints it, and the status is 1
            return 1, errors + status
        return status, errors

    return run


@pytest.fixture
def train(tmp_path):
    """train(envs, network, **arguments) runs pqn_abs.py on envs and returns the run's folder."""
    count = iter(range(1000))

    def run(envs, network=SmallNetwork, rollout_length=pqn_abs.rollout_length, **arguments):
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        args = pqn_abs.Args(**(names | defaults | arguments))
        return pqn_abs.main(args, **on(envs, network), rollout_length=rollout_length)

    return run
