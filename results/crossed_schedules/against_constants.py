"""ABS against each constant L, by learning rate: exploratory.

    python results/crossed_schedules/against_constants.py runs/thin

The folder has the arms with thin rows, as the constants have. The score is that of the whole run.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

HERE = Path(__file__).parent
scores = defaultdict(lambda: defaultdict(list))
for folder in [*Path(sys.argv[1]).glob("A_*__*__*/"), *(HERE / "constants").glob("C*__*__*/")]:
    arm, game, _ = folder.name.split("__")
    scores[arm][game].append(np.log(report.score(plot.read_run(folder), window=1.0)))
logs = {}
for arm, games in scores.items():
    logs[arm] = np.array([games[game] for game in sorted(games)])  # (games, seeds)

rng = np.random.default_rng(0)
games = np.arange(5)[:, None]
for rate in ("low", "high"):
    ours = logs[f"A_{rate}"]
    for constant in (16, 32, 48, 64, 96):
        theirs = logs[f"C{constant}_{rate}"]
        draws = []
        for _ in range(10_000):
            one = ours[games, rng.integers(ours.shape[1], size=ours.shape)]
            other = theirs[games, rng.integers(theirs.shape[1], size=theirs.shape)]
            draws.append(one.mean() - other.mean())
        change = ours.mean() - theirs.mean()
        low, high = 100 * np.expm1(np.quantile(draws, (0.025, 0.975)))
        by_game = ours.mean(axis=1) - theirs.mean(axis=1)
        words = ", ".join(f"{each:+.0f}" for each in 100 * np.expm1(by_game))
        interval = f"{100 * np.expm1(change):+.1f}% ({low:.1f} to {high:.1f})"
        print(f"{rate}, L = {constant}: {interval}; by game {words}")
