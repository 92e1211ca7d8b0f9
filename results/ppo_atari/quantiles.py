"""Quantiles of the KL divergence of plain PPO, of which the thresholds of ppo_abs.py are made.

python results/ppo_atari/quantiles.py
"""

import sys
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

print("| game | 5% | 25% | 50% | 75% | 95% | 50% of the last quarter | rank correlation with δ |")
print("|---|---|---|---|---|---|---|---|")
everything = []
for folder in sorted((Path(__file__).parent / "runs").glob("fixed__*")):
    run = plot.read_run(folder)
    measured = np.isfinite(run.columns[plot.KL])
    divergence = run.columns[plot.KL][measured]
    everything.extend(divergence)
    late = run.columns[plot.STEP][measured] > 0.75 * run.args["total_timesteps"]
    cells = list(np.quantile(divergence, (0.05, 0.25, 0.5, 0.75, 0.95)))
    cells.append(np.median(divergence[late]))
    words = " | ".join(f"{cell:.5f}" for cell in cells)
    correlation = spearmanr(divergence, run.columns[plot.DIVERGENCE][measured]).statistic
    print(f"| {run.game} | {words} | {correlation:.2f} |")
words = " | ".join(f"{cell:.5f}" for cell in np.quantile(everything, (0.05, 0.25, 0.5, 0.75, 0.95)))
print(f"| all | {words} | | |")
