"""Draw one or several runs: return, the divergence that drives L, and L, over environment steps.

    python tools/plot.py runs/A runs/B ... [--out plot.png]

A run in progress is drawn as far as it is. tools/report.py compares finished runs, with intervals.
"""

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import scores

STEP, RETURN, LENGTH = "global_step", "charts/episodic_return", "abs/rollout_length"
DIVERGENCE, KL = "abs/behavioral_divergence", "abs/kl_divergence"
TITLES = {RETURN: "Return", DIVERGENCE: "Behavioural divergence", KL: "KL divergence"}
TITLES |= {LENGTH: "Rollout length L"}
COLOURS = matplotlib.color_sequences["petroff10"]  # can be told apart with colour-blind eyes
plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"axes.grid": True, "axes.axisbelow": True, "grid.color": "0.92"})
plt.rcParams.update({"legend.frameon": False, "text.parse_math": False})  # a name may hold a $

ALGORITHMS = {"pqn_abs": "PQN", "pqn_abs_xl": "PQN", "minatar_abs": "PQN", "gns_baseline": "PQN"}
ALGORITHMS |= {"ppo_abs": "PPO", "ppo_abs_continuous": "PPO", "p3o_abs": "P3O"}
COUNTS = "seed total_timesteps num_steps rollout_min rollout_max update_epochs num_minibatches"
OPTIONS = {name: (int,) for name in COUNTS.split()}  # what config.json must hold, and its types
OPTIONS |= {"env_id": (str,), "adapt_rollout": (bool,)}
# gns_baseline.py has no thresholds
OPTIONS |= {"delta_min": (float, int, type(None)), "delta_max": (float, int, type(None))}


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders of runs
    out: Path = Path("plot.png")  # the picture: .png, .svg or .pdf


@dataclass
class Run:
    folder: Path
    script: str  # its name without .py
    args: dict  # its options
    columns: dict[str, np.ndarray]  # of metrics.csv; NaN where nothing was measured

    def __post_init__(self):
        self.game = scores.title(self.args["env_id"])
        self.algorithm = ALGORITHMS.get(self.script, self.script)
        if self.args.get("size") in ("l", "xl"):
            self.algorithm += f"-{self.args['size'].upper()}"
        signal = "noise scale" if self.script == "gns_baseline" else "ABS"
        fixed = f"{self.algorithm}, L = {self.args['num_steps']}"
        self.arm = f"{self.algorithm} with {signal}" if self.args["adapt_rollout"] else fixed
        self.signal = KL if KL in self.columns else DIVERGENCE  # what drives L


def fail(message: str, status: int = 2):
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(status)


# --- Reading ---


def read_config(path: Path) -> tuple[str, dict]:
    """The script's name and options; or a ValueError where they are not as OPTIONS says."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(config, dict) or not isinstance(config.get("script"), str):
        raise ValueError(f"{path} names no script: it is not a run's")
    args = config.get("args")
    if not isinstance(args, dict):
        raise ValueError(f"{path} has no args: it is not a run's")
    for name, types in OPTIONS.items():
        value = args.get(name)
        if type(value) not in types:
            raise ValueError(f"{path}: {name} is {json.dumps(value)[:40]}, which no run writes")
        if isinstance(value, int | float) and not 0 <= value < 2**64:
            raise ValueError(f"{path}: {name} is out of range")
    return Path(config["script"]).stem, args


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a metrics.csv as float64, NaN where a cell is empty; or a ValueError."""
    text = path.read_bytes().decode(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be torn
    if len(lines) < 2:
        raise ValueError(f"{path} has no data yet")
    try:
        table = []
        for line in lines[1:]:
            table.append([float(cell or "nan") for cell in line.split(",")])
        columns = dict(zip(lines[0].split(","), np.array(table).T, strict=True))
    except ValueError:
        raise ValueError(f"{path} is damaged: rows of unequal length, or no numbers") from None
    columns.setdefault(DIVERGENCE, np.full(len(table), np.nan))
    for name in (STEP, RETURN, LENGTH):
        if name not in columns:
            raise ValueError(f"{path} has no column {name}")
    for name in (STEP, *TITLES):
        if name in columns and (np.abs(columns[name]) > 1e30).any():
            raise ValueError(f"{path} is damaged: {name} has a number beyond 1e30")
    if not (np.diff(columns[STEP], prepend=0) > 0).all():  # nor is NaN
        raise ValueError(f"{path} is damaged: {STEP} does not rise from row to row")
    return columns


def read_run(folder: Path) -> Run:
    """A run, finished or not; or a ValueError that says what is wrong with its files."""
    try:
        script, args = read_config(folder / "config.json")
        return Run(folder, script, args, read_columns(folder / "metrics.csv"))
    except OSError as error:
        raise ValueError(f"{folder} is no run: {error.filename}: {error.strerror}") from None


# --- Drawing ---


def draw_limits(axis: plt.Axes, runs: list[Run], column: str) -> None:
    """Thin lines at the limits of L, or at the thresholds of the divergence that drives it."""
    option, symbol = ("rollout", "L") if column == LENGTH else ("delta", "δ")
    # where early divergences, which are large, and late ones leave room
    ends = {"min": {"xytext": (2, 2), "ha": "left", "va": "bottom"}}
    ends |= {"max": {"xytext": (0, -2), "ha": "right", "va": "top"}}
    for end, style in ends.items():
        values = {run.args.get(f"{option}_{end}") for run in runs if run.args["adapt_rollout"]}
        for value in values - {None}:
            axis.axhline(value, color="0.4", linewidth=0.8, linestyle="--", zorder=1)
            text = rf"${symbol}_\{end}$ = {value:g}"
            style |= {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points"}
            style |= {"fontsize": 9, "color": "0.3", "parse_math": True}
            axis.annotate(text, (end == "max", value), **style)
    if column == DIVERGENCE:
        axis.set_ylim(-0.02, 1.02)
    if column == KL:
        axis.set_yscale("log", nonpositive="mask")
        axis.yaxis.set_major_formatter("{x:g}")


def legend(figure: plt.Figure, title: str = "") -> None:
    """One legend above for all axes."""
    handles = {}
    for axis in figure.axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    columns = max(1, 100 // (8 + max(map(len, handles))))
    style = {"loc": "outside upper center", "ncols": columns, "title_fontsize": 11}
    figure.legend(handles.values(), handles.keys(), title=title, **style)


def labels(runs: list[Run]) -> tuple[str, list[str]]:
    """What all runs have in common, and what each has of its own, or else its folder's name."""
    parts = []
    for run in runs:
        precision = str(run.args.get("precision"))
        parts.append([run.game, run.arm, precision, f"seed {run.args['seed']}"])
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    own = []
    for run, names in zip(runs, parts, strict=True):
        rest = [name for name in names if name not in shared]
        own.append(", ".join(rest) or run.folder.name)
    return ", ".join(name for name in shared if name not in ("auto", "None")), own


def draw(runs: list[Run]) -> plt.Figure:
    signals = [column for column in (DIVERGENCE, KL) if any(run.signal == column for run in runs)]
    panels = [RETURN, *signals, LENGTH]
    size = (8, 2.1 * len(panels) + 0.5)
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=size, layout="constrained")
    shared, own = labels(runs)
    for axis, column in zip(axes, panels, strict=True):
        style = {"marker": "o", "markersize": 2.5, "linewidth": 0.8} if column in signals else {}
        for run, label, colour in zip(runs, own, COLOURS * len(runs), strict=False):
            if column not in signals or column == run.signal:
                known = np.isfinite(run.columns[column])
                points = run.columns[STEP][known], run.columns[column][known]
                axis.plot(*points, color=colour, label=label, **style)
        if column != RETURN:
            draw_limits(axis, [run for run in runs if column in (LENGTH, run.signal)], column)
        axis.set_ylabel(TITLES[column].replace(" ", "\n", 1))
    axes[-1].xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes[-1].set_xlabel("Environment steps")
    axes[-1].set_xlim(left=0)
    figure.align_ylabels(axes)
    legend(figure, shared)
    return figure


def main(args: Args) -> None:
    if not args.runs:
        fail("name at least one run's folder")
    if args.out.suffix not in (".png", ".svg", ".pdf"):
        fail(f"--out {args.out} is no picture's name; take one that ends in .png")
    if args.out.is_dir():
        fail(f"--out {args.out} is a folder; take a picture's name")
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ValueError as error:
        fail(str(error))
    partial = args.out.with_name(f"{args.out.name}.part")  # an earlier picture stays until the end
    try:
        partial.touch()
    except OSError as error:
        fail(f"--out {args.out} can't be written: {error.strerror}")
    picture = io.BytesIO()
    draw(runs).savefig(picture, format=args.out.suffix[1:], dpi=160)
    try:
        partial.write_bytes(picture.getvalue())
        partial.replace(args.out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        fail(f"can't write {args.out}: {error.strerror}", status=1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
