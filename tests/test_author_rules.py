"""The example with the rules of the author's code: L, recomputed from the divergences it logged."""

import signal

import numpy as np
import pytest
from helpers import ROOT, FakeEnvs, column, config, end_of, load, on, rows, start

import pqn_abs
from examples import author_rules

SCRIPT = ROOT / "examples" / "author_rules.py"
MINIBATCHES = 3
SMALL = ["--num-envs", 2, "--num-minibatches", MINIBATCHES, "--device", "cpu"]


def lengths_by_the_rules(divergences):
    """Rollout lengths by the rules' own words, with NaN where an iteration measured nothing.

    The mean of the last 20 measurements moves L by a tenth of the way, once there are 10 of them.
    It starts at 16. What it moves to and where it arrives are truncated to integers.
    """
    lengths = [16]
    for iteration in range(1, len(divergences)):
        measured = np.array(divergences[:iteration])
        is_new = not np.isnan(measured[-1])
        measured = measured[~np.isnan(measured)]
        length = lengths[-1]
        if is_new and len(measured) >= 10:
            mean = max(np.mean(measured[-20:]), 1e-9)
            target = np.trunc(np.interp(np.log(mean), np.log([0.05, 0.95]), [64, 16]))
            length = np.trunc((1 - 0.1) * length + 0.1 * target)
        lengths.append(int(length))
    return lengths


class Interrupted(FakeEnvs):
    """Sends SIGTERM to its own process in the step with this number."""

    def __init__(self, at, *args, **options):
        super().__init__(*args, **options)
        self.at = at

    def step(self, actions):
        if len(self.steps) == self.at:
            signal.raise_signal(signal.SIGTERM)
        return super().step(actions)


@pytest.fixture
def run(launch, tmp_path):
    """run(*arguments, stops=...) is the example's run, stopped and resumed after these steps."""

    def go(*arguments, stops=()):
        folder = tmp_path / "run"
        names = ["--runs-dir", tmp_path, "--run-name", "run", *SMALL, *arguments]
        for at in (*stops, None):
            envs = Interrupted(at, 2, lives=3)
            parts = on(envs) | {"rollout_length": author_rules.AuthorRules()}
            status, errors = launch(*names, Args=author_rules.Args, **parts)
            assert status == 0 and ("stopped" in errors) == (at is not None), errors
            names = ["--resume", folder, *arguments[:2]]
        return folder

    return go


def divergences_of(folder):
    cells = [row["abs/behavioral_divergence"] for row in rows(folder / "metrics.csv")]
    return [float(cell or "nan") for cell in cells]


# A learning rate that falls to 0 has many greedy actions change at first, and none at the end.
FALLING = ["--total-timesteps", 6000, "--anneal-lr", "--learning-rate", 0.05, "--gamma", 0.5]


@pytest.mark.parametrize("frequency, stops", [(1, ()), (1, (60,)), (1, (700, 900)), (2, (300,))])
def test_lengths_and_epochs_are_the_rules(run, frequency, stops):
    """Guards the integer in each rollout, over resumes before and after the 10th measurement."""
    folder = run(*FALLING, "--adapt-frequency", frequency, stops=stops)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    divergences = divergences_of(folder)
    assert lengths == lengths_by_the_rules(divergences)
    assert lengths[: 10 * frequency] == [16] * (10 * frequency) and len(set(lengths)) > 10
    epochs = np.diff([0, *column(folder / "metrics.csv", "charts/updates", int)]) / MINIBATCHES
    assert epochs.tolist() == [max(2, 2 * length // 32) for length in lengths]
    assert len(load(folder)["rollout_length"]["divergences"]) == 20


def test_the_longest_rollout_is_of_55_steps(run):
    """Guards the truncations: nothing changes here, and L still does not get to 64."""
    arguments = ["--learning-rate", 1e-9, "--adapt-frequency", 1]
    folder = run("--total-timesteps", 9000, *arguments)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert set(divergences_of(folder)) == {0.0}
    assert max(lengths) == 55 and lengths[-20:] == [55] * 20
    updates = column(folder / "metrics.csv", "charts/updates", int)
    assert updates[-1] - updates[-2] == 3 * MINIBATCHES


# Of all sizes, in stretches of 50 measurements with a mean of their own.
DRAWN = np.random.default_rng(1).uniform(0, np.repeat(np.linspace(1, 0, 40), 50)).tolist()


@pytest.mark.parametrize(
    "divergences",
    [[0.0] * 200, [0.04] * 200, [0.06] * 200, [0.3] * 200, [1.0] * 200, DRAWN],
    ids=lambda divergences: f"{divergences[0]:.2f}...",
)
def test_rules_alone(divergences):
    """Guards the object that others pass on: each call is a measurement."""
    limits = {"rollout_min": 16, "rollout_max": 64, "delta_min": 0.05, "delta_max": 0.95}
    rules = author_rules.AuthorRules()
    length = 16.0
    lengths = [16]
    for divergence in divergences:
        length = rules(divergence, length, beta=0.1, **limits)
        lengths.append(int(length))
        assert length == lengths[-1]
    assert lengths == lengths_by_the_rules([*divergences, 0.0])


def test_defaults_are_the_authors():
    """Guards what else the author's code has in another way than the paper."""
    args, paper = vars(author_rules.Args()), vars(pqn_abs.Args())
    changed = {name: args[name] for name in args if args[name] != paper[name]}
    assert changed == {"num_steps": 16, "scale_epochs": True, "episodic_life": True}


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its rules measure, and its checkpoint keeps that."""
    options = [*SMALL, "--adapt-frequency", 1, "--total-timesteps", 96, "--runs-dir", tmp_path]
    end_of(start(SCRIPT, *options))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("BreakoutNoFrameskip-v4__author_rules__1__")
    assert config(folder)["script"] == "author_rules.py"
    assert load(folder)["rollout_length"]["divergences"] == divergences_of(folder)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [16] * 3
