# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib", "numpy", "pillow", "tyro"]
# ///
"""Draw one or several runs: return, the divergence that drives L, and L, over environment steps.

    python tools/plot.py runs/A runs/B ... [--out picture.png]

A run in progress is drawn as far as it is. With --also charts/updates, there is one more panel, of
that column of metrics.csv. tools/report.py compares finished runs, with intervals.
"""

import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib import ticker
from PIL import Image

STEP, RETURN, LENGTH = "global_step", "charts/episodic_return", "abs/rollout_length"
DIVERGENCE, KL = "abs/behavioral_divergence", "abs/kl_divergence"
TITLES = {RETURN: "Return\n(points)", LENGTH: "Rollout length L\n(steps)"}
TITLES |= {DIVERGENCE: "Behavioral Divergence δ\n(share of states)", KL: "KL divergence δ\n(nats)"}
TITLES["charts/updates"] = "Gradient steps"
COLOURS = matplotlib.color_sequences["petroff10"]  # can be told apart with colour-blind eyes
MARKERS = "osD^vXP"  # and without colours
plt.switch_backend("Agg")  # draws without a screen
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
plt.rcParams.update({"axes.axisbelow": True, "grid.color": "0.92", "legend.frameon": False})


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs
    out: Path | None = None  # the picture: .png, .svg or .pdf; by default plot.png in the first run
    also: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """one more column of metrics.csv to draw, for example charts/updates; once for each"""


@dataclass(eq=False)
class Run:
    folder: Path
    args: dict  # its options
    columns: dict[str, np.ndarray]  # of metrics.csv; NaN where nothing was measured
    game: str  # Space Invaders
    arm: str  # PQN with ABS
    signal: str  # the column of its δ


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a metrics.csv, by name."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no data yet")
    columns = {}
    for name in rows[0]:
        columns[name] = np.array([float(row[name] or "nan") for row in rows])
    return columns


def title(env_id: str) -> str:
    """The name that people use: Space Invaders, of ALE/SpaceInvaders-v5 or space_invaders."""
    name = re.sub(r"^ALE/|^MinAtar/|(NoFrameskip)?-v\d+$", "", env_id).replace("_", " ")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return words.title() if words.islower() else words


def read_run(folder: Path) -> Run:
    """A run, finished or not."""
    config = json.loads((folder / "config.json").read_text())
    args = config["args"] | {"script": Path(config["script"]).stem}
    if args["script"] == "p3o_tokens":
        raise ValueError(f"{folder}: results/p3o_tokens/figure.py draws runs of p3o_tokens.py")
    columns = read_columns(folder / "metrics.csv")
    signal = KL if KL in columns else DIVERGENCE
    algorithm = "PPO" if signal == KL else "PQN"
    arm = f"{algorithm}, L = {args['num_steps']}"
    if args["adapt_rollout"]:
        arm = f"{algorithm} with ABS"
        if "micro_batches" in args:  # gns_baseline.py
            arm = "PQN with noise scale"
            args |= {"delta_min": None, "delta_max": None}  # δ is measured, but drives nothing
    return Run(folder, args, columns, title(args["env_id"]), arm, signal)


def style(i: int, points: int) -> dict:
    """The i-th curve's colour and marker. About ten of its points have a marker."""
    every = max(1, points // 10)
    look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    return look | {"markersize": 4.5, "markevery": (2 * i * every // 5 % every, every)}


def finish_axis(axis: plt.Axes, runs: list[Run], column: str) -> None:
    """Steps from 0 on, and thin lines at the limits of L or of the divergence that drives it."""
    axis.set_xlim(0, 1.02 * max(run.columns[STEP][-1] for run in runs))
    axis.xaxis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=True))
    axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axis.margins(y=0.12)
    values = np.concatenate([line.get_ydata() for line in axis.lines])
    if not np.isfinite(values).any():
        missing = "no episode has ended yet" if column == RETURN else "not measured yet"
        axis.text(0.5, 0.5, missing, ha="center", va="center", transform=axis.transAxes)
        return
    if column == LENGTH:
        axis.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    if column == KL and (values > 0).any():  # of zeros there is no logarithm
        axis.set_yscale("log", nonpositive="mask")
    option, symbol = ("rollout", "L") if column == LENGTH else ("delta", "δ")
    limits = set()
    for run in runs:
        if run.args["adapt_rollout"] and column in (LENGTH, run.signal):
            for end in ("min", "max"):
                limits.add((end, run.args.get(f"{option}_{end}")))
    for end, limit in limits:
        if limit is not None:  # the noise scale has none for δ
            axis.axhline(limit, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
            look = {"fontsize": 8, "color": "0.3", "transform": axis.get_yaxis_transform()}
            axis.text(1.01, limit, f"${symbol}_\\{end}$\n{limit:g}", va="center", **look)
    axis.autoscale_view(scalex=False)  # axhline does not widen a view that a limit is in


def legend(figure: plt.Figure, lines: dict[str, plt.Line2D]) -> None:
    """One legend above for all axes."""
    columns = max(1, 100 // (8 + max(map(len, lines))))
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=columns)


def draw(runs: list[Run], also: tuple[str, ...] = ()) -> plt.Figure:
    names = [f"{run.game}, {run.arm}, seed {run.args['seed']}" for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    panels = [RETURN, *sorted({run.signal for run in runs}), LENGTH, *also]
    size = (8, 2.1 * len(panels) + 0.5)
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=size, layout="constrained")
    lines = {}
    for axis, column in zip(axes, panels, strict=True):
        for i, run in enumerate(runs):
            if column not in (DIVERGENCE, KL) or column in (run.signal, *also):
                known = np.isfinite(run.columns[column])
                points = run.columns[STEP][known], run.columns[column][known]
                (lines[names[i]],) = axis.plot(*points, **style(i, known.sum()))
        axis.set_ylabel(TITLES.get(column, column))
        finish_axis(axis, runs, column)
    figure.supxlabel("Environment steps", fontsize=10)
    legend(figure, lines)
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=160)
    plt.close(figure)
    if path.suffix == ".png":  # with 128 colours it has a third of the size
        image = Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(path, optimize=True)


def main(args: Args) -> None:
    if not args.runs:
        raise ValueError("name at least one run's folder")
    runs = [read_run(folder) for folder in args.runs]
    for run in runs:
        for column in args.also:
            if column not in run.columns:
                raise ValueError(f"--also {column}: {run.folder} has only {', '.join(run.columns)}")
    out = args.out or args.runs[0] / "plot.png"
    save(draw(runs, args.also), out)
    print(out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:  # a folder that holds no run, a wrong --out
        sys.exit(f"plot.py: {error}")
