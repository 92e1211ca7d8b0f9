"""What the study's page says beside its contrasts: all of it exploratory.

    python results/minatar_study/further.py

It reads selection and confirmation.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

HERE = Path(__file__).parent
WINDOW = 0.2
FIXED = "L16 L24 L32 L48 L64".split()
rng = np.random.default_rng(0)


def read(folder: str) -> dict[str, list[list[plot.Run]]]:
    """Runs of each arm, by game and seed."""
    arms = defaultdict(lambda: defaultdict(list))
    for path in sorted((HERE / folder).glob("*__*__*/")):
        arm, game, _ = path.name.split("__")
        arms[arm][game].append(plot.read_run(path))
    return {arm: [games[game] for game in sorted(games)] for arm, games in arms.items()}


def log_scores(arm, window: float = WINDOW) -> np.ndarray:
    """(games, seeds)"""
    return np.log([[report.score(run, window) for run in runs] for runs in arm])


def print_selection(arms):
    """How sure the choice of L* is, and ABS against the best length of each game."""
    scores = {name: log_scores(arm) for name, arm in arms.items()}
    wins = defaultdict(int)
    games = np.arange(5)[:, None]
    for _ in range(10_000):
        means = {name: scores[name][games, rng.integers(4, size=(5, 4))].mean() for name in FIXED}
        wins[max(means, key=means.get)] += 1
    for name in FIXED:
        print(f"selection, seeds resampled: {name} is best in {wins[name] / 100:.0f}% of draws")
    best = np.max([scores[name].mean(axis=1) for name in FIXED], axis=0)
    lead = np.expm1((scores["abs"].mean(axis=1) - best).mean())
    print(f"selection: ABS against the best length of each game {100 * lead:+.1f}%")


def print_fixed_lengths(arms):
    """ABS against each fixed length, over the last fifth and over the whole run."""
    for window in (WINDOW, 1):
        for name in FIXED:
            pair = log_scores(arms["abs"], window), log_scores(arms[name], window)
            change, low, high = 100 * np.expm1(report.estimate(report.difference, *pair))
            print(
                f"selection, window {window}: abs - {name} {change:+.1f}% ({low:.1f} to {high:.1f})"
            )


def print_lengths(arm):
    """The range of ABS's L, and how much of its variance goes with game and time."""
    curves = np.array([[report.curve(run, plot.LENGTH) for run in runs] for runs in arm])
    low, high = np.quantile(curves, (0.05, 0.95))
    means = curves.mean(axis=(1, 2))
    print(f"a: mean L {curves.mean():.1f}, by game {means.min():.1f} to {means.max():.1f}")
    print(f"a: L is from {low:.0f} to {high:.0f} in 90% of the samples")
    logs = np.log(curves)
    unexplained = logs - logs.mean(axis=1, keepdims=True)
    print(f"a: game and time explain {100 * (1 - unexplained.var() / logs.var()):.0f}% of log L")


def print_truncated(arm):
    """d's mean L, and what it were if L and its target were truncated, as in the author's code.

    The divergences are those of d's runs, the steps each run's own."""
    lengths, truncated, steps = [], [], []
    for run in [run for runs in arm for run in runs]:
        deltas, length = [], 16
        for delta in run.columns[plot.DIVERGENCE]:
            truncated.append(length)
            if np.isfinite(delta):
                deltas.append(delta)
            if len(deltas) >= 10:
                clipped = np.clip(np.mean(deltas[-20:]), 0.05, 0.95)
                alpha = np.log(clipped / 0.05) / np.log(0.95 / 0.05)
                length = int(0.9 * length + 0.1 * int(64 - alpha * 48))
        lengths.extend(run.columns[plot.LENGTH])
        steps.extend(np.diff(run.columns[plot.STEP], prepend=0))
    means = [np.average(each, weights=steps) for each in (lengths, truncated)]
    print(f"d: mean L {means[0]:.1f}, truncated {means[1]:.1f}")


def print_games_as_a_sample(arms):
    """The games taken as five of many: a t-test over their mean differences."""
    for first, second in ("ab", "ac", "de", "da"):
        changes = (log_scores(arms[first]) - log_scores(arms[second])).mean(axis=1)
        print(f"games as a sample: {first} - {second} p {ttest_1samp(changes, 0).pvalue:.2f}")


def print_early_scores(arms):
    """Scores over the first half million steps."""
    logs = {}
    for name in "abce":
        curves = [[report.curve(run, plot.RETURN) for run in runs] for runs in arms[name]]
        logs[name] = np.log(np.array(curves)[:, :, : report.POINTS // 2].mean(axis=2))
    for name in "bce":
        lead = np.expm1((logs["a"] - logs[name]).mean())
        print(f"first half million steps: a - {name} {100 * lead:+.0f}%")


if __name__ == "__main__":
    selection = read("selection")
    print_selection(selection)
    print_fixed_lengths(selection)
    confirmation = read("confirmation")
    print_lengths(confirmation["a"])
    print_truncated(confirmation["d"])
    print_games_as_a_sample(confirmation)
    print_early_scores(confirmation)
