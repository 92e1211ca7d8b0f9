"""The shortest example: it runs under its own name, and it learns."""

import pytest
from helpers import ROOT, column, rows, start

from examples import cartpole_abs

SCRIPT = ROOT / "examples" / "cartpole_abs.py"
SMALL = ["--num-envs", 4, "--num-minibatches", 2, "--adapt-frequency", 2]


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its folder carries its name."""
    process = start(SCRIPT, *SMALL, "--total-timesteps", 1000, "--runs-dir", tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("CartPole-v1__cartpole_abs__1__")
    lengths = column(folder / "episodes.csv", "episodic_length", int)
    assert lengths == column(folder / "episodes.csv", "episodic_return")  # a point a step


@pytest.mark.parametrize("game", ["Nonsense-v9", "no:Module-v0", "Pendulum-v1", "Blackjack-v1"])
def test_an_environment_that_does_not_fit_is_refused(example, refused, game):
    """Guards --env-id: unknown ones, continuous actions, observations that are no vector."""
    example(cartpole_abs)
    assert "--env-id" in refused("--env-id", game)


@pytest.mark.slow
def test_cartpole_is_solved(example, launch, tmp_path):
    """Guards the whole algorithm: over 300 points in 500,000 steps, and rollouts that grow."""
    example(cartpole_abs)
    arguments = ["--total-timesteps", 500_000, "--device", "cpu"]
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "run", *arguments)
    assert status == 0, errors
    table = tmp_path / "run" / "metrics.csv"
    assert float(rows(table)[-1]["charts/episodic_return"]) > 300
    assert column(table, "abs/rollout_length")[-1] > 40
