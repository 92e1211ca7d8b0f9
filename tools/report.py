"""Compare finished runs: contrasts between arms, scores, curves, and what BD goes together with.

    python tools/report.py runs/suite --out report
    python tools/report.py runs/study --label "*_open_*=Open loop" \\
        --contrast "PQN with ABS" "PQN, L = 48" --contrast "PQN with ABS" "Open loop"

Folders are searched for runs. Settings decide a run's arm: "PQN with ABS", "PQN, L = 32". Runs of
one name that differ in a setting which changes the numbers are different arms, and that setting
becomes part of the name. --label "GLOB=NAME" names the runs whose folder's path matches GLOB, where
* matches / too; it is for arms that config.json does not tell apart, and sets the order of arms.

A score is the mean of charts/episodic_return over the last 20% of the samples (--window), weighted
by environment steps. A contrast is the difference of two arms' mean log scores, shown as ratio - 1
in percent, by game and as the mean over games. Scores of 0 or less have no logarithm: a game where
one of the two arms has such is shown as a difference of means, in points, and is left out of the
mean. p is from permutations of the arms' labels within each game. Contrasts named by --contrast are
the primary ones: with several, p_holm is corrected for their number. Intervals are 95% bootstrap
intervals over the seeds of all arms within each game. With few seeds they are too narrow: simulated
ones of contrasts over three games hold the truth in 85% of cases with 3 seeds, 90% with 5 and 94%
with 12, while p holds its level.

Every figure in --out has its numbers in the .csv of its name: headline (return and L of what
adapts and of a fixed L), learning_curves, divergence, kl_divergence (of runs in which KL drives L),
rollout_length, contrasts, aggregate (interquartile mean over steps), improvement (probability that
a run of one arm beats one of another, over steps). Tables are scores, interquartile_means (of the
scores) and signals (rank correlations of BD with others over a run, plain and given the step).
"""

import csv
import fnmatch
import math
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.ticker import EngFormatter, MaxNLocator
from scipy.stats import rankdata, trim_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import plot, scores
from tools.plot import DIVERGENCE, KL, LENGTH, RETURN, STEP, plt

SIGNALS = {"abs/policy_entropy": "policy entropy", "losses/entropy": "policy entropy"}
SIGNALS |= {"abs/value_variance": "value variance", "gns/noise_scale_raw": "gradient noise scale"}
SIGNALS |= {KL: "KL divergence"}
# Options that change no numbers, and those that do so only where L adapts.
SILENT = """seed env_id device env_groups compile log_noise_scale runs_dir run_name resume track
    checkpoint_every wandb_project wandb_project_name wandb_entity wandb_group""".split()
ADAPTING = """rollout_min rollout_max adapt_frequency delta_min delta_max beta divergence_window
    burn_in reference_states micro_batches""".split()
RESAMPLES, PERMUTATIONS, POINTS = 4000, 20_000, 50
ALL = "All games"


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # folders that hold runs
    out: Path = Path("report")  # folder for the figures and their numbers
    contrast: tyro.conf.UseAppendAction[tuple[tuple[str, str], ...]] = ()
    """two arms, the first against the second; by default each that adapts against each fixed one
    of the same algorithm"""
    label: tuple[str, ...] = ()  # GLOB=NAME each: the arm of the runs in such folders
    reference: str | None = None
    """the arm whose mean score is 1 in pooled figures; by default the human's is 1 where all games
    have one, else that of the first fixed L"""
    window: float = 0.2  # share of the samples, the last ones, over which scores are taken


@dataclass
class Study:
    arms: list[str]  # in the order of every legend
    games: list[str]  # in the order of every figure
    cells: dict[tuple[str, str], list[plot.Run]]  # by arm and game
    scores: dict[tuple[str, str], np.ndarray]  # a number for each run of a cell
    total: int  # environment steps of each run
    window: float  # see Args
    reference: str = ""  # the arm beside which headline shows what adapts
    scale: dict[str, tuple[float, float]] | None = None  # scores that are 0 and 1 in pooled figures
    unit: str = "0 = random, 1 = human"  # of pooled figures

    def shared(self, *arms: str) -> list[str]:
        """The games that all of these arms were run on."""
        return [game for game in self.games if all((arm, game) in self.cells for arm in arms)]

    def runs(self, arm: str) -> list[plot.Run]:
        return [run for game in self.shared(arm) for run in self.cells[arm, game]]

    def adapts(self, arm: str) -> bool:
        return self.runs(arm)[0].args["adapt_rollout"]

    def curves(self, arm: str, game: str, column: str) -> np.ndarray:
        """(POINTS, runs), see curve()."""
        return np.stack([curve(run, column) for run in self.cells[arm, game]], axis=1)

    def pool(self, game: str, values: np.ndarray) -> np.ndarray:
        """Returns or scores on the scale of pooled figures."""
        zero, one = self.scale[game]
        return (values - zero) / (one - zero)

    def caption(self) -> str:
        counts = [len(group) for group in self.cells.values()]
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        window = f"scores: means over the last {100 * self.window:g}% of the samples"
        return f"n = {number} seeds; 95% bootstrap intervals over seeds; {window}"

    def shade(self, axis: plt.Axes) -> None:
        """Show the samples over which scores are taken."""
        axis.axvspan((1 - self.window) * self.total, self.total, color="0.94", zorder=0)
        style = {"transform": axis.transAxes, "ha": "center", "va": "bottom", "fontsize": 9}
        axis.text(1 - self.window / 2, 0.02, "scored", color="0.3", **style)


# --- Reading ---


def settings(run: plot.Run) -> dict:
    """The options that change a run's numbers; one that is off is as one that is not there."""
    silent = SILENT if run.args["adapt_rollout"] else SILENT + ADAPTING
    if run.script != "gns_baseline":
        silent = [*silent, "micro_batches"]
    return {name: value for name, value in run.args.items() if value and name not in silent}


def tags(own: dict, others: list[dict]) -> str:
    """The settings that some other run of the same name does not have, in words."""
    words = []
    for option, value in sorted(own.items()):
        if any(other.get(option) != value for other in others):
            name = option.replace("_", " ")
            words.append(name if value is True else f"{name} {value}")
    return ", ".join(words)


def name_arms(runs: list[plot.Run], labels: tuple[str, ...]) -> None:
    """Set each run's arm: its label, or its plain name and what tells it from others of that."""
    labelled, groups = set(), defaultdict(list)
    for label in reversed(labels):  # of two that fit, the first counts
        glob, _, name = label.partition("=")
        fitting = [run for run in runs if fnmatch.fnmatchcase(run.folder.as_posix(), glob)]
        if not name or not fitting:
            raise ValueError(f'--label "{label}" fits no run; give it as "GLOB=NAME"')
        for run in fitting:
            run.arm = name
            labelled.add(run.folder)
    for run in runs:
        if run.folder not in labelled:
            groups[run.arm].append((run, settings(run)))
    for group in groups.values():
        for run, own in group:
            if differing := tags(own, [other for _, other in group]):
                run.arm += f" ({differing})"


def score(run: plot.Run, window: float) -> float:
    """The mean return over the last share of the samples, weighted by environment steps."""
    steps, returns = run.columns[STEP], run.columns[RETURN]
    start = (1 - window) * steps[-1]
    weights = np.diff(np.maximum(steps, start), prepend=start)
    weights[np.isnan(returns)] = 0
    if not weights.any():
        raise ValueError(f"{run.folder} has no score: no episode ended before its end")
    return float(np.average(np.nan_to_num(returns), weights=weights))


def updates(run: plot.Run) -> float:
    """Gradient steps; runs without a column of them made as many in each iteration, a row each."""
    if "charts/updates" in run.columns:
        return float(run.columns["charts/updates"][-1])
    return float(run.args["update_epochs"] * run.args["num_minibatches"] * len(run.columns[STEP]))


def curve(run: plot.Run, column: str) -> np.ndarray:
    """(POINTS,): means over each 2% of the samples; NaN before the first value."""
    known = np.isfinite(run.columns[column])
    if not known.any():
        return np.full(POINTS, np.nan)
    steps, values = run.columns[STEP][known], run.columns[column][known]
    fine = np.linspace(0, run.args["total_timesteps"], 20 * POINTS + 1)[1:]
    before = values[0] if column == LENGTH else np.nan  # the first row's L is that of its rollout
    return np.interp(fine, steps, values, left=before).reshape(POINTS, 20).mean(axis=1)


def read_runs(folders: tuple[Path, ...]) -> list[plot.Run]:
    """The finished runs in the folders; a ValueError where they cannot be compared."""
    found = set()
    for folder in folders:
        inside = {path.parent for path in folder.rglob("config.json")}
        if not inside:
            raise ValueError(f"{folder} holds no run")
        found |= inside
    runs, first_of = [plot.read_run(folder) for folder in sorted(found)], {}
    for run in runs:
        total, step = run.args["total_timesteps"], run.columns[STEP][-1]
        if step < total:
            where = f"{run.folder} is at step {step:,.0f} of {total:,}"
            raise ValueError(f"{where}; let it finish, or leave it out")
        if total != runs[0].args["total_timesteps"]:
            raise ValueError(f"{runs[0].folder} and {run.folder} differ in --total-timesteps")
        first = first_of.setdefault(run.game, run)
        if run.args["env_id"] != first.args["env_id"]:
            raise ValueError(f"{first.folder} and {run.folder} play two forms of {run.game}")
    return runs


def read_study(args: Args) -> Study:
    """All that is compared; a ValueError where it cannot be."""
    if not args.runs:
        raise ValueError("name at least one folder that holds runs")
    if not 0 < args.window <= 1:
        raise ValueError("--window must be above 0 and at most 1")
    runs = read_runs(args.runs)
    name_arms(runs, args.label)
    labels = [label.partition("=")[2] for label in args.label]

    def place(run: plot.Run) -> tuple:
        if run.arm in labels:
            return labels.index(run.arm), 0, run.arm, run.args["seed"]
        length = 0 if run.args["adapt_rollout"] else run.args["num_steps"]
        return len(labels), length, run.arm, run.args["seed"]

    cells = defaultdict(list)
    for run in sorted(runs, key=place):
        cell = cells[run.arm, run.game]
        if cell and cell[-1].args["seed"] == run.args["seed"]:
            raise ValueError(f"{cell[-1].folder} and {run.folder} are one arm, game and seed")
        cell.append(run)
    arms = list(dict.fromkeys(arm for arm, _ in cells))
    for name in [*sum(args.contrast, ()), args.reference or arms[0]]:
        if name not in arms:
            raise ValueError(f"no arm is called {name!r}; there are {'; '.join(arms)}")
    values = {}
    for cell, group in cells.items():
        values[cell] = np.array([score(run, args.window) for run in group])
    games = sorted({game for _, game in cells})
    total = runs[0].args["total_timesteps"]
    study = Study(arms, games, dict(cells), values, total, args.window)
    for pair in args.contrast:
        if not study.shared(*pair):
            raise ValueError(f"{' and '.join(pair)} have no game in common")

    fixed = [arm for arm in arms if not study.adapts(arm)]
    study.reference = args.reference or [*fixed, *arms][0]
    humans = scores.reference_scores()
    study.scale = {run.game: humans.get(scores.game_name(run.args["env_id"])) for run in runs}
    if args.reference or None in study.scale.values():
        study.unit = f"1 = score of {study.reference}"
        study.scale = {}
        for game in study.shared(study.reference):
            level = values[study.reference, game].mean()
            if level > 0:
                study.scale[game] = (0, level)
    return study


# --- Statistics: groups are arrays (..., runs), one for each game, or for each arm and game ---


def estimate(groups: list[np.ndarray], statistic) -> np.ndarray:
    """(3, ...): the statistic and its 95% interval, runs resampled within groups; NaN with one."""
    value, rng, draws = statistic(groups), np.random.default_rng(0), []
    if min(group.shape[-1] for group in groups) < 2:
        return np.stack([value, value * np.nan, value * np.nan])
    for group in groups:
        number = group.shape[-1]
        draws.append(group[..., rng.integers(number, size=(RESAMPLES, number))])
    return np.stack([value, *np.quantile(statistic(draws), (0.025, 0.975), axis=-1)])


def over_steps(groups: list[np.ndarray], statistic) -> np.ndarray:
    """(3, POINTS): estimate() of each point alone, for what would need much memory."""
    found = [estimate(list(point), statistic) for point in zip(*groups, strict=True)]
    return np.stack(found, axis=1)


def mean(groups: list[np.ndarray]) -> np.ndarray:
    """The mean over games of the means over runs."""
    return np.mean([group.mean(axis=-1) for group in groups], axis=0)


def interquartile_mean(groups: list[np.ndarray]) -> np.ndarray:
    """The mean of the middle half of all runs of all games."""
    return trim_mean(np.concatenate(groups, axis=-1), 0.25, axis=-1)


def difference(groups: list[np.ndarray]) -> np.ndarray:
    """The mean of the first half of groups, one arm's games, less that of the other arm's."""
    half = len(groups) // 2
    return mean(groups[:half]) - mean(groups[half:])


def improvement(groups: list[np.ndarray]) -> np.ndarray:
    """The probability that a run of the first arm beats one of the second, mean over games."""
    half, shares = len(groups) // 2, []
    for first, second in zip(groups[:half], groups[half:], strict=True):
        gain = np.sign(first[..., :, None] - second[..., None, :])  # a tie is half a win
        shares.append((1 + gain).mean(axis=(-2, -1)) / 2)
    return np.mean(shares, axis=0)


def permutation_p(groups: list[np.ndarray]) -> float:
    """Two-sided p of difference(groups), the arms' labels permuted within each game."""
    half, rng = len(groups) // 2, np.random.default_rng(0)
    firsts, seconds = [], []
    for first, second in zip(groups[:half], groups[half:], strict=True):
        both = np.tile(np.concatenate([first, second]), (PERMUTATIONS, 1))
        both = rng.permuted(both, axis=1)
        firsts.append(both[:, : len(first)])
        seconds.append(both[:, len(first) :])
    found = np.abs(difference(groups)) * (1 - 1e-9)  # equal ones may differ by rounding
    as_large = np.abs(difference(firsts + seconds)) >= found
    return float((1 + as_large.sum()) / (1 + PERMUTATIONS))


def holm(ps: list[float]) -> list[float]:
    """Holm's correction: the smallest p times their number, the next times one less, rising."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(np.argsort(ps)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = largest
    return corrected


# --- Tables ---


def columns(name: str, found: np.ndarray) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), map(float, found), strict=True))


def contrast(study: Study, pair: tuple[str, str], games: list[str], unit: str) -> dict:
    """The row of two arms over games. unit: "%", of the ratio of scores, or "points", of scores."""
    groups = [study.scores[arm, game] for arm in pair for game in games]
    if unit == "%":
        groups = [np.log(group) for group in groups]
    change = estimate(groups, difference)
    if unit == "%":
        change = 100 * np.expm1(change)
    row = {"arm": pair[0], "against": pair[1], "game": games[0]} | columns("change", change)
    row |= {"unit": unit, "p": permutation_p(groups), "p_holm": ""}
    return row | columns("p_improvement", estimate(groups, improvement))


def contrast_rows(study: Study, pairs: list[tuple[str, str]], primary: bool) -> list[dict]:
    """By pair of arms: a row for each game, and one over all that have logarithms."""
    rows, pooled = [], []
    for pair in pairs:
        with_log = []
        for game in study.shared(*pair):
            if min(study.scores[arm, game].min() for arm in pair) > 0:
                with_log.append(game)
                rows.append(contrast(study, pair, [game], "%"))
            else:
                print(f"{game}: a score is not above 0, so {' against '.join(pair)} is in points")
                rows.append(contrast(study, pair, [game], "points"))
        if with_log:
            rows.append(contrast(study, pair, with_log, "%") | {"game": ALL})
            pooled.append(rows[-1])
    if primary:
        for row, p in zip(pooled, holm([row["p"] for row in pooled]), strict=True):
            row["p_holm"] = p
    return rows


def score_rows(study: Study) -> list[dict]:
    rows = []
    for (arm, game), values in study.scores.items():
        spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
        row = {"arm": arm, "game": game, "mean": float(values.mean()), "sd": spread}
        steps = float(np.mean([updates(run) for run in study.cells[arm, game]]))
        rows.append(row | {"n": len(values), "updates": steps})
    return rows


def correlations(run: plot.Run, signal: str) -> list[float]:
    """BD's rank correlation with a signal, and the partial one given the step; NaN without any."""
    table = np.array([run.columns[name] for name in (DIVERGENCE, signal, STEP)])
    table = table[:, np.isfinite(table).all(axis=0)]
    if table.shape[1] < 4 or (np.ptp(table, axis=1) == 0).any():
        return [math.nan, math.nan]
    ranks = np.corrcoef(rankdata(table, axis=1))
    plain, bd_step, signal_step = ranks[0, 1], ranks[0, 2], ranks[1, 2]
    rest = (1 - bd_step**2) * (1 - signal_step**2)
    if rest < 1e-9:  # the step tells one of the two
        return [math.nan, math.nan]
    return [plain, (plain - bd_step * signal_step) / math.sqrt(rest)]


def signal_rows(study: Study) -> list[dict]:
    """By arm and signal: means over a game's runs, and over games."""
    rows = []
    for arm in study.arms:
        for column, signal in SIGNALS.items():
            groups = []
            for game in study.shared(arm):
                runs = [run for run in study.cells[arm, game] if column in run.columns]
                found = np.array([correlations(run, column) for run in runs]).reshape(-1, 2).T
                found = found[:, np.isfinite(found).all(axis=0)]
                if found.size:
                    groups.append(found)
            if groups:
                plain, partial = estimate(groups, mean).T
                row = {"arm": arm, "signal": signal} | columns("correlation", plain)
                rows.append(row | columns("given_step", partial))
    return rows


def show(name: str, rows: list[dict]) -> None:
    """Print a table in Markdown, numbers with three digits."""
    print(f"\n{name}\n\n| {' | '.join(rows[0])} |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        cells = []
        for value in row.values():
            if isinstance(value, float):
                value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
            cells.append(str(value))
        print(f"| {' | '.join(cells)} |")


# --- Figures ---


def save_rows(out: Path, name: str, rows: list[dict]) -> None:
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for row in rows:
            values = row.values()
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values)


def save_figure(out: Path, name: str, study: Study, figure: plt.Figure, about: str = "") -> None:
    """Write a figure with its caption below."""
    figure.supxlabel(about + study.caption(), fontsize=9, color="0.3")
    figure.savefig(out / f"{name}.png", dpi=160)
    plt.close(figure)


def panels(number: int, height: float, **options) -> tuple[plt.Figure, np.ndarray]:
    """A figure as wide as a page, and axes in rows of three."""
    width = min(3, number)
    lines = -(-number // width)
    options |= {"figsize": (8, lines * height + 0.7), "layout": "constrained"}
    figure, axes = plt.subplots(lines, width, squeeze=False, **options)
    for axis in axes.ravel()[number:]:
        axis.remove()
    return figure, axes.ravel()[:number]


def band(axis: plt.Axes, study: Study, found: np.ndarray, arm: str) -> list[dict]:
    """Draw an arm's curve over steps and its interval; returns the numbers as rows."""
    if np.isnan(found[0]).all():
        return []
    steps = (np.arange(POINTS) + 0.5) * study.total / POINTS
    colour = plot.COLOURS[study.arms.index(arm) % len(plot.COLOURS)]
    width, place = (2, 3) if study.adapts(arm) else (1.3, 2)  # what adapts lies on top
    axis.plot(steps, found[0], color=colour, label=arm, linewidth=width, zorder=place)
    axis.fill_between(steps, found[1], found[2], color=colour, alpha=0.16, linewidth=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set_xlim(0, study.total)
    axis.set_xlabel("Environment steps")
    rows = []
    for step, value, low, high in zip(steps.tolist(), *found.tolist(), strict=True):
        rows.append({"arm": arm, "step": step, "value": value, "low": low, "high": high})
    return rows


def draw_games(study: Study, out: Path, name: str, column: str) -> None:
    """A panel a game, a curve an arm; a divergence only of the arms whose L it drives."""
    arms = [arm for arm in study.arms if column in (RETURN, LENGTH, study.runs(arm)[0].signal)]
    if not arms:
        return
    figure, axes = panels(len(study.games), 2.2, sharey=column != RETURN)
    rows = []
    for axis, game in zip(axes, study.games, strict=True):
        runs = []
        for arm in arms:
            if (arm, game) in study.cells:
                runs += study.cells[arm, game]
                found = estimate([study.curves(arm, game, column)], mean)
                for row in band(axis, study, found, arm):
                    rows.append({"game": game} | row)
        axis.set_title(game, fontsize=10)
        if column == RETURN:
            study.shade(axis)
        else:
            plot.draw_limits(axis, runs, column)
    figure.supylabel(plot.TITLES[column], fontsize=10)
    plot.legend(figure)
    save_figure(out, name, study, figure)
    save_rows(out, name, rows)


def draw_headline(study: Study, out: Path) -> None:
    """What adapts beside a fixed L, pooled over games: return above, L below."""
    adapting = [arm for arm in study.arms if study.adapts(arm)]
    pair = list(dict.fromkeys([*adapting[:1], study.reference]))
    games = [game for game in study.shared(*pair) if game in study.scale]
    if not games:
        return
    options = {"sharex": True, "height_ratios": (3, 2), "layout": "constrained"}
    figure, axes = plt.subplots(2, figsize=(8, 5), **options)
    rows = []
    for arm in pair:
        returns = [study.pool(game, study.curves(arm, game, RETURN)) for game in games]
        lengths = [study.curves(arm, game, LENGTH) for game in games]
        for axis, column, groups in zip(axes, (RETURN, LENGTH), (returns, lengths), strict=True):
            for row in band(axis, study, estimate(groups, mean), arm):
                rows.append({"column": column} | row)
    study.shade(axes[0])
    axes[0].set_xlabel("")
    axes[0].set_ylabel(f"Return\n({study.unit})")
    axes[1].set_ylabel("Rollout length L")
    plot.draw_limits(axes[1], [run for arm in pair for run in study.runs(arm)], LENGTH)
    names = ", ".join(games) if len(games) < 6 else f"{len(games)} games"
    plot.legend(figure)
    save_figure(out, "headline", study, figure, f"Games: {names}\n")
    save_rows(out, "headline", rows)


def draw_contrasts(study: Study, out: Path, rows: list[dict]) -> None:
    """A panel a pair of arms, a line a game: the change in percent and its interval."""
    rows = [row for row in rows if row["unit"] == "%"]
    if not rows:
        return
    pairs = list(dict.fromkeys((row["arm"], row["against"]) for row in rows))
    lines = [*study.games, ALL]
    figure, axes = panels(len(pairs), 1.1 + 0.22 * len(lines), sharey=True)
    for axis, pair in zip(axes, pairs, strict=True):
        chosen = [row for row in rows if (row["arm"], row["against"]) == pair]
        for row in chosen:
            place = lines.index(row["game"])
            colour = plot.COLOURS[0] if row["game"] == ALL else "0.5"
            axis.plot([row["change_low"], row["change_high"]], [place, place], color=colour)
            axis.plot(row["change"], place, "o", color=colour)
        axis.axvline(0, color="0.2", linewidth=0.9)
        axis.set_yticks(range(len(lines)), lines)
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_title(f"{pair[0]}\nagainst {pair[1]}", fontsize=10)
        axis.xaxis.set_major_formatter("{x:g}%")
        change, p, corrected = (chosen[-1][name] for name in ("change", "p", "p_holm"))
        p_text = f"Holm's p = {corrected:.3g}" if corrected else f"p = {p:.3g}"
        axis.set_xlabel(f"{change:+.1f}%, {p_text}", color=plot.COLOURS[0])
    ends = np.array([axis.get_xlim() for axis in axes])
    for axis in axes:
        axis.set_xlim(ends.min(), ends.max())
    save_figure(out, "contrasts", study, figure, "Change in score. ")


def draw_improvement(study: Study, out: Path, pairs: list[tuple[str, str]]) -> None:
    """A panel a pair of arms: the probability of improvement over steps."""
    figure, axes = panels(len(pairs), 2.2, sharey=True)
    rows = []
    for axis, pair in zip(axes, pairs, strict=True):
        games = study.shared(*pair)
        groups = [study.curves(arm, game, RETURN) for arm in pair for game in games]
        for row in band(axis, study, over_steps(groups, improvement), pair[0]):
            rows.append({"against": pair[1]} | row)
        axis.axhline(0.5, color="0.2", linewidth=0.9)
        axis.set_ylim(0, 1)
        axis.set_title(f"{pair[0]}\nagainst {pair[1]}", fontsize=10)
    figure.supylabel("Probability of improvement", fontsize=10)
    save_figure(out, "improvement", study, figure)
    save_rows(out, "improvement", rows)


def draw_aggregate(study: Study, out: Path) -> list[dict]:
    """The arms' interquartile means over steps; returns those of the scores."""
    games = [game for game in study.shared(*study.arms) if game in study.scale]
    left_out = [game for game in study.games if game not in games]
    if left_out:
        print(f"left out of pooled figures: {', '.join(left_out)}")
    if not games:
        return []
    figure, (axis,) = panels(1, 3.2)
    table, rows = [], []
    for arm in study.arms:
        groups = [study.pool(game, study.curves(arm, game, RETURN)) for game in games]
        rows += band(axis, study, over_steps(groups, interquartile_mean), arm)
        groups = [study.pool(game, study.scores[arm, game]) for game in games]
        table.append({"arm": arm} | columns("IQM", estimate(groups, interquartile_mean)))
    study.shade(axis)
    axis.set_ylabel(f"Interquartile mean return\n({study.unit})")
    plot.legend(figure)
    save_figure(out, "aggregate", study, figure)
    save_rows(out, "aggregate", rows)
    return table


def write(study: Study, named: tuple[tuple[str, str], ...], out: Path) -> dict[str, list[dict]]:
    """Write all figures and their numbers; returns the tables."""
    pairs = list(dict.fromkeys(named))
    for first in [] if named else study.arms:
        for second in study.arms:
            alike = study.runs(first)[0].algorithm == study.runs(second)[0].algorithm
            opposed = study.adapts(first) and not study.adapts(second)
            if alike and opposed and study.shared(first, second):
                pairs.append((first, second))
    draw_headline(study, out)
    draw_games(study, out, "learning_curves", RETURN)
    draw_games(study, out, "divergence", DIVERGENCE)
    draw_games(study, out, "kl_divergence", KL)
    draw_games(study, out, "rollout_length", LENGTH)
    tables = {"scores": score_rows(study)}
    tables["contrasts"] = contrast_rows(study, pairs, bool(named) and len(pairs) > 1)
    tables["interquartile_means"] = draw_aggregate(study, out)
    tables["signals"] = signal_rows(study)
    tables = {name: rows for name, rows in tables.items() if rows}
    for name, rows in tables.items():
        save_rows(out, name, rows)
    if "contrasts" in tables:
        draw_contrasts(study, out, tables["contrasts"])
    if pairs:
        draw_improvement(study, out, pairs)
    return tables


def main(args: Args) -> None:
    try:
        study = read_study(args)
    except ValueError as error:
        plot.fail(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=args.out)
    except OSError as error:
        plot.fail(f"--out {args.out} can't be written: {error.strerror}")
    try:
        with temporary:
            tables = write(study, args.contrast, Path(temporary.name))
            for path in Path(temporary.name).iterdir():
                path.replace(args.out / path.name)
    except OSError as error:
        plot.fail(f"can't write to {args.out}: {error.strerror}", status=1)
    for name, rows in tables.items():
        show(name, rows)
    print(f"\n{study.caption()}\nfigures and numbers: {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
