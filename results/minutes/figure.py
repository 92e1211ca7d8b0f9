"""The table and the figure of this folder."""

import csv
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

HERE = Path(__file__).parent
PROGRAMS = {"ours": "pqn_abs.py", "pqn": "CleanRL, PQN", "ppo": "CleanRL, PPO"}
TARGETS = (("breakout", 10), ("breakout", 20), ("pong", -10))


def curves(program, game):
    """Rows (minutes, global_step, score) of each run, in the order of seeds."""
    runs = []
    for path in sorted(HERE.glob(f"{program}_{game}_*.csv")):
        with path.open() as file:
            runs.append([[float(value) for value in row] for row in list(csv.reader(file))[1:]])
    return runs


print("| score | " + " | ".join(PROGRAMS.values()) + " |")
print("|---" * (1 + len(PROGRAMS)) + "|")
for game, target in TARGETS:
    cells = []
    for program in PROGRAMS:
        results = []
        for rows in curves(program, game):
            result = f"{rows[-1][2]:.1f} after {rows[-1][0]:.0f} ({rows[-1][1] / 1000:,.0f}k steps)"
            for minutes, step, score in rows:
                if score >= target:
                    result = f"**{minutes:.0f}** ({step / 1000:,.0f}k steps)"
                    break
            results.append(result)
        cells.append(", ".join(results))
    print(f"| {game.title()} {target} | " + " | ".join(cells) + " |")

figure, axes = plot.plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
lines = {}
for axis, game in zip(axes, ("breakout", "pong"), strict=True):
    for i, (program, name) in enumerate(PROGRAMS.items()):
        for rows in curves(program, game):
            minutes, _, scores = zip(*rows, strict=True)
            (lines[name],) = axis.plot(minutes, scores, **plot.style(i, len(rows)))
    axis.set(title=game.title(), xlabel="Time on one core (minutes)")
    axis.set(ylabel="Mean of the last 100 games\n(points)")
plot.legend(figure, lines)
plot.save(figure, HERE / "figure.png")
