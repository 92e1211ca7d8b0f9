"""The contrasts of PROTOCOL.md, from the runs of the four arms.

    python results/crossed_schedules/analyse.py results/crossed_schedules/arms

A run's folder is <arm>_<low or high>__<game>__<seed>, where the arm is A, R, X or C.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import trim_mean

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

ARMS = "A R X C".split()
CONTRASTS = [("R", "X"), ("A", "R"), ("A", "C")]  # primary
RUNS = 320  # 4 arms, 10 settings, 8 seeds
RESAMPLES, PERMUTATIONS = 10_000, 100_000
rng = np.random.default_rng(0)


def read(folder: Path, window: float) -> np.ndarray:
    """Scores (arms, settings, seeds), not divided yet. Every cell must have the same seeds."""
    scores = defaultdict(dict)
    run_folders = sorted(folder.glob("*__*__*/"))
    if len(run_folders) != RUNS:
        raise SystemExit(f"{len(run_folders)} of {RUNS} runs; the protocol wants all runs first")
    for run_folder in run_folders:
        run = plot.read_run(run_folder)
        if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
            raise SystemExit(f"{run_folder} is not finished; the protocol wants all runs first")
        name, game, seed = run_folder.name.split("__")
        arm, rate = name.split("_")
        scores[arm, f"{rate}_{game}"][int(seed)] = report.score(run, window)
    settings = sorted({setting for _, setting in scores})
    seeds = sorted(scores[ARMS[0], settings[0]])
    table = np.empty((len(ARMS), len(settings), len(seeds)))
    for arm, setting, seed in np.ndindex(table.shape):
        table[arm, setting, seed] = scores[ARMS[arm], settings[setting]][seeds[seed]]
    print(f"{len(settings)} settings, seeds {seeds[0]} to {seeds[-1]}, window {window:g}")
    for index, setting in enumerate(settings):
        means = (f"{ARMS[arm]} {table[arm, index].mean():.3g}" for arm in range(len(ARMS)))
        print(f"  {setting}:", ", ".join(means))
    return table


def interval(first, second, share, statistic):
    """Bootstrap: seeds are resampled within setting and arm."""
    settings, seeds = first.shape
    rows = np.arange(settings)[:, None]
    draws = []
    for _ in range(RESAMPLES):
        one = first[rows, rng.integers(seeds, size=first.shape)]
        other = second[rows, rng.integers(seeds, size=second.shape)]
        draws.append(statistic(one) - statistic(other))
    return np.quantile(draws, ((1 - share) / 2, (1 + share) / 2))


def permutation_p(first, second, statistic) -> float:
    """Two-sided; the labels of the two arms are permuted within settings."""
    found = abs(statistic(first) - statistic(second))
    both = np.concatenate([first, second], axis=1)
    seeds = first.shape[1]
    extreme = 0
    for _ in range(PERMUTATIONS):
        shuffled = rng.permuted(both, axis=1)
        difference = statistic(shuffled[:, :seeds]) - statistic(shuffled[:, seeds:])
        extreme += abs(difference) >= found * (1 - 1e-9)
    return (1 + extreme) / (1 + PERMUTATIONS)


def contrast(table, statistic, label):
    rows = []
    for first, second in CONTRASTS:
        one, other = table[ARMS.index(first)], table[ARMS.index(second)]
        difference = statistic(one) - statistic(other)
        p = permutation_p(one, other, statistic)
        wide = interval(one, other, 0.95, statistic)
        narrow = interval(one, other, 0.90, statistic)
        rows.append((f"{first} - {second}", difference, wide, narrow, p))
    print(label)
    for row, p_holm in zip(rows, report.holm([row[-1] for row in rows]), strict=True):
        name, difference, wide, narrow, p = row
        verdict = "equivalent" if np.abs(narrow).max() < 0.05 else ""
        print(
            f"  {name}: {100 * difference:+.1f}% ({100 * wide[0]:.1f} to {100 * wide[1]:.1f}), "
            f"p {p:.4f}, Holm {p_holm:.4f} {verdict}"
        )


def interquartile_mean(scores):
    return trim_mean(scores.flatten(), 0.25)


def main(folder):
    for window, label in ((1.0, "primary: the whole run"), (0.2, "secondary: the last fifth")):
        table = read(folder, window)
        relative = table / table.mean(axis=(0, 2))[None, :, None]
        contrast(relative, np.mean, label)
        if window == 1.0:
            contrast(relative, interquartile_mean, "secondary: interquartile mean")
            positive = (table > 0).all(axis=(0, 2))
            contrast(
                np.log(table[:, positive]), np.mean, f"secondary: log, {positive.sum()} settings"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
