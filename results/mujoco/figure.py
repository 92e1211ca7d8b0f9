"""The tables and the figure of this folder, from the runs in runs.

python results/mujoco/figure.py
"""

import sys
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

HERE = Path(__file__).parent
ARMS = {"abs": "ABS", "L2048": "L = 2,048", "Lmean": "ABS's mean L"}
OTHERS = {"constant": "ABS, constant rate", "ended": "L = 2,048, limits end"}
GAMES = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5")


def runs_of(arm, game):
    return [plot.read_run(folder) for folder in sorted((HERE / "runs").glob(f"{arm}__{game}__*/"))]


def print_scores():
    """By game and arm: mean score, its 95% interval, mean L and gradient steps."""
    print("| game | arm | runs | score (95% interval) | mean L | gradient steps |")
    print("|---|---|---|---|---|---|")
    for game in GAMES:
        for arm, name in (ARMS | OTHERS).items():
            runs = runs_of(arm, game)
            if not runs:
                continue
            scores = np.array([[report.score(run, 0.2) for run in runs]])
            value, low, high = report.estimate(report.mean, scores)
            lengths = [run.columns[plot.STEP][-1] / len(run.columns[plot.STEP]) for run in runs]
            updates = np.mean([report.updates(run) for run in runs])
            interval = (
                f"{value:,.0f} ({low:,.0f} to {high:,.0f})" if len(runs) > 1 else f"{value:,.0f}"
            )
            print(f"| {plot.title(game)} | {name} | {len(runs)} | {interval} ", end="")
            print(f"| {np.mean(lengths):,.0f} | {updates:,.0f} |")


def print_signals():
    """KL and L at half-time and at the end, the KL's rank correlation with the steps left, and R²
    of the logarithms of KL and learning rate."""
    print("\n| game | arm | KL, half-time and end | L, half-time and end ", end="")
    print("| KL and steps left | KL and learning rate, R² |")
    print("|---|---|---|---|---|---|")
    for game in GAMES:
        for arm in ("abs", "constant", "L2048"):
            kls, lengths, ranks, explained = [], [], [], []
            for run in runs_of(arm, game):
                known = np.isfinite(run.columns[plot.KL])
                kl = run.columns[plot.KL][known]
                rate = run.columns["charts/learning_rate"][known]
                ranks.append(-spearmanr(kl, run.columns[plot.STEP][known])[0])
                if run.args["anneal_lr"]:
                    explained.append(np.corrcoef(np.log(kl), np.log(rate))[0, 1] ** 2)
                kls.append(report.curve(run, plot.KL)[[24, 49]])
                lengths.append(report.curve(run, plot.LENGTH)[[24, 49]])
            if not ranks:
                continue
            half, end = np.mean(kls, axis=0)
            print(f"| {plot.title(game)} | {(ARMS | OTHERS)[arm]} | {half:.3f}, {end:.3f} ", end="")
            half, end = np.mean(lengths, axis=0)
            share = f"{np.mean(explained):.2f}" if explained else ""
            print(f"| {half:,.0f}, {end:,.0f} | {np.mean(ranks):.2f} | {share} |")


def draw():
    """Return, KL and L of the arms that have the same seeds of all games."""
    folders, labels = [], []
    for arm, name in ARMS.items():
        if found := sorted((HERE / "runs").glob(f"{arm}__*/")):
            folders += found
            labels.append(f"*/{arm}__*={name}")
    study = report.read_study(report.Args(runs=tuple(folders), label=(tuple(labels),)))
    panels = []
    for column in (plot.RETURN, plot.KL, plot.LENGTH):
        for place, game in enumerate(study.games):
            found = {}
            for arm in study.arms:
                found[arm] = report.estimate(report.mean, study.curves(arm, column)[:, [place]])
            panels.append((game, column, found))
    report.draw(study, HERE / "figure.png", panels, columns=len(study.games))


if __name__ == "__main__":
    print_scores()
    print_signals()
    try:
        draw()
    except ValueError as error:  # seeds are missing
        raise SystemExit(f"no figure yet: {error}") from None
