"""Contrasts of the confirmation's greedy scores, by tools/report.py's statistics.

python results/minatar_study/greedy.py

greedy.txt has a line of tools/watch.py for each run: the mean score of 100 whole games. The second
p is corrected for the four contrasts.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools.report import Study, contrast_rows

means = {}
for line in (Path(__file__).parent / "greedy.txt").read_text().splitlines():
    run, _, text = line.partition(" ")
    means[tuple(run.split("__"))] = float(text.partition("mean ")[2].partition(",")[0])
arms, games, seeds = (sorted({run[i] for run in means}) for i in range(3))
scores = {}
for arm in arms:
    scores[arm] = np.array([[means[arm, game, seed] for seed in seeds] for game in games])
    cells = [f"{values.mean():.2f} ({values.std(ddof=1):.2f})" for values in scores[arm]]
    print(f"| {arm} | {' | '.join(cells)} |")
study = Study(games, {}, scores, caption="", is_small=False, is_human=False)
for row in contrast_rows(study, ["ab", "ac", "de", "da"]):
    if row["game"] == "All games":
        interval = f"{row['change']:+.1f}% ({row['change_low']:.1f} to {row['change_high']:.1f})"
        print(f"{row['arm']} - {row['against']}: {interval}, p {row['p']:.2g}, {row['p_holm']:.2g}")
