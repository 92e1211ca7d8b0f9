import os
import signal

import pytest
import torch
from helpers import SmallNetwork, started

import pqn_abs

torch.set_num_threads(1)  # the networks are small


@pytest.fixture(autouse=True)
def signal_handlers():
    """main() puts them back when it ends, but not where a test cuts it short."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    while started:
        if (process := started.pop()).poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(envs, network, **arguments) runs the script on an environment, or what makes one, and a network of ours."""

    def run(envs, network=SmallNetwork, **arguments):
        monkeypatch.setattr(pqn_abs, "make_envs", envs if callable(envs) else lambda args: envs)
        monkeypatch.setattr(pqn_abs, "QNetwork", network)
        arguments = {"runs_dir": str(tmp_path), "precision": "float32"} | arguments
        arguments.setdefault("num_envs", getattr(envs, "num_envs", None))
        return pqn_abs.main(pqn_abs.Args(device="cpu", **arguments))

    return run
