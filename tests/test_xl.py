"""pqn_abs_xl.py: its networks, its loop beside pqn_abs.py's, and several processes."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from helpers import (
    ROOT,
    FakeEnvs,
    SmallNetwork,
    column,
    end_of,
    load,
    on,
    rows,
    same_weights,
    stacked,
    start,
)
from test_pqn import forward_view

import pqn_abs
import pqn_abs_xl

# --- The network ---

ENVS = SimpleNamespace(single_action_space=Discrete(6))
FRAMES = torch.from_numpy(np.random.default_rng(0).integers(256, size=(3, 4, 84, 84), dtype="u1"))


def make(size, precision="float32"):
    torch.manual_seed(0)
    return pqn_abs_xl.QNetwork(ENVS, pqn_abs_xl.Args(size=size, device="cpu", precision=precision))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_size_s_is_the_network_of_pqn_abs(precision):
    torch.manual_seed(0)
    plain = pqn_abs.QNetwork(ENVS, pqn_abs.Args(device="cpu", precision=precision))
    ours = make("s", precision)
    assert same_weights(ours.state_dict(), plain.state_dict())
    assert torch.equal(ours(FRAMES), plain(FRAMES))


@pytest.mark.parametrize("size, blocks, count", [("l", 5, 6_496_070), ("xl", 10, 9_132_870)])
def test_network_is_its_equation(size, blocks, count):
    """In float64 from the weights alone, which are as many as in the author's network."""
    network = make(size)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    for parameter in network.parameters():  # LayerNorm's parameters other than 0 and 1
        nn.init.normal_(parameter, std=0.05)
    w = {name: parameter.detach().double() for name, parameter in network.named_parameters()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = FRAMES.double() / 255
    for i, stride in (0, 4), (3, 2), (6, 1):
        x = F.conv2d(x, w[f"body.{i}.weight"], w[f"body.{i}.bias"], stride)
        x = norm(x, f"body.{i + 1}").relu()
    x0 = x = norm(linear(x.flatten(1), "body.10"), "body.11")
    for k in range(blocks):
        f = norm(linear(x.relu(), f"blocks.{k}.1"), f"blocks.{k}.2")
        f = norm(linear(f.relu(), f"blocks.{k}.4"), f"blocks.{k}.5")
        x = x + f + x0
    expected = linear(norm(linear(x, "before_head.0"), "before_head.1").relu(), "head")
    torch.testing.assert_close(network(FRAMES).double(), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_sums_and_head_stay_in_float32():
    """Guards the action gaps: rounded to bfloat16, nearby Q-values would tie."""
    network = make("l", "bfloat16")
    sums = []
    network.before_head.register_forward_pre_hook(lambda layer, inputs: sums.append(inputs[0]))
    q_values = network(FRAMES)
    for values in (*sums, q_values):
        assert values.dtype == torch.float32
        assert not torch.equal(values, values.bfloat16().float())
    assert not torch.equal(q_values, make("l")(FRAMES))  # other layers are in bfloat16


# --- One process ---


def test_alone_it_is_pqn_abs(tmp_path):
    """Weights, rows and actions are those of pqn_abs.py, bit for bit, lost lives among them."""
    options = {"runs_dir": str(tmp_path), "num_envs": 6, "device": "cpu", "precision": "float32"}
    options |= {"adapt_frequency": 1, "learning_rate": 0.01, "exploration_fraction": 0.2}
    options |= {"total_timesteps": 3000, "rollout_max": 64}
    envs, others = FakeEnvs(6, lives=3), FakeEnvs(6, lives=3)
    ours = pqn_abs_xl.main(pqn_abs_xl.Args(run_name="xl", **options), **on(envs))
    theirs = pqn_abs.main(pqn_abs.Args(run_name="plain", **options), **on(others))
    assert same_weights(load(ours)["network"], load(theirs)["network"])
    assert np.array_equal(stacked(envs.steps, "action"), stacked(others.steps, "action"))
    for name in rows(theirs / "metrics.csv")[0].keys() - {"charts/SPS"}:
        assert column(ours / "metrics.csv", name) == column(theirs / "metrics.csv", name)
    assert len(set(column(ours / "metrics.csv", "abs/rollout_length"))) > 2


# --- Several processes ---

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
OPTIONS = "--device cpu --precision float32 --num-envs 4 --num-steps 16 --adapt-frequency 1".split()


def train(folder, *arguments, processes=2, event="", status=0):
    """Run tests/xl_run.py, which writes what it has seen to folder; returns its errors."""
    command = TORCHRUN if processes == 2 else []
    command = [*command, ROOT / "tests/xl_run.py", "--runs-dir", folder / "runs", *OPTIONS]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "SEEN": str(folder), "EVENT": event}
    return end_of(start(*command, *arguments, env=env), status)[1]


def what_they_saw(folder, processes=2):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A run in which every update is one step on the whole rollout, and clips the gradient."""
    folder = tmp_path_factory.mktemp("pair")
    options = "--num-minibatches 1 --update-epochs 1 --max-grad-norm 0.5 --learning-rate 0.03"
    options += " --beta 0.3 --reference-states 1000000 --total-timesteps 3000"
    errors = train(folder, *options.split())
    (run,) = (folder / "runs").iterdir()
    return SimpleNamespace(run=run, seen=what_they_saw(folder), errors=errors)


def test_processes_share_network_and_length_and_play_their_own_games(pair):
    """The network is the same, though each process began with other weights."""
    first, second = pair.seen
    for ours, theirs in zip(first["weights"], second["weights"], strict=True):
        assert same_weights(ours, theirs)
    assert same_weights(first["weights"][-1], load(pair.run)["network"])
    assert not same_weights(first["weights"][0], first["weights"][1])
    assert first["lengths"] == second["lengths"] and len(set(first["lengths"])) > 2
    assert first["divergences"] == second["divergences"]
    played = [16, *map(round, first["lengths"][:-1])]
    assert column(pair.run / "metrics.csv", "abs/rollout_length", int) == played
    batches = [2 * 4 * length for length in played]
    assert column(pair.run / "metrics.csv", "abs/batch_size", int) == batches
    assert column(pair.run / "metrics.csv", "global_step", int) == np.cumsum(batches).tolist()
    assert sum(batches[:-1]) < 3000 <= sum(batches)
    assert second["seed"] == first["seed"] + 4
    assert not np.array_equal(first["steps"]["action"][:16], second["steps"]["action"][:16])
    assert pair.errors.count(f"--resume '{pair.run}'") == 2


def test_two_processes_learn_as_one_would_from_both_rollouts(pair):
    """Every update again, on the transitions of both. δ is measured on all of their states."""
    lengths = column(pair.run / "metrics.csv", "abs/rollout_length", int)
    weights = pair.seen[0]["weights"]
    network = SmallNetwork(FakeEnvs(1), None).double()
    network.load_state_dict(weights[0], strict=False)  # without the spare parameters
    optimizer = torch.optim.RAdam(network.parameters(), lr=0.03)
    norms, divergences = [], []
    begin = 0
    for length, after in zip(lengths, weights[1:-1], strict=True):
        states, greedy, errors = [], [], []
        for seen in pair.seen:
            arrays = {name: seen["steps"][name][begin : begin + length] for name in seen["steps"]}
            steps = SimpleNamespace(**arrays)
            next_values = network(torch.from_numpy(steps.true_next).flatten(0, 1)).amax(1)
            next_values = next_values.detach().view(steps.reward.shape).numpy()
            endings = steps.terminated, steps.truncated
            returns = forward_view(np.sign(steps.reward), next_values, *endings, 0.99, 0.65)
            states.append(torch.from_numpy(steps.obs).flatten(0, 1))
            q_values = network(states[-1])
            greedy.append(q_values.argmax(1))
            taken = q_values[range(returns.size), steps.action.flatten()]
            errors.append(taken - torch.from_numpy(returns.flatten()))
        begin += length
        optimizer.zero_grad()
        torch.cat(errors).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), 0.5).item())
        optimizer.step()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(tensor.float(), after[name], rtol=1e-4, atol=1e-5)
        network.load_state_dict(after, strict=False)
        changed = [network(states[i]).argmax(1) != greedy[i] for i in (0, 1)]
        divergences.append([process.double().mean().item() for process in changed])
    assert column(pair.run / "metrics.csv", "losses/grad_norm") == pytest.approx(norms, rel=1e-4)
    assert len(norms) > 5 and min(norms) > 0.5
    logged = column(pair.run / "metrics.csv", "abs/behavioral_divergence")
    assert logged == pytest.approx(np.mean(divergences, axis=1), abs=1e-6)
    assert sum(first != second for first, second in divergences) > 3  # else one could be both


@pytest.mark.parametrize("processes", [2, 1])
def test_resuming(pair, tmp_path, processes):
    """It goes on where two processes ended, with two of them or with one alone."""
    resumed = tmp_path / "runs" / "resumed"
    shutil.copytree(pair.run, resumed)
    before, saved = len(rows(resumed / "metrics.csv")), load(resumed)
    options = "--num-minibatches 4 --update-epochs 2 --total-timesteps 5000".split()
    train(tmp_path, "--resume", resumed, *options, processes=processes)
    row = rows(resumed / "metrics.csv")[before]
    length = round(saved["adaptive_length"])
    assert int(row["global_step"]) == saved["global_step"] + 4 * length * processes
    assert int(row["charts/updates"]) == saved["updates"] + 8
    steps = sum(column(resumed / "metrics.csv", "abs/rollout_length", int)[before:])
    for seen in what_they_saw(tmp_path, processes):
        assert len(seen["steps"]["obs"]) == 3000 + steps
        assert same_weights(seen["weights"][0], saved["network"])
        assert same_weights(seen["weights"][-1], load(resumed)["network"])


@pytest.mark.parametrize("event", ["SIGINT 1", "SIGTERM 0"])
def test_a_signal_to_one_process_stops_both_after_the_iteration(tmp_path, event):
    train(tmp_path, event=event)
    (folder,) = (tmp_path / "runs").iterdir()
    steps = column(folder / "metrics.csv", "global_step", int)
    assert steps[-2] < 40 * 8 <= steps[-1]
    assert load(folder)["global_step"] == steps[-1]
    for seen in what_they_saw(tmp_path):
        assert same_weights(seen["weights"][-1], load(folder)["network"])


@pytest.mark.parametrize("event", ["SIGKILL 1", "break 1"])
def test_a_process_that_fails_ends_the_job(tmp_path, event):
    """The first checkpoint stays; a NaN in one process ends all by the mean of the gradients."""
    errors = train(tmp_path, event=event, status=1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert load(folder)["global_step"] == column(folder / "metrics.csv", "global_step", int)[0]
    assert ("the gradient is not finite" in errors) == (event == "break 1")


def test_a_folder_that_exists_ends_the_job(tmp_path):
    """Guards the start, where the others wait for the first process."""
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    errors = train(tmp_path, "--run-name", "taken", status=1)
    assert "xl_run.py: [Errno" in errors
    assert list((tmp_path / "runs" / "taken").iterdir()) == []
