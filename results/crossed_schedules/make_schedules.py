"""Make schedules.csv of the recorders, test the gate, and print the derangement for arm X.

    python results/crossed_schedules/make_schedules.py runs/crossed_recorders

A recorder's folder is <low or high>__<game>__<seed>.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

STEPS = np.arange(0, 1_000_001, 5_000)

lengths, scores, divergences = defaultdict(list), defaultdict(list), []
for folder in sorted(Path(sys.argv[1]).glob("*__*__*/")):
    run = plot.read_run(folder)
    rate, game, _ = folder.name.split("__")
    setting = f"{rate}_{game}"
    # The L in force at a step is that of the next row. Thinned runs have the last row of each L.
    rows = np.searchsorted(run.columns[plot.STEP], STEPS)
    lengths[setting].append(run.columns[plot.LENGTH][rows])
    scores[setting].append(report.score(run, window=0.2))
    measured = run.columns[plot.DIVERGENCE]
    divergences.extend(measured[np.isfinite(measured)])

settings = sorted(lengths)
schedules = np.array([np.mean(lengths[setting], axis=0) for setting in settings])
with Path(__file__).with_name("schedules.csv").open("w") as file:
    file.write(",".join(["global_step", *settings]) + "\n")
    for step, row in zip(STEPS, schedules.T, strict=True):
        file.write(",".join([str(step), *(f"{length:.3f}" for length in row)]) + "\n")

means = schedules.mean(axis=1)
print("setting", "runs", "mean L", "score over the last fifth", sep="\t")
for setting, mean in zip(settings, means, strict=True):
    print(
        setting, len(lengths[setting]), f"{mean:.1f}", f"{np.mean(scores[setting]):.2f}", sep="\t"
    )
print(f"gate: the largest mean L is {means.max() / means.min():.2f} times the smallest; needs 1.5")
low, high = np.quantile(divergences, (0.05, 0.95))
print(f"5th and 95th percentile of the divergence: {low:.4f} and {high:.4f}")

logs = np.log(schedules)
distances = np.abs(logs[:, None] - logs[None]).mean(axis=-1)
np.fill_diagonal(distances, -1e9)
rows, columns = linear_sum_assignment(distances, maximize=True)
for row, column in zip(rows, columns, strict=True):
    distance = distances[row, column]
    print(f"X: {settings[row]} follows {settings[column]}, distance {distance:.3f}")
