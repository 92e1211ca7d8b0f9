"""The ruler: how fast pqn_abs.py trains, beside other people's scripts.

    python tools/speed.py --peer "CleanRL=python pqn_atari_envpool.py --num-envs 128 --num-steps 32
        --num-minibatches 4 --update-epochs 2 --total-timesteps {steps}"

Each script runs once for few steps and once for many. Its speed is the extra steps over the extra
seconds: imports, loading games and saving are left out.

    python tools/speed.py --turns "before=python ../before/pqn_abs.py" "after=python pqn_abs.py"

--turns is for a machine whose speed varies within minutes: all versions start, and one at a time
goes on for some iterations and is stopped again (SIGSTOP), in an order drawn anew in each repeat.
Samples go to stdout as CSV, and a table of them to stderr. Runs on Linux and macOS.
"""

import csv
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

SCRIPT = Path(__file__).resolve().parents[1] / "pqn_abs.py"
ITERATIONS = 3  # that count in a turn; one more goes before them, torn by the stop


@dataclass
class Args:
    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND, once for each; {steps} in it stands for its number of steps"""
    short: int = 16_384  # steps of the short runs
    long: int = 81_920  # steps of the long runs
    turns: tuple[str, ...] = ()  # NAME=COMMAND each, instead of all this: versions that take turns
    repeats: int = 3  # of all runs or turns


def read_commands(texts, commands) -> dict[str, list[str]]:
    """These commands and those of the texts, by name."""
    for text in texts:
        name, _, words = text.partition("=")
        words = shlex.split(words)
        if not (name.strip() and words) or name in commands:
            raise ValueError(f"{text!r}: it must be NAME=COMMAND, each name once")
        commands = commands | {name: words}
    return commands


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


def read_rows(folder) -> list[tuple[int, float]]:
    """Step and seconds of each row of a run's metrics.csv."""
    text = "".join(path.read_text() for path in folder.glob("*/metrics.csv"))
    table = csv.DictReader(text.splitlines())
    return [(int(row["global_step"]), float(row["charts/seconds"])) for row in table]


def wait(process, folder, more) -> list[tuple[int, float]]:
    """The rows of a run's metrics.csv, as soon as there are so many more."""
    before = len(read_rows(folder))
    while len(rows := read_rows(folder)) < before + more:
        if process.poll() is not None:
            raise ValueError(f"a version ended: {(folder / 'log').read_text()[-200:]!r}")
        time.sleep(0.02)
    return rows


def take_turns(commands, args, folder):
    """For each repeat and version: its name and its steps per second. Others stand still."""
    versions = {}
    endless = "--no-adapt-rollout --total-timesteps 1000000000 --checkpoint-every 1000000"
    try:
        for name, words in commands.items():
            own = folder / str(len(versions))
            own.mkdir()
            words = [*words, "--runs-dir", str(own), *endless.split()]
            with (own / "log").open("w") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log)
            versions[name] = process, own
            wait(process, own, 2)
            process.send_signal(signal.SIGSTOP)
        for _ in range(args.repeats):
            for name in random.sample(list(versions), len(versions)):
                process, own = versions[name]
                process.send_signal(signal.SIGCONT)
                rows = wait(process, own, 1 + ITERATIONS)
                process.send_signal(signal.SIGSTOP)
                (first, start), (last, end) = rows[-1 - ITERATIONS], rows[-1]
                yield name, (last - first) / (end - start)
    finally:
        for process, _ in versions.values():
            process.kill()
            process.wait()


def main(args):
    if args.repeats < 1 or not 0 < args.short < args.long:
        raise ValueError("--repeats must be at least 1, and --short less than --long")
    with tempfile.TemporaryDirectory() as folder:
        own = f"--no-adapt-rollout --runs-dir {folder} --total-timesteps {{steps}}"
        commands = {"pqn_abs.py": [sys.executable, str(SCRIPT), *own.split()]}
        commands = read_commands(args.peer, commands)
        samples = measure(commands, args)
        if args.turns:
            commands = read_commands(args.turns, {})
            samples = take_turns(commands, args, Path(folder))
        speeds = {name: [] for name in commands}
        print("name,steps_per_second", flush=True)
        for name, speed in samples:
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
        print(f"speed.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
