import copy
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import SmallActorCritic, SmallNetwork, load, record, started

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
    """train(envs, network, script, **arguments) runs a script on an environment, or what makes one, and a network."""

    def run(envs, network=None, script=pqn_abs, **arguments):
        name = "QNetwork" if hasattr(script, "QNetwork") else "ActorCritic"
        small = SmallNetwork if name == "QNetwork" else SmallActorCritic
        monkeypatch.setattr(script, "make_envs", envs if callable(envs) else lambda args: envs)
        monkeypatch.setattr(script, name, network or small)
        arguments = {"runs_dir": str(tmp_path), "precision": "float32", "device": "cpu"} | arguments
        arguments.setdefault("num_envs", getattr(envs, "num_envs", None))
        return script.main(script.Args(**arguments))

    return run


@pytest.fixture
def watch(train, monkeypatch):
    """Train and hand out what the second computation needs: the first network, the shuffled orders, the new network."""

    def run(envs, script=pqn_abs, **arguments):
        seen = SimpleNamespace(envs=record(envs), orders=[])

        small = SmallNetwork if hasattr(script, "QNetwork") else SmallActorCritic

        def network(envs, *sizes):
            seen.first = small(envs)
            seen.start = copy.deepcopy(seen.first).double()
            return seen.first

        def randperm(*args, **options):
            seen.orders.append(torch_randperm(*args, **options))
            return seen.orders[-1]

        torch_randperm = torch.randperm
        monkeypatch.setattr(torch, "randperm", randperm)
        seen.folder = train(envs, network, script, **arguments)
        monkeypatch.setattr(torch, "randperm", torch_randperm)
        seen.args = script.Args(**load(seen.folder)["args"])
        return seen

    return run
