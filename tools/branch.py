"""Does the batch size matter less where BD is lower? A run goes on, from where its BD has fallen to, with several L.

    python tools/branch.py --levels 0.5 0.3 --lengths 16 32 64 --samples 200000 -- --env-id BreakoutNoFrameskip-v4
    python tools/branch.py --script examples/minatar_abs.py --samples 100000 -- --env-id breakout

Arguments after -- are the script's: pqn_abs.py, or one that replaces its environments and network, as the example does.
For each seed a run is trained until the mean of its last five BDs (the untrained network's, often near 0, left out) has
fallen to the highest level, then to the next, and so on; each time its checkpoint is kept. From each checkpoint it goes
on with each fixed rollout length, for the same number of environment steps and with the same ε: batch sizes differ,
samples do not. The score of a branch is the mean return of the episodes that end in its second half.

How much L matters at a level is told by the spread: the largest mean score over L less the smallest, relative to their
mean. Noise alone makes some of it. How much is told by giving each seed's scores to its branches at random: of 2,000
such spreads, 95% are below "by chance", and p is the share of those that are at least as large as the real one. Levels
can be compared where their spreads stand out from chance. --out gets the runs, branches.csv and branches.png.
"""

import csv
import importlib.util
import itertools
import math
import shutil
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import pqn_abs
from tools import plot


@dataclass
class Args:
    script: Path = Path("pqn_abs.py")  # the script, or an example that replaces pqn_abs.py's parts
    levels: tuple[float, ...] = (0.5, 0.3)  # BD, from high to low
    lengths: tuple[int, ...] = (16, 32, 64)  # fixed rollout lengths L of the branches
    seeds: tuple[int, ...] = (1, 2, 3)
    samples: int = 200_000  # environment steps of each branch
    out: Path = Path("branches")  # folder of the runs and results


def fail(message: str):
    print(f"branch.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def replace_parts(path: Path, words: list[str]) -> None:
    """Have the script at path replace parts of pqn_abs, as it does when it is run, without running anything."""
    main, pqn_abs.main, sys.argv = pqn_abs.main, lambda args: None, [str(path), *words]
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        script = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = script  # where dataclasses look for it
        spec.loader.exec_module(script)
    except (OSError, ImportError, AttributeError) as error:
        fail(f"--script {path}: {error}")
    pqn_abs.main = main
    for name in ("Args", "QNetwork", "make_envs"):
        setattr(pqn_abs, name, getattr(script, name, getattr(pqn_abs, name)))
    if hasattr(script, "main") or script.__dict__.get("pqn_abs") is not pqn_abs:
        fail(f"--script {path}: it must be pqn_abs.py, or a script that imports it and replaces its parts")


def train_to(level: float, words: list[str]) -> tuple[Path, float | None]:
    """Train until the mean of the last five BDs is at most level: the run's folder, and that mean if it ever is."""
    recent, reached, write = deque(maxlen=5), [], pqn_abs.Table.write
    untrained = "--resume" not in words

    def watch(table, row):
        write(table, row)
        nonlocal untrained
        if row.get(plot.DIVERGENCE) is not None and not reached:
            if not untrained:
                recent.append(row[plot.DIVERGENCE])
            untrained = False
            if len(recent) == 5 and np.mean(recent) <= level:
                reached.append(float(np.mean(recent)))
                signal.raise_signal(signal.SIGINT)  # the script finishes the iteration, saves and returns

    pqn_abs.Table.write = watch
    folder = pqn_abs.main(pqn_abs.parse_args(words))
    pqn_abs.Table.write = write
    return (folder, reached[0]) if reached else (whole(folder), None)


def whole(folder: Path) -> Path:
    """The folder of a run that reached its end; one that did not was stopped by a Ctrl-C, and so is all the rest."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    if state["global_step"] < state["args"]["total_timesteps"]:
        raise KeyboardInterrupt
    return folder


def branch(checkpoint: Path, folder: Path, length: int, samples: int) -> float:
    """Go on from a checkpoint with a fixed L; the mean return of the episodes that end in the second half."""
    state = torch.load(checkpoint, weights_only=True)
    args, start = state["args"], state["global_step"]
    duration, end = args["exploration_fraction"] * args["total_timesteps"], start + samples
    args |= {"adapt_rollout": False, "num_steps": length, "total_timesteps": end}
    # ε stays the same function of the step, and where it is still falling at the end, the end is a point of its line
    args["end_e"] = pqn_abs.linear_schedule(args["start_e"], args["end_e"], duration, end)
    args["exploration_fraction"] = min(1.0, duration / end)
    state |= {"adaptive_length": float(length), "recent_scores": []}
    folder.mkdir(parents=True)
    torch.save(state, folder / "checkpoint.pt")
    whole(pqn_abs.main(pqn_abs.parse_args(["--resume", str(folder / "checkpoint.pt")])))
    with open(folder / "episodes.csv") as file:
        rows = [row for row in csv.DictReader(file) if int(row["global_step"]) > start + samples / 2]
    return float(np.mean([float(row["episodic_return"]) for row in rows])) if rows else math.nan


def spread(means: list[float]) -> float:
    """The largest less the smallest, relative to the mean."""
    return float((max(means) - min(means)) / max(abs(np.mean(means)), 1e-9))


def table(rows: list[dict], lengths: tuple[int, ...]) -> list[dict]:
    """By level: how many seeds reached it, the mean score of each L, their spread, and what chance makes of it."""
    lines, rng = [], np.random.default_rng(0)
    for level in sorted({row["level"] for row in rows}, reverse=True):
        seeds = sorted({row["seed"] for row in rows if row["level"] == level})
        by_seed = {(row["seed"], row["rollout_length"]): row["score"] for row in rows if row["level"] == level}
        scores = np.array([[by_seed[seed, length] for length in lengths] for seed in seeds])
        real = spread(scores.mean(axis=0))
        draws = np.array([spread(rng.permuted(scores, axis=1).mean(axis=0)) for _ in range(2000)])
        p = np.mean(draws >= real * (1 - 1e-9)) if len(seeds) > 1 else math.nan  # all orders of one seed are alike
        line = {"BD": level, "seeds": len(seeds)}
        line |= {f"L = {length}": float(mean) for length, mean in zip(lengths, scores.mean(axis=0), strict=True)}
        lines.append(line | {"spread": real, "by chance": float(np.quantile(draws, 0.95)), "p": float(p)})
    return lines


def draw(rows: list[dict], lines: list[dict], lengths: tuple[int, ...], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for line, colour in zip(lines, itertools.cycle(plot.COLOURS), strict=False):
        means = [line[f"L = {length}"] for length in lengths]
        axis.plot(lengths, means, "-", color=colour, label=f"from BD = {line['BD']}")
        points = [(row["rollout_length"], row["score"]) for row in rows if row["level"] == line["BD"]]
        axis.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.6)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, lengths)
    axis.set_xlabel("Rollout length L of the branch")
    axis.set_ylabel("Mean return, second half")
    axis.grid(color="0.9")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(args: Args, words: list[str]) -> None:
    if not args.levels or not 1 >= args.levels[0] > 0 or args.levels[-1] <= 0:
        fail("--levels: numbers above 0 and up to 1, from high to low")
    for name in ("levels", "lengths", "seeds"):
        values = getattr(args, name)
        if not values or list(values) != sorted(set(values), reverse=name == "levels"):
            fail(f"--{name}: at least one, in {'falling' if name == 'levels' else 'rising'} order, each once")
    if min(args.samples, *args.lengths) < 1:
        fail("--lengths and --samples must be at least 1")
    if taken := {word.partition("=")[0].replace("_", "-") for word in words} & {"--seed", "--runs-dir", "--resume"}:
        fail(f"{taken.pop()} is for branch.py to set: leave it out")
    if args.out.exists():
        fail(f"--out {args.out} is there already; take another folder, or move it away")
    if args.script.resolve() != Path(pqn_abs.__file__).resolve():
        replace_parts(args.script, words)
    for seed, length in itertools.product(args.seeds, (None, *args.lengths)):
        fixed = ["--no-adapt-rollout", "--num-steps", str(length)] if length is not None else []
        pqn_abs.check_args(pqn_abs.parse_args([*words, "--seed", str(seed), *fixed]))
    rows = []
    for seed in args.seeds:
        base = ["--seed", str(seed), "--runs-dir", str(args.out / "bases"), *words]
        for level in args.levels:
            folder, reached = train_to(level, base)
            base = ["--resume", str(folder / "checkpoint.pt")]  # for the next level
            if reached is None:
                print(f"seed {seed}: BD never fell to {level}")
                break
            kept = args.out / f"BD_{level}_seed_{seed}.pt"
            shutil.copy(folder / "checkpoint.pt", kept)
            for length in args.lengths:
                score = branch(kept, args.out / f"BD_{level}_seed_{seed}_L_{length}", length, args.samples)
                step = torch.load(kept, weights_only=True)["global_step"]
                row = {"level": level, "seed": seed, "BD": reached, "step": step, "rollout_length": length}
                rows.append(row | {"score": score})
                with open(args.out / "branches.csv", "w", newline="") as file:  # whatever happens later
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)
    if not rows:
        fail("no run's BD fell to any of the levels")
    lines = table(rows, args.lengths)
    draw(rows, lines, args.lengths, args.out / "branches.png")
    print("| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|")
    for line in lines:
        print("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in line.values()) + " |")


if __name__ == "__main__":
    here = sys.argv[1:]
    cut = here.index("--") if "--" in here else len(here)
    try:
        main(tyro.cli(Args, args=here[:cut], description=__doc__), here[cut + 1 :])
    except KeyboardInterrupt:
        print("branch.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
