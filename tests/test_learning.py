"""The whole algorithm learns Catch from pixels with the real network, and fails when a part of it is broken."""

from catch import Catch
from helpers import column

import pqn_abs

BUDGET = {"total_timesteps": 20_000, "num_envs": 8, "num_minibatches": 8, "adapt_frequency": 10}
BUDGET |= {"exploration_fraction": 0.3, "precision": "auto"}


def best_return(folder):
    """The highest mean return of 100 episodes that the run reached."""
    return max(column(folder / "metrics.csv", "charts/episodic_return"))


def test_catch_is_solved_and_the_batch_grows(train):
    folder = train(Catch(8), pqn_abs.QNetwork, **BUDGET)
    assert best_return(folder) >= 0.9
    divergences = column(folder / "metrics.csv", "abs/behavioral_divergence")
    batches = column(folder / "metrics.csv", "abs/batch_size")
    assert sum(divergences[-3:]) < sum(divergences[:3]) / 2
    assert batches[-1] > batches[len(batches) // 2]


def test_catch_is_not_solved_without_bootstrapping(train, monkeypatch):
    monkeypatch.setattr(pqn_abs, "lambda_returns", lambda rewards, *rest: rewards)
    assert best_return(train(Catch(8), pqn_abs.QNetwork, **BUDGET)) < 0.6


def test_catch_is_not_solved_with_random_actions_only(train, monkeypatch):
    monkeypatch.setattr(pqn_abs, "linear_schedule", lambda *args: 1.0)
    assert best_return(train(Catch(8), pqn_abs.QNetwork, **BUDGET)) < 0.0
