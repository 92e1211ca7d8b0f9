"""The contrasts of PROTOCOL.md, from the runs of the four arms.

    python results/crossed_schedules/analyse.py results/crossed_schedules/arms

A run's folder is <arm>_<low or high>__<game>__<seed>, where the arm is A, R, X or C.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

ARMS = "A R X C".split()
CONTRASTS = [("R", "X"), ("A", "R"), ("A", "C")]  # primary
RATES = {"low": 2.5e-4, "high": 4e-3}
RUNS = 320  # 4 arms, 10 settings, 8 seeds
CHUNKS, CHUNK = 200, 500  # 100,000 resamples, and as many permutations
MARGIN = 5  # percent
rng = np.random.default_rng(0)


def read(folder: Path, window: float) -> np.ndarray:
    """Scores (arms, settings, seeds), not divided yet. Every cell must have the same seeds."""
    scores = defaultdict(dict)
    run_folders = sorted(folder.glob("*__*__*/"))
    if len(run_folders) != RUNS:
        plot.fail(f"{folder} holds {len(run_folders)} of {RUNS} runs; the protocol wants all")
    for run_folder in run_folders:
        run = plot.read_run(run_folder)
        if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
            plot.fail(f"{run_folder} is not finished; the protocol wants all runs first")
        name, game, seed = run_folder.name.split("__")
        arm, rate = name.split("_")
        found = (run.args["env_id"], run.args["seed"], run.args["learning_rate"])
        if found != (game, int(seed), RATES[rate]):
            plot.fail(f"{run_folder} holds another run: {found}")
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


def interval_draws(first, second, statistic):
    """Bootstrap differences: seeds are resampled within setting and arm."""
    settings, seeds = first.shape
    rows = np.arange(settings)[:, None]
    draws = []
    for _ in range(CHUNKS):
        one = first[rows, rng.integers(seeds, size=(CHUNK, *first.shape))]
        other = second[rows, rng.integers(seeds, size=(CHUNK, *second.shape))]
        draws.append(statistic(one) - statistic(other))
    return np.concatenate(draws)


def permutation_p(first, second, statistic) -> float:
    """Two-sided; the labels of the two arms are permuted within settings."""
    found = abs(statistic(first) - statistic(second))
    both = np.concatenate([first, second], axis=1)
    both = np.repeat(both[None], CHUNK, axis=0)
    seeds = first.shape[1]
    extreme = 0
    for _ in range(CHUNKS):
        shuffled = rng.permuted(both, axis=-1)
        differences = statistic(shuffled[..., :seeds]) - statistic(shuffled[..., seeds:])
        extreme += np.sum(np.abs(differences) >= found * (1 - 1e-9))
    return (1 + extreme) / (1 + CHUNKS * CHUNK)


def contrasts(table, statistic, label, as_share=np.positive):
    """as_share turns a difference of the statistic into a share; by default it is one."""
    print(f"{label}: effect, 95% interval, 90% interval, p, p by Holm")
    lines, ps = [], []
    for first, second in CONTRASTS:
        one, other = table[ARMS.index(first)], table[ARMS.index(second)]
        draws = 100 * as_share(interval_draws(one, other, statistic))
        wide, narrow = np.quantile(draws, (0.025, 0.975)), np.quantile(draws, (0.05, 0.95))
        effect = 100 * as_share(statistic(one) - statistic(other))
        intervals = f"({wide[0]:.2f} to {wide[1]:.2f}), ({narrow[0]:.2f} to {narrow[1]:.2f})"
        equivalent = "; equivalent" if np.abs(narrow).max() < MARGIN else ""
        lines.append((f"  {first} - {second}: {effect:+.2f}% {intervals}", equivalent))
        ps.append(permutation_p(one, other, statistic))
    for (line, equivalent), p, corrected in zip(lines, ps, report.holm(ps), strict=True):
        print(f"{line}, {p:.5f}, {corrected:.5f}{equivalent}")


def main(folder):
    for window, label in ((1.0, "primary: the whole run"), (0.2, "secondary: the last fifth")):
        table = read(folder, window)
        relative = table / table.mean(axis=(0, 2))[None, :, None]
        contrasts(relative, report.mean, label)
        if window == 1.0:
            contrasts(relative, report.interquartile_mean, "secondary: interquartile mean")
            logs = np.log(table[:, (table > 0).all(axis=(0, 2))])
            label = f"secondary: mean log, {logs.shape[1]} settings"
            contrasts(logs, report.mean, label, np.expm1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
