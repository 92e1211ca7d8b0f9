"""The constant of arm C: the one with the largest mean relative score over all settings.

    python results/crossed_schedules/select_constant.py results/crossed_schedules/constants

A run's folder is C<L>_<low or high>__<game>__<seed>. A score is the mean over the whole run, and
relative to the setting's mean over the five constants.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

CONSTANTS = (16, 32, 48, 64, 96)

scores = defaultdict(list)
for folder in sorted(Path(sys.argv[1]).glob("C*__*__*/")):
    run = plot.read_run(folder)
    if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
        raise SystemExit(f"{folder} is not finished")
    name, game, _ = folder.name.split("__")
    constant, rate = name.removeprefix("C").split("_")
    scores[f"{rate}_{game}", int(constant)].append(report.score(run, window=1.0))

settings = sorted({setting for setting, _ in scores})
table = np.array([[np.mean(scores[setting, L]) for L in CONSTANTS] for setting in settings])
relative = table / table.mean(axis=1, keepdims=True)
print("| setting |", " | ".join(f"L = {L}" for L in CONSTANTS), "|")
print("|---" * (1 + len(CONSTANTS)) + "|")
for setting, row in zip(settings, table, strict=True):
    rate, _, game = setting.partition("_")
    cells = " | ".join(f"{score:.3g}" for score in row)
    print(f"| {rate}, {plot.title(game)} | {cells} |")
print("| relative, mean |", " | ".join(f"{mean:.3f}" for mean in relative.mean(axis=0)), "|")
counts = sorted({len(values) for values in scores.values()})
best = CONSTANTS[relative.mean(axis=0).argmax()]
print(f"{len(scores)} cells of {counts} runs; the constant is {best}")
