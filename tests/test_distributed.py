"""Two processes on the CPU, each with environments of its own, train one network."""

import copy
import os
import signal
import socket

import numpy as np
import pytest
import torch
from helpers import ROOT, SCRIPT, Noise, SmallNetwork, column, load, same, second_computation, start, wait_for

import pqn_abs

DRIVER = ROOT / "tests" / "driver.py"
OPTIONS = "--precision float32 --device cpu --num-envs 4".split()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_pair(*command):
    """Two processes that form a group by themselves, without torchrun."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(*command, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def run_pair(folder, kind, *arguments):
    """A run of two processes; its folder, and what each process saw."""
    process = start(*TORCHRUN, DRIVER, kind, "--runs-dir", folder, *OPTIONS, *arguments, DUMP=str(folder))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    seen = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return next(folder.glob("*/config.json")).parent, seen


@pytest.fixture(scope="module")
def catch(tmp_path_factory):
    arguments = """--num-minibatches 2 --adapt-frequency 2 --rollout-min 4 --num-steps 8 --rollout-max 16
        --total-timesteps 1000 --learning-rate 0.001"""
    return run_pair(tmp_path_factory.mktemp("catch"), "catch", *arguments.split())


def test_processes_hold_the_same_network_and_rollout_length(catch):
    folder, (first, second) = catch
    assert len(first["lengths"]) >= 5 and len(set(first["lengths"])) > 2
    assert first["lengths"] == second["lengths"]
    assert same(first["end"], second["end"])
    assert not same(first["start"], first["end"])
    assert same(first["end"], load(folder)["network"]) and first["lengths"][-1] == load(folder)["adaptive_length"]


def test_processes_explore_environments_of_their_own(catch):
    _, (first, second) = catch
    assert abs(first["seed"] - second["seed"]) >= 4
    actions = [np.stack([step["action"] for step in process["steps"]]) for process in (first, second)]
    assert actions[0].shape == actions[1].shape and not np.array_equal(*actions)


def test_steps_and_batches_count_all_processes(catch):
    folder, (first, _) = catch
    steps, lengths, batches = (
        column(folder / "metrics.csv", name, int) for name in ("global_step", "abs/rollout_length", "abs/batch_size")
    )
    assert batches == [2 * 4 * length for length in lengths]
    assert steps == np.cumsum(batches).tolist()
    assert sum(lengths) == len(first["steps"])
    assert steps[-2] < 1000 <= steps[-1]
    episodes = column(folder / "episodes.csv", "global_step", int)
    assert len(episodes) == sum(step["terminated"].sum() for step in first["steps"])


def test_two_processes_update_as_one_does_on_the_joined_batch(tmp_path):
    arguments = "--num-steps 16 --total-timesteps 1 --learning-rate 0.01"
    folder, seen = run_pair(tmp_path, "noise", *arguments.split())
    args = pqn_abs.Args(**load(folder)["args"])
    network = SmallNetwork(Noise(4))
    network.load_state_dict(seen[0]["start"])
    network.double()
    before = copy.deepcopy(network)
    second_computation(network, [process["steps"] for process in seen], [process["orders"] for process in seen], args)
    for name, parameter in seen[1]["end"].items():
        torch.testing.assert_close(parameter.double(), network.state_dict()[name], rtol=1e-4, atol=2e-6)

    states = torch.from_numpy(np.concatenate([step["obs"] for process in seen for step in process["steps"]]))
    changed = (before(states).argmax(1) != network(states).argmax(1)).double().mean().item()
    assert column(folder / "metrics.csv", "abs/behavioral_divergence") == pytest.approx([changed], abs=1e-6)


AVERAGE = """
import os, torch, torch.distributed as dist, pqn_abs
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
assert pqn_abs.average(torch.tensor([1.0, 10.0]) * (rank + 1), 2).tolist() == [1.5, 15.0]
dist.destroy_process_group()
"""


def test_average_is_the_mean_over_processes(tmp_path):
    (tmp_path / "average.py").write_text(AVERAGE)
    for process in start_pair(tmp_path / "average.py"):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_average_of_one_process_is_the_tensor_itself():
    tensor = torch.ones(3)
    assert pqn_abs.average(tensor, 1) is tensor


@pytest.mark.parametrize("command", ["resume", "input"])
def test_one_process_complains_about_the_input(train, command):
    """A checkpoint of one process isn't for two."""
    if command == "resume":
        arguments = ["--resume", train(Noise(2), total_timesteps=1) / "checkpoint.pt"]
    else:
        arguments = ["--num-envs", 0]
    processes = start_pair(SCRIPT, *arguments)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert len(errors[0].splitlines()) == 1 and errors[1] == ""
    assert command == "input" or "it takes 1 processes" in errors[0]


def wait_for_iterations(folder, process):
    wait_for(lambda: any(path.read_text().count("\n") > 2 for path in folder.glob("*/metrics.csv")), process)


def test_interrupt_of_one_process_stops_both(tmp_path):
    processes = start_pair(DRIVER, "noise", "--runs-dir", tmp_path, *OPTIONS)
    wait_for_iterations(tmp_path, processes[0])
    processes[1].terminate()
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    folder = next(tmp_path.glob("*/metrics.csv")).parent
    assert load(folder)["global_step"] == column(folder / "metrics.csv", "global_step", int)[-1]


def complains(errors):
    return any(
        line.startswith("pqn_abs.py: another process is gone") and "--resume" in line for line in errors.splitlines()
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_one_process_ends_the_other(tmp_path, victim):
    processes = start_pair(DRIVER, "noise", "--runs-dir", tmp_path, *OPTIONS)
    wait_for_iterations(tmp_path, processes[0])
    processes[victim].kill()
    survivor = processes[1 - victim]
    _, errors = survivor.communicate(timeout=60)
    assert survivor.returncode == 1 and complains(errors) and "Traceback" not in errors, errors


def test_death_of_one_process_ends_torchrun(tmp_path):
    process = start(*TORCHRUN, DRIVER, "noise", "--runs-dir", tmp_path, *OPTIONS, DUMP=str(tmp_path))
    wait_for_iterations(tmp_path, process)
    os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and complains(errors), errors
