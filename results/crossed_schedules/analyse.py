"""The contrasts of PROTOCOL.md, from the runs of the four arms, and figure.png.

    python results/crossed_schedules/analyse.py results/crossed_schedules/arms

A run's folder is <arm>_<low or high>__<game>__<seed>, where the arm is A, R, X or C.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

ARMS = "A R X C".split()
CONTRASTS = [("R", "X"), ("A", "R"), ("A", "C")]  # primary
RATES = {"low": 2.5e-4, "high": 4e-3}
WITHIN = ("high_breakout", "high_seaquest", "low_asterix", "low_breakout")  # pairs of arm X
RUNS = 320  # 4 arms, 10 settings, 8 seeds
CHUNKS, CHUNK = 200, 500  # 100,000 resamples, and as many permutations
MARGIN = 5  # percent
rng = np.random.default_rng(0)


def read(folder: Path, window: float) -> tuple[np.ndarray, list[str]]:
    """Scores (arms, settings, seeds), not divided yet, and the settings' names."""
    scores = defaultdict(dict)
    run_folders = sorted(folder.glob("*__*__*/"))
    if len(run_folders) != RUNS:
        raise SystemExit(f"{folder} has {len(run_folders)} of {RUNS} runs; the protocol wants all")
    for run_folder in run_folders:
        run = plot.read_run(run_folder)
        if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
            raise SystemExit(f"{run_folder} is not finished; the protocol wants all runs first")
        name, game, seed = run_folder.name.split("__")
        arm, rate = name.split("_")
        found = (run.args["env_id"], run.args["seed"], run.args["learning_rate"])
        if found != (game, int(seed), RATES[rate]):
            raise SystemExit(f"{run_folder} holds another run: {found}")
        scores[arm, f"{rate}_{game}"][int(seed)] = report.score(run, window)
    settings = sorted({setting for _, setting in scores})
    seeds = sorted(scores[ARMS[0], settings[0]])
    table = np.empty((len(ARMS), len(settings), len(seeds)))
    for arm, setting, seed in np.ndindex(table.shape):
        table[arm, setting, seed] = scores[ARMS[arm], settings[setting]][seeds[seed]]
    print(f"{len(settings)} settings, seeds {seeds[0]} to {seeds[-1]}, window {window:g}")
    for index, setting in enumerate(settings):
        means = (f"{ARMS[arm]} {table[arm, index].mean():.3g}" for arm in range(len(ARMS)))
        print(f"  {setting}:", ", ".join(means))
    return table, settings


def interval_draws(first, second, statistic):
    """Bootstrap differences: seeds are resampled within setting and arm."""
    settings, seeds = first.shape
    rows = np.arange(settings)[:, None]
    draws = []
    for _ in range(CHUNKS):
        one = first[rows, rng.integers(seeds, size=(CHUNK, *first.shape))]
        other = second[rows, rng.integers(seeds, size=(CHUNK, *second.shape))]
        draws.append(statistic(one) - statistic(other))
    return np.concatenate(draws)


def permutation_p(first, second, statistic) -> float:
    """Two-sided; the labels of the two arms are permuted within settings."""
    found = abs(statistic(first) - statistic(second))
    both = np.concatenate([first, second], axis=1)
    both = np.repeat(both[None], CHUNK, axis=0)
    seeds = first.shape[1]
    extreme = 0
    for _ in range(CHUNKS):
        shuffled = rng.permuted(both, axis=-1)
        differences = statistic(shuffled[..., :seeds]) - statistic(shuffled[..., seeds:])
        extreme += np.sum(np.abs(differences) >= found * (1 - 1e-9))
    return (1 + extreme) / (1 + CHUNKS * CHUNK)


def contrasts(table, statistic, label, as_share=np.positive):
    """Print them; returns effects and 95% intervals (3, 3) in percent.

    as_share turns a difference of the statistic into a share; by default it is one.
    """
    print(f"{label}: effect, 95% interval, 90% interval, p, p by Holm")
    lines, ps, found = [], [], []
    for first, second in CONTRASTS:
        one, other = table[ARMS.index(first)], table[ARMS.index(second)]
        draws = 100 * as_share(interval_draws(one, other, statistic))
        wide, narrow = np.quantile(draws, (0.025, 0.975)), np.quantile(draws, (0.05, 0.95))
        effect = 100 * as_share(statistic(one) - statistic(other))
        intervals = f"({wide[0]:.2f} to {wide[1]:.2f}), ({narrow[0]:.2f} to {narrow[1]:.2f})"
        equivalent = "; equivalent" if np.abs(narrow).max() < MARGIN else ""
        lines.append((f"  {first} - {second}: {effect:+.2f}% {intervals}", equivalent))
        ps.append(permutation_p(one, other, statistic))
        found.append([effect, *wide])
    for (line, equivalent), p, corrected in zip(lines, ps, report.holm(ps), strict=True):
        print(f"{line}, {p:.5f}, {corrected:.5f}{equivalent}")
    return np.array(found)


def groups(relative, settings):
    """Exploratory: effects by setting and by rate, and without the largest |R - X|, or two."""
    differences = relative[ARMS.index("R")] - relative[ARMS.index("X")]
    chosen = {setting: [index] for index, setting in enumerate(settings)}
    for rate in RATES:
        chosen[f"{rate}, all games"] = [i for i, name in enumerate(settings) if rate in name]
    smallest_first = np.abs(differences.mean(axis=1)).argsort()
    for left_out in (1, 2):
        chosen[f"without the {left_out} largest R - X"] = smallest_first[:-left_out]
    within = [i for i, name in enumerate(settings) if name in WITHIN]
    chosen["pairs within a rate"] = within
    chosen["pairs across rates"] = [i for i in range(len(settings)) if i not in within]
    pairs = (" - ".join(pair) for pair in CONTRASTS)
    print("exploratory:", ", ".join(pairs), "by setting, with 95% intervals")
    for name, indices in chosen.items():
        cells = []
        for first, second in CONTRASTS:
            one, other = relative[ARMS.index(first), indices], relative[ARMS.index(second), indices]
            low, high = np.quantile(interval_draws(one, other, report.mean), (0.025, 0.975))
            effect = report.mean(one) - report.mean(other)
            cells.append(f"{100 * effect:+.1f}% ({100 * low:.1f} to {100 * high:.1f})")
        print(f"  {name}:", ", ".join(cells))


def draw(relative, settings, found) -> plot.plt.Figure:
    """The ten schedules, and each contrast: its mean with interval, and the settings' own."""
    size = {"figsize": (10, 4.2), "width_ratios": (3, 4), "layout": "constrained"}
    figure, (left, right) = plot.plt.subplots(1, 2, **size)
    schedules = np.genfromtxt(Path(__file__).with_name("schedules.csv"), delimiter=",", names=True)
    games = sorted({setting.partition("_")[2] for setting in settings})
    lines = {}
    for index, setting in enumerate(settings):
        rate, _, game = setting.partition("_")
        look = plot.style(games.index(game), len(schedules))
        look["markerfacecolor"] = "white" if rate == "low" else look["color"]
        name = f"{plot.title(game)}, {RATES[rate]:g}"
        (lines[name],) = left.plot(schedules["global_step"], schedules[setting], **look)
        for row, (first, second) in enumerate(CONTRASTS):
            one, other = relative[ARMS.index(first), index], relative[ARMS.index(second), index]
            y = row + 0.12 + 0.06 * index
            right.plot(100 * (one.mean() - other.mean()), y, **(look | {"markevery": 1}))
    left.set(xlabel="Environment steps", ylabel="L of the schedules", xlim=(0, None))
    left.xaxis.set_major_formatter(plot.ticker.EngFormatter(sep=""))
    right.axvspan(-MARGIN, MARGIN, color="0.92", zorder=0)
    right.axvline(0, color="0.4", linewidth=0.8)
    for row, (effect, low, high) in enumerate(found):
        errors = [[effect - low], [high - effect]]
        right.errorbar(effect, row, xerr=errors, color="black", fmt="D", capsize=4, zorder=3)
    right.set_yticks(range(len(CONTRASTS)), [" - ".join(pair) for pair in CONTRASTS])
    right.set_xscale("symlog", linthresh=10)
    ticks = (-200, -50, -20, -10, -5, 0, 5, 10, 20)
    right.set_xticks(ticks, [f"{tick:d}" for tick in ticks])
    right.set_xlabel("Difference of scores (%), logarithmic beyond ±10")
    right.set(xlim=(-300, 30), ylim=(len(CONTRASTS) - 0.1, -0.3))
    plot.legend(figure, lines)
    return figure


def main(folder):
    for window, label in ((1.0, "primary: the whole run"), (0.2, "secondary: the last fifth")):
        table, settings = read(folder, window)
        relative = table / table.mean(axis=(0, 2))[None, :, None]
        found = contrasts(relative, report.mean, label)
        if window == 1.0:
            groups(relative, settings)
            figure = draw(relative, settings, found)
            plot.save(figure, Path(__file__).with_name("figure.png"))
            contrasts(relative, report.interquartile_mean, "secondary: interquartile mean")
            logs = np.log(table[:, (table > 0).all(axis=(0, 2))])
            label = f"secondary: mean log, {logs.shape[1]} settings"
            contrasts(logs, report.mean, label, np.expm1)
    print("exploratory: A against C over the whole run, mean log, with 95% intervals")
    for rate in RATES:
        rows = [index for index, setting in enumerate(settings) if rate in setting]
        one, other = logs[ARMS.index("A"), rows], logs[ARMS.index("C"), rows]
        draws = interval_draws(one, other, report.mean)
        low, high = 100 * np.expm1(np.quantile(draws, (0.025, 0.975)))
        effect = 100 * np.expm1(report.mean(one) - report.mean(other))
        print(f"  {rate}: {effect:+.1f}% ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
