"""pqn_abs_xl.py: its networks, two vectors in flight, and several processes."""

import os
import signal
import socket
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import ROOT, FakeEnvs, SmallNetwork, column, load, rows, same_weights, start, wait_for

import pqn_abs
import pqn_abs_xl

# --- The network ---


def make(size, actions=6):
    torch.manual_seed(0)
    return pqn_abs_xl.QNetwork(
        SimpleNamespace(single_action_space=SimpleNamespace(n=actions)), size
    )


def random_frames(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 4, 84, 84), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size, parameters", [("l", 6_496_070), ("xl", 9_132_870)])
def test_number_of_parameters_is_that_of_the_authors_network(size, parameters):
    assert sum(p.numel() for p in make(size).parameters()) == parameters


def test_size_s_is_the_network_of_pqn_abs():
    plain = pqn_abs.QNetwork(SimpleNamespace(single_action_space=SimpleNamespace(n=6)))
    small = make("s")
    small.load_state_dict(plain.state_dict())
    assert torch.equal(small(random_frames(5)), plain(random_frames(5)))


def test_network_is_its_equation():
    """The same from the weights alone, in float64: LayerNorm by hand, and x + f(x) + x_0."""
    network = make("l")
    for parameter in network.parameters():  # LayerNorm's parameters other than 0 and 1
        nn.init.normal_(parameter, std=0.05)
    w = {name: parameter.detach().double() for name, parameter in network.named_parameters()}

    def norm(x, name):
        flat = x.flatten(1)
        flat = flat - flat.mean(1, keepdim=True)
        flat = flat / (flat.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return flat.view_as(x) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def images(x, layer, stride, norm_layer):
        x = F.conv2d(x, w[f"{layer}.weight"], w[f"{layer}.bias"], stride)
        return norm(x.permute(0, 2, 3, 1), norm_layer).permute(0, 3, 1, 2).relu()

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = images(random_frames(3).double() / 255, "conv1", 4, "body.0")
    x = images(x, "body.2", 2, "body.3")
    x = images(x, "body.5", 1, "body.6")
    x0 = x = norm(linear(x.flatten(1), "body.9"), "body.10")
    for k in range(5):
        f = norm(linear(x.relu(), f"blocks.{k}.1"), f"blocks.{k}.2")
        f = norm(linear(f.relu(), f"blocks.{k}.4"), f"blocks.{k}.5")
        x = x + f + x0
    expected = linear(norm(linear(x, "last.0"), "last.1").relu(), "head")
    torch.testing.assert_close(network(random_frames(3)).double(), expected, rtol=1e-3, atol=1e-4)


# --- Two vectors in flight ---


class InFlight(FakeEnvs):
    """As AtariVectorEnv: the step of send() is taken when recv() asks for it. Events are kept."""

    events: ClassVar = []

    def send(self, actions):
        self.events.append(("send", id(self)))
        self.sent = actions

    def recv(self):
        self.events.append(("recv", id(self)))
        return FakeEnvs.step(self, self.sent)

    def step(self, actions):
        raise AssertionError("both halves are to be in flight")


class Joined(FakeEnvs):
    """Two FakeEnvs, one after the other, as one vector."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **options)
        self.halves = [FakeEnvs(num_envs // 2, **options) for _ in range(2)]

    def reset(self, *, seed=None, options=None):
        parts = [half.reset(seed=seed + i * half.num_envs) for i, half in enumerate(self.halves)]
        return np.concatenate([obs for obs, _ in parts]), self.joined([info for _, info in parts])

    def step(self, actions):
        parts = zip(self.halves, np.split(actions, 2), strict=True)
        *arrays, infos = zip(*[half.step(part) for half, part in parts], strict=True)
        return *map(np.concatenate, arrays), self.joined(infos)

    def joined(self, infos):
        return {name: np.concatenate([info[name] for info in infos]) for name in infos[0]}


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(envs class, script, **arguments): its run's folder."""

    def run(kind, script=pqn_abs_xl, lives=0, **arguments):
        monkeypatch.setattr(script, "make_envs", lambda args: kind(args.num_envs, lives=lives))
        monkeypatch.setattr(script, "QNetwork", lambda envs, *size: SmallNetwork(envs))
        name = f"run{len(list(tmp_path.iterdir()))}"
        defaults = {"num_envs": 6, "device": "cpu", "precision": "float32", "rollout_max": 64}
        names = {"runs_dir": str(tmp_path), "run_name": name}
        return script.main(script.Args(**(defaults | names | arguments)))

    return run


@pytest.mark.parametrize("kind", [InFlight, FakeEnvs])
@pytest.mark.parametrize("lives", [0, 3])
def test_halves_play_what_one_vector_of_both_plays(play, kind, lives):
    """Rewards, lost lives, FIRE, cut episodes and scores: all as pqn_abs.py has them."""
    options = {"total_timesteps": 3000, "adapt_frequency": 2, "learning_rate": 0.01}
    options |= {"episodic_life": lives > 0, "lives": lives, "exploration_fraction": 0.2}
    halves, whole = play(kind, **options), play(Joined, pqn_abs, **options)
    assert (halves / "episodes.csv").read_text() == (whole / "episodes.csv").read_text()
    for name in ("abs/rollout_length", "abs/behavioral_divergence"):
        assert column(halves / "metrics.csv", name) == column(whole / "metrics.csv", name)
    ours, theirs = load(halves)["network"], load(whole)["network"]
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-4, atol=1e-6)


def test_one_half_is_in_flight_while_the_network_acts_for_the_other(play):
    InFlight.events.clear()
    play(InFlight, total_timesteps=1, num_steps=16)
    (_, a), (_, b) = InFlight.events[:2]
    between = [("recv", a), ("send", a), ("recv", b), ("send", b)] * 15
    assert InFlight.events == [("send", a), ("send", b), *between, ("recv", a), ("recv", b)]


def test_rollouts_reach_128_steps(play, monkeypatch):
    monkeypatch.setattr(pqn_abs_xl, "behavioral_divergence", lambda *args: 0.0)
    folder = play(FakeEnvs, total_timesteps=1200, adapt_frequency=1, beta=1.0, rollout_max=128)
    assert column(folder / "metrics.csv", "abs/batch_size", int) == [192, 768, 768]


def test_halves_of_an_odd_number(play, capsys, tmp_path):
    with pytest.raises(SystemExit) as error:
        play(FakeEnvs, num_envs=5)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith("pqn_abs_xl.py: --num-envs 5: ")
    assert list(tmp_path.iterdir()) == []


def test_atari(tmp_path):
    """Breakout, two iterations of real games in flight with lost lives, and of the l network."""
    options = {"num_envs": 4, "num_steps": 16, "total_timesteps": 128, "adapt_frequency": 1}
    options |= {"episodic_life": True, "num_minibatches": 2, "device": "cpu"}
    folder = pqn_abs_xl.main(pqn_abs_xl.Args(runs_dir=str(tmp_path), **options))
    assert len(column(folder / "metrics.csv", "abs/behavioral_divergence")) == 2
    assert sum(p.numel() for p in load(folder)["network"].values()) > 6_000_000


# --- Several processes ---

PROCESS = """
import os, sys, time, torch, torch.nn.functional as F
from pathlib import Path
from helpers import FakeEnvs, SmallNetwork
import pqn_abs_xl as xl

torch.set_num_threads(1)
folder, rank = Path(sys.argv.pop(1)), os.environ["RANK"]
delay = float(sys.argv.pop(1))
seen = {"frames": [], "targets": [], "gradients": [], "lengths": [], "steps": []}
halves = []

class Envs(FakeEnvs):
    def step(self, actions):
        time.sleep(delay)
        return super().step(actions)

class Network(SmallNetwork):
    def __init__(self, envs, size):
        super().__init__(envs)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, frames):
        if torch.is_grad_enabled() and self.training and halves:
            seen["frames"].append(frames.clone())
        return super().forward(frames)

def make_envs(args):
    halves.append(Envs(args.num_envs))
    return halves[-1]

def average_gradients(network, original=xl.average_gradients):
    original(network)
    seen["gradients"].append([p.grad.clone() for p in network.parameters()])
    if len(seen["gradients"]) == 1:
        seen["start"] = {name: p.clone() for name, p in network.state_dict().items()}

def mse_loss(q, target, original=F.mse_loss):
    seen["targets"].append(target.clone())
    return original(q, target)

def rollout_length(*args, original=xl.rollout_length, **options):
    seen["lengths"].append(original(*args, **options))
    return seen["lengths"][-1]

xl.make_envs, xl.QNetwork = make_envs, Network
xl.average_gradients, xl.rollout_length, F.mse_loss = average_gradients, rollout_length, mse_loss
Path(folder, rank + ".pid").write_text(str(os.getpid()))
run = xl.Run if rank == "0" else xl.Follower
save = run.save
def keep(self, **state):
    seen["end"] = {name: tensor.clone() for name, tensor in state["network"].items()}
    save(self, **state)
run.save = keep
xl.launch()
seen["seeds"] = [half.seed for half in halves]
seen["obs"] = torch.cat([torch.from_numpy(s.obs) for half in halves for s in half.steps])
seen["actions"] = torch.cat([torch.from_numpy(s.action) for half in halves for s in half.steps])
torch.save(seen, folder / (rank + ".pt"))
"""

OPTIONS = "--device cpu --precision float32 --num-envs 4 --run-name run".split()


def start_pair(folder, *arguments, delay=0.0):
    """Two processes as torchrun would start them."""
    (folder / "process.py").write_text(PROCESS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    command = [folder / "process.py", folder, delay, "--runs-dir", folder, *OPTIONS, *arguments]
    return [
        start(*command, env=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A run of two processes with ten measurements; its folder, and what each of them saw."""
    folder = tmp_path_factory.mktemp("pair")
    options = "--adapt-frequency 1 --num-steps 16 --total-timesteps 1200 --learning-rate 0.01"
    for process in start_pair(folder, *options.split(), "--max-grad-norm", 1000):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    seen = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return folder / "run", *seen


def test_processes_hold_the_same_network_and_rollout_length(pair):
    folder, first, second = pair
    assert len(set(first["lengths"])) > 2 and first["lengths"] == second["lengths"]
    assert same_weights(first["end"], second["end"])
    assert not same_weights(first["end"], first["start"])
    assert same_weights(first["end"], load(folder)["network"])


def test_processes_play_games_of_their_own(pair):
    _, first, second = pair
    assert len({*first["seeds"], *second["seeds"]}) == 4
    drawn = [process["actions"][:32] for process in (first, second)]  # ε is 1 in the first rollout
    assert not torch.equal(*drawn)


def test_averaged_gradient_is_that_of_the_joined_batch(pair):
    """The first mini-batch: 16 steps in 4 environments make 64 transitions, a quarter is 16."""
    _, first, second = pair
    frames, actions, targets = [], [], []
    for process in (first, second):
        taken = dict(zip(map(bytes, process["obs"].numpy()), process["actions"], strict=True))
        minibatch = next(f for f in process["frames"] if len(f) == 16)
        frames.append(minibatch)
        actions += [taken[bytes(frame)] for frame in minibatch.numpy()]
        targets.append(process["targets"][0])
    network = SmallNetwork(FakeEnvs(1))
    network.load_state_dict({n: p for n, p in first["start"].items() if n != "unused"})
    q = network(torch.cat(frames))[range(32), torch.stack(actions)]
    F.mse_loss(q, torch.cat(targets)).backward()
    averaged = [g for g in first["gradients"][0] if g.shape != (3,)]
    for gradient, parameter in zip(averaged, network.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)
    unused = [g for g in first["gradients"][0] if g.shape == (3,)]
    assert [g.tolist() for g in unused] == [[0, 0, 0]]


def test_steps_count_all_processes_and_the_first_one_writes(pair):
    folder, first, _ = pair
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    batches = column(folder / "metrics.csv", "abs/batch_size", int)
    steps = column(folder / "metrics.csv", "global_step", int)
    assert batches == [2 * 4 * length for length in lengths]
    assert steps == np.cumsum(batches).tolist() and steps[-2] < 1200 <= steps[-1]
    assert len(first["actions"]) == 4 * sum(lengths)
    assert [path.name for path in folder.parent.glob("*/metrics.csv")] == ["metrics.csv"]


def test_more_processes_than_gpus_are_refused(monkeypatch, capsys):
    """Guards --nproc-per-node: the first process says it, before one waits for the others."""
    monkeypatch.setattr(pqn_abs_xl, "WORLD_SIZE", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as error:
        pqn_abs_xl.main(pqn_abs_xl.Args())
    assert error.value.code == 2 and "2 GPUs" in capsys.readouterr().err


def wait_for_rows(folder, processes):
    table = folder / "run" / "metrics.csv"
    wait_for(lambda: table.exists() and len(rows(table)) > 1, processes[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_one_process_ends_the_other_with_one_line(tmp_path, victim):
    processes = start_pair(tmp_path, delay=0.001)
    wait_for_rows(tmp_path, processes)
    os.kill(processes[victim].pid, signal.SIGKILL)
    survivor = processes[1 - victim]
    _, errors = survivor.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("pqn_abs_xl.py: ")]
    assert survivor.returncode == 1 and "Traceback" not in errors, errors
    assert len(lines) == 1 and "another process is gone" in lines[0] and "--resume" in lines[0]


def test_resuming_takes_as_many_processes(pair, capsys):
    folder, *_ = pair
    before = (folder / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as error:
        pqn_abs_xl.main(pqn_abs_xl.Args(**(load(folder)["args"] | {"resume": str(folder)})))
    assert error.value.code == 2 and (folder / "checkpoint.pt").read_bytes() == before
    assert capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_torchrun(tmp_path, signum):
    """The command of the README, ended by Ctrl-C or with its terminal: a saved run."""
    (tmp_path / "process.py").write_text(PROCESS)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [*torchrun, tmp_path / "process.py", tmp_path, 0.001, "--runs-dir", tmp_path]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = start(*command, *OPTIONS, env=path)
    wait_for_rows(tmp_path, [process])
    process.send_signal(signum)
    process.communicate(timeout=60)
    steps = column(tmp_path / "run" / "metrics.csv", "global_step", int)
    assert load(tmp_path / "run")["global_step"] == steps[-1] == 256 * len(steps)
    assert (tmp_path / "0.pt").exists() and (tmp_path / "1.pt").exists()
