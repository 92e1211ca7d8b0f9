"""The table and the figure of this folder."""

import csv
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

HERE = Path(__file__).parent
PROGRAMS = {"ours": "pqn_abs.py", "pqn": "CleanRL, PQN", "ppo": "CleanRL, PPO"}
TARGETS = (("breakout", 10), ("breakout", 20), ("pong", -10))


def curve(program, game):
    """Rows (minutes, global_step, score) of one run; none where it was not made."""
    path = HERE / f"{program}_{game}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [[float(value) for value in row] for row in list(csv.reader(file))[1:]]


print("| score | " + " | ".join(PROGRAMS.values()) + " |")
print("|---" * (1 + len(PROGRAMS)) + "|")
for game, target in TARGETS:
    cells = []
    for program in PROGRAMS:
        cell = "not run"
        for minutes, step, score in curve(program, game):
            cell = f"{score:.1f} after {minutes:.0f} minutes ({step / 1000:,.0f}k steps)"
            if score >= target:
                cell = f"**{minutes:.0f} minutes** ({step / 1000:,.0f}k steps)"
                break
        cells.append(cell)
    print(f"| {game.title()} {target} | " + " | ".join(cells) + " |")

figure, axes = plot.plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for axis, game in zip(axes, ("breakout", "pong"), strict=True):
    for (program, name), colour in zip(PROGRAMS.items(), plot.COLOURS, strict=False):
        rows = curve(program, game)
        axis.plot([row[0] for row in rows], [row[2] for row in rows], color=colour, label=name)
    axis.set(title=game.title(), xlabel="minutes on one core", ylabel="mean of the last 100 games")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
figure.savefig(HERE / "figure.png", dpi=150)
