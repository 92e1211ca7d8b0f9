"""Over steps, the probability that a run of one arm is ahead of one of another: improvement.png.

It takes tools/report.py's arguments, and puts the figure beside that tool's.
"""

import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

args = tyro.cli(report.Args, description=__doc__)
study = report.read_study(args)
panels = []
for arm in dict.fromkeys(first for first, _ in args.contrast):
    found = {}
    for second in [second for first, second in args.contrast if first == arm]:
        curves = study.curves(arm, plot.RETURN), study.curves(second, plot.RETURN)
        found[second] = report.estimate(report.improvement, *curves)
    panels.append((f"Probability that {arm} is ahead of others", "Probability", found))
report.draw(study, args.out / "improvement.png", panels, columns=1, sharey=True)
