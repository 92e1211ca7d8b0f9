"""Keep of a suite's runs what figures are made of, in one archive, to be committed.

    python tools/pack.py runs/study results/study/runs.tar.gz [--thin]
    tar xzf results/study/runs.tar.gz -C results/study

The archive holds one folder, named as the archive is. In it each run has its config.json, and of
metrics.csv all columns but losses, speeds, ε and batch sizes, numbers with six digits. The last row
has the seconds that the run took. --thin keeps only the rows in which the divergence was measured,
and the last one. The same runs give the same archive.
"""

import csv
import gzip
import io
import json
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tools import plot
from tools.suite import is_done

LEFT_OUT = ("losses/", "charts/SPS", "charts/epsilon", "abs/batch_size")  # batch = L times E
SECONDS = "charts/seconds"  # earlier runs have this column


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # a folder of runs
    archive: tyro.conf.Positional[Path]  # .tar.gz
    thin: bool = False  # keep only the rows in which the divergence was measured


def packed_metrics(path: Path, thin: bool) -> str:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows yet")
    last = rows[-1]
    if SECONDS not in last:
        last[SECONDS] = sum(float(row["abs/batch_size"]) / float(row["charts/SPS"]) for row in rows)
    names = [name for name in last if not name.startswith(LEFT_OUT)]
    if thin:
        rows = [row for row in rows if row.get(plot.DIVERGENCE) or row.get(plot.KL) or row is last]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if row is not last:
            row[SECONDS] = ""
        for name in names:
            if "." in str(row[name]):
                row[name] = f"{float(row[name]):.6g}"
        writer.writerow(row)
    return text.getvalue()


def packed_config(path: Path) -> str:
    config = json.loads(path.read_text())
    config["args"] |= {"runs_dir": "runs", "resume": None}  # not the paths of a machine
    return json.dumps(config, indent=2) + "\n"


def main(args) -> None:
    files = {}
    runs = [path.parent for path in sorted(args.runs.rglob("config.json"))]
    if not runs:
        raise ValueError(f"{args.runs} holds no run")
    for run in runs:
        name = f"{args.archive.name.removesuffix('.tar.gz')}/{run.relative_to(args.runs)}"
        files[f"{name}/config.json"] = packed_config(run / "config.json")
        files[f"{name}/metrics.csv"] = packed_metrics(run / "metrics.csv", args.thin)
    with (
        args.archive.open("wb") as file,
        gzip.GzipFile(args.archive.name, "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    unfinished = len(runs) - sum(map(is_done, runs))
    print(f"{args.archive}: {len(runs)} runs, {unfinished} of them unfinished")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:
        sys.exit(f"pack.py: {error}")
