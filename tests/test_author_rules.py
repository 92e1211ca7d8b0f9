"""The example with the rules of the author's code: L, recomputed from the divergences it logged."""

import signal

import numpy as np
import pytest
from helpers import ROOT, FakeEnvs, column, end_of, load, on, rows, start

import pqn_abs
from examples.author_rules import Args, AuthorRules

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


# A learning rate that falls to 0 has many greedy actions change at first, and none at the end.
FALLING = ["--total-timesteps", 6000, "--anneal-lr", "--learning-rate", 0.05, "--gamma", 0.5]


@pytest.mark.parametrize("frequency, stops", [(1, []), (1, [60]), (1, [700, 900]), (2, [300])])
def test_lengths_and_epochs_are_the_rules(launch, tmp_path, frequency, stops):
    """Guards the integer in each rollout, over stops before and after the 10th measurement."""
    folder, table = tmp_path / "run", tmp_path / "run" / "metrics.csv"
    names = ["--runs-dir", tmp_path, "--run-name", "run", *SMALL, *FALLING]
    for at in [*stops, None]:
        parts = on(Interrupted(at, 2)) | {"rollout_length": AuthorRules()}
        status, errors = launch(*names, "--adapt-frequency", frequency, Args=Args, **parts)
        assert status == 0, errors
        assert (load(folder)["global_step"] < 6000) == (at is not None)
        names = ["--resume", folder, *FALLING]
    lengths = column(table, "abs/rollout_length", int)
    cells = [row["abs/behavioral_divergence"] for row in rows(table)]
    assert lengths == lengths_by_the_rules([float(cell or "nan") for cell in cells])
    assert lengths[: 10 * frequency] == [16] * (10 * frequency) and len(set(lengths)) > 10
    epochs = np.diff([0, *column(table, "charts/updates", int)]) / MINIBATCHES
    assert epochs.tolist() == [max(2, 2 * length // 32) for length in lengths]
    measured = column(table, "abs/behavioral_divergence")
    assert load(folder)["rollout_length"]["divergences"] == measured[-20:]


@pytest.mark.parametrize("divergence", [0.0, 0.06, 0.3, 1.0])
def test_rules_alone(divergence):
    """Guards the object that others pass on: each call is a measurement. L gets no longer than 55.

    The measurements fall from 1 to twice this divergence, or to less.
    """
    drawn = np.random.default_rng(1).uniform(0, np.linspace(1, 2 * divergence, 400)).tolist()
    limits = {"rollout_min": 16, "rollout_max": 64, "delta_min": 0.05, "delta_max": 0.95}
    rules = AuthorRules()
    lengths = [16.0]
    for measured in drawn:
        lengths.append(rules(measured, lengths[-1], beta=0.1, **limits))
        rules.load_state_dict(rules.state_dict())  # as torchrun may do: it adds nothing
    assert lengths == lengths_by_the_rules([*drawn, 0.0])
    assert (max(lengths) == 55) == (divergence == 0)


def test_defaults_are_the_authors():
    """Guards what else the author's code has in another way than the paper."""
    args, paper = vars(Args()), vars(pqn_abs.Args())
    changed = {name: args[name] for name in args if args[name] != paper[name]}
    assert changed == {"num_steps": 16, "scale_epochs": True}


def test_a_run_from_the_command_line(tmp_path):
    """Guards the example as a user starts it: its rules measure, and its checkpoint keeps that."""
    options = [*SMALL, "--adapt-frequency", 1, "--total-timesteps", 96, "--runs-dir", tmp_path]
    end_of(start(SCRIPT, *options))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("BreakoutNoFrameskip-v4__author_rules__1__")
    measured = column(folder / "metrics.csv", "abs/behavioral_divergence")
    assert load(folder)["rollout_length"]["divergences"] == measured and len(measured) == 3
