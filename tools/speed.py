"""The ruler: how fast pqn_abs.py trains, beside the bare emulator and other people's scripts.

    python tools/speed.py --peer "CleanRL=python pqn_atari_envpool.py --num-envs 128 --num-steps 32
        --num-minibatches 4 --update-epochs 2 --total-timesteps {steps}"

Each script runs as its user would run it, once for few steps and once for many. Its speed is the
extra steps over the extra seconds: imports, loading games and saving are left out. Ratios are taken
within a repeat: a machine that slows down slows all alike.

    git worktree add ../before HEAD~1
    python tools/speed.py --turns "before=python ../before/pqn_abs.py" "after=python pqn_abs.py"

--turns is for a machine whose speed varies within minutes: all versions start, and one at a time
goes on for some iterations and is stopped again (SIGSTOP), in an order drawn anew in each repeat.
Samples go to stdout as CSV, and a table of them to stderr. Runs on Linux and macOS.
"""

import csv
import os
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.suite import failure

SCRIPT = Path(__file__).resolve().parents[1] / "pqn_abs.py"
ITERATIONS = 3  # that count in a turn; one more goes before them, torn by the stop
PLAY = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import numpy as np
import tyro
import pqn_abs
args = tyro.cli(pqn_abs.Args)
envs = pqn_abs.make_envs(args)
envs.reset(seed=args.seed)
rng = np.random.default_rng(args.seed)
for _ in range(args.total_timesteps // args.num_envs):
    envs.step(rng.integers(envs.single_action_space.n, size=args.num_envs))
"""  # its environments alone, with random actions


@dataclass
class Args:
    flags: str = ""  # of pqn_abs.py and its emulator: --flags="--precision float32"
    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND, once for each; {steps} in it stands for its number of steps"""
    short: int = 16_384  # steps of the short runs
    long: int = 81_920  # steps of the long runs
    turns: tuple[str, ...] = ()  # NAME=COMMAND each, instead of all this: versions that take turns
    repeats: int = 3  # of all runs or turns


def fail(message, status=2):
    print(f"speed.py: {message}", file=sys.stderr)
    raise SystemExit(status)


def named(option, texts) -> dict[str, list[str]]:
    result = {}
    for text in texts:
        name, _, words = text.partition("=")
        if not (name and words) or name in result:
            fail(f"{option} {text!r}: it must be NAME=COMMAND, each name once")
        if option == "--peer" and "{steps}" not in words:
            fail(f"{option} {text!r}: {{steps}} must stand where it takes its number of steps")
        result[name] = shlex.split(words)
    return result


def run_once(command, steps, folder) -> tuple[float, int]:
    """Seconds from start to exit, and peak memory in MiB."""
    words = [word.replace("{steps}", str(steps)) for word in command]
    log = folder / "log"
    started = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    _, status, usage = os.wait4(process.pid, 0)  # unlike process.wait(), it tells the memory
    seconds = time.perf_counter() - started
    if status != 0:
        fail(f"{words[:2]} failed: {failure(log.read_text())}", 1)
    return seconds, usage.ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def measure(commands, args, folder):
    """For each repeat and command: its name, steps per second, and peak memory in MiB."""
    for command in commands.values():
        run_once(command, args.short, folder)  # fills the disk's cache and compilers' caches
    for _ in range(args.repeats):
        for name in random.sample(list(commands), len(commands)):
            short_seconds, _ = run_once(commands[name], args.short, folder)
            long_seconds, memory = run_once(commands[name], args.long, folder)
            if long_seconds <= short_seconds:
                fail(f"{name} took no longer for more steps: raise --long", 1)
            yield name, (args.long - args.short) / (long_seconds - short_seconds), memory


class Version:
    """A run that is stopped unless it is its turn."""

    def __init__(self, name, words, folder):
        self.name = name
        self.folder = folder
        folder.mkdir()
        endless = ["--total-timesteps", "1000000000", "--checkpoint-every", "1000000"]
        words = [*words, "--no-adapt-rollout", "--runs-dir", str(folder), *endless]
        with (folder / "log").open("w") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=file)

    def rows(self) -> list[dict]:
        text = "".join(path.read_text() for path in self.folder.glob("*/metrics.csv"))
        return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))

    def wait(self, count) -> list[dict]:
        while len(self.rows()) < count:
            if self.process.poll() is not None:
                fail(f"{self.name} ended: {failure((self.folder / 'log').read_text())}", 1)
            time.sleep(0.02)
        return self.rows()

    def turn(self) -> float:
        """Steps per second of some iterations, after the one that the last stop has torn."""
        torn = len(self.rows())
        self.process.send_signal(signal.SIGCONT)
        rows = self.wait(torn + 1 + ITERATIONS)
        self.process.send_signal(signal.SIGSTOP)
        start, end = rows[torn], rows[torn + ITERATIONS]
        seconds = float(end["charts/seconds"]) - float(start["charts/seconds"])
        return (int(end["global_step"]) - int(start["global_step"])) / seconds


def take_turns(commands, args, folder):
    """For each repeat and version: its name, steps per second, and no memory."""
    versions = []
    try:
        for name, words in commands.items():
            version = Version(name, words, folder / str(len(versions)))
            versions.append(version)
            version.wait(2)
            version.process.send_signal(signal.SIGSTOP)
        for _ in range(args.repeats):
            for version in random.sample(versions, len(versions)):
                yield version.name, version.turn(), ""
    finally:
        for version in versions:
            version.process.kill()
            version.process.wait()


def table(speeds) -> str:
    """Markdown: medians, and the range of ratios within a repeat."""
    first = next(iter(speeds))
    lines = [f"| | steps/s | {first} is × as fast | from | to |", "|---|---|---|---|---|"]
    for name, own in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(speeds[first], own, strict=True)]
        row = f"| {name} | {median(own):,.0f} | {median(ratios):.2f} | "
        lines.append(row + f"{min(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines)


def main(args):
    if args.repeats < 1 or not 0 < args.short < args.long:
        fail("--repeats must be at least 1, and --short less than --long")
    with tempfile.TemporaryDirectory() as folder:
        if args.turns:
            commands = named("--turns", args.turns)
            samples = take_turns
        else:
            own = ["--runs-dir", folder, "--total-timesteps", "{steps}", *shlex.split(args.flags)]
            commands = {
                "pqn_abs.py": [sys.executable, str(SCRIPT), "--no-adapt-rollout", *own],
                "bare emulator": [sys.executable, "-c", PLAY, *own],
                **named("--peer", args.peer),
            }
            samples = measure
        speeds = {name: [] for name in commands}
        print("name,steps_per_second,peak_memory_mib", flush=True)
        for name, speed, memory in samples(commands, args, Path(folder)):
            speeds[name].append(speed)
            print(f"{name},{speed:.1f},{memory}", flush=True)
    print(table(speeds), file=sys.stderr)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError) as error:  # no such command, no such folder, torn quotation marks
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted", 130)
