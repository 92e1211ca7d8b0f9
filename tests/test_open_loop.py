"""The study's open loop counts steps as they are made, also after a resume."""

import sys

import numpy as np
import pytest
from helpers import ROOT, FakeEnvs, column, on

import pqn_abs

pytest.importorskip("minatar")
sys.path.append(str(ROOT / "results" / "minatar_study"))
import open_loop


def test_steps_are_counted_as_they_are_made(tmp_path):
    """By main's own count, and the same after a resume."""
    schedule = [0, 300, 1500, 2000], [32, 8, 40, 3]

    def run(**names):
        args = pqn_abs.Args(num_envs=4, adapt_frequency=2, runs_dir=str(tmp_path), **names)
        loop = open_loop.OpenLoop(*schedule)
        loop.steps_a_unit = args.adapt_frequency * args.num_envs
        return pqn_abs.main(args, **on(FakeEnvs(4)), rollout_length=loop) / "metrics.csv"

    whole = run(run_name="whole", total_timesteps=2500)
    steps, lengths = column(whole, "global_step", int), column(whole, "abs/rollout_length", int)
    assert len(set(lengths)) > 5
    for i in range(2, len(steps), 2):  # rows i and i + 1 follow the measurement in row i - 1
        expected = round(np.interp(steps[i - 1], *schedule).item())
        assert set(lengths[i : i + 2]) == {expected}
    half = run(run_name="half", total_timesteps=1200)
    resumed = run(resume=str(half.parent), total_timesteps=2500)
    assert column(resumed, "abs/rollout_length", int) == lengths
