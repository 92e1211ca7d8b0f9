"""Write schedules.csv, and print which games count and how many seeds the arms get (PROTOCOL.md).

    tar xzf results/minatar_study/selection.tar.gz -C results/minatar_study
    python results/length_or_steps/make_schedules.py results/length_or_steps/recorders

A recorder's folder is <rate>__<game>__<seed>. Without recorders, only step 0's schedules are there.
"""

import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
HERE = Path(__file__).parent
GRID = np.arange(0, 1_000_001, 5_000)


def mean_length(runs):
    """L(t), averaged over runs. The L in force at a step is that of the next row."""
    lengths = []
    for run in runs:
        rows = np.searchsorted(run.columns[plot.STEP], GRID)
        lengths.append(run.columns[plot.LENGTH][rows.clip(max=len(run.columns[plot.STEP]) - 1)])
    return np.mean(lengths, axis=0)


selection, recorders = {}, defaultdict(dict)
for game in GAMES:
    folders = HERE.parent.glob(f"minatar_study/selection/abs__{game}__*")
    selection[game] = [plot.read_run(folder) for folder in sorted(folders)]
for rate in ("0.0005", "0.002"):
    for game in GAMES:
        folders = sorted(Path(sys.argv[1]).glob(f"{rate}__{game}__*/"))
        if folders:
            recorders[rate][game] = [plot.read_run(folder) for folder in folders]

columns = {"global_step": GRID}
for game in GAMES:
    columns[f"0.001_{game}_own"] = mean_length(selection[game])
for rate, games in recorders.items():
    own = {game: mean_length(runs) for game, runs in games.items()}
    squared_mean = np.exp(2 * np.mean(np.log(list(own.values())), axis=0))  # g(t)²
    for game in GAMES:
        columns[f"{rate}_{game}_own"] = own[game]
        columns[f"{rate}_{game}_mirror"] = squared_mean / own[game]
with (HERE / "schedules.csv").open("w") as file:
    file.write(",".join(columns) + "\n")
    for row in zip(*columns.values(), strict=True):
        file.write(",".join([str(row[0]), *(f"{length:.3f}" for length in row[1:])]) + "\n")
for name, lengths in columns.items():
    print(f"{name}: mean {np.mean(lengths):.1f}, {min(lengths):.1f} to {max(lengths):.1f}")

variances = []
for game in GAMES:
    needed = np.mean([report.score(run, 0.2) for run in selection[game]]) / 4
    for rate in recorders:
        late = [report.score(run, 0.2) for run in recorders[rate][game]]
        logs = [math.log(max(report.score(run, 1.0), 0.01)) for run in recorders[rate][game]]
        variances.append(np.var(logs, ddof=1))
        verdict = "learns" if min(late) >= needed else "DOES NOT LEARN"
        print(f"{rate} {game}: last fifth {np.round(late, 2)}, needs {needed:.2f}: {verdict}")
if variances:
    spread = math.sqrt(np.mean(variances))
    seeds = min(16, max(8, math.ceil(8 * (spread / 0.13) ** 2)))
    print(f"spread of the log score {spread:.3f}: {seeds} seeds")
