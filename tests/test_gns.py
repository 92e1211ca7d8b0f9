"""gns_baseline.py: the noise scale, the other signals beside it, and what L makes of them."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import FakeEnvs, SmallNetwork, column, load, on, rows, same_weights, stacked
from test_ppo import NotFinite, Watching
from test_pqn import forward_view

import gns_baseline
import pqn_abs
from gns_baseline import (
    measure_signals,
    noise_and_squared_norm,
    noise_scale,
    noise_scale_batch,
)

# --- The estimator, where the truth is known ---


@pytest.mark.parametrize("b, m", [(4, 2), (8, 16)])
def test_noise_and_signal_are_unbiased(b, m):
    """Linear regression y = x·v + e: the gradient of a sample is 2 x (x·d - e), d = w - v.

    With x standard normal its mean is 2d, and the mean of its square 4 ((P + 2) ‖d‖² + P σ²).
    """
    rng = np.random.default_rng(0)
    size, sigma, draws = 5, 3.0, 100_000 // (b * m)
    d = rng.normal(size=size)
    x = rng.normal(size=(draws, m, b, size))
    e = sigma * rng.normal(size=(draws, m, b, 1))
    gradients = torch.from_numpy((2 * x * ((x @ d)[..., None] - e)).mean(axis=2))
    signal = 4 * d @ d
    noise = 4 * ((size + 2) * d @ d + size * sigma**2) - signal
    estimates = np.array([noise_and_squared_norm(sample, b) for sample in gradients])
    error = estimates.std(axis=0) / math.sqrt(draws)
    assert (abs(estimates.mean(axis=0) - (noise, signal)) < 4 * error).all()
    assert (error < np.array([noise, signal]) / 5).all()  # or the line above says nothing


@pytest.mark.parametrize(
    "noise, signal, batch",
    [(30.0, 0.099, 303), (1.0, 1.0, 100), (1e9, 1.0, 900), (1.0, 0.0, 900), (1.0, -2.0, 900)],
)
def test_batch_is_the_noise_scale_in_its_range(noise, signal, batch):
    """Where S ≤ 0, noise hides the signal: the largest batch, and no noise scale."""
    assert noise_scale_batch(noise, signal, 100, 900) == batch
    assert noise_scale(noise, signal) == (noise / signal if signal > 0 else None)


# --- The signals of a rollout ---


def independent_signals(q_network, old_network, obs, actions, returns, micro_batches, reference):
    """Noise, signal, BD and entropy from their definitions: a gradient per sample, in float64."""
    q_network, old_network = copy.deepcopy(q_network).double(), copy.deepcopy(old_network).double()
    means = []
    for micro_batch in micro_batches:
        samples = []
        for j in micro_batch:
            loss = (old_network(obs[j : j + 1])[0, actions[j]] - returns[j]) ** 2
            gradient = torch.autograd.grad(loss, list(old_network.parameters()))
            samples.append(torch.cat([g.flatten() for g in gradient]).numpy())
        means.append(np.mean(samples, axis=0))
    m, b = len(micro_batches), len(micro_batches[0])
    mean = np.mean(means, axis=0)
    noise = b / (m - 1) * sum(((g - mean) ** 2).sum() for g in means)
    new, old = q_network(obs[reference]).argmax(1), old_network(obs[reference]).argmax(1)
    shares = [np.mean(new.numpy() == action) for action in range(4)]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    divergence = np.mean(new.numpy() != old.numpy())
    assert 0 < divergence < 1 and entropy > 0
    return noise, mean @ mean - noise / (b * m), divergence, entropy


NAMES = ("gns/noise", "gns/signal", "abs/behavioral_divergence", "abs/policy_entropy")


@pytest.mark.parametrize("m", [2, 16])
def test_signals_of_a_rollout_computed_twice(m):
    """84 transitions, shuffled: the remainder that m does not divide is left out."""
    torch.manual_seed(5)
    old_network = SmallNetwork(FakeEnvs(1))
    nn.init.normal_(old_network.head.weight)  # enough for all actions to occur
    q_network = copy.deepcopy(old_network)
    nn.init.normal_(q_network.head.bias, std=0.3)
    networks = q_network, old_network
    obs = torch.randint(256, (84, 6), dtype=torch.uint8)
    batch = obs, torch.randint(4, (84,)), torch.randn(84)
    torch.manual_seed(7)
    order = torch.randperm(84)
    micro_batches = [order[i * (84 // m) : (i + 1) * (84 // m)] for i in range(m)]
    expected = independent_signals(*networks, *batch, micro_batches, order[:40])
    args = gns_baseline.Args(micro_batches=m, reference_states=40)
    values = torch.randn(21, 4)
    torch.manual_seed(7)
    signals = measure_signals(args, *networks, contextlib.nullcontext(), *batch, values)
    assert [signals[name] for name in NAMES] == pytest.approx(expected, rel=1e-4)
    noise, signal, *_ = expected
    raw = pytest.approx(noise / signal, rel=1e-4) if signal > 0 else None
    assert signals["gns/noise_scale_raw"] == raw


# --- In a run ---


@pytest.fixture
def play(tmp_path):
    """play(envs, network, script, **arguments) runs a script and returns the run's folder."""
    count = iter(range(1000))

    def run(envs=None, network=SmallNetwork, script=gns_baseline, **arguments):
        envs = envs or FakeEnvs(4)
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": 4, "device": "cpu", "precision": "float32", "adapt_frequency": 1}
        return script.main(script.Args(**(defaults | names | arguments)), **on(envs, network))

    return run


def test_an_iteration_measures_its_own_rollout_and_updates(play):
    """The third: θ_old is from before its updates, all its transitions and targets count.

    Each transition is a micro-batch and a reference state, so that their order makes no difference.
    """
    envs = Watching(4, SmallNetwork)
    options = {"num_steps": 21, "adapt_rollout": False, "total_timesteps": 3 * 84}
    options |= {"adapt_frequency": 3, "micro_batches": 84, "reference_states": 10**6}
    folder = play(envs, envs.make_network, learning_rate=0.01, **options)
    old_network, q_network = envs.network_at(42), envs.network
    steps = envs.steps[42:]
    obs, true_next = (torch.from_numpy(stacked(steps, name)) for name in ("obs", "true_next"))
    with torch.no_grad():
        values, next_values = (old_network(frames.flatten(0, 1)) for frames in (obs, true_next))
    rewards = np.sign(stacked(steps, "reward"))
    endings = stacked(steps, "terminated"), stacked(steps, "truncated")
    next_values = next_values.amax(1).view(21, 4).numpy()
    returns = forward_view(rewards, next_values, *endings, 0.99, 0.65).flatten()
    actions = stacked(steps, "action").flatten()
    single = [[j] for j in range(84)]
    batch = obs.flatten(0, 1), actions, returns, single, range(84)
    expected = independent_signals(q_network, old_network, *batch)
    first, second, third = rows(folder / "metrics.csv")
    assert [float(third[name]) for name in NAMES] == pytest.approx(expected, rel=1e-4)
    variance = values.amax(1).numpy().var()
    assert float(third["abs/value_variance"]) == pytest.approx(variance, rel=1e-4)
    for name in gns_baseline.SIGNALS:
        assert first[name] == second[name] == ""


def test_batch_follows_the_averages_of_noise_and_signal(play):
    """L is that of the weighted means of N and S; S_avg ≤ 0 gives L_max; a resumed run goes on."""
    options = {"beta": 0.6, "learning_rate": 0.03}
    folder = play(total_timesteps=4000, **options)
    table = folder / "metrics.csv"
    resumed_at = len(rows(table))
    play(total_timesteps=8000, resume=str(folder), **options)
    noise, signal = np.array([column(table, name) for name in ("gns/noise", "gns/signal")])
    scales, lengths = [], [32]
    for k in range(1, len(noise) + 1):
        weights = 0.4 ** np.arange(k)[::-1]
        scale = weights @ noise[:k] / (weights @ signal[:k])
        scales.append(scale if weights @ signal[:k] > 0 else None)
        lengths.append(round(np.clip(scales[-1] // 1, 64, 256) / 4) if scales[-1] else 64)
    assert column(table, "abs/rollout_length", int) == lengths[:-1]
    shown = [float(row["gns/noise_scale"] or "nan") for row in rows(table)]
    assert shown == pytest.approx([scale or math.nan for scale in scales], nan_ok=True)
    for part in (slice(resumed_at), slice(resumed_at, None)):  # both had all kinds of averages
        assert None in scales[part] and any(16 < length < 64 for length in lengths[part])
    assert len(set(lengths)) > 10


def test_driven_by_bd_it_is_pqn_abs(play):
    """Weights and rows are those of pqn_abs.py, bit for bit, whatever else is measured."""
    options = {"total_timesteps": 4000, "adapt_frequency": 2, "learning_rate": 0.01}
    options |= {"scale_epochs": True}
    ours, theirs = play(signal="bd", **options), play(script=pqn_abs, **options)
    assert same_weights(load(ours)["network"], load(theirs)["network"])
    columns = rows(theirs / "metrics.csv")[0].keys() - {"charts/seconds", "charts/SPS"}
    for name in columns:
        assert column(ours / "metrics.csv", name) == column(theirs / "metrics.csv", name)
    assert len(set(column(ours / "metrics.csv", "abs/rollout_length"))) > 2


def test_a_nan_ends_the_run_and_the_checkpoint_stays(play, tmp_path):
    with pytest.raises(FloatingPointError):
        play(NotFinite(4), total_timesteps=2000, num_steps=8, adapt_rollout=False)
    (folder,) = tmp_path.iterdir()
    assert load(folder)["global_step"] == 32 and len(rows(folder / "metrics.csv")) == 1


@pytest.mark.parametrize(
    "option, value", [("micro_batches", 1), ("micro_batches", 65), ("beta", 0), ("signal", "GNS")]
)
def test_options_that_make_no_estimate(play, tmp_path, option, value):
    """m is at most the transitions of the shortest rollout, 16 steps in 4 environments."""
    with pytest.raises(gns_baseline.UsageError, match=f"--{option.replace('_', '-')} must be"):
        play(**{option: value}, total_timesteps=1)
    assert list(tmp_path.iterdir()) == []
