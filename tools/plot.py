"""Draw one or several runs: return, the divergence that drives L, and L, over environment steps.

    python tools/plot.py runs/A runs/B ... [--out plot.png]

A run in progress is drawn as far as it is. tools/report.py compares finished runs, with intervals.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import numpy as np
import tyro

STEP, RETURN, LENGTH = "global_step", "charts/episodic_return", "abs/rollout_length"
DIVERGENCE, KL = "abs/behavioral_divergence", "abs/kl_divergence"
TITLES = {RETURN: "Return", LENGTH: "Rollout\nlength L"}
TITLES |= {DIVERGENCE: "Behavioural\ndivergence", KL: "KL\ndivergence"}
COLOURS = matplotlib.color_sequences["petroff10"]  # can be told apart with colour-blind eyes
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
plt.rcParams.update({"axes.axisbelow": True, "grid.color": "0.92", "legend.frameon": False})

# What config.json must hold, and of which type. Early runs of gns_baseline.py had no thresholds.
COUNTS = "seed total_timesteps num_steps rollout_min rollout_max update_epochs num_minibatches"
TYPES = dict.fromkeys(COUNTS.split(), (int,)) | {"env_id": (str,), "adapt_rollout": (bool,)}
TYPES |= dict.fromkeys(["delta_min", "delta_max"], (int, float, type(None)))
LARGEST = 1e30  # of the numbers that are drawn


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs
    out: Path = Path("plot.png")  # the picture: .png, .svg or .pdf


@dataclass(eq=False)
class Run:
    folder: Path
    args: dict  # its options
    columns: dict[str, np.ndarray]  # of metrics.csv; NaN where nothing was measured
    game: str  # Space Invaders
    arm: str  # PQN with ABS
    signal: str  # the column that drives L


def read_options(path: Path) -> dict:
    """The options in a config.json, and the script's name as one more."""
    try:
        config = json.loads(path.read_bytes())
        options = config["args"] | {"script": Path(config["script"]).stem}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is damaged, or not a run's") from None
    for name, types in TYPES.items():
        value = options.get(name)
        if type(value) not in types or (type(value) in (int, float) and not abs(value) < LARGEST):
            raise ValueError(f"{path}: {name} is {str(value)[:40]}, which no run writes")
    return options


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a metrics.csv, by name."""
    text = path.read_bytes().decode(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be torn
    try:
        table = []
        for line in lines[1:]:
            table.append([float(cell or "nan") for cell in line.split(",")])
        columns = dict(zip(lines[0].split(","), np.array(table).T, strict=True))
        columns.setdefault(DIVERGENCE, np.full(len(table), np.nan))
        steps = columns[STEP]
        drawn = [steps, columns[RETURN], columns[LENGTH], columns[DIVERGENCE]]
    except (ValueError, KeyError, IndexError):
        raise ValueError(f"{path} has no data yet, or is damaged") from None
    too_large = np.abs([*drawn, columns.get(KL, steps)]) > LARGEST
    if too_large.any() or not (np.diff(steps, prepend=0) > 0).all():
        raise ValueError(f"{path} is damaged: {STEP} doesn't rise, or a number is beyond {LARGEST}")
    return columns


def title(env_id: str) -> str:
    """The name that people use: Space Invaders, of ALE/SpaceInvaders-v5 or space_invaders."""
    name = re.sub(r"^ALE/|^MinAtar/|(NoFrameskip)?-v\d+$", "", env_id).replace("_", " ")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return words.title() if words.islower() else words


def read_run(folder: Path) -> Run:
    """A run, finished or not; a ValueError says what is wrong with its files."""
    args = read_options(folder / "config.json")
    columns = read_columns(folder / "metrics.csv")
    algorithm = args["script"].partition("_")[0].upper()
    if algorithm not in ("PPO", "P3O"):
        algorithm = "PQN"  # of gns_baseline.py and the examples, too
    arm = f"{algorithm}, L = {args['num_steps']}"
    if args["adapt_rollout"]:
        by_noise = args["script"] == "gns_baseline" and args.get("signal") != "bd"
        arm = f"{algorithm} with {'noise scale' if by_noise else 'ABS'}"
    signal = KL if KL in columns else DIVERGENCE
    return Run(folder, args, columns, title(args["env_id"]), arm, signal)


def finish_axis(axis: plt.Axes, runs: list[Run], column: str) -> None:
    """Steps from 0 on, and thin lines at the limits of L or of the divergence that drives it."""
    axis.margins(x=0, y=0.12)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if column == KL:
        axis.set_yscale("log", nonpositive="mask")
    option, symbol = ("rollout", "L") if column == LENGTH else ("delta", "δ")
    limits = set()
    for run in runs:
        if run.args["adapt_rollout"] and column in (LENGTH, run.signal):
            for end in ("min", "max"):
                limits.add((end, run.args.get(f"{option}_{end}")))
    for end, limit in limits:
        if limit is not None:
            axis.axhline(limit, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
            style = {"textcoords": "offset points", "fontsize": 9}
            style |= {"xycoords": axis.get_yaxis_transform(), "color": "0.3"}
            if end == "min":
                style |= {"xy": (0, limit), "xytext": (3, 3), "ha": "left"}
            else:
                style |= {"xy": (1, limit), "xytext": (-3, 3), "ha": "right"}
            axis.annotate(f"${symbol}_\\{end}$ = {limit:g}", **style)


def legend(figure: plt.Figure) -> None:
    """One legend above for all axes."""
    handles = {}
    for axis in figure.axes:
        lines, names = axis.get_legend_handles_labels()
        handles.update(zip(names, lines, strict=True))
    columns = max(1, 100 // (8 + max(map(len, handles))))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)


def draw(runs: list[Run]) -> plt.Figure:
    names = [f"{run.game}, {run.arm}, seed {run.args['seed']}" for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder.name for run in runs]
    signals = sorted({run.signal for run in runs})
    panels = [RETURN, *signals, LENGTH]
    size = (8, 2.1 * len(panels) + 0.5)
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=size, layout="constrained")
    for axis, column in zip(axes, panels, strict=True):
        marker = "." if column in signals else None
        for i, run in enumerate(runs):
            if column in (RETURN, LENGTH, run.signal):
                known = np.isfinite(run.columns[column])
                points = run.columns[STEP][known], run.columns[column][known]
                axis.plot(*points, marker=marker, color=COLOURS[i % len(COLOURS)], label=names[i])
        axis.set_ylabel(TITLES[column])
        finish_axis(axis, runs, column)
    figure.supxlabel("Environment steps", fontsize=10)
    legend(figure)
    return figure


def main(args: Args) -> None:
    if not args.runs:
        raise ValueError("name at least one run's folder")
    figure = draw([read_run(folder) for folder in args.runs])
    figure.savefig(args.out, format=args.out.suffix[1:], dpi=160)
    print(args.out)


def fail(error: Exception) -> None:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:  # a folder that holds no run, a full disk
        fail(error)
