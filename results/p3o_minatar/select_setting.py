"""The sweep's table, and its best setting, by the rule of PROTOCOL.md.

    python results/p3o_minatar/select_setting.py results/p3o_minatar/sweep

A run's folder is <arm>__<game>__<seed>. The arm is ppo, or lr<rate>_e<epochs>_m<mini-batches>.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

scores = defaultdict(list)
for folder in sorted(Path(sys.argv[1]).glob("*__*__*/")):
    run = plot.read_run(folder)
    arm, game, _ = folder.name.split("__")
    if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
        raise SystemExit(f"{folder} is not finished")
    scores[arm, game].append(report.score(run, window=0.2))

games = sorted({game for _, game in scores})
means = {cell: np.mean(values) for cell, values in scores.items()}
relative = {}
for arm in sorted({arm for arm, _ in scores}):
    relative[arm] = np.mean([means[arm, game] / means["ppo", game] for game in games])
print("| setting |", " | ".join(plot.title(game) for game in games), "| relative to PPO |")
print("|---" * (len(games) + 2) + "|")
for arm in sorted(relative, key=relative.get, reverse=True):
    cells = " | ".join(f"{means[arm, game]:.3g}" for game in games)
    print(f"| {arm} | {cells} | {relative[arm]:.3f} |")
print("runs in a cell:", sorted({len(values) for values in scores.values()}))
del relative["ppo"]
print("the best setting is", max(relative, key=relative.get))
