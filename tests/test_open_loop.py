"""The study's open loop counts steps as they are made, also after a resume."""

import importlib
import sys

import pytest
from helpers import ROOT, FakeEnvs, column

STUDY = ROOT / "results" / "minatar_study"


@pytest.fixture
def open_loop(monkeypatch):
    pytest.importorskip("minatar")
    monkeypatch.setattr(sys, "path", [*sys.path, str(STUDY)])
    return importlib.import_module("open_loop")


def test_steps_are_counted_as_they_are_made(open_loop, train):
    """By main's own count, and the same after a resume."""
    schedule = [0, 300, 1500, 2000], [32, 8, 40, 3]

    def run(**arguments):
        loop = open_loop.OpenLoop(*schedule)
        envs = open_loop.CountedEnvs(FakeEnvs(4), loop)
        arguments |= {"adapt_frequency": 2, "num_minibatches": 2}
        return train(envs, rollout_length=loop, **arguments) / "metrics.csv"

    whole = run(total_timesteps=2500)
    steps, lengths = column(whole, "global_step", int), column(whole, "abs/rollout_length", int)
    assert len(set(lengths)) > 5
    for i in range(2, len(steps), 2):  # rows i and i + 1 follow the measurement in row i - 1
        expected = round(float(open_loop.np.interp(steps[i - 1], *schedule)))
        assert lengths[i : i + 2] == [expected] * len(lengths[i : i + 2])
    half = run(total_timesteps=1200)
    assert 1200 <= column(half, "global_step", int)[-1] < 1500
    resumed = run(resume=str(half.parent), total_timesteps=2500)
    assert column(resumed, "abs/rollout_length", int) == lengths
