"""The shortest example: it runs under its own name, and it learns."""

import pytest
from helpers import ROOT, column, end_of, load, rows, start

from examples import cartpole_abs

SCRIPT = ROOT / "examples" / "cartpole_abs.py"
SMALL = ["--num-envs", 4, "--num-minibatches", 2, "--adapt-frequency", 2]
PARTS = {name: getattr(cartpole_abs, name) for name in ("Args", "make_envs", "QNetwork")}


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its folder carries its name."""
    process = start(SCRIPT, *SMALL, "--total-timesteps", 1000, "--runs-dir", tmp_path)
    _, errors = end_of(process)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("CartPole-v1__cartpole_abs__1__")
    assert f"--resume '{folder}'" in errors
    scores = load(folder)["scores"]  # a point a step; a pole takes 8 of them to fall
    assert 8 <= min(scores) < max(scores) <= 500 and 900 < sum(scores) <= 1024 + 200


@pytest.mark.slow
def test_cartpole_is_solved(launch, tmp_path):
    """Guards the whole algorithm: over 300 points in 500,000 steps, and rollouts that grow."""
    arguments = ["--total-timesteps", 500_000, "--device", "cpu"]
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "run", *arguments, **PARTS)
    assert status == 0, errors
    table = tmp_path / "run" / "metrics.csv"
    assert float(rows(table)[-1]["charts/episodic_return"]) > 300
    assert column(table, "abs/rollout_length")[-1] > 40
