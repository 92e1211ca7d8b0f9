"""The contrasts of PROTOCOL.md: step 0, and the 2 x 2 of L and gradient steps.

    python results/length_or_steps/analyse.py step0 results/length_or_steps/step0
    python results/length_or_steps/analyse.py main results/length_or_steps/arms

A run's folder is R__<game>__<seed> in step 0, where arm A is minatar_study's arm a. In the 2 x 2 it
is <arm>_<rate>__<game>__<seed>: OO, OM, MO or MM, first L and then the steps, own or mirror.
"""

import math
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

ARMS = ("OO", "OM", "MO", "MM")
SIGNS = {"L": (1, 1, -1, -1), "steps": (1, -1, 1, -1), "interaction": (1, -1, -1, 1)}
DRAWS = 20_000
MARGIN = math.log(1.05)
rng = np.random.default_rng(0)


def log_score(run, window):
    return math.log(max(report.score(run, window), 0.01))


def read(folders, window):
    """Log scores (settings, seeds) by arm, and the settings' names. Refuses unfinished runs."""
    scores = defaultdict(dict)
    for folder in folders:
        run = plot.read_run(folder)
        if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
            raise SystemExit(f"{folder} is not finished; the protocol wants all runs first")
        name, game, seed = folder.name.split("__")
        arm, _, rate = name.partition("_")
        scores[arm].setdefault(f"{rate} {game}".strip(), {})[int(seed)] = log_score(run, window)
    settings = sorted(next(iter(scores.values())))
    table = {}
    for arm, found in scores.items():
        rows = []
        for setting in settings:
            rows.append([found[setting][seed] for seed in sorted(found[setting])])
        table[arm] = np.array(rows)
    return table, settings


def effect(arms, signs):
    """Mean over settings of the signed mean of the arms, in log score."""
    weights = 2 / len(signs)
    parts = [sign * arm.mean(axis=-1) for sign, arm in zip(signs, arms, strict=True)]
    return weights * np.sum(parts, axis=0)


def resampled(arms, signs):
    """Bootstrap effects, seeds resampled within setting and arm."""
    settings, seeds = arms[0].shape
    rows = np.arange(settings)[:, None]
    draws = []
    for _ in range(DRAWS):
        again = [arm[rows, rng.integers(seeds, size=arm.shape)] for arm in arms]
        draws.append(effect(again, signs).mean())
    return np.array(draws)


def permutation_p(arms, signs):
    """Two-sided. Arms of a pair differ only in the factor; their labels change places."""
    found = abs(effect(arms, signs).mean())
    plus = [arm for arm, sign in zip(arms, signs, strict=True) if sign > 0]
    minus = [arm for arm, sign in zip(arms, signs, strict=True) if sign < 0]
    extreme = 0
    for _ in range(DRAWS):
        difference = 0.0
        for one, other in zip(plus, minus, strict=True):
            both = rng.permuted(np.concatenate([one, other], axis=1), axis=1)
            seeds = one.shape[1]
            difference += both[:, :seeds].mean() - both[:, seeds:].mean()
        extreme += abs(difference / len(plus)) >= found * (1 - 1e-9)
    return (1 + extreme) / (1 + DRAWS)


def sign_flip_p(effects):
    """Two-sided, over all flips of the settings' effects: the settings as a sample of others."""
    flips = np.array(list(product((1, -1), repeat=len(effects))))
    means = np.abs((flips * effects).mean(axis=1))
    return (means >= abs(effects.mean()) * (1 - 1e-9)).mean()


def percent(logs):
    return 100 * np.expm1(logs)


def show(name, arms, signs):
    """Print one effect; returns its p."""
    own = effect(arms, signs)
    draws = resampled(arms, signs)
    low, high = percent(np.quantile(draws, (0.025, 0.975)))
    narrow = np.quantile(draws, (0.05, 0.95))
    settings = own[rng.integers(len(own), size=(DRAWS, len(own)))].mean(axis=1)
    wide = percent(np.quantile(settings, (0.025, 0.975)))
    p = permutation_p(arms, signs)
    equivalent = "; equivalent" if np.abs(narrow).max() < MARGIN else ""
    print(f"{name}: {percent(own.mean()):+.1f}% ({low:.1f} to {high:.1f}), p {p:.4f}{equivalent}")
    print(f"  settings resampled: {wide[0]:.1f} to {wide[1]:.1f}, p {sign_flip_p(own):.3f}")
    return p


def main(what, folder):
    if what == "step0":
        study = Path(__file__).parents[1] / "minatar_study" / "confirmation"
        arms = []
        for folders in (study.glob("a__*/"), Path(folder).glob("R__*/")):
            (scores,) = read(sorted(folders), 1.0)[0].values()
            arms.append(scores)
        show("A - R, whole run", arms, (1, -1))
        return
    for window in (1.0, 0.2):
        table, settings = read(sorted(Path(folder).glob("*__*__*/")), window)
        arms = [table[arm] for arm in ARMS]
        print(f"window {window:g}, {len(settings)} settings, {arms[0].shape[1]} seeds")
        ps = [show(name, arms, SIGNS[name]) for name in ("L", "steps")]
        print("  p by Holm:", [f"{p:.4f}" for p in report.holm(ps)])
        show("interaction (secondary)", arms, SIGNS["interaction"])
        for row, setting in enumerate(settings):
            parts = [percent(effect(arms, SIGNS[name])[row]) for name in ("L", "steps")]
            print(f"  {setting}: L {parts[0]:+.1f}%, steps {parts[1]:+.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
