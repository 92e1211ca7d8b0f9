"""gns_baseline.py: the noise scale, the other signals beside it, and what L makes of them."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import FakeEnvs, SmallNetwork, column, load, rows, same_weights

import gns_baseline
import pqn_abs
from gns_baseline import gradient_noise, noise_scale, noise_scale_batch


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(script, network, **arguments) runs a script on four FakeEnvs and returns its folder."""

    def run(script=gns_baseline, network=SmallNetwork, **arguments):
        monkeypatch.setattr(script, "make_envs", lambda args: FakeEnvs(args.num_envs))
        monkeypatch.setattr(script, "QNetwork", network)
        name = f"run{len(list(tmp_path.iterdir()))}"
        defaults = {"num_envs": 4, "device": "cpu", "precision": "float32", "adapt_frequency": 1}
        names = {"runs_dir": str(tmp_path), "run_name": name}
        return script.main(script.Args(**(defaults | names | arguments)))

    return run


# --- The estimator, where the truth is known ---


@pytest.mark.parametrize("b, m", [(4, 2), (3, 7), (8, 16)])
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
    estimates = np.array([gradient_noise(sample, b) for sample in gradients])
    error = estimates.std(axis=0) / math.sqrt(draws)
    assert (abs(estimates.mean(axis=0) - (noise, signal)) < 4 * error).all()
    assert (error < np.array([noise, signal]) / 5).all()  # or the line above says nothing


def test_noise_and_signal_are_their_equations():
    """g_1 = (0, 5), g_2 = (2, 1), b = 3: ḡ = (1, 3), Σ ‖g_i - ḡ‖² = 10, N = 30, S = 10 - 30/6."""
    assert gradient_noise(torch.tensor([[0.0, 5.0], [2.0, 1.0]]), 3) == pytest.approx((30, 5))


def test_batch_is_the_noise_scale_in_its_range():
    """Where S ≤ 0 noise drowns the signal: the largest batch, and no noise scale."""
    table = [(30.0, 0.099, 303), (1.0, 1.0, 100), (1e9, 1.0, 900), (1e308, 1e-308, 900)]
    table += [(1.0, 0.0, 900), (1.0, -2.0, 900), (0.0, 0.0, 900), (math.nan, math.nan, 900)]
    for noise, signal, batch in table:
        assert noise_scale_batch(noise, signal, batch_min=100, batch_max=900) == batch
    assert noise_scale(30.0, 0.5) == 60
    assert noise_scale(30.0, 0.0) is None and noise_scale(30.0, -1.0) is None


# --- In a run ---


def independent_signals(q_network, old_network, obs, actions, returns, m, states):
    """Once more from the definitions: a gradient for each sample, in float64."""
    order = torch.randperm(len(obs), generator=torch.Generator().manual_seed(7))
    q_network, old_network = copy.deepcopy(q_network).double(), copy.deepcopy(old_network).double()
    b = len(obs) // m
    means = []
    for i in range(m):
        samples = []
        for j in order[i * b : (i + 1) * b]:
            loss = (old_network(obs[j : j + 1])[0, actions[j]] - returns[j].double()) ** 2
            gradient = torch.autograd.grad(loss, list(old_network.parameters()))
            samples.append(torch.cat([g.flatten() for g in gradient]).numpy())
        means.append(np.mean(samples, axis=0))
    mean = np.mean(means, axis=0)
    noise = b / (m - 1) * sum(((g - mean) ** 2).sum() for g in means)
    reference = obs[order[:states]]
    new, old = q_network(reference).argmax(1), old_network(reference).argmax(1)
    shares = [np.mean(new.numpy() == action) for action in range(4)]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return noise, mean @ mean - noise / (b * m), (new != old).double().mean().item(), entropy


@pytest.mark.parametrize("m", [2, 16, 42])
def test_signals_of_an_iteration_computed_twice(play, monkeypatch, m):
    """84 transitions: what m does not divide is left out; θ_old is from before the updates."""
    first, seen = [], []

    def network(envs):
        first.append(SmallNetwork(envs))
        first.append(copy.deepcopy(first[0].state_dict()))
        return first[0]

    def measure(args, q_network, old_network, autocast, obs, actions, returns):
        assert same_weights(old_network.state_dict(), first[1])
        assert not same_weights(q_network.state_dict(), first[1])
        batch = obs, actions, returns
        seen.extend(independent_signals(q_network, old_network, *batch, m, 40))
        torch.manual_seed(7)
        return original(args, q_network, old_network, autocast, *batch)

    original = gns_baseline.measure_signals
    monkeypatch.setattr(gns_baseline, "measure_signals", measure)
    options = {"num_steps": 21, "total_timesteps": 1, "learning_rate": 0.01}
    folder = play(network=network, micro_batches=m, reference_states=40, **options)
    (row,) = rows(folder / "metrics.csv")
    noise, signal, divergence, entropy = seen
    assert float(row["gns/noise"]) == pytest.approx(noise, rel=1e-4)
    assert float(row["gns/signal"]) == pytest.approx(signal, rel=1e-3, abs=1e-4)
    assert float(row["abs/behavioral_divergence"]) == pytest.approx(divergence) and divergence > 0
    assert float(row["abs/policy_entropy"]) == pytest.approx(entropy, abs=1e-5) and entropy > 0


def test_all_signals_stand_in_the_same_rows(play):
    """Every K-th row has them, also where nothing drives L."""
    folder = play(adapt_rollout=False, adapt_frequency=3, total_timesteps=128 * 7)
    table = rows(folder / "metrics.csv")
    for name in ("gns/noise", "gns/signal", "abs/policy_entropy", "abs/value_variance"):
        assert [i for i, row in enumerate(table, 1) if row[name]] == [3, 6]
    assert [i for i, row in enumerate(table, 1) if row["abs/behavioral_divergence"]] == [3, 6]
    assert {row["abs/rollout_length"] for row in table} == {"32"}


def test_measuring_does_not_change_what_is_learned(play):
    options = {"adapt_rollout": False, "total_timesteps": 1000}
    often, never = play(**options), play(adapt_frequency=1000, **options)
    assert same_weights(load(often)["network"], load(never)["network"])


def test_batch_follows_the_averages_of_noise_and_signal(play, monkeypatch):
    """L is that of the weighted means of N and S; S_avg ≤ 0 gives L_max; a resumed run goes on."""
    measured = [(320, 2.0), (320, 2.0), (620, 2.0), (520, -28.0), (520, 42.0), (100, 9.0)]
    estimates = iter(measured)
    monkeypatch.setattr(gns_baseline, "gradient_noise", lambda *args: next(estimates))
    folder = play(total_timesteps=500, beta=0.2)
    play(total_timesteps=900, beta=0.2, resume=str(folder))
    scales, lengths = [], [32]
    for k in range(1, 7):
        weights = 0.8 ** np.arange(k)[::-1]
        noise, signal = weights @ np.array(measured[:k])
        scales.append(noise / signal)
        target = min(max(noise / signal // 1, 64), 256) if signal > 0 else 256
        lengths.append(round(target / 4))
    table = folder / "metrics.csv"
    played = column(table, "abs/rollout_length", int)
    assert played == lengths[: len(played)] and len(played) >= 5
    assert {40, 55, 64} < set(played)
    positive = [scale for scale in scales[: len(played)] if scale > 0]
    assert len(positive) < len(played)
    assert column(table, "gns/noise_scale") == pytest.approx(positive)


def test_burn_in_holds_for_the_noise_scale(play, monkeypatch):
    monkeypatch.setattr(gns_baseline, "gradient_noise", lambda *args: (1000.0, 1.0))
    folder = play(burn_in=3, total_timesteps=700)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [32, 32, 32, 64, 64]


def test_driven_by_bd_it_is_pqn_abs(play):
    """Weights, L and BD are those of pqn_abs.py, bit for bit, whatever else is measured."""
    options = {"total_timesteps": 4000, "adapt_frequency": 2, "learning_rate": 0.01}
    options |= {"burn_in": 2, "divergence_window": 3, "scale_epochs": True}
    ours, theirs = play(signal="bd", **options), play(pqn_abs, **options)
    assert same_weights(load(ours)["network"], load(theirs)["network"])
    for name in ("abs/rollout_length", "abs/behavioral_divergence", "losses/td_loss"):
        assert column(ours / "metrics.csv", name) == column(theirs / "metrics.csv", name)
    assert len(set(column(ours / "metrics.csv", "abs/rollout_length"))) > 2


class WithSpareParts(SmallNetwork):
    """One parameter takes no part in the loss, another one is frozen."""

    def __init__(self, envs):
        super().__init__(envs)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def test_parameters_without_a_gradient_add_no_noise(play):
    options = {"total_timesteps": 500, "adapt_rollout": False}
    spare, plain = play(network=WithSpareParts, **options), play(**options)
    noise = column(plain / "metrics.csv", "gns/noise")
    assert column(spare / "metrics.csv", "gns/noise") == pytest.approx(noise)


@pytest.mark.parametrize("m", [1, 65])
def test_number_of_micro_batches_that_makes_no_estimate(play, capsys, tmp_path, m):
    with pytest.raises(SystemExit) as error:
        play(micro_batches=m)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.startswith(f"gns_baseline.py: --micro-batches {m}: ")
    assert list(tmp_path.iterdir()) == []


def test_atari(tmp_path):
    """Two iterations of Breakout, with all signals of real frames and the real network."""
    options = {"num_envs": 4, "num_steps": 16, "total_timesteps": 128, "adapt_frequency": 2}
    folder = gns_baseline.main(gns_baseline.Args(runs_dir=str(tmp_path), device="cpu", **options))
    last = rows(folder / "metrics.csv")[-1]
    assert float(last["gns/noise"]) > 0 and 0 <= float(last["abs/policy_entropy"]) <= math.log(4)
    assert 0 <= float(last["abs/behavioral_divergence"]) <= 1
