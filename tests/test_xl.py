"""pqn_abs_xl.py: its network, and that the algorithm learns with it. What it shares with pqn_abs.py is tested there."""

import pytest
import torch
import torch.nn as nn
from catch import Catch
from helpers import Bandit, Noise, SmallNetwork, column, load, rows, same

import pqn_abs_xl


def make(size, **sizes):
    torch.manual_seed(0)
    width, num_blocks = pqn_abs_xl.SIZES[size]
    sizes = {"channels": pqn_abs_xl.Args().channels, "width": width, "num_blocks": num_blocks} | sizes
    return pqn_abs_xl.QNetwork(Catch(1), **sizes)


@pytest.mark.parametrize("size, blocks", [("l", 5), ("xl", 10)])
def test_network_has_the_layers_of_its_size(size, blocks):
    """Convolutions of 64, 128 and 128 channels, then 512 hidden units throughout, a LayerNorm after each layer."""
    convolutions = 64 * (4 * 8 * 8 + 1) + 128 * (64 * 4 * 4 + 1) + 128 * (128 * 3 * 3 + 1)
    norms = 2 * (64 * 20 * 20 + 128 * 9 * 9 + 128 * 7 * 7)
    first, head, layer = 512 * (128 * 7 * 7 + 1) + 2 * 512, 3 * (512 + 1), 512 * (512 + 1) + 2 * 512
    expected = convolutions + norms + first + 2 * blocks * layer + layer + head
    assert sum(p.numel() for p in make(size).parameters()) == expected
    assert make(size)(torch.zeros((7, 4, 84, 84), dtype=torch.uint8)).shape == (7, 3)


def test_network_computes_its_equation():
    """The same once more from the weights alone, in float64: convolutions as sums over patches, LayerNorm by hand."""
    network = make("l", channels=(8, 12, 16), width=24, num_blocks=3)
    for parameter in network.parameters():  # biases and LayerNorm's parameters other than 0 and 1
        nn.init.normal_(parameter, std=0.2)
    w = {name: parameter.detach().double() for name, parameter in network.named_parameters()}
    frames = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def norm(x, name):
        flat = x.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return flat.view_as(x) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def convolution(x, name, stride):  # (N, C, H, W) -> (N, H', W', C')
        kernel = w[f"{name}.weight"]
        patches = x.unfold(2, kernel.shape[2], stride).unfold(3, kernel.shape[3], stride)
        return torch.einsum("nchwij,ocij->nhwo", patches, kernel) + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = frames.double() / 255
    for i, stride in enumerate((4, 2, 1), 1):
        x = norm(convolution(x, f"conv{i}", stride), f"norm{i}").relu().movedim(-1, 1)
    x0 = x = norm(linear(x.movedim(1, -1).flatten(1), "first"), "norm4")
    for k in range(3):
        block = norm(linear(x.relu(), f"blocks.{k}.1"), f"blocks.{k}.2")
        block = norm(linear(block.relu(), f"blocks.{k}.4"), f"blocks.{k}.5")
        x = x + block + x0
    expected = linear(norm(linear(x, "last"), "norm5").relu(), "head")
    torch.testing.assert_close(network(frames).double(), expected, rtol=1e-3, atol=1e-4)


def test_gradient_reaches_the_first_layer_at_any_depth():
    """Through 10 blocks (20 layers) as well as through one; a plain stack of PyTorch's own layers loses it."""

    def gradient(network, first, inputs):
        network(inputs).square().mean().backward()
        return first.weight.grad.norm()

    def plain(depth):
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(64, 3))

    frames = torch.randint(256, (16, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    networks = [make("l", channels=(8, 8, 8), width=64, num_blocks=n) for n in (1, 10)]
    shallow, deep = (gradient(network, network.conv1, frames) for network in networks)
    assert 1 / 3 < deep / shallow < 3
    stacks = [plain(2 * n + 2) for n in (1, 10)]
    shallow, deep = (gradient(stack, stack[0], torch.rand(16, 64)) for stack in stacks)
    assert deep / shallow < 1 / 100


def test_size_reaches_the_network(train):
    def network(envs, *sizes):
        seen.append(sizes)
        return SmallNetwork(envs)

    seen = []
    train(Noise(4), network, pqn_abs_xl, total_timesteps=1)
    train(Noise(4), network, pqn_abs_xl, total_timesteps=1, size="xl")
    train(Noise(4), network, pqn_abs_xl, total_timesteps=1, size="xl", width=64, channels=(8, 8, 16))
    assert seen == [((64, 128, 128), 512, 5), ((64, 128, 128), 512, 10), ((8, 8, 16), 64, 10)]


def test_resumed_run_equals_a_straight_one(train):
    options = {"start_e": 0.3, "end_e": 0.3, "adapt_frequency": 2, "script": pqn_abs_xl, "channels": (8, 8, 16)}
    straight = train(Bandit(4), total_timesteps=3000, **options)
    folder = train(Bandit(4), total_timesteps=1000, **options)
    args = pqn_abs_xl.parse_args(["--resume", str(folder / "checkpoint.pt"), "--total-timesteps", "3000"])
    assert train(Bandit(4), script=pqn_abs_xl, **vars(args) | {"device": "cpu"}) == folder
    assert same(load(folder)["network"], load(straight)["network"])


def test_catch_is_solved(train):
    options = {"total_timesteps": 20_000, "num_envs": 8, "num_minibatches": 8, "adapt_frequency": 10}
    options |= {"exploration_fraction": 0.3, "precision": "auto", "channels": (16, 16, 16), "width": 64}
    folder = train(Catch(8), pqn_abs_xl.QNetwork, pqn_abs_xl, **options)
    assert max(column(folder / "metrics.csv", "charts/episodic_return")) >= 0.9


def test_rollouts_reach_128_steps(train, monkeypatch):
    monkeypatch.setattr(pqn_abs_xl, "behavioral_divergence", lambda *args: 0.0)
    folder = train(Noise(4), script=pqn_abs_xl, total_timesteps=3000, adapt_frequency=1, beta=1.0)
    assert column(folder / "metrics.csv", "abs/batch_size", int)[-1] == 4 * 128


@pytest.mark.parametrize("option, value", [("size", "xl"), ("width", 128), ("num_blocks", 3), ("channels", (8, 8, 8))])
def test_checkpoint_of_one_size_does_not_load_into_another(train, capsys, option, value):
    folder = train(Noise(4), script=pqn_abs_xl, total_timesteps=256)
    metrics = rows(folder / "metrics.csv")
    capsys.readouterr()
    words = [str(word) for word in (value if isinstance(value, tuple) else [value])]
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(SystemExit) as error:
        pqn_abs_xl.parse_args(["--resume", str(folder / "checkpoint.pt"), flag, *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith(f"pqn_abs_xl.py: {flag}") and "checkpoint" in line
    assert rows(folder / "metrics.csv") == metrics and load(folder)["args"]["size"] == "l"


@pytest.mark.parametrize("sizes", [{"width": 0}, {"num_blocks": 0}, {"channels": (64, 0, 64)}, {"width": -1}])
def test_sizes_below_one(train, tmp_path, capsys, sizes):
    with pytest.raises(SystemExit) as error:
        train(Noise(4), script=pqn_abs_xl, **sizes)
    assert error.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
