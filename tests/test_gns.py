"""gns_baseline.py: the noise scale, and what L makes of it; δ and losses as in pqn_abs.py."""

import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import FakeEnvs, SmallNetwork, column, load, on, rows, same_weights, stacked
from test_pqn import forward_view

import gns_baseline
import pqn_abs
from gns_baseline import micro_batch_gradients, noise_and_squared_norm, noise_scale_batch

# --- The estimator, where the truth is known ---


@pytest.mark.parametrize("b, m", [(4, 2), (8, 16)])
def test_noise_and_squared_norm_are_unbiased(b, m):
    """Linear regression y = x·v + e: the gradient of a sample is 2 x (x·d - e), d = w - v.

    With x standard normal its mean is 2d, and the mean of its square 4 ((P + 2) ‖d‖² + P σ²).
    """
    rng = np.random.default_rng(0)
    size, sigma, draws = 5, 3.0, 100_000 // (b * m)
    d = rng.normal(size=size)
    x = rng.normal(size=(draws, m, b, size))
    e = sigma * rng.normal(size=(draws, m, b, 1))
    gradients = torch.from_numpy((2 * x * ((x @ d)[..., None] - e)).mean(axis=2))
    squared_norm = 4 * d @ d
    noise = 4 * ((size + 2) * d @ d + size * sigma**2) - squared_norm
    estimates = np.array([noise_and_squared_norm(sample, b) for sample in gradients])
    error = estimates.std(axis=0) / math.sqrt(draws)
    assert (abs(estimates.mean(axis=0) - (noise, squared_norm)) < 4 * error).all()
    assert (error < np.array([noise, squared_norm]) / 5).all()  # or the line above says nothing


@pytest.mark.parametrize(
    "noise, squared_norm, batch",
    [(30.0, 0.0988, 303), (1.0, 1.0, 100), (1e9, 1.0, 900), (1.0, 0.0, 900), (1.0, -2.0, 900)],
)
def test_batch_is_the_noise_scale_in_its_range(noise, squared_norm, batch):
    """Guards the floor, both limits, and S ≤ 0, where noise hides the gradient."""
    assert noise_scale_batch(noise, squared_norm, 100, 900) == batch


def gradients_of_samples(network, obs, actions, returns):
    """The gradient of each sample's squared error, from its definition, in float64: (N, P)."""
    gradients = []
    for j in range(len(obs)):
        error = (network(obs[j : j + 1])[0, actions[j]] - returns[j]) ** 2
        gradient = torch.autograd.grad(error, list(network.parameters()))
        gradients.append(torch.cat([g.flatten() for g in gradient]))
    return torch.stack(gradients).numpy()


def test_a_gradient_is_the_mean_over_its_micro_batch():
    """Guards the loss's factor and the indices; a parameter without effect has gradient 0."""
    network = SmallNetwork(FakeEnvs(1), None)
    obs = torch.randint(256, (12, 6), dtype=torch.uint8)
    batch = obs, torch.randint(4, (12,)), torch.randn(12)
    micro_batches = torch.randperm(12)[:10].view(2, 5)
    expected = gradients_of_samples(network.double(), *batch)[micro_batches].mean(axis=1)
    network.float().unused = nn.Parameter(torch.ones(3))
    gradients = micro_batch_gradients(network, *batch, micro_batches)
    assert gradients.shape == (2, expected.shape[1] + 3)
    unused = [name for name, _ in network.named_parameters()].index("unused")
    assert unused == 0 and not gradients[:, :3].any()
    np.testing.assert_allclose(gradients[:, 3:], expected, rtol=1e-4, atol=1e-6)


# --- In a run ---


@pytest.fixture
def play(tmp_path):
    """play(envs, script, **arguments) runs a script and returns the run's folder."""
    count = iter(range(1000))

    def run(envs=None, script=gns_baseline, **arguments):
        defaults = {"num_envs": 4, "device": "cpu", "precision": "float32", "adapt_frequency": 1}
        defaults |= {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        return script.main(script.Args(**(defaults | arguments)), **on(envs or FakeEnvs(4)))

    return run


@pytest.mark.parametrize("m", [2, 16, 84])
def test_an_iteration_measures_its_own_rollout_and_updates(play, monkeypatch, m):
    """The third of three: θ_old is the network that a run of two iterations ends with.

    Of the 84 shuffled samples, those that m does not divide are left out.
    """
    orders = []
    randperm = torch.randperm

    def recorded(*given, **options):
        orders.append(randperm(*given, **options))
        return orders[-1]

    monkeypatch.setattr(torch, "randperm", recorded)
    envs = FakeEnvs(4)
    options = {"num_steps": 21, "adapt_rollout": False, "learning_rate": 0.01}
    options |= {"adapt_frequency": 3, "micro_batches": m, "reference_states": 10**6}
    earlier = play(**options, total_timesteps=2 * 84)
    folder = play(envs, **options, total_timesteps=3 * 84)
    old_network, network = (SmallNetwork(envs, None).double() for _ in range(2))
    old_network.load_state_dict(load(earlier)["network"])
    network.load_state_dict(load(folder)["network"])

    steps = envs.steps[42:]
    obs, true_next = (torch.from_numpy(stacked(steps, name)) for name in ("obs", "true_next"))
    obs = obs.flatten(0, 1)
    with torch.no_grad():
        next_values = old_network(true_next.flatten(0, 1)).amax(1).view(21, 4).numpy()
    rewards = np.sign(stacked(steps, "reward"))
    endings = stacked(steps, "terminated"), stacked(steps, "truncated")
    returns = forward_view(rewards, next_values, *endings, 0.99, 0.65).flatten()
    actions = stacked(steps, "action").flatten()
    gradients = gradients_of_samples(old_network, obs, actions, returns)

    b = 84 // m
    order = orders[-1].numpy()
    means = [gradients[order[i * b : (i + 1) * b]].mean(axis=0) for i in range(m)]
    mean = np.mean(means, axis=0)
    noise = b / (m - 1) * sum(((g - mean) ** 2).sum() for g in means)
    squared_norm = mean @ mean - noise / (m * b)
    divergence = (network(obs).argmax(1) != old_network(obs).argmax(1)).double().mean().item()
    assert 0 < divergence < 1
    names = ["gns/noise", "gns/squared_norm", "abs/behavioral_divergence"]
    *before, last = [[row[name] for name in names] for row in rows(folder / "metrics.csv")]
    assert before == [["", "", ""]] * 2
    values = [float(value) for value in last]
    assert values == pytest.approx([noise, squared_norm, divergence], rel=1e-3)


def test_batch_follows_the_averages_of_noise_and_squared_norm(play):
    """L is that of the weighted means of N and S; S_avg ≤ 0 gives L_max; a resumed run goes on."""
    options = {"beta": 0.6, "learning_rate": 0.03}
    folder = play(total_timesteps=4000, **options)
    table = folder / "metrics.csv"
    resumed_at = len(rows(table))
    envs = FakeEnvs(4)
    play(envs, total_timesteps=8000, resume=str(folder), **options)
    noise, squared_norm = (np.array(column(table, f"gns/{x}")) for x in ("noise", "squared_norm"))
    scales, lengths = [], [32]
    for k in range(1, len(noise) + 1):
        weights = 0.4 ** np.arange(k)[::-1]
        average = weights @ squared_norm[:k]
        scales.append(weights @ noise[:k] / average if average > 0 else math.nan)
        lengths.append(round(np.clip(scales[-1] // 1, 64, 256) / 4) if average > 0 else 64)
    assert column(table, "abs/rollout_length", int) == lengths[:-1]
    assert len(envs.steps) == 3000 + sum(lengths[resumed_at:-1])
    shown = [float(row["gns/noise_scale"] or "nan") for row in rows(table)]
    assert shown == pytest.approx(scales, nan_ok=True)
    for part in (slice(resumed_at), slice(resumed_at, None)):  # both had all kinds of averages
        assert np.isnan(scales[part]).any() and any(16 < length < 64 for length in lengths[part])


def test_without_adaptation_it_is_pqn_abs(play):
    """Weights and rows are those of pqn_abs.py, bit for bit, whatever else is measured."""
    options = {"total_timesteps": 4000, "adapt_frequency": 2, "learning_rate": 0.1}
    options |= {"adapt_rollout": False, "reference_states": 50}
    ours, theirs = play(**options), play(script=pqn_abs, **options)
    assert same_weights(load(ours)["network"], load(theirs)["network"])
    for name in rows(theirs / "metrics.csv")[0].keys() - {"charts/SPS"}:
        assert column(ours / "metrics.csv", name) == column(theirs / "metrics.csv", name)
    assert len(set(column(ours / "metrics.csv", "abs/behavioral_divergence"))) > 2


def test_a_nan_ends_the_run(play, tmp_path):
    with pytest.raises(FloatingPointError):
        play(learning_rate=math.inf, total_timesteps=128)
    assert not (tmp_path / "run0" / "checkpoint.pt").exists()


@pytest.mark.parametrize("name, value", [("micro_batches", 1), ("micro_batches", 65), ("beta", 0)])
def test_options_that_make_no_estimate(name, value):
    """m is at most the samples of the shortest rollout, 16 steps in 4 environments."""
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*must be"):
        gns_baseline.Args(num_envs=4, **{name: value})
