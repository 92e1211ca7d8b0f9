# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib", "numpy", "pillow", "scipy", "tyro"]
# ///
"""Compare finished runs: contrasts between arms, scores and curves.

    python tools/report.py runs/suite --out report
    python tools/report.py runs/study --label "*/open_*=Open loop" \\
        --contrast "PQN with ABS" "PQN, L = 48" --contrast "PQN with ABS" "Open loop"

Folders are searched for runs. A run's options name its arm, "PQN with ABS" or "PQN, L = 32".
--label "GLOB=NAME" names that of runs whose folder's path matches GLOB, where * matches / too.

A score is the mean return over the last 20% of the samples (--window). A contrast is the difference
of two arms' mean log scores, shown as ratio - 1 in percent, by game and as the mean over games.
Scores of 0 or less have no logarithm: their game is a difference of means, in points, and is left
out of the mean. p is from permutations of the arms' labels within each game; p_holm is corrected
for the number of pairs of arms. p_improvement is the probability that a run of one arm scores more
than one of the other. Intervals are 95% bootstrap intervals, seeds resampled within game and arm.
They are a little too narrow: over three games they hold the truth in 90% of cases with 5 seeds, and
in 94% with 12, while p holds its level. With fewer than 5 seeds, every run is shown instead.

With --human, a game's score is (score - random) / (human - random), by tools/human.csv: 1 is a
professional's. Contrasts are differences of such scores, by game and as the mean over games.
"""

import csv
import fnmatch
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import rankdata, trim_mean

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tools import plot
from tools.plot import DIVERGENCE, KL, LENGTH, RETURN, STEP, plt

NAMES = {RETURN: "learning_curves", LENGTH: "rollout_length"}
NAMES |= {DIVERGENCE: "divergence", KL: "kl_divergence"}
RELATIVE = "Relative return"
PER_RUN = {"env_id", "seed", "run_name", "runs_dir", "resume"}  # may differ within an arm
RESAMPLES, PERMUTATIONS, POINTS = 4000, 20_000, 50
ENOUGH = 5  # seeds; two of an arm cannot give a p below 1/3, however much they differ


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders that hold runs
    out: Path = Path("report")  # folder for the figures and their numbers
    contrast: tyro.conf.UseAppendAction[tuple[tuple[str, str], ...]] = ()
    """two arms, the first against the second; by default each that adapts against each fixed one"""
    label: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """GLOB=NAME each: the arm of the runs in such folders"""
    window: float = 0.2  # share of the samples, the last ones, over which scores are taken
    human: bool = False  # scores on Atari relative to random play and to a human


@dataclass
class Study:
    games: list[str]  # G of them, in the order of every figure
    arms: dict[str, list[list[plot.Run]]]  # by game and seed, in the order of every legend
    scores: dict[str, np.ndarray]  # (G, n) of each arm
    caption: str
    is_small: bool  # too few seeds for intervals and p
    is_human: bool  # scores are human-normalised

    def run(self, arm: str) -> plot.Run:
        return self.arms[arm][0][0]

    def curves(self, arm: str, column: str) -> np.ndarray:
        """(POINTS, G, n)"""
        curves = [[curve(run, column) for run in runs] for runs in self.arms[arm]]
        return np.moveaxis(np.array(curves), -1, 0)


def read_study(args: Args) -> Study:
    """Every arm must have the same seeds of every game: else arms would be mixed, or cut short."""
    if not args.runs or not 0 < args.window <= 1:
        raise ValueError("name at least one folder; --window must be above 0 and at most 1")
    runs = []
    for folder in args.runs:
        found = [plot.read_run(path.parent) for path in sorted(folder.rglob("config.json"))]
        if not found:
            raise ValueError(f"{folder} holds no run")
        runs += found
    for run in runs:
        total = run.args["total_timesteps"]
        if total != runs[0].args["total_timesteps"] or total > run.columns[STEP][-1]:
            raise ValueError(f"{run.folder} is unfinished, or not as long as {runs[0].folder}")
    if args.human:
        normalise(runs)
    runs.sort(key=lambda run: (not run.args["adapt_rollout"], run.args["num_steps"]))
    labelled = []
    for label in sum(args.label, ()):
        glob, _, name = label.partition("=")
        found = [run for run in runs if fnmatch.fnmatchcase(run.folder.as_posix(), glob)]
        if not name or not found:
            raise ValueError(f"--label {label!r} names no run; give it as GLOB=NAME")
        for run in found:
            run.arm = name
        labelled += found
        runs = [run for run in runs if run not in found] + found
    for run in runs:
        first = next(other for other in runs if other.arm == run.arm)
        for name in run.args.keys() & first.args.keys() - PER_RUN:
            if run.args[name] != first.args[name] and run not in labelled:
                where = f"{run.folder} and {first.folder} are both {run.arm!r}"
                raise ValueError(f"{where}, but differ in {name}: name their arms by --label")
    games = sorted({run.args["env_id"] for run in runs})
    seeds = sorted({run.args["seed"] for run in runs})
    arms, scores = {}, {}
    for arm in dict.fromkeys(run.arm for run in runs):
        arms[arm] = []
        for game in games:
            cell = [run for run in runs if (run.arm, run.args["env_id"]) == (arm, game)]
            cell.sort(key=lambda run: run.args["seed"])
            found = [run.args["seed"] for run in cell]
            if found != seeds:
                where = f"{arm!r} has seeds {found} of {game} where others have {seeds}"
                raise ValueError(f"{where}: leave runs out, or name an arm by --label")
            arms[arm].append(cell)
        scores[arm] = np.array([[score(run, args.window) for run in cell] for cell in arms[arm]])
    for arm in sum(args.contrast, ()):
        if arm not in arms:
            raise ValueError(f"no arm is called {arm!r}; there are {'; '.join(arms)}")
    is_small = len(seeds) < ENOUGH
    shown = "95% bootstrap intervals"
    if is_small:
        shown = "too few for intervals and p: thin lines are single runs"
    caption = f"seeds an arm: {len(seeds)}; {shown}; "
    caption += f"scores are over the last {100 * args.window:g}% of the samples"
    titles = [plot.title(game) for game in games]
    return Study(titles, arms, scores, caption, is_small, args.human)


def normalise(runs: list[plot.Run]) -> None:
    """Human-normalised returns in place of the game's points."""
    with Path(__file__).with_name("human.csv").open() as file:
        table = {row["game"]: row for row in csv.DictReader(file)}
    for run in runs:
        game = re.fullmatch(r"(?:ALE/)?(\w+?)(?:NoFrameskip)?-v\d", run.args["env_id"])
        if not game or game[1] not in table:
            raise ValueError(f"--human: {run.folder} is of none of the 57 games in human.csv")
        random, human = float(table[game[1]]["random"]), float(table[game[1]]["human"])
        run.columns[RETURN] = (run.columns[RETURN] - random) / (human - random)


def score(run: plot.Run, window: float) -> float:
    """The mean return over the last share of the samples, weighted by environment steps."""
    steps, returns = run.columns[STEP], run.columns[RETURN]
    start = (1 - window) * steps[-1]
    weights = np.diff(np.maximum(steps, start), prepend=start)
    weights[np.isnan(returns)] = 0
    if not weights.any():
        raise ValueError(f"{run.folder} has no score: no episode ended before its end")
    return float(np.average(np.nan_to_num(returns), weights=weights))


def curve(run: plot.Run, column: str) -> np.ndarray:
    """(POINTS,): means over each 2% of the samples; the first value stands also for all before."""
    known = np.isfinite(run.columns[column])
    if not known.any():
        return np.full(POINTS, np.nan)
    fine = np.linspace(0, float(run.args["total_timesteps"]), 20 * POINTS + 1)[1:]
    values = np.interp(fine, run.columns[STEP][known], run.columns[column][known])
    return values.reshape(POINTS, 20).mean(axis=1)


def updates(run: plot.Run) -> float:
    """Gradient steps; runs without a column of them made as many in each iteration, a row each."""
    if "charts/updates" in run.columns:
        return float(run.columns["charts/updates"][-1])
    return float(run.args["update_epochs"] * run.args["num_minibatches"] * len(run.columns[STEP]))


def estimate(statistic, *arms: np.ndarray) -> np.ndarray:
    """(3, ...): a statistic of arms (..., G, n) and its 95% interval, seeds resampled."""
    value = statistic(*arms)
    games, seeds = arms[0].shape[-2:]
    rng = np.random.default_rng(0)
    draws = []
    for arm in arms:
        chosen = rng.integers(seeds, size=(games, RESAMPLES, seeds)).swapaxes(0, 1)
        draws.append(arm[..., np.arange(games)[:, None], chosen])
    return np.stack([value, *np.quantile(statistic(*draws), (0.025, 0.975), axis=-1)])


def with_spread(study: Study, statistic, curves: np.ndarray) -> np.ndarray:
    """A statistic of curves (POINTS, G, n), and its interval, or that of each seed alone."""
    if not study.is_small:
        return estimate(statistic, curves)
    alone = [statistic(curves[..., [seed]]) for seed in range(curves.shape[-1])]
    return np.stack([statistic(curves), *alone])


def mean(arm: np.ndarray) -> np.ndarray:
    return arm.mean(axis=(-2, -1))


def interquartile_mean(arm: np.ndarray) -> np.ndarray:
    """The mean of the middle half of all runs of all games."""
    return trim_mean(arm.reshape(*arm.shape[:-2], -1), 0.25, axis=-1)


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return mean(first) - mean(second)


def improvement(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The probability that a run of the first arm beats one of the second; a tie is half a win."""
    seeds = first.shape[-1]
    ranks = rankdata(np.concatenate([first, second], axis=-1), axis=-1)
    return (mean(ranks[..., :seeds]) - (seeds + 1) / 2) / seeds  # Mann and Whitney's U / n²


def permutation_p(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p of difference(first, second), the arms' labels permuted within each game."""
    both = np.concatenate([first, second], axis=-1)
    both = np.repeat(both[:, None], PERMUTATIONS, axis=1)
    both = np.random.default_rng(0).permuted(both, axis=-1).swapaxes(0, 1)
    seeds = first.shape[-1]
    drawn = difference(both[..., :seeds], both[..., seeds:])
    found = np.abs(difference(first, second)) * (1 - 1e-9)  # equal ones may differ by rounding
    return float((1 + (np.abs(drawn) >= found).sum()) / (1 + PERMUTATIONS))


def holm(ps: list[float]) -> list[float]:
    """Holm's correction: the smallest p times their number, the next times one less, rising."""
    order = np.argsort(ps)
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.arange(len(ps), 0, -1) * np.sort(ps))
    return np.minimum(corrected, 1).tolist()


def write(path: Path, rows: list[dict]) -> str:
    """Write a .csv, numbers with six digits; returns a table in Markdown, with four."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(rows[0])
        for row in rows:
            table.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row.values()])
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(name: str, found: np.ndarray) -> dict[str, float]:
    value, low, high = found.tolist()
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def contrast_rows(study: Study, pairs: list[tuple[str, str]]) -> list[dict]:
    """By pair of arms: a row for each game, and one over all that have logarithms."""
    rows, pooled = [], []
    for pair in pairs:
        scores = np.array([study.scores[arm] for arm in pair])  # (2, G, n)
        has_log = (scores.min(axis=(0, 2)) > 0) & (not study.is_human)
        together = has_log | study.is_human
        chosen = list(zip(study.games, np.eye(len(study.games), dtype=bool), strict=True))
        if together.any():
            chosen.append(("All games", together))
        for name, places in chosen:
            first, second = scores[:, places]
            row = {"arm": pair[0], "against": pair[1], "game": name}
            if has_log[places].all():
                first, second = np.log(first), np.log(second)
                row |= interval("change", 100 * np.expm1(estimate(difference, first, second)))
                row["unit"] = "%"
            else:
                row |= interval("change", estimate(difference, first, second))
                row["unit"] = "human - random" if study.is_human else "points"
            if study.is_small:
                del row["change_low"], row["change_high"]
            else:
                row |= {"p": permutation_p(first, second), "p_holm": ""}
                row |= interval("p_improvement", estimate(improvement, first, second))
            rows.append(row)
        if together.any() and not study.is_small:
            pooled.append(rows[-1])
    for row, p in zip(pooled, holm([row["p"] for row in pooled]), strict=True):
        row["p_holm"] = p
    return rows


def score_rows(study: Study) -> list[dict]:
    rows = []
    for arm, cells in study.arms.items():
        for game, cell, values in zip(study.games, cells, study.scores[arm], strict=True):
            row = {"arm": arm, "game": game, "mean": float(values.mean())}
            if study.is_small:
                row["runs"] = " ".join(f"{value:.4g}" for value in values)
            else:
                row |= {"sd": float(values.std(ddof=1)), "n": len(cell)}
            rows.append(row | {"updates": round(np.mean([updates(run) for run in cell]))})
    return rows


def draw(study: Study, path: Path, panels: list[tuple], columns: int = 3, **options) -> None:
    """A panel is a title, what it shows, and by arm with_spread's curves."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    size = (2.7 * max(3, columns), 2.3 * rows + 0.7)
    options |= {"figsize": size, "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(rows, columns, **options)
    runs = [run for cells in study.arms.values() for cell in cells for run in cell]
    steps = (np.arange(POINTS) + 0.5) * runs[0].args["total_timesteps"] / POINTS
    looks = {arm: plot.style(i, POINTS) for i, arm in enumerate(study.arms)}
    lines = {}
    for axis, (title, column, curves) in zip(axes.flat, panels, strict=False):
        for arm, found in curves.items():
            width, shade = (2.2, 0.2) if study.run(arm).args["adapt_rollout"] else (1, 0.1)
            (lines[arm],) = axis.plot(steps, found[0], **looks[arm], linewidth=width)
            colour = looks[arm]["color"]
            if study.is_small:
                axis.plot(steps, found[1:].T, color=colour, alpha=0.5, linewidth=0.7)
            else:
                axis.fill_between(steps, *found[1:], color=colour, alpha=shade, linewidth=0)
        if axis in axes[:, 0]:
            label = plot.TITLES.get(column, column)
            axis.set_ylabel("Return\n(human = 1)" if study.is_human and column == RETURN else label)
        axis.set_title(title, fontsize=10)
        plot.finish_axis(axis, runs, column)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    plot.legend(figure, lines)
    figure.supxlabel(f"Environment steps\n{study.caption}", fontsize=9)
    plot.save(figure, path)


def draw_games(study: Study, out: Path) -> None:
    """A figure for each column, a panel for each game; divergences of arms whose L they drive."""
    for column, name in NAMES.items():
        panels = [(game, column, {}) for game in study.games]
        for arm in study.arms:
            if column in (RETURN, LENGTH, study.run(arm).signal):
                curves = study.curves(arm, column)
                for place, (_, _, found) in enumerate(panels):
                    found[arm] = with_spread(study, mean, curves[:, [place]])
        if panels[0][2]:
            draw(study, out / f"{name}.png", panels, sharey=column != RETURN)


def draw_headline(study: Study, out: Path) -> list[dict]:
    """Return and L over all games; returns the rows of the scores over several games."""
    fixed = [arm for arm in study.arms if not study.run(arm).args["adapt_rollout"]]
    reference = [*fixed, *study.arms][0]
    level = study.scores[reference].mean(axis=1)[:, None]
    unit = f"1 = score of {reference}"
    if study.is_human:
        level = np.ones_like(level)
        unit = "1 = a human's score"
    usable = level[:, 0] > 0
    returns, lengths, rows = {}, {}, []
    for arm in study.arms:
        lengths[arm] = with_spread(study, mean, study.curves(arm, LENGTH))
        if usable.sum() > 1:
            scores = study.scores[arm][usable] / level[usable]
            curves = study.curves(arm, RETURN)[:, usable] / level[usable]
            returns[arm] = with_spread(study, interquartile_mean, curves)
            row = {"arm": arm} | interval("IQM", estimate(interquartile_mean, scores))
            if study.is_small:
                del row["IQM_low"], row["IQM_high"]
            rows.append(row)
    panels = [("Mean rollout length", LENGTH, lengths)]
    if returns:
        title = f"Interquartile mean of {usable.sum()} games; {unit}"
        panels.insert(0, (title, RELATIVE, returns))
    draw(study, out / "headline.png", panels, columns=1)
    return rows


def main(args: Args) -> None:
    study = read_study(args)
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = list(dict.fromkeys(args.contrast))
    if not pairs:
        adapting = [arm for arm in study.arms if study.run(arm).args["adapt_rollout"]]
        pairs = [(arm, other) for arm in adapting for other in study.arms if other not in adapting]
    draw_games(study, args.out)
    tables = {"scores": score_rows(study), "aggregate": draw_headline(study, args.out)}
    tables["contrasts"] = contrast_rows(study, pairs)
    for name, rows in tables.items():
        if rows:
            print(f"\n{name}\n\n{write(args.out / f'{name}.csv', rows)}")
    print(f"\n{study.caption}\nfigures and numbers: {args.out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:  # a folder that holds no run
        sys.exit(f"report.py: {error}")
