r"""Many runs from one command: scripts x games x seeds x arms, some at once, over many sittings.

    python tools/suite.py --games Breakout Pong --seeds 1 2 3 --jobs 2 \
        --arms "abs=" "fixed32=--no-adapt-rollout --num-steps 32"

An arm is NAME=FLAGS: options that its runs get. If FLAGS begins with a file, that is the arm's
script, instead of --scripts. Breakout means BreakoutNoFrameskip-v4; other ids are handed on as they
are. A run's folder is <runs-dir>/<arm>__<game>__<seed>, and what it prints is in the .log beside
it. Runs at once share the cores, by OMP_NUM_THREADS unless that is set.

The same command again goes on, whatever ended the last one: a run is done when metrics.csv has
reached total_timesteps, or resumes from its checkpoint, or starts anew if there is none. A run goes
on as it began: other options need another arm's name. Ctrl-C lets each run finish its iteration and
save; a second one ends all at once. The exit status is 0 if all are done. For Linux and macOS.
"""

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import tyro

OWN = ("--env-id", "--seed", "--runs-dir", "--run-name", "--resume")  # for the suite to set
signals = []  # that this process has got


@dataclass
class Args:
    games: tuple[str, ...]  # Breakout, ALE/Breakout-v5, or what else the scripts take as --env-id
    scripts: tuple[str, ...] = ("pqn_abs.py",)  # each runs every game, seed and arm
    seeds: tuple[int, ...] = (1, 2, 3)  # one run each
    arms: tuple[str, ...] = ("abs=",)  # NAME=FLAGS each
    runs_dir: Path = Path("runs/suite")  # where the runs' folders are
    jobs: int = 1  # runs at once


def list_runs(args) -> dict[Path, list[str]]:
    """Folders, and what is run in them. Seed by seed, so that unfinished arms can be compared."""
    runs = {}
    for seed, game, arm, script in product(args.seeds, args.games, args.arms, args.scripts):
        name, equals, text = arm.partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"--arms {arm!r}: it must be NAME=FLAGS, NAME without spaces or /")
        flags = shlex.split(text)
        if flags and not flags[0].startswith("-"):
            script = flags.pop(0)
        if not Path(script).is_file():
            raise ValueError(f"there is no script {script}")
        for flag in flags:
            if flag.partition("=")[0].replace("_", "-") in OWN:
                raise ValueError(f"--arms {arm!r}: {flag} is for the suite to set")
        if len(args.scripts) > 1:
            name += f"-{Path(script).stem}"
        env_id = f"{game}NoFrameskip-v4" if re.fullmatch(r"[A-Z]\w*", game) else game
        folder = args.runs_dir / f"{name}__{env_id.replace('/', '-')}__{seed}"
        if folder in runs:
            raise ValueError(f"{folder} comes twice: give each script, game, seed and arm once")
        runs[folder] = [script, "--env-id", env_id, "--seed", str(seed), *flags]
    return runs


def is_done(folder) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
        rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
        return int(rows[-1]["global_step"]) >= config["args"]["total_timesteps"]
    except (FileNotFoundError, IndexError):
        return False  # no row yet


def play(folder, words) -> None:
    """Run to the end, unless the suite is to stop, and print how it ended."""
    if signals:
        return
    with Path(f"{folder}.log").open("a") as log:
        try:  # the run inherits the lock, and holds it even if the suite is killed
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder.name}: another process is at work on it", flush=True)
            return
        if (folder / "checkpoint.pt").exists():
            run = [words[0], "--resume", str(folder)]
        else:
            shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint
            run = [*words, "--runs-dir", str(folder.parent), "--run-name", folder.name]
        print(f"{folder.name}: started", flush=True)
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # In a session of its own: the terminal's Ctrl-C reaches it through the suite only.
        process = subprocess.Popen([sys.executable, *run], start_new_session=True, **streams)
        told = 0
        while process.poll() is None:
            time.sleep(0.1)
            if len(signals) > told:  # background processes ignore SIGINT while they load
                told += 1
                process.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
        ended = f"failed with status {process.returncode}, see {log.name}"
        if told or process.returncode == 0:
            ended = "interrupted"
        if is_done(folder):
            ended = "done"
        print(f"{folder.name}: {ended}", flush=True)


def main(args) -> int:
    runs = list_runs(args)
    left = {folder: words for folder, words in runs.items() if not is_done(folder)}
    with ThreadPoolExecutor(args.jobs) as pool:
        args.runs_dir.mkdir(parents=True, exist_ok=True)
        print(f"runs: {len(runs)}, left: {len(left)}, at once: {args.jobs}", flush=True)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *received: signals.append(received))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
        os.environ["PYTHONUNBUFFERED"] = "1"  # logs keep the order of what is said
        list(pool.map(play, left.keys(), left.values()))
    return int(not all(map(is_done, runs)))


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except (OSError, ValueError) as error:  # a bad folder, a quotation mark alone in --arms
        sys.exit(f"suite.py: {error}")
