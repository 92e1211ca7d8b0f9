"""What PROTOCOL.md reads off, in two tables, and figure.png.

    python results/breakout_paper/analyse.py results/breakout_paper/runs

A run's folder is <arm>_<seed>: fixed32, abs or scaled. A ratio is to L = 32 of the same seed.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

ARMS = {"fixed32": "L = 32", "abs": "ABS", "scaled": "ABS, scaled epochs"}
UPDATES = "charts/updates"
MILLIONS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20)
PANELS = {
    "return": (plot.STEP, plot.RETURN),
    "return by gradient steps": (UPDATES, plot.RETURN),
    "divergence": (plot.STEP, plot.DIVERGENCE),
    "length": (plot.STEP, plot.LENGTH),
    "updates": (plot.STEP, UPDATES),
}
LABELS = plot.TITLES | {plot.STEP: "Environment steps"}
# The protocol's last section: where the two runs were interrupted shortly before their end.
INTERRUPTED = {("fixed32", 1): 18_595_840, ("abs", 1): 18_705_152}


def last_values(run, column, axis, places):
    """A column in the last row up to each place on an axis."""
    return [run.columns[column][run.columns[axis] <= place][-1] for place in places]


def mean_return(run, first, last):
    steps = run.columns[plot.STEP]
    return run.columns[plot.RETURN][(first <= steps) & (steps <= last)].mean()


def ratio(run, fixed):
    """Geometric mean of ten ratios of returns at equal gradient steps."""
    end = min(run.columns[UPDATES][-1], fixed.columns[UPDATES][-1])
    places = end * np.arange(1, 11) / 10
    returns = [last_values(each, plot.RETURN, UPDATES, places) for each in (run, fixed)]
    return np.exp(np.mean(np.log(returns[0]) - np.log(returns[1])))


def draw(runs):
    mosaic = [["return"] * 3 + ["return by gradient steps"] * 3]
    mosaic += [["divergence"] * 2 + ["length"] * 2 + ["updates"] * 2]
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(10, 6), layout="constrained")
    lines = {}
    for panel, (x, y) in PANELS.items():
        for i, ((arm, seed), run) in enumerate(runs.items()):
            known = np.isfinite(run.columns[y])
            points = run.columns[x][known], run.columns[y][known]
            (line,) = axes[panel].plot(*points, **plot.style(i, known.sum()))
            lines[f"{ARMS[arm]}, seed {seed}"] = line
        axes[panel].set(xlabel=LABELS[x], ylabel=LABELS[y], xlim=(0, None))
        axes[panel].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes["updates"].yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    plot.legend(figure, lines)
    plot.save(figure, Path(__file__).with_name("figure.png"))


def main(folder):
    runs = {}
    for arm in ARMS:
        for path in sorted(folder.glob(f"{arm}_*")):
            run = plot.read_run(path)
            if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
                raise SystemExit(f"{path} is not finished")
            runs[arm, int(path.name.rpartition("_")[2])] = run
    print("| arm, seed | last million | million before the interruption ", end="")
    print("| 100 points at | mean δ | mean L | gradient steps | ratio |")
    print("|---" * 8 + "|")
    for (arm, seed), run in runs.items():
        reached = run.columns[plot.RETURN] >= 100  # false where it is NaN
        first = run.columns[plot.STEP][reached.argmax()] if reached.any() else np.nan
        relative = ratio(run, runs["fixed32", seed])
        cells = [f"{ARMS[arm]}, {seed}", f"{mean_return(run, 19e6, np.inf):.1f}"]
        if (arm, seed) in INTERRUPTED:
            last = INTERRUPTED[arm, seed]
            cells += [f"{mean_return(run, last - 1e6, last):.1f}"]
        else:
            cells += [""]
        cells += [f"{first:,.0f}"]
        cells += [f"{np.nanmean(run.columns[plot.DIVERGENCE]):.3f}"]
        cells += [f"{np.mean(run.columns[plot.LENGTH]):.1f}"]
        cells += [f"{run.columns[UPDATES][-1]:,.0f}", f"{relative:.2f}"]
        print("|", " | ".join(cells), "|")
    print("\n| million steps |", " | ".join(map(str, MILLIONS)), "|")
    print("|---" * (1 + len(MILLIONS)) + "|")
    places = np.array(MILLIONS) * 1e6
    for column in (plot.RETURN, plot.LENGTH, UPDATES):
        for (arm, seed), run in runs.items():
            values = last_values(run, column, plot.STEP, places)
            cells = [
                f"{value:.3g}" if column == plot.RETURN else f"{value:,.0f}" for value in values
            ]
            print(f"| {column}, {ARMS[arm]}, {seed} |", " | ".join(cells), "|")
    draw(runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
