"""gns_baseline.py: the gradient noise scale, and what follows from it. The rest it shares with pqn_abs.py."""

import math

import numpy as np
import pytest
import torch
from catch import Catch
from helpers import Bandit, Noise, column, load, rows, same, targets, without_clock

import gns_baseline
import pqn_abs
from gns_baseline import gradient_noise, noise_scale_batch

SCRIPTS = [pqn_abs, gns_baseline]


# --- The estimator, where the truth is known ---


def regression(draws, b, m, spread, size=5):
    """Gradients (draws, m, size) of micro-batches of b samples, with tr Σ and ‖G‖² in closed form.

    The loss is (x·w - y)², y = x·v + e, x standard normal and e with the given spread. With d = w - v a sample's
    gradient is 2 x (x·d - e): its mean is 2d, and its squares' mean 4 ((P + 2) ‖d‖² + P spread²).
    """
    rng = np.random.default_rng(0)
    d = rng.normal(size=size)
    x, e = rng.normal(size=(draws, m, b, size)), spread * rng.normal(size=(draws, m, b, 1))
    gradients = (2 * x * ((x @ d)[..., None] - e)).mean(axis=2)
    signal = 4 * d @ d
    return torch.from_numpy(gradients), 4 * ((size + 2) * d @ d + size * spread**2) - signal, signal


@pytest.mark.parametrize("b, m", [(1, 2), (4, 2), (3, 7), (8, 16)])
def test_noise_and_signal_are_unbiased(b, m):
    gradients, *truth = regression(200_000 // (b * m), b, m, spread=3.0)
    estimates = np.array([gradient_noise(sample, b) for sample in gradients])
    error = estimates.std(axis=0) / math.sqrt(len(estimates))
    assert (abs(estimates.mean(axis=0) - truth) < 4 * error).all()
    assert (error < np.array(truth) / 5).all()  # or the line above says nothing
    assert b * m > 8 or (estimates[:, 1] < 0).any()  # a single batch's signal may be negative


def test_noise_scale_grows_with_the_noise_of_the_data():
    scales, expected = [], []
    for spread in (1.0, 2.0, 4.0):
        gradients, noise, signal = regression(4000, 8, 16, spread)
        scales.append(np.divide(*np.mean([gradient_noise(sample, 8) for sample in gradients], axis=0)))
        expected.append(noise / signal)
    assert scales == pytest.approx(expected, rel=0.05)
    assert expected[2] > 5 * expected[0]


def test_noise_and_signal_are_their_equations():
    """Two gradients of three samples each: g = (1, 3), Σ ‖g_i - g‖² = 10, N = 3 · 10 and S = 10 - 30 / 6."""
    assert gradient_noise(torch.tensor([[0.0, 5.0], [2.0, 1.0]]), 3) == pytest.approx((30.0, 5.0))


@pytest.mark.parametrize(
    "noise, signal, expected",
    [
        (30.0, 0.1, 300),
        (30.0, 0.099, 303),
        (1.0, 1.0, 100),
        (1e9, 1.0, 900),
        (1e308, 1e-308, 900),
        (1.0, 0.0, 900),
        (1.0, -2.0, 900),
        (0.0, 0.0, 900),
    ],
)
def test_batch_is_the_noise_scale_in_its_range(noise, signal, expected):
    assert noise_scale_batch(noise, signal, (100, 900)) == expected


# --- In a run ---


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("m", [2, 4, 21])
def test_noise_and_signal_of_an_iteration_computed_twice(watch, script, m):
    """21 transitions: micro-batches of 10, 5 and 1, and what is left over is left out."""
    options = {"num_steps": 7, "rollout_min": 7, "rollout_max": 9, "micro_batches": m, "total_timesteps": 1}
    options |= {"log_noise_scale": True} if script is pqn_abs else {}
    seen = watch(Noise(3), script=script, **options)
    b, steps, gradients = 21 // m, seen.envs.steps, []
    obs = torch.from_numpy(np.concatenate([step["obs"] for step in steps]))
    actions = np.concatenate([step["action"] for step in steps])
    returns = torch.from_numpy(targets(steps, seen.start, seen.args).flatten())
    for i in seen.orders[0][: b * m].split(b):
        loss = (seen.start(obs[i])[range(b), actions[i]] - returns[i]).square().mean()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(seen.start.parameters()))]))
    mean = sum(gradients) / m
    noise = b / (m - 1) * sum((g - mean).square().sum() for g in gradients)
    (row,) = rows(seen.folder / "metrics.csv")
    assert float(row["gns/noise"]) == pytest.approx(noise.item(), rel=1e-3)
    assert float(row["gns/signal"]) == pytest.approx((mean.square().sum() - noise / (b * m)).item(), rel=1e-2, abs=1e-3)


def test_batch_follows_the_averages_of_noise_and_signal(train, monkeypatch):
    """From the second measurement on, a fifth of each new one; S_avg ≤ 0 gives the largest batch and is counted."""
    measured = [(9e9, 3e6), (320.0, 2.0), (320.0, 2.0), (1320.0, 2.0), (520.0, -18.0), (520.0, 42.0)]
    averages = [(320, 2), (320, 2), (520, 2), (520, -2), (520, 6.8)]
    estimates = iter(measured)
    monkeypatch.setattr(gns_baseline, "gradient_noise", lambda *args: next(estimates))
    folder = train(Noise(4), script=gns_baseline, total_timesteps=900, adapt_frequency=1, beta=0.2)
    expected = [round(min(max(n / s // 1, 64), 256) / 4) if s > 0 else 64 for n, s in averages]
    table = folder / "metrics.csv"
    assert column(table, "abs/rollout_length", int) == [32, 32, *expected[:-1]]
    assert load(folder)["adaptive_length"] == 76 // 4 == expected[-1]
    assert column(table, "gns/signal_drowned", int) == [0, 0, 0, 0, 1, 1]
    assert column(table, "gns/noise_scale") == pytest.approx([n / s for n, s in averages if s > 0])
    assert column(table, "gns/noise_scale_raw") == pytest.approx([n / s for n, s in measured if s > 0])
    assert len(column(table, "abs/behavioral_divergence")) == 6


def test_noise_is_measured_every_kth_iteration_and_a_fixed_rollout_stays(train):
    folder = train(Noise(4), script=gns_baseline, total_timesteps=128 * 9, adapt_frequency=4, adapt_rollout=False)
    assert [i for i, row in enumerate(rows(folder / "metrics.csv")) if row["gns/noise"]] == [0, 4, 8]
    assert set(column(folder / "metrics.csv", "abs/rollout_length", int)) == {32}


def test_resumed_run_keeps_its_averages(train):
    options = {"adapt_frequency": 2, "start_e": 0.3, "end_e": 0.3, "learning_rate": 0.01, "script": gns_baseline}
    straight = train(Bandit(4), total_timesteps=3000, **options)
    folder = train(Bandit(4), total_timesteps=1000, **options)
    args = gns_baseline.parse_args(["--resume", str(folder / "checkpoint.pt"), "--total-timesteps", "3000"])
    arguments = {name: value for name, value in vars(args).items() if name != "device"}
    assert train(Bandit(4), script=gns_baseline, **arguments) == folder
    assert without_clock(folder / "metrics.csv") == without_clock(straight / "metrics.csv")
    assert same(load(folder)["noise_scale"], load(straight)["noise_scale"])


def test_logging_the_noise_scale_leaves_the_run_as_it_is(train):
    options = {"total_timesteps": 2000, "adapt_frequency": 2, "learning_rate": 0.01}
    without, logged = (train(Noise(4), log_noise_scale=on, **options) for on in (False, True))
    assert same(load(without)["network"], load(logged)["network"])
    assert not any(name.startswith("gns/") for name in rows(without / "metrics.csv")[0])
    assert min(column(logged / "metrics.csv", "gns/noise")) > 0
    measured = [bool(row["abs/behavioral_divergence"]) for row in rows(logged / "metrics.csv")]
    assert measured == [bool(row["gns/signal"]) for row in rows(logged / "metrics.csv")]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("m", [1, 0, 65])
def test_number_of_micro_batches_that_makes_no_estimate(train, capsys, script, m):
    with pytest.raises(SystemExit) as error:
        train(Noise(4), script=script, micro_batches=m, **({"log_noise_scale": True} if script is pqn_abs else {}))
    assert error.value.code == 2 and f"--micro-batches {m}: " in capsys.readouterr().err


def test_catch_is_solved(train):
    options = {"total_timesteps": 20_000, "num_envs": 8, "num_minibatches": 8, "adapt_frequency": 10}
    options |= {"exploration_fraction": 0.3, "precision": "auto"}
    folder = train(Catch(8), gns_baseline.QNetwork, gns_baseline, **options)
    assert max(column(folder / "metrics.csv", "charts/episodic_return")) >= 0.9


def test_a_fixed_rollout_is_the_smallest_batch(train):
    """128 transitions make 100 micro-batches; the 64 of L_min, which then has no say, would not."""
    options = {"num_steps": 32, "adapt_rollout": False, "log_noise_scale": True, "micro_batches": 100}
    assert column(train(Noise(4), total_timesteps=1, **options) / "metrics.csv", "gns/noise")[0] > 0
