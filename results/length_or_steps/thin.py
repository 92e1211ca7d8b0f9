"""Thin the rows of finished runs so that their scores stay what they are; then pack.py packs them.

    python results/length_or_steps/thin.py runs/arms runs/thin/arms

pack.py --thin keeps every K-th return as it is. Returns rise, and K rows of long rollouts cover
more steps, so that would favour long rollouts. Here a kept row has the mean return, weighted by
steps, since the kept row before it. Kept are the rows in which δ was measured, the last one, and
the last one before the first return. A run that is thin already does not change.
"""

import csv
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools.plot import DIVERGENCE, RETURN, STEP
from tools.suite import is_done


def thinned(rows):
    kept = []
    last_fifth = 0.8 * int(rows[-1][STEP])
    before, points, steps = 0, 0.0, 0  # since the kept row before
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        step = int(row[STEP])
        own_steps = step - before
        is_at_last_fifth = before <= last_fifth < step
        is_before_last_fifth = after is not None and step <= last_fifth < int(after[STEP])
        before = step
        if row[RETURN]:
            points += own_steps * float(row[RETURN])
            steps += own_steps
        is_last_without = after is not None and not row[RETURN] and after[RETURN]
        is_kept = row[DIVERGENCE] or after is None or is_last_without
        if is_kept or is_at_last_fifth or is_before_last_fifth:
            kept.append(row | {RETURN: points / steps if steps else ""})
            points, steps = 0.0, 0
    return kept


def main(source, target):
    for run in sorted(path.parent for path in source.glob("*/config.json")):
        if not is_done(run):
            continue
        with (run / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        folder = target / run.name
        folder.mkdir(parents=True)
        shutil.copy(run / "config.json", folder)
        with (folder / "metrics.csv").open("w") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(thinned(rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
