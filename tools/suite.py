r"""Many runs from one command: scripts x games x seeds x arms, some at once, over many sittings.

    python tools/suite.py --games Breakout Pong --seeds 1 2 3 --jobs 2 \
        --arms "abs=" "fixed32=--no-adapt-rollout --num-steps 32"
    python tools/suite.py --scripts examples/minatar_abs.py --games breakout asterix \
        --seeds {101..112} --arms "abs=" "open=results/study/open_loop.py" --runs-dir runs/study

An arm is NAME=FLAGS: options that its runs get. If FLAGS begins with a file, that is the arm's
script, instead of --scripts. Breakout means BreakoutNoFrameskip-v4; other ids are handed on as they
are. A run's folder is <runs-dir>/<arm>__<game>__<seed>, and what it prints is in the .log beside
it. With several --scripts, the script's name is added to the arm's. Runs at once share the cores,
by OMP_NUM_THREADS unless that is set.

The same command again goes on, whatever ended the last one: a run is done when metrics.csv has
reached total_timesteps, or resumes from its checkpoint, or starts anew if there is none. Ctrl-C
lets each run finish its iteration and save; a second one ends all at once. A run that fails does
not stop the others. The exit status is 0 if all are done. For Linux and macOS.

--print prints the commands that are left, one a line, for GNU parallel or a Slurm array:

    OMP_NUM_THREADS=1 parallel -j 8 < commands.txt
    sbatch --array 1-120 --wrap 'eval "$(sed -n ${SLURM_ARRAY_TASK_ID}p commands.txt)"'
"""

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
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    print: bool = False  # print the commands that are left to run, and run nothing


def fail(message):
    print(f"suite.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_arm(arm, scripts):
    """Its name, its scripts and its options."""
    name, equals, text = arm.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", name):
        fail(f"--arms {arm!r}: it must be NAME=FLAGS, the name of letters, digits and . _ -")
    flags = shlex.split(text)
    if flags and not flags[0].startswith("-"):
        scripts = [flags.pop(0)]
    for flag in flags:
        if flag.partition("=")[0].replace("_", "-") in OWN:
            fail(f"--arms {arm!r}: {flag} is for the suite to set")
    for script in scripts:
        if not Path(script).is_file():
            fail(f"there is no script {script}")
    return name, scripts, flags


def list_runs(args) -> dict[Path, list[str]]:
    """Folders, and what is run in them. Seed by seed, so that unfinished arms can be compared."""
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: it must be at least 1")
    runs = {}
    for seed, game, arm in product(args.seeds, args.games, args.arms):
        name, scripts, flags = read_arm(arm, args.scripts)
        env_id = f"{game}NoFrameskip-v4" if re.fullmatch(r"[A-Z]\w*", game) else game
        for script in scripts:
            label = f"{name}-{Path(script).stem}" if len(scripts) > 1 else name
            folder = args.runs_dir / f"{label}__{env_id.replace('/', '-')}__{seed}"
            if folder in runs:
                fail(f"{folder.name} comes twice: give each script, game, seed and arm once")
            runs[folder] = [script, "--env-id", env_id, "--seed", str(seed), *flags]
    return runs


def remember(runs, path):
    """Keep what each folder is run with, and refuse to go on with it in another way."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for folder, words in runs.items():
        before = known.get(folder.name, words)
        if folder.exists() and before != words:
            fail(f"{folder} was run as {shlex.join(before)}: give the arm another name")
        known[folder.name] = words
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(known, indent=1) + "\n")
    new.replace(path)


def is_done(folder) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
        text = (folder / "metrics.csv").read_text()
        header, *rows = text[: text.rindex("\n")].splitlines()  # a kill may tear the last one
        row = dict(zip(header.split(","), rows[-1].split(","), strict=True))
        return int(row["global_step"]) >= config["args"]["total_timesteps"]
    except (FileNotFoundError, ValueError, KeyError, IndexError, TypeError):
        return False  # torn or not there yet: the script writes it again


def command(folder, words) -> list[str]:
    """What starts the run, or goes on with it."""
    if (folder / "checkpoint.pt").exists():
        return [words[0], "--resume", str(folder)]
    return [*words, "--runs-dir", str(folder.parent), "--run-name", folder.name]


def failure(said) -> str:
    """The line of a log that says what went wrong."""
    said = re.sub(r"[^\r\n]*\d%\|[^\r\n\]]*\]", "\n", said)  # progress bars leave
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    boxed = [line.strip("│ ") for line in lines if line.startswith("│")]  # tyro draws a frame
    return (boxed[:1] or lines[-1:] or ["it said nothing"])[0]


def play(folder, words) -> str | None:
    """Run to the end; returns how it ended, or None where it was not to start any more."""
    if signals:
        return None
    with Path(f"{folder}.log").open("a+", errors="replace") as log:
        try:  # the run inherits the lock, and holds it even if the suite is killed
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "another process is at work on it"
        run = command(folder, words)
        if "--resume" not in run:
            shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint
        start = log.tell()
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # In a session of its own: the terminal's Ctrl-C reaches it through the suite only.
        process = subprocess.Popen([sys.executable, *run], start_new_session=True, **streams)
        told = 0
        while process.poll() is None:
            time.sleep(0.1)
            if len(signals) > told:
                told += 1
                process.send_signal(signal.SIGINT if told == 1 else signal.SIGKILL)
        if is_done(folder):
            return "done"
        if told or process.returncode == 0:
            return "interrupted"
        log.seek(start)
        return f"failed with status {process.returncode}: {failure(log.read())} ({log.name})"


def main(args) -> int:
    runs = list_runs(args)
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    remember(runs, args.runs_dir / "suite.json")
    left = {folder: words for folder, words in runs.items() if not is_done(folder)}
    if args.print:
        for folder, words in left.items():
            run = command(folder, words)
            if folder.exists() and "--resume" not in run:  # killed before its first checkpoint
                print(f"rm -r {shlex.quote(str(folder))} && ", end="")
            print(shlex.join(["python", *run]))
        return 0
    print(f"{len(runs)} runs, {len(left)} of them left", flush=True)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, lambda *received: signals.append(received))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
    os.environ["PYTHONUNBUFFERED"] = "1"  # logs keep the order of what is said
    done = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        players = {pool.submit(play, *run): run[0] for run in left.items()}
        for player in as_completed(players):
            ended = player.result()
            done += ended == "done"
            if ended is not None:
                print(f"{players[player].name}: {ended}; {len(left) - done} left", flush=True)
    return int(done < len(left))


if __name__ == "__main__":
    try:
        raise SystemExit(main(tyro.cli(Args, description=__doc__)))
    except (OSError, ValueError) as error:  # a bad folder, a quotation mark alone in --arms
        fail(error)
