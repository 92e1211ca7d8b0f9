"""The contrasts of PROTOCOL.md: step 0, and the 2 x 2 of L and gradient steps.

    python results/length_or_steps/analyse.py step0 results/length_or_steps/step0
    python results/length_or_steps/analyse.py main results/length_or_steps/arms

A run's folder is R__<game>__<seed> in step 0, where arm A is minatar_study's arm a. In the 2 x 2 it
is <arm>_<rate>__<game>__<seed>: OO, OM, MO or MM, first L and then the steps, own or mirror. The
second command wants all 640 runs, and also draws figure.png.
"""

import math
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

ARMS = ("OO", "OM", "MO", "MM")
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
RATES = ("0.0005", "0.002")
SEEDS = range(11, 27)
SIGNS = {"L": (1, 1, -1, -1), "steps": (1, -1, 1, -1), "interaction": (1, -1, -1, 1)}
DRAWS = 20_000
MARGIN = 5  # percent
rng = np.random.default_rng(0)


def log_score(run, window):
    return math.log(max(report.score(run, window), 0.01))


def read(folders, window):
    """Log scores (settings, seeds) by arm, and the settings' names. Refuses unfinished runs."""
    scores = defaultdict(dict)
    for folder in folders:
        run = plot.read_run(folder)
        if run.columns[plot.STEP][-1] < run.args["total_timesteps"]:
            raise SystemExit(f"{folder} is not finished; the protocol wants all runs first")
        if (np.diff(run.columns[plot.STEP]) <= 0).any():
            raise SystemExit(f"{folder} has rows twice")
        name, game, seed = folder.name.split("__")
        arm, _, rate = name.partition("_")
        scores[arm].setdefault(f"{rate} {game}".strip(), {})[int(seed)] = log_score(run, window)
    settings = sorted(next(iter(scores.values())))
    table = {}
    for arm, found in scores.items():
        rows = []
        for setting in settings:
            rows.append([found[setting][seed] for seed in sorted(found[setting])])
        table[arm] = np.array(rows)
    return table, settings


def effect(arms, signs):
    """(settings,): the signed mean of the arms, in log score."""
    weights = 2 / len(signs)
    parts = [sign * arm.mean(axis=-1) for sign, arm in zip(signs, arms, strict=True)]
    return weights * np.sum(parts, axis=0)


def slope(effects, x):
    """Slope of the line through the origin; the mean of the effects, if every x is 1."""
    return (x * effects).sum(axis=-1) / (x * x).sum(axis=-1)


def resampled(arms, signs, x):
    """Bootstrap slopes, seeds resampled within setting and arm."""
    settings, seeds = arms[0].shape
    rows = np.arange(settings)[:, None]
    draws = []
    for _ in range(DRAWS):
        again = [arm[rows, rng.integers(seeds, size=arm.shape)] for arm in arms]
        draws.append(slope(effect(again, signs), x))
    return np.array(draws)


def permutation_p(arms, signs, x):
    """Two-sided. Arms of a pair differ only in the factor; their labels change places."""
    found = abs(slope(effect(arms, signs), x))
    plus = [arm for arm, sign in zip(arms, signs, strict=True) if sign > 0]
    minus = [arm for arm, sign in zip(arms, signs, strict=True) if sign < 0]
    extreme = 0
    for _ in range(DRAWS):
        difference = 0.0
        for one, other in zip(plus, minus, strict=True):
            both = rng.permuted(np.concatenate([one, other], axis=1), axis=1)
            seeds = one.shape[1]
            difference += both[:, :seeds].mean(axis=1) - both[:, seeds:].mean(axis=1)
        extreme += abs(slope(difference / len(plus), x)) >= found * (1 - 1e-9)
    return (1 + extreme) / (1 + DRAWS)


def sign_flip_p(effects, x):
    """Two-sided, over all flips of the settings' effects: the settings as a sample of others."""
    flips = np.array(list(product((1, -1), repeat=len(effects))))
    slopes = np.abs(slope(flips * effects, x))
    return (slopes >= abs(slope(effects, x)) * (1 - 1e-9)).mean()


def percent(logs):
    return 100 * np.expm1(logs)


def show(name, arms, signs, x=None):
    """Print a mean effect, or a slope in x; returns p, and it with its intervals, in percent."""
    own = effect(arms, signs)
    if x is None:
        x = np.ones(len(own))
    found = slope(own, x)
    draws = resampled(arms, signs, x)
    low, high = percent(np.quantile(draws, (0.025, 0.975)))
    narrow = percent(np.quantile(draws, (0.05, 0.95)))
    again = rng.integers(len(own), size=(DRAWS, len(own)))
    wide = percent(np.quantile(slope(own[again], x[again]), (0.025, 0.975)))
    p = permutation_p(arms, signs, x)
    equivalent = ", equivalent" if np.abs(narrow).max() < MARGIN else ""
    print(f"{name}: {percent(found):+.1f}% ({low:.1f} to {high:.1f}), p {p:.5f}")
    print(f"  90% interval {narrow[0]:.1f} to {narrow[1]:.1f}{equivalent}")
    print(f"  settings resampled: {wide[0]:.1f} to {wide[1]:.1f}, p {sign_flip_p(own, x):.3f}")
    return p, (percent(found), low, high, *narrow)


def doublings(settings):
    """(settings,): by how many doublings the own schedule is longer than its mirror, on average."""
    table = np.genfromtxt(Path(__file__).with_name("schedules.csv"), delimiter=",", names=True)
    found = []
    for setting in settings:
        name = setting.replace(".", "").replace(" ", "_", 1)
        found.append(np.log2(table[f"{name}_own"] / table[f"{name}_mirror"]).mean())
    return np.array(found)


def updates(folder, arm, setting, share):
    """Gradient steps over the first share of an arm's run; they are the same with every seed."""
    rate, game = setting.split()
    run = plot.read_run(Path(folder, f"{arm}_{rate}__{game}__{SEEDS[0]}"))
    steps = [0, *run.columns[plot.STEP]]
    return np.interp(share * steps[-1], steps, [0, *run.columns["charts/updates"]])


def draw(settings, effects, found, leads):
    """The two main effects, at both rates and at each; and the settings' effects of the steps.

    found, by name and rate: the mean with its 95% and 90% intervals, percent. effects: (settings,),
    percent. leads: by how much a setting's own schedule has more steps over the first half.
    """
    size = {"figsize": (10, 3.8), "layout": "constrained"}
    figure, (left, right) = plot.plt.subplots(1, 2, **size)
    left.axvspan(-MARGIN, MARGIN, color="0.92", zorder=0)
    left.axvline(0, color="0.4", linewidth=0.8)
    names = {"steps": "Gradient steps", "L": "Rollout length L"}
    parts = {"all": "both rates", RATES[0]: f"rate {RATES[0]}", RATES[1]: f"rate {RATES[1]}"}
    rows = [(name, part) for name in names for part in parts]
    for height, row in enumerate(rows):
        mean, *limits = found[row]
        left.plot(limits[:2], [height, height], color="black", linewidth=1.2)  # 95%
        left.plot(limits[2:], [height, height], color="black", linewidth=3.5)  # 90%
        left.plot(mean, height, "D", color="black")
    left.set_yticks(range(len(rows)), [f"{names[name]},\n{parts[part]}" for name, part in rows])
    left.invert_yaxis()
    left.set_xlabel("Score: mirror better < 0 < own better (%)")
    left.set_title("Main effects, 95% and 90% intervals", fontsize="medium")
    right.axhline(0, color="0.4", linewidth=0.8)
    right.axvline(0, color="0.4", linewidth=0.8)
    lines = {}
    for setting, effect, lead in zip(settings, effects, leads, strict=True):
        rate, game = setting.split()
        look = plot.style(GAMES.index(game), 1) | {"linestyle": "", "markersize": 7}
        if rate == RATES[0]:
            look["markerfacecolor"] = "white"
        (lines[plot.title(game)],) = right.plot(lead, effect, **look)
    right.set_xlabel("Gradient steps over the first half: own more than mirror (%)")
    right.set_ylabel("Effect of the own gradient steps (%)")
    right.set_title(f"The settings; hollow: rate {RATES[0]}", fontsize="medium")
    right.legend(lines.values(), lines.keys(), loc="upper left")
    return figure


def main(what, folder):
    if what == "step0":
        study = Path(__file__).parents[1] / "minatar_study" / "confirmation"
        arms = []
        for folders in (study.glob("a__*/"), Path(folder).glob("R__*/")):
            (scores,) = read(sorted(folders), 1.0)[0].values()
            arms.append(scores)
        show("A - R, whole run", arms, (1, -1))
        return
    names = []
    for arm, rate, game, seed in product(ARMS, RATES, GAMES, SEEDS):
        names.append(f"{arm}_{rate}__{game}__{seed}")
    for window in (1.0, 0.2):
        table, settings = read([Path(folder, name) for name in names], window)
        arms = [table[arm] for arm in ARMS]
        print(f"window {window:g}, {len(settings)} settings, {arms[0].shape[1]} seeds")
        ps, found, effects = [], {}, {}
        for name in ("L", "steps"):
            p, found[name, "all"] = show(name, arms, SIGNS[name])
            ps.append(p)
            effects[name] = percent(effect(arms, SIGNS[name]))
        print("  p by Holm:", [f"{p:.4f}" for p in report.holm(ps)])
        show("interaction (secondary)", arms, SIGNS["interaction"])
        x = doublings(settings)
        show("per doubling of L (exploratory)", arms, SIGNS["L"], x)
        show("per doubling of gradient steps (exploratory)", arms, SIGNS["steps"], -x)
        for rate in RATES:  # chosen after the scores were seen
            chosen = np.array([setting.startswith(rate) for setting in settings])
            few = [arm[chosen] for arm in arms]
            show(f"{rate}, per doubling of L (exploratory)", few, SIGNS["L"], x[chosen])
            name = f"{rate}, per doubling of gradient steps (exploratory)"
            show(name, few, SIGNS["steps"], -x[chosen])
        leads = []  # of the own schedule in gradient steps: over the run, and over its first half
        for row, setting in enumerate(settings):
            leads.append([])
            for share in (1, 0.5):
                own, mirror = (updates(folder, arm, setting, share) for arm in ("OO", "OM"))
                leads[row].append(100 * (own / mirror - 1))
            run, half = leads[row]
            steps = f"steps {run:+.0f}%, over the first half {half:+.0f}%"
            design = f"L {100 * (2 ** x[row] - 1):+.0f}%, {steps}"
            both = f"L {effects['L'][row]:+.1f}%, steps {effects['steps'][row]:+.1f}%"
            scores = []  # geometric means, with the own steps and with their mirror
            for pair in (("OO", "MO"), ("OM", "MM")):
                scores.append(np.exp(np.mean([table[arm][row] for arm in pair])))
            points = f"{scores[0]:.2f} and {scores[1]:.2f} points"
            print(f"  {setting}: own is {design}; effects {both}; {points} by steps")
        if window == 1.0:
            for name in ("L", "steps"):
                largest = np.abs(effects[name]).argmax()
                parts = {f"without {settings[largest]}": np.arange(len(settings)) != largest}
                for rate in RATES:
                    parts[rate] = [setting.startswith(rate) for setting in settings]
                for part, chosen in parts.items():
                    few = [arm[np.array(chosen)] for arm in arms]
                    row = f"{name}, {part} (secondary)"
                    _, found[name, part] = show(row, few, SIGNS[name])
            figure = draw(settings, effects["steps"], found, [half for _, half in leads])
            plot.save(figure, Path(__file__).with_name("figure.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
