"""Keeps of a suite's finished runs what is worth committing: settings, and the rows that have BD.

python results/minatar_study/thin.py runs/minatar_selection results/minatar_study/selection

Of metrics.csv the rows in which BD was measured stay (every tenth), and the last one, by which
tools/suite.py knows a run that is copied back for done.
"""

import csv
import json
import shutil
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
target.mkdir(parents=True, exist_ok=True)
kept = 0
for folder in sorted(source.glob("*__*__*/")):
    total_timesteps = json.loads((folder / "config.json").read_text())["args"]["total_timesteps"]
    with (folder / "metrics.csv").open() as file:
        table = csv.DictReader(file)
        rows = list(table)
    if not rows or int(rows[-1]["global_step"]) < total_timesteps:
        continue  # under way
    (target / folder.name).mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", target / folder.name)
    with (target / folder.name / "metrics.csv").open("w") as file:
        writer = csv.DictWriter(file, table.fieldnames, lineterminator="\n")
        writer.writeheader()
        for row in rows[:-1]:
            if row["abs/behavioral_divergence"]:
                writer.writerow(row)
        writer.writerow(rows[-1])
    kept += 1
print(f"{kept} runs in {target}")
