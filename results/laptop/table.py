"""Scores of runs, at several steps and at the end, and their mean L.

    python results/laptop/table.py results/laptop/runs/*

A score is the mean of the last 100 games, in the last row up to that step. The mean of L is over
the rows in which δ was measured.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

STEPS = (100_000, 200_000, 300_000, 400_000, 500_000, 600_000, 800_000, 1_000_000)

print("| run |", " | ".join(f"{step // 1000}k" for step in STEPS), "| last step | score | mean L |")
print("|---" * (4 + len(STEPS)) + "|")
for folder in map(Path, sys.argv[1:]):
    run = plot.read_run(folder)
    known = np.flatnonzero(np.isfinite(run.columns[plot.RETURN]))
    steps, scores = run.columns[plot.STEP][known], run.columns[plot.RETURN][known]
    cells = [folder.name]
    for step in STEPS:
        is_reached = step <= run.args["total_timesteps"] and step <= steps[-1]
        cells.append(f"{scores[steps <= step][-1]:.1f}" if is_reached else "")
    measured = np.isfinite(run.columns[run.signal])
    lengths = run.columns[plot.LENGTH][measured]
    cells += [f"{steps[-1]:,.0f}", f"{scores[-1]:.1f}", f"{lengths.mean():.1f}"]
    print("|", " | ".join(cells), "|")
