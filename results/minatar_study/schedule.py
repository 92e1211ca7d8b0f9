"""Writes schedule.csv: ABS's rollout length over steps, averaged over the selection runs.

python results/minatar_study/schedule.py runs/minatar_study/selection
"""

import csv
import sys
from pathlib import Path

import numpy as np

runs = sorted(Path(sys.argv[1]).glob("abs__*"))
steps = np.arange(0, 1_000_001, 5_000)
lengths = []
for run in runs:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    global_step = [int(row["global_step"]) for row in rows]
    length = [int(row["abs/rollout_length"]) for row in rows]
    lengths.append(np.interp(steps, global_step, length))
mean = np.mean(lengths, axis=0)
with Path(__file__).with_name("schedule.csv").open("w") as file:
    file.write("global_step,rollout_length\n")
    for step, length in zip(steps, mean, strict=True):
        file.write(f"{step},{length:.3f}\n")
print(f"{len(runs)} runs, L from {mean.min():.1f} to {mean.max():.1f}")
