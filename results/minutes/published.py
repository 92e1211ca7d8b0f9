"""Our two runs beside the curves that CleanRL publishes:  published.py pqn.png

pqn.png is docs/rl-algorithms/pqn/pqn.png of its repository (commit fe8d8a0), the mean of three
seeds. A value is the height of the line's middle there, the mean of five columns of pixels.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import image

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot

LINE = np.array([76, 114, 176]) / 255  # its colour
X = {0: 87, 10e6: 375}  # steps: column of pixels, of both panels' first and last tick
PANELS = {  # scores: row of pixels, of two ticks; million steps
    "Breakout": ({0: 292, 400: 123}, (1, 2, 3, 4, 5, 6, 7, 8)),
    "Pong": ({-20: 557, 20: 387}, (0.5, 1, 1.25, 1.5, 2, 2.5, 3)),
}

picture = image.imread(sys.argv[1])[:, :, :3]
for game, (scores, millions) in PANELS.items():
    run = plot.read_run(Path(__file__).parent / "runs" / game.lower())
    (low, bottom), (high, top) = scores.items()
    published, ours = [], []
    for million in millions:
        middle = round(np.interp(million * 1e6, list(X), list(X.values())))
        rows = []
        for column in range(middle - 2, middle + 3):
            near = np.abs(picture[top - 20 : bottom + 5, column] - LINE).sum(axis=1) < 0.3
            rows.append(top - 20 + np.flatnonzero(near).mean())
        published.append(low + (bottom - np.mean(rows)) / (bottom - top) * (high - low))
        last = np.searchsorted(run.columns[plot.STEP], million * 1e6, side="right") - 1
        ours.append(run.columns[plot.RETURN][last])
    print(f"| {game}, million steps | " + " | ".join(f"{million:g}" for million in millions) + " |")
    print("|---" * (len(millions) + 1) + "|")
    for name, values in (("CleanRL, three seeds", published), ("ours", ours)):
        print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
