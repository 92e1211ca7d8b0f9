"""What the selection runs decide: L*, and the open-loop schedule (schedule.csv).

python results/minatar_study/select_length.py

A score is as PROTOCOL.md has it. L* has the largest mean over games of the mean log score. The
schedule is ABS's L at each step, averaged over its runs in all games.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

HERE = Path(__file__).parent
STEPS = np.arange(0, 1_000_001, 5_000)

scores = defaultdict(list)
lengths = []
for folder in sorted((HERE / "selection").glob("*__*__*/")):
    arm, game, _ = folder.name.split("__")
    run = plot.read_run(folder)
    scores[arm, game].append(report.score(run, window=0.2))
    if arm == "abs":
        lengths.append(np.interp(STEPS, run.columns[plot.STEP], run.columns[plot.LENGTH]))

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
