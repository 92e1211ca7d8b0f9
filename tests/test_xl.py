"""pqn_abs_xl.py: its networks, its loop beside pqn_abs.py's, and several processes."""

import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from helpers import (
    LIMIT,
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
    wait_for,
)
from test_pqn import forward_view

import pqn_abs
import pqn_abs_xl

# --- The network ---


def make(size):
    torch.manual_seed(0)
    return pqn_abs_xl.QNetwork(SimpleNamespace(single_action_space=Discrete(6)), size)


def random_frames(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 4, 84, 84), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size, parameters", [("l", 6_496_070), ("xl", 9_132_870)])
def test_number_of_parameters_is_that_of_the_authors_network(size, parameters):
    assert sum(p.numel() for p in make(size).parameters()) == parameters


def test_size_s_is_the_network_of_pqn_abs():
    torch.manual_seed(0)
    plain = pqn_abs.QNetwork(SimpleNamespace(single_action_space=Discrete(6)))
    assert same_weights(make("s").state_dict(), plain.state_dict())
    assert torch.equal(make("s")(random_frames(5)), plain(random_frames(5)))


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

    x = images(random_frames(3).double() / 255, "body.0", 4, "body.1")
    x = images(x, "body.3", 2, "body.4")
    x = images(x, "body.6", 1, "body.7")
    x0 = x = norm(linear(x.flatten(1), "body.10"), "body.11")
    for k in range(5):
        f = norm(linear(x.relu(), f"blocks.{k}.1"), f"blocks.{k}.2")
        f = norm(linear(f.relu(), f"blocks.{k}.4"), f"blocks.{k}.5")
        x = x + f + x0
    expected = linear(norm(linear(x, "before_head.0"), "before_head.1").relu(), "head")
    torch.testing.assert_close(network(random_frames(3)).double(), expected, rtol=1e-3, atol=1e-4)


def test_head_stays_in_float32():
    """Guards the action gaps: rounded to bfloat16, nearby Q-values would tie."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q_values = make("l")(random_frames(2))
    assert q_values.dtype == torch.float32
    assert not torch.equal(q_values, q_values.bfloat16().float())


# --- One process ---


@pytest.fixture
def play(tmp_path):
    """play(envs, script, **arguments) runs a script and returns the run's folder."""
    count = iter(range(1000))

    def run(envs, script=pqn_abs_xl, **arguments):
        sized = {"QNetwork": lambda envs, *size: SmallNetwork(envs)}
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        args = script.Args(**(defaults | names | {"adapt_frequency": 1} | arguments))
        return script.main(args, **(on(envs) | sized))

    return run


def test_alone_it_is_pqn_abs(play):
    """Weights, rows and actions are those of pqn_abs.py, bit for bit, lost lives among them."""
    options = {"total_timesteps": 3000, "learning_rate": 0.01, "exploration_fraction": 0.2}
    options |= {"rollout_max": 64}
    envs, others = FakeEnvs(6, lives=3), FakeEnvs(6, lives=3)
    ours = play(pqn_abs_xl.EpisodicLife(envs, 2), **options)
    theirs = play(pqn_abs.EpisodicLife(others, 2), pqn_abs, **options)
    assert same_weights(load(ours)["network"], load(theirs)["network"])
    assert np.array_equal(stacked(envs.steps, "action"), stacked(others.steps, "action"))
    for name in rows(theirs / "metrics.csv")[0].keys() - {"charts/seconds", "charts/SPS"}:
        assert column(ours / "metrics.csv", name) == column(theirs / "metrics.csv", name)
    assert len(set(column(ours / "metrics.csv", "abs/rollout_length"))) > 2


# --- Several processes ---

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
OPTIONS = "--device cpu --precision float32 --num-envs 4 --num-steps 16 --adapt-frequency 1".split()


def start_run(folder, *arguments, script="tests/xl_run.py", processes=2, env=(), **options):
    """Start a run in folder/runs. tests/xl_run.py writes what it has seen to folder."""
    command = TORCHRUN if processes == 2 else []
    command = [*command, ROOT / script, "--runs-dir", folder / "runs", *OPTIONS, *arguments]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "SEEN": str(folder)}
    return start(*command, env=environment | dict(env), **options)


def what_they_saw(folder, processes=2):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A run in which every update is one step on the whole rollout, and clips the gradient."""
    folder = tmp_path_factory.mktemp("pair")
    options = "--num-minibatches 1 --update-epochs 1 --max-grad-norm 0.5 --size xl --beta 0.3"
    options += " --learning-rate 0.03 --reference-states 1000000 --total-timesteps 3000"
    output, errors = end_of(start_run(folder, *options.split()))
    (run,) = (folder / "runs").iterdir()
    return SimpleNamespace(run=run, seen=what_they_saw(folder), output=output + errors)


def test_processes_hold_the_same_network_and_rollout_length(pair):
    first, second = pair.seen
    for ours, theirs in zip(first["weights"], second["weights"], strict=True):
        assert same_weights(ours, theirs)
    assert same_weights(first["weights"][-1], load(pair.run)["network"])
    assert not same_weights(first["weights"][0], first["weights"][1])
    assert first["lengths"] == second["lengths"] and len(set(first["lengths"])) > 2
    played = [16, *map(round, first["lengths"][:-1])]
    assert column(pair.run / "metrics.csv", "abs/rollout_length", int) == played
    assert first["size"] == second["size"] == "xl"
    assert first["seed"] != second["seed"]  # they play games of their own
    assert not np.array_equal(first["steps"]["action"][:16], second["steps"]["action"][:16])


def rollouts(pair):
    """Each iteration's weights before and after it, and what both processes saw in it."""
    weights = pair.seen[0]["weights"]
    begin = 0
    for i, length in enumerate(column(pair.run / "metrics.csv", "abs/rollout_length", int)):
        networks = [SmallNetwork(FakeEnvs(1)) for _ in range(2)]
        for network, state in zip(networks, weights[i : i + 2], strict=True):
            network.load_state_dict(state, strict=False)  # without its spare parameters
        both = []
        for seen in pair.seen:
            arrays = {name: seen["steps"][name][begin : begin + length] for name in seen["steps"]}
            both.append(SimpleNamespace(**arrays))
        yield networks, both
        begin += length


def test_divergence_is_the_mean_over_both(pair):
    """Each process measures on its own states: here on all of its rollout."""
    own = []
    for (before, after), both in rollouts(pair):
        states = [torch.from_numpy(steps.obs).flatten(0, 1) for steps in both]
        own.append([(before(s).argmax(1) != after(s).argmax(1)).float().mean() for s in states])
    logged = column(pair.run / "metrics.csv", "abs/behavioral_divergence")
    assert logged == pytest.approx(np.mean(own, axis=1), abs=1e-6)
    assert logged == pair.seen[0]["divergences"] == pair.seen[1]["divergences"]
    assert sum(first != second for first, second in own) > 3  # or one could stand for both


def test_two_processes_learn_as_one_would_from_both_rollouts(pair):
    """Every update again, on the transitions of both: the mean of the gradients, then the clip."""
    network = SmallNetwork(FakeEnvs(1)).double()
    network.load_state_dict(pair.seen[0]["weights"][0], strict=False)
    optimizer = torch.optim.RAdam(network.parameters(), lr=0.03)
    norms = []
    for (_, after), both in rollouts(pair):
        errors = []
        for steps in both:
            frames = torch.from_numpy(np.stack([steps.obs, steps.true_next])).flatten(1, 2)
            q_values, next_q_values = network(frames.flatten(0, 1)).chunk(2)
            next_values = next_q_values.detach().amax(1).view(steps.reward.shape).numpy()
            endings = steps.terminated, steps.truncated
            returns = forward_view(np.sign(steps.reward), next_values, *endings, 0.99, 0.65)
            taken = q_values[range(returns.size), steps.action.flatten()]
            errors.append(taken - torch.from_numpy(returns.flatten()))
        optimizer.zero_grad()
        torch.cat(errors).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), 0.5).item())
        optimizer.step()
        for ours, theirs in zip(network.parameters(), after.parameters(), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-5)
    assert column(pair.run / "metrics.csv", "losses/grad_norm") == pytest.approx(norms, rel=1e-4)
    assert len(norms) > 5 and min(norms) > 0.5


def test_steps_count_both_processes_and_the_first_one_writes(pair):
    lengths = column(pair.run / "metrics.csv", "abs/rollout_length", int)
    batches = column(pair.run / "metrics.csv", "abs/batch_size", int)
    steps = column(pair.run / "metrics.csv", "global_step", int)
    assert batches == [2 * 4 * length for length in lengths]
    assert steps == np.cumsum(batches).tolist() and steps[-2] < 3000 <= steps[-1]
    for seen in pair.seen:
        assert len(seen["steps"]["obs"]) == sum(lengths)
    names = {path.name for path in pair.run.iterdir()}
    assert names == {"checkpoint.pt", "config.json", "metrics.csv", "xl_run.py", "pqn_abs_xl.py"}
    assert pair.output.count("saved; to continue") == 1


@pytest.mark.parametrize("processes", [2, 1])
def test_resuming(pair, tmp_path, processes):
    """It goes on where two processes ended, with two of them or with one alone."""
    resumed = tmp_path / "runs" / "resumed"
    shutil.copytree(pair.run, resumed)
    before, saved = rows(resumed / "metrics.csv"), load(resumed)
    options = "--num-minibatches 4 --update-epochs 2 --total-timesteps 5000".split()
    end_of(start_run(tmp_path, "--resume", resumed, *options, processes=processes))
    table = rows(resumed / "metrics.csv")
    assert table[: len(before)] == before
    first_row, last_row = table[len(before)], table[-1]
    length = round(saved["adaptive_length"])
    assert int(first_row["abs/rollout_length"]) == length
    assert int(first_row["global_step"]) == saved["global_step"] + 4 * length * processes
    assert int(first_row["charts/updates"]) == saved["updates"] + 8
    assert int(last_row["global_step"]) >= 5000
    seen = what_they_saw(tmp_path, processes)
    kept = load(resumed)["network"]
    assert not same_weights(kept, saved["network"])
    for process in seen:
        assert process["seed"] not in [seen["seed"] for seen in pair.seen]
        assert same_weights(process["weights"][-1], kept)


def test_a_signal_ends_the_iteration_and_saves(tmp_path):
    """Ctrl-C reaches torchrun's process group, and both processes stop after the same iteration.

    They wait in step 40 until the first one has said that it is going to stop.
    """
    (tmp_path / "hold").touch()
    variables = {"EVENT": "hold 0 1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LIMIT)}
    with (tmp_path / "errors").open("w") as errors:
        process = start_run(tmp_path, env=variables, stderr=errors, start_new_session=True)
    wait_for(lambda: all((tmp_path / f"{rank}.held").exists() for rank in (0, 1)), process)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(lambda: "finishing the iteration" in (tmp_path / "errors").read_text(), process)
    (tmp_path / "hold").unlink()
    end_of(process, status=1)  # torchrun's own, after a signal
    (folder,) = (tmp_path / "runs").iterdir()
    steps = column(folder / "metrics.csv", "global_step", int)
    assert steps[-2] < 40 * 8 <= steps[-1]
    saved = load(folder)
    assert saved["global_step"] == steps[-1]
    for seen in what_they_saw(tmp_path):
        assert same_weights(seen["weights"][-1], saved["network"])


@pytest.mark.parametrize("event", ["kill 0", "break 1"])
def test_a_process_that_fails_ends_the_job(tmp_path, event):
    """The first checkpoint stays; a NaN in one process ends all by the mean of the gradients."""
    _, errors = end_of(start_run(tmp_path, env={"EVENT": event}), status=1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert load(folder)["global_step"] == column(folder / "metrics.csv", "global_step", int)[0]
    assert list(tmp_path.glob("*.pt")) == []
    assert ("the gradient is not finite" in errors) == (event == "break 1")


@pytest.mark.parametrize("words", ["--beta 2", "--run-name taken"])
def test_bad_arguments_leave_nothing(tmp_path, words):
    """Guards the start: before the processes meet, and after it."""
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    script = "pqn_abs_xl.py"
    output, errors = end_of(start_run(tmp_path, *words.split(), script=script), status=1)
    assert "pqn_abs_xl.py: " in output + errors
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "taken"]
