"""The ruler: how fast pqn_abs.py trains, beside other people's scripts.

    python tools/speed.py --peer "CleanRL=python pqn_atari_envpool.py --num-envs 128 --num-steps 32
        --num-minibatches 4 --update-epochs 2 --total-timesteps {steps}"

In each repeat, each script runs once for few steps and once for many, in an order drawn anew. Its
speed is the extra steps over the extra seconds: imports, loading games and saving are left out.
Samples go to stdout as CSV, and a table of them to stderr.
"""

import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

SCRIPT = Path(__file__).resolve().parents[1] / "pqn_abs.py"


@dataclass
class Args:
    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND, once for each; {steps} in it stands for its number of steps"""
    short: int = 16_384  # steps of the short runs
    long: int = 81_920  # steps of the long runs
    repeats: int = 3  # of all runs


def run_once(command, steps) -> float:
    """Seconds from start to exit."""
    words = [word.replace("{steps}", str(steps)) for word in command]
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise ValueError(f"{words[:2]} failed: {done.stderr[-200:]!r}")
    return seconds


def measure(commands, args):
    """For each repeat and command: its name and its steps per second."""
    for command in commands.values():
        run_once(command, args.short)  # fills the disk's cache and compilers' caches
    for _ in range(args.repeats):
        for name in random.sample(list(commands), len(commands)):
            seconds = run_once(commands[name], args.long) - run_once(commands[name], args.short)
            yield name, (args.long - args.short) / seconds


def main(args):
    with tempfile.TemporaryDirectory() as folder:
        own = f"--no-adapt-rollout --runs-dir {folder} --total-timesteps {{steps}}"
        commands = {"pqn_abs.py": [sys.executable, str(SCRIPT), *own.split()]}
        for text in args.peer:
            name, _, words = text.partition("=")
            if "{steps}" not in words:
                raise ValueError(f"{text!r}: it must be NAME=COMMAND, with {{steps}} in COMMAND")
            commands[name] = shlex.split(words)
        speeds = {name: [] for name in commands}
        print("name,steps_per_second", flush=True)
        for name, speed in measure(commands, args):
            speeds[name].append(speed)
            print(f"{name},{speed:.1f}", flush=True)
    first = next(iter(speeds))
    print(f"| | steps/s | {first} is × as fast (range) |\n|---|---|---|", file=sys.stderr)
    for name, own in speeds.items():  # within a repeat, a slower machine slows all alike
        ratios = [ours / theirs for ours, theirs in zip(speeds[first], own, strict=True)]
        text = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {median(own):,.0f} | {text} |", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:  # no such command, torn quotation marks
        sys.exit(f"speed.py: {error}")
