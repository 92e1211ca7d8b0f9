"""What the selection runs decide: L*, and the open-loop schedule (schedule.csv).

python results/minatar_study/select_length.py

A score is as PROTOCOL.md has it. L* has the largest mean over games of the mean log score. The
schedule is ABS's L at each step, averaged over its runs in all games.
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
STEPS = np.arange(0, 1_000_001, 5_000)


def read(folder, *names):
    """Columns of a run's metrics.csv, empty cells as NaN."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name] or "nan") for row in rows]) for name in names]


def score(folder):
    """Mean return over the last 20% of the steps, a row weighted by the steps up to it."""
    step, score = read(folder, "global_step", "charts/episodic_return")
    weights = np.diff(step, prepend=0)
    late = step > 800_000
    return np.average(score[late], weights=weights[late])


scores = defaultdict(list)
lengths = []
for folder in sorted((HERE / "selection").glob("*__*__*/")):
    arm, game, _ = folder.name.split("__")
    scores[arm, game].append(score(folder))
    if arm == "abs":
        lengths.append(np.interp(STEPS, *read(folder, "global_step", "abs/rollout_length")))

games = sorted({game for _, game in scores})
log_means = {}
print("arm", *games, "mean log score", "runs", sep="\t")
for arm in sorted({arm for arm, _ in scores}):
    means = [np.mean(scores[arm, game]) for game in games]
    log_means[arm] = np.mean([np.mean(np.log(scores[arm, game])) for game in games])
    runs = sum(len(scores[arm, game]) for game in games)
    print(arm, *(f"{mean:.2f}" for mean in means), f"{log_means[arm]:.4f}", runs, sep="\t")
fixed = {arm: value for arm, value in log_means.items() if arm != "abs"}
print("L* is that of", max(fixed, key=fixed.get))

mean = np.mean(lengths, axis=0)
with (HERE / "schedule.csv").open("w") as file:
    file.write("global_step,rollout_length\n")
    for step, length in zip(STEPS, mean, strict=True):
        file.write(f"{step},{length:.3f}\n")
print(f"schedule.csv: {len(lengths)} runs with ABS, L from {mean.min():.1f} to {mean.max():.1f}")
