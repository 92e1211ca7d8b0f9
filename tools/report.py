"""Compare finished runs: the paper's figures, aggregate scores with intervals, and what BD goes together with.

    python tools/report.py runs/suite --out report                   games with human and random scores
    python tools/report.py results/minatar_pilot --normalise fixed   others: relative to the fixed batch's score

Folders are searched for runs. Those with --no-adapt-rollout are the fixed batch that the others are compared with (for
gns_baseline.py, those of pqn_abs.py too); they must be equal in all other settings, and finished. Where there are some
of several lengths, the baseline has the --num-steps that the adaptive runs start at. A run's score is its
charts/episodic_return (the mean of the last 100 episodes), averaged over the last tenth of its rows. Intervals are 95%
bootstrap intervals over seeds, within each game (stratified); with few seeds they are too narrow, and hold the mean of
normal scores in 73% (3 seeds), 83% (5) or 90% (10) of cases. Every figure, a .png in the folder --out, has its numbers
beside it in a .csv:

    learning_curves   return over steps
    divergence        BD over steps                                              (the paper's figure 1)
    batch_size        BD and batch size over steps                               (2)
    improvement       over the fixed batch, by game                              (3)
    rollout_max       mean improvement over L_max, where several were run        (4)
    aggregate         interquartile mean and performance profile of normalised scores
    signals           rank correlation of BD with other signals over a run; a table only
"""

import csv
import itertools
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import numpy as np
import tyro
from scipy.stats import spearmanr, trim_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import plot, scores

RETURN, DIVERGENCE, BATCH = "charts/episodic_return", "abs/behavioral_divergence", "abs/batch_size"
SIGNALS = "abs/policy_entropy losses/entropy abs/value_variance gns/noise_scale_raw abs/kl_divergence".split()
# What may differ between runs that are compared: what tells them apart, and what does not change the numbers.
MAY_DIFFER = """seed env_id adapt_rollout rollout_max log_noise_scale device env_groups compile runs_dir
    checkpoint_every resume track wandb_project_name wandb_entity wandb_group"""
RESAMPLES, POINTS = 2000, 200  # of the bootstrap, and of a curve


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders of runs, or folders in which they are
    out: Path = Path("report")  # folder for the figures and their numbers
    normalise: Literal["human", "fixed"] = "human"
    """what improvements are divided by: the human's score less the random agent's, or the fixed batch's own score"""


@dataclass
class Run:
    folder: Path
    script: str
    game: str
    seed: int
    args: dict
    columns: dict[str, np.ndarray]

    @property
    def condition(self) -> "Condition":
        if self.args["adapt_rollout"]:
            return Condition(self.script, self.args["rollout_max"], 0)
        return Condition(family(self.script), 0, self.args["num_steps"])

    @property
    def score(self) -> float:
        tenth = self.columns[RETURN][-max(1, len(self.columns[RETURN]) // 10) :]
        return float(np.nanmean(tenth)) if np.isfinite(tenth).any() else math.nan


class Condition(NamedTuple):
    script: str
    rollout_max: int  # L_max, or 0 with a fixed rollout
    length: int  # L of a fixed rollout, or 0


def family(script: str) -> str:
    """What the script is with a fixed rollout."""
    return "pqn_abs" if script == "gns_baseline" else script


def baseline(runs: list[Run], script: str) -> Condition:
    """The fixed rollout that a script's runs are compared with."""
    own = [run for run in runs if family(run.script) == family(script)]
    starts = [run.args["num_steps"] for run in own if run.args["adapt_rollout"]]
    return Condition(family(script), 0, min(starts or [run.args["num_steps"] for run in own]))


def fail(*messages: str):
    for message in messages:
        print(f"report.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- Reading ---


def read(folder: Path) -> Run:
    _, columns = plot.read_run(folder)
    config = json.loads((folder / "config.json").read_text())
    args, script = config["args"], Path(config["script"]).stem
    for name in ("adapt_rollout", "num_steps", "rollout_max", "total_timesteps"):
        if name not in args:
            raise ValueError(f"{folder}/config.json has no {name}: it is from another version or script")
    run = Run(folder, script, scores.game_name(args["env_id"]), args["seed"], args, {})
    run.columns = {name: np.array(column) for name, column in columns.items()}
    step = int(run.columns[plot.STEP][-1])
    if step < args["total_timesteps"]:
        raise ValueError(f"{folder} is at step {step:,} of {args['total_timesteps']:,}; let it finish, or leave it out")
    if math.isnan(run.score):
        raise ValueError(f"{folder} has no score: no episode ended in its last tenth")
    return run


def check(runs: list[Run], normalise: str) -> None:
    """Refuse what cannot be compared."""
    first, seen = {}, {}
    for run in runs:
        for name, value in run.args.items():
            # scripts may have settings of their own, but samples are what all have to have the same of
            key = "total_timesteps" if name == "total_timesteps" else (family(run.script), name)
            if name == "num_steps" and not run.args["adapt_rollout"]:
                continue
            only_logs = name == "micro_batches" and "log_noise_scale" in run.args
            other, folder = first.setdefault(key, (value, run.folder))
            if value != other and not only_logs and name not in MAY_DIFFER.split():
                raise ValueError(f"--{name.replace('_', '-')} is {other} in {folder}, but {value} in {run.folder}")
        other, folder = first.setdefault(run.game, (run.args["env_id"], run.folder))
        if run.args["env_id"] != other:
            raise ValueError(f"--env-id is {other} in {folder}, but {run.args['env_id']} in {run.folder}")
    for run in runs:
        key = run.condition, run.game, run.seed
        if key in seen:
            raise ValueError(f"{seen[key]} and {run.folder} are the same game, settings and seed; leave one out")
        seen[key] = run.folder
    unknown = {run.game for run in runs} - scores.reference_scores().keys()
    if normalise == "human" and unknown:
        raise ValueError(f"no human score is known of {', '.join(sorted(unknown))}; use --normalise fixed")
    if normalise == "fixed":
        for script, game in sorted({(run.script, run.game) for run in runs}):
            fixed = baseline(runs, script)
            found = scores_by_game(runs, fixed).get(game)
            if found is None or found.mean() == 0:
                raise ValueError(f"--normalise fixed: there is no score other than 0 of {label(fixed)}, on {game}")


def missing(runs: list[Run]) -> list[str]:
    """The seeds that some games and conditions have and others do not."""
    lines, seeds = [], {run.seed for run in runs}
    for condition in sorted({run.condition for run in runs}):
        for game in sorted({run.game for run in runs}):
            lacking = seeds - {run.seed for run in runs if (run.condition, run.game) == (condition, game)}
            if lacking:
                lines.append(f"{label(condition)}, {game}: no seed {', '.join(map(str, sorted(lacking)))}")
    return lines


def label(condition: Condition) -> str:
    signal = "noise scale" if condition.script == "gns_baseline" else "ABS"
    how = f"{signal} to L = {condition.rollout_max}" if condition.rollout_max else f"L = {condition.length}"
    return f"{condition.script}, {how}"


# --- Statistics ---


def interval(groups: list[np.ndarray], statistic) -> tuple[float, float]:
    """The 95% interval of statistic(groups), by resampling within each group; NaN where a group has a single run."""
    if min(map(len, groups)) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = [statistic([rng.choice(group, len(group)) for group in groups]) for _ in range(RESAMPLES)]
    return tuple(np.quantile(draws, (0.025, 0.975), axis=0))


def interquartile_mean(groups: list[np.ndarray]) -> float:
    """The mean of the middle half of all scores."""
    return float(trim_mean(np.concatenate(groups), 0.25))


def curve(runs: list[Run], column: str, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over runs at the steps of grid, NaN before all have a value, and its interval, NaN with a single run."""
    curves = []
    for run in runs:
        known = np.isfinite(run.columns[column])
        steps, values = run.columns[plot.STEP][known], run.columns[column][known]
        curves.append(np.interp(grid, steps, values, left=np.nan) if known.any() else np.full(len(grid), np.nan))
    curves, rng = np.array(curves), np.random.default_rng(0)
    if len(runs) < 2:
        return curves[0], *np.full((2, len(grid)), np.nan)
    means = curves[rng.integers(len(curves), size=(RESAMPLES, len(curves)))].mean(axis=1)
    return curves.mean(axis=0), *np.quantile(means, (0.025, 0.975), axis=0)


def scores_by_game(runs: list[Run], condition: Condition) -> dict[str, np.ndarray]:
    groups = defaultdict(list)
    for run in runs:
        if run.condition == condition:
            groups[run.game].append(run.score)
    return {game: np.array(group) for game, group in sorted(groups.items())}


def normalised(games: list[str], groups: list[np.ndarray], baselines: list[np.ndarray], normalise: str) -> list:
    """The games' scores on a scale from random (0) to human (1), or relative to the mean of the fixed batch's.

    The latter is a part of the statistic: its noise belongs into the interval, so that it is resampled as well.
    """
    if normalise == "human":
        ends = [scores.reference_scores()[game] for game in games]
        return [(group - random) / (human - random) for group, (random, human) in zip(groups, ends, strict=True)]
    # a fixed batch with a negative score would turn better into worse
    return [group / abs(baseline.mean()) for group, baseline in zip(groups, baselines, strict=True)]


# --- Figures ---


def save(figure: plt.Figure | None, out: Path, name: str, rows: list[dict]) -> None:
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )
    if figure:
        figure.savefig(out / f"{name}.png", dpi=140)
        plt.close(figure)


def panels(number: int, height: float = 2.6) -> tuple[plt.Figure, list]:
    columns = min(3, number)
    lines = -(-number // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns + 1, height * lines + 0.6), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[number:]:
        axis.set_visible(False)
    for axis in axes.flat[:number]:
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    return figure, list(axes.flat[:number])


def draw_curves(runs: list[Run], columns: dict[str, str], colours: dict, out: Path, name: str) -> None:
    """A panel a game, a colour a condition; a second column of numbers gets an axis of its own, and dashes."""
    games = sorted({run.game for run in runs})
    figure, axes = panels(len(games))
    grid = np.linspace(0, runs[0].args["total_timesteps"], POINTS + 1)[1:]
    rows, handles = [], {}
    for axis, game in zip(axes, games, strict=True):
        twin = axis.twinx() if len(columns) == 2 else None
        for (column, title), canvas in zip(columns.items(), (axis, twin), strict=False):
            for condition, colour in colours.items():
                chosen = [run for run in runs if (run.condition, run.game) == (condition, game)]
                if chosen:
                    mean, low, high = curve(chosen, column, grid)
                    style = {"color": colour, "linestyle": "--" if canvas is twin else "-"}
                    canvas.plot(grid, mean, label=label(condition), linewidth=1.4, **style)
                    canvas.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
                    about = {"game": game, "condition": label(condition), "column": column, "seeds": len(chosen)}
                    points = zip(grid.tolist(), mean.tolist(), low.tolist(), high.tolist(), strict=True)
                    rows += [about | dict(zip(("step", "mean", "low", "high"), point, strict=True)) for point in points]
            canvas.set_ylabel(title + (", dashed" if canvas is twin else ""))
        handles |= {line.get_label(): line for line in axis.get_lines()}
        axis.set_title(game)
        axis.set_xlabel("Environment steps")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        if DIVERGENCE in columns:
            axis.set_ylim(-0.03, 1.03)
        if twin:
            twin.set_ylim(bottom=0)
    figure.legend(handles=[*handles.values()], loc="outside upper center", ncols=2, frameon=False)
    save(figure, out, name, rows)


def improvements(runs: list[Run], condition: Condition, normalise: str) -> tuple[list[dict], dict | None]:
    """By game and on average, in percent: the normalised score of a condition less that of the fixed batch."""
    adaptive, fixed = (scores_by_game(runs, c) for c in (condition, baseline(runs, condition.script)))
    games, rows = sorted(adaptive.keys() & fixed.keys()), []

    for name, chosen in [(game, [game]) for game in games] + [("mean", games)] * bool(games):

        def mean_difference(groups, chosen=chosen):  # the games' adaptive scores, then their fixed ones
            half = len(chosen)
            ours, theirs = (
                normalised(chosen, part, groups[half:], normalise) for part in (groups[:half], groups[half:])
            )
            return 100 * np.mean([a.mean() - f.mean() for a, f in zip(ours, theirs, strict=True)])

        groups = [by_game[game] for by_game in (adaptive, fixed) for game in chosen]
        low, high = interval(groups, mean_difference)
        row = {"condition": label(condition), "game": name, "improvement_percent": mean_difference(groups)}
        rows.append(row | {"low": low, "high": high, "runs": sum(map(len, groups))})
    return rows[:-1], rows[-1] if rows else None


def draw_improvements(runs: list[Run], normalise: str, out: Path) -> list[dict]:
    conditions = sorted({run.condition for run in runs} - {baseline(runs, run.script) for run in runs})
    results = {condition: improvements(runs, condition, normalise) for condition in conditions}
    results = {condition: (rows, mean) for condition, (rows, mean) in results.items() if mean}
    if not results:
        return []
    figure, axes = panels(len(results), height=1.2 + 0.3 * max(len(rows) for rows, _ in results.values()))
    unit = "% of human less random" if normalise == "human" else "% of the fixed batch's score"
    for axis, (condition, (rows, mean)) in zip(axes, results.items(), strict=True):
        rows = [*sorted(rows, key=lambda row: row["improvement_percent"]), mean]
        for place, row in enumerate(rows):
            value = row["improvement_percent"]
            colour = "0.4" if row is mean else plot.COLOURS[0] if value >= 0 else plot.COLOURS[2]
            axis.barh(place, value, color=colour, height=0.7)
            axis.plot([row["low"], row["high"]], [place, place], color="black", linewidth=1)
        axis.set_yticks(range(len(rows)), [row["game"] for row in rows])
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(label(condition), fontsize=10)
    limits = np.array([axis.get_xlim() for axis in axes])
    for axis in axes:  # one scale
        axis.set_xlim(limits.min(), limits.max())
    figure.supxlabel(f"Improvement, {unit}", fontsize=9)
    table = [row for rows, mean in results.values() for row in [*rows, mean]]
    save(figure, out, "improvement", table)

    results = {condition: result for condition, result in results.items() if condition.rollout_max}
    if len({condition.rollout_max for condition in results}) > 1:
        figure, (axis,) = panels(1)
        for script, colour in zip(sorted({condition.script for condition in results}), plot.COLOURS, strict=False):
            points = [(c.rollout_max, mean) for c, (_, mean) in sorted(results.items()) if c.script == script]
            x, means = zip(*points, strict=True)
            axis.plot(x, [mean["improvement_percent"] for mean in means], "o-", color=colour, label=script)
            axis.vlines(x, *([mean[end] for mean in means] for end in ("low", "high")), color=colour)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xlabel("L_max")
        axis.set_ylabel(f"Mean improvement,\n{unit}")
        axis.legend(frameon=False)
        save(figure, out, "rollout_max", [mean for _, mean in results.values()])
    return table


def draw_aggregate(runs: list[Run], normalise: str, colours: dict, out: Path) -> list[dict]:
    rows, table, everything = [], [], {}
    figure, (left, right) = panels(2)
    for condition in colours:
        fixed, by_game = baseline(runs, condition.script), scores_by_game(runs, condition)
        groups = list(by_game.values())
        if normalise == "fixed" and condition != fixed:  # what is resampled, see normalised()
            groups += [scores_by_game(runs, fixed)[game] for game in by_game]
        everything[condition] = list(by_game), groups

    def on_scale(games, groups):
        return normalised(games, groups[: len(games)], groups[-len(games) :], normalise)

    every_score = np.concatenate([score for games, groups in everything.values() for score in on_scale(games, groups)])
    low, high = min(0, every_score.min()), every_score.max()
    thresholds = np.linspace(low, high + 0.02 * (high - low), 100)
    for place, (condition, (games, groups)) in enumerate(everything.items()):
        colour, number = colours[condition], sum(map(len, groups[: len(games)]))

        def middle(groups, games=games):
            return interquartile_mean(on_scale(games, groups))

        def profile(groups, games=games):  # a game counts the same whatever its number of seeds
            return np.mean([(group[:, None] > thresholds).mean(axis=0) for group in on_scale(games, groups)], axis=0)

        value, (low, high) = middle(groups), interval(groups, middle)
        left.plot([low, high], [place, place], color=colour, linewidth=8, alpha=0.4, solid_capstyle="butt")
        left.plot(value, place, "o", color=colour)
        table.append({"condition": label(condition), "statistic": "IQM", "at": "", "value": value})
        table[-1] |= {"low": low, "high": high, "runs": number}
        share = profile(groups)
        lows, highs = (np.broadcast_to(end, share.shape) for end in interval(groups, profile))
        right.plot(thresholds, share, color=colour, label=label(condition))
        right.fill_between(thresholds, lows, highs, color=colour, alpha=0.2, linewidth=0)
        points = zip(thresholds.tolist(), share.tolist(), lows.tolist(), highs.tolist(), strict=True)
        names = "at", "value", "low", "high"
        about = {"condition": label(condition), "statistic": "share of runs above"}
        rows += [about | dict(zip(names, point, strict=True)) | {"runs": number} for point in points]
    unit = "human-normalised" if normalise == "human" else "relative to the fixed batch"
    left.set_yticks(range(len(colours)), map(label, colours))
    left.set_ylim(-0.7, len(colours) - 0.3)
    left.set_xlabel(f"Interquartile mean,\n{unit}")
    right.set_xlabel(f"Score, {unit}")
    right.set_ylabel("Share of runs above")
    save(figure, out, "aggregate", table + rows)
    return table


def signals(runs: list[Run], out: Path) -> list[dict]:
    """The rank correlation of BD with each signal over a run: its mean over a condition's runs, and an interval."""
    rows = []
    for condition in sorted({run.condition for run in runs}):
        for name in SIGNALS:
            by_game = defaultdict(list)
            for run in runs:
                if run.condition == condition and name in run.columns:
                    pairs = np.array([run.columns[DIVERGENCE], run.columns[name]])
                    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
                    if pairs.shape[1] > 2 and (pairs.min(axis=1) < pairs.max(axis=1)).all():
                        by_game[run.game].append(spearmanr(*pairs).statistic)
            groups = [np.array(group) for group in by_game.values()]
            if groups:
                mean = float(np.mean([group.mean() for group in groups]))
                low, high = interval(groups, lambda groups: np.mean([group.mean() for group in groups]))
                row = {"condition": label(condition), "signal": name, "rank_correlation_with_BD": mean}
                rows.append(row | {"low": low, "high": high, "runs": sum(map(len, groups))})
    if rows:
        save(None, out, "signals", rows)
    return rows


def show(title: str, rows: list[dict]) -> None:
    """A table in Markdown."""
    if rows:
        print(f"\n{title}\n\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
        for row in rows:
            print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


def main(args: Args) -> None:
    if not args.runs:
        fail("name at least one folder that holds runs")
    found = {folder: [path.parent for path in folder.rglob("config.json")] for folder in args.runs}
    runs, problems = [], [f"{folder} holds no run" for folder in found if not found[folder]]
    for folder in sorted(set(itertools.chain(*found.values()))):
        try:
            runs.append(read(folder))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        fail(*problems)
    try:
        check(runs, args.normalise)
    except ValueError as error:
        fail(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "learning_curves.csv").touch()
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False})
    adaptive_first = sorted(
        {run.condition for run in runs}, key=lambda condition: (not condition.rollout_max, condition)
    )
    colours = dict(zip(adaptive_first, itertools.cycle(plot.COLOURS), strict=False))
    draw_curves(runs, {RETURN: "Return"}, colours, args.out, "learning_curves")
    draw_curves(runs, {DIVERGENCE: "Behavioural Divergence"}, colours, args.out, "divergence")
    adaptive = [run for run in runs if run.args["adapt_rollout"]]
    if adaptive:
        columns = {DIVERGENCE: "Behavioural Divergence", BATCH: "Batch size"}
        draw_curves(adaptive, columns, colours, args.out, "batch_size")
    show("Improvement over the fixed batch", draw_improvements(runs, args.normalise, args.out))
    show("Normalised scores", draw_aggregate(runs, args.normalise, colours, args.out))
    show("What BD goes together with", signals(runs, args.out))
    for line in missing(runs):
        print(f"missing: {line}")
    print(f"\n{len(runs)} runs; figures and numbers: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
