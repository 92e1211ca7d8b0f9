"""Draw runs: their return, Behavioural Divergence and batch size over environment steps, one colour a run.

python tools/plot.py runs/A runs/B ... [--out plot.png]      a run in progress is drawn as far as it is
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import tyro
from matplotlib.backend_bases import FigureCanvasBase

STEP, DIVERGENCE = "global_step", "abs/behavioral_divergence"
PANELS = {"charts/episodic_return": "Return, mean of\nthe last 100 episodes", DIVERGENCE: "Behavioural\nDivergence"}
PANELS |= {"abs/batch_size": "Batch size\n(transitions)"}
COLOURS = matplotlib.color_sequences["petroff10"]  # can be told apart with colour-blind eyes


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders of runs, each with metrics.csv and config.json
    out: Path = Path("plot.png")  # the picture: .png, .svg or .pdf


def fail(message: str):
    print(f"plot.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_run(folder: Path) -> tuple[str, dict[str, list[float]]]:
    """The run's name for the legend, and its columns as numbers, NaN where nothing was measured; or a ValueError."""
    try:
        config = json.loads((folder / "config.json").read_text())
        args = config["args"]
        name = f"{args['env_id']}, {Path(config['script']).stem}, seed {args['seed']}"
        if args.get("precision", "auto") != "auto":
            name += f", {args['precision']}"
        name += ", adaptive L" if args.get("adapt_rollout", True) else f", fixed L = {args['num_steps']}"
        lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no run: it has no {Path(error.filename).name}") from None
    except OSError as error:
        raise ValueError(f"can't read {folder}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} is no run: its config.json or metrics.csv is not what a run writes") from None

    # the last line of a run in progress may be torn
    header, *rows = [line.rstrip("\n").split(",") for line in lines if line[-1] == "\n"] or [[]]
    if not rows:
        raise ValueError(f"{folder}/metrics.csv has no data yet")
    for column in (STEP, *PANELS):
        if column not in header:
            raise ValueError(f"{folder}/metrics.csv has no column {column}")
    try:
        numbers = [[float(text or "nan") for text in row] for row in rows]
        return name, dict(zip(header, zip(*numbers, strict=True), strict=True))
    except ValueError:
        raise ValueError(f"{folder}/metrics.csv is damaged: rows of unequal length, or no numbers") from None


def draw(runs: list[tuple[str, dict]]) -> plt.Figure:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        len(PANELS), sharex=True, figsize=(8, 7), height_ratios=[1.4, 1, 1], layout="constrained"
    )
    figure.align_ylabels(axes)
    parts = [name.split(", ") for name, _ in runs]
    shared = [part for part in parts[0] if len(runs) > 1 and all(part in others for others in parts)]
    labels = [", ".join(part for part in own if part not in shared) or ", ".join(own) for own in parts]
    for axis, (column, title) in zip(axes, PANELS.items(), strict=True):
        for (_, columns), label, colour in zip(runs, labels, COLOURS * len(runs), strict=False):
            measured = [point for point in zip(columns[STEP], columns[column], strict=True) if math.isfinite(point[1])]
            style = {"marker": "o", "markersize": 3, "linewidth": 0.8} if column == DIVERGENCE else {"linewidth": 1.6}
            style |= {"drawstyle": "steps-pre"} if column == "abs/batch_size" else {}  # the batch that ended there
            axis.plot(*zip(*measured or [(math.nan, math.nan)], strict=True), color=colour, label=label, **style)
        axis.set_ylabel(title)
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    axes[1].set_ylim(-0.04, 1.04)
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter("{x:,.0f}")
    axes[2].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes[2].set_xlabel("Environment steps")
    axes[2].set_xlim(left=0)
    legend = {"title": ", ".join(shared), "ncols": 1 + (len(runs) > 3), "frameon": False}
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", **legend)
    return figure


def main(args: Args) -> None:
    if not args.runs:
        fail("name at least one run's folder")
    if args.out.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        fail(f"--out {args.out}: no picture format; take .png, .svg or .pdf")
    try:
        figure = draw([read_run(folder) for folder in args.runs])
    except ValueError as error:
        fail(str(error))
    try:
        figure.savefig(args.out, dpi=140)
    except OSError as error:
        fail(f"can't write {args.out}: {error.strerror}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
