"""The figure and the table of this folder, from the runs in runs: CONDITION__LOSS__SEED.

python results/p3o_tokens/figure.py
"""

import csv
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

HERE = Path(__file__).parent
CONDITIONS = {
    "fresh": "fresh",
    "lag16": "16 updates late",
    "bfloat16": "bfloat16 sampler",
    "temperature": "sampler at temperature 1.3",
    "temperature2": "sampler at temperature 2",
    "lag16slow": "16 late, learning rate 3e-4",
}
OTHERS = {"abs": "fresh, --adapt-batch", "rewritten": "16 updates late, at 401b9ba"}  # not drawn
LOSSES = ("p3o", "ppo", "grpo")
METRICS = {
    "charts/greedy_accuracy": "Greedy accuracy\n(share of problems)",
    "charts/sampled_accuracy": "Sampled accuracy\n(share of problems)",
    "p3o/ess": "ESS e_B\n(share of the tokens)",
    "p3o/capped": "Share of tokens\nwith ρ > e_B",
}


def column(folder, name):
    """Steps and values of one column, without its empty cells."""
    with open(folder / "metrics.csv") as file:
        cells = [(int(row["global_step"]), row[name]) for row in csv.DictReader(file)]
    steps, values = zip(*[(step, float(cell)) for step, cell in cells if cell], strict=True)
    return np.array(steps), np.array(values)


def runs_of(condition, loss):
    return sorted((HERE / "runs").glob(f"{condition}__{loss}__*"))


def smoothed(values, width=5):
    """Mean of each value and those before it, at most width."""
    return np.array([values[max(i - width + 1, 0) : i + 1].mean() for i in range(len(values))])


def draw(path):
    drawn = {name: title for name, title in CONDITIONS.items() if runs_of(name, "p3o")}
    layout = {"figsize": (2.5 * len(drawn), 9), "layout": "constrained"}
    figure, axes = plot.plt.subplots(len(METRICS), len(drawn), sharex=True, sharey="row", **layout)
    lines = {}
    for axis_column, (condition, title) in zip(axes.T, drawn.items(), strict=True):
        axis_column[0].set_title(title, fontsize=9)
        axis_column[-1].set_xlabel("Answers")
        for i, loss in enumerate(LOSSES):
            for axis, (metric, label) in zip(axis_column, METRICS.items(), strict=True):
                curves = []
                for run in runs_of(condition, loss):
                    steps, values = column(run, metric)
                    curves.append(values if metric.startswith("charts") else smoothed(values))
                if curves:
                    mean, deviation = np.mean(curves, 0), np.std(curves, 0)
                    look = plot.style(i, len(steps))
                    (lines[loss],) = axis.plot(steps, mean, **look)
                    band = mean - deviation, mean + deviation
                    axis.fill_between(steps, *band, color=look["color"], alpha=0.2, linewidth=0)
                if axis in axes[:, 0]:
                    axis.set_ylabel(label)
    plot.legend(figure, lines)
    plot.save(figure, path)


def last_mean(folder, name, share=0.2):
    """Mean of a column over the last share of the answers."""
    steps, values = column(folder, name)
    return values[steps > (1 - share) * steps[-1]].mean()


def print_table():
    print(
        "| condition | loss | greedy | sampled | mean greedy | ESS | 1 - ESS | capped | clipped |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for condition, title in (CONDITIONS | OTHERS).items():
        for loss in LOSSES:
            runs = runs_of(condition, loss)
            if not runs:
                continue
            cells = []
            for name in ("charts/greedy_accuracy", "charts/sampled_accuracy"):
                values = [last_mean(run, name) for run in runs]
                deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
                cells.append(f"{np.mean(values):.3f}{deviation}")
            for name in ("charts/greedy_accuracy", "p3o/ess", "p3o/kl_weight"):
                values = [column(run, name)[1].mean() for run in runs]
                cells.append(f"{np.mean(values):.3f}")
            for name in ("p3o/capped", "ppo/clipped"):
                values = [column(run, name)[1].mean() for run in runs]
                cells.append(f"{np.mean(values):.2f}")
            print(f"| {title} ({len(runs)}) | {loss} | {' | '.join(cells)} |")


draw(HERE / "figure.png")
print_table()
