r"""Many runs from one command: scripts x games x seeds x flag sets, as many at once as the machine carries.

    python tools/suite.py --scripts pqn_abs.py ppo_abs.py --games atari10 --seeds 1 2 3 \
        --flags "abs=--adapt-rollout" "fixed=--no-adapt-rollout" --runs-dir runs/suite

With --print it prints the plain commands that are left, one a line, for GNU parallel, xargs or a Slurm array:

    python tools/suite.py ... --print > commands.txt
    parallel -j 8 < commands.txt
    xargs -d '\n' -P 8 -I % sh -c % < commands.txt
    sbatch --array 1-120 --wrap 'eval "$(sed -n ${SLURM_ARRAY_TASK_ID}p commands.txt)"'

Ctrl-C (or SIGTERM) lets every run finish its iteration and save. The same command again goes on: runs are known by the
script and the arguments in their config.json, a complete one is left alone, an unfinished one resumes. All arguments
count but those that --resume may change; --total-timesteps counts, as schedules follow it. One run that fails does not
stop the others; what a run says is kept in <runs-dir>/logs. A script may also be one that imports another and replaces
its parts. Runs on Linux and macOS.
"""

import contextlib
import fcntl
import importlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
ATARI10 = "Amidar Bowling Frostbite KungFuMaster Riverraid BattleZone DoubleDunk NameThisGame Phoenix Qbert".split()
# Gymnasium has no Surround without sticky actions
ATARI57 = """Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing
    Breakout Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk Enduro FishingDerby Freeway Frostbite
    Gopher Gravitar Hero IceHockey Jamesbond Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix
    Pitfall Pong PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner
    ALE/Surround-v5 Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon""".split()


@dataclass
class Args:
    scripts: tuple[Path, ...] = (Path("pqn_abs.py"),)  # each runs every game, seed and flag set
    games: tuple[str, ...] = ("atari10",)
    """atari10, atari57 (its Surround is ALE/Surround-v5, with sticky actions: there is no other), names like Breakout,
    which means BreakoutNoFrameskip-v4, or full ids; what begins in lower case is left as it is"""
    seeds: tuple[int, ...] = (1, 2, 3)  # one run each
    flags: tuple[str, ...] = ("default=",)  # NAME=FLAGS each: sets of further flags, handed to every script
    runs_dir: Path = Path("runs/suite")  # where the runs' folders are made and looked for
    jobs: int | None = None  # runs at once; by default one a GPU, without GPUs one per two CPU cores
    print: bool = False  # print the commands that are left to run, and run nothing


@dataclass
class Run:
    name: str
    script: Path
    words: list[str]  # of a run from its start
    flags: list[str]
    total: int = 0  # steps that it should reach
    device: str = ""
    folder: Path | None = None  # None until there is something to show or to resume
    status: str = "waiting"  # then running, then done, interrupted or failed
    step: int = 0
    score: float | None = None
    speed: float | None = None
    note: str = ""  # why it failed
    log: Path | None = None
    log_start: int = 0  # an earlier run's words may come before
    process: subprocess.Popen | None = None
    interrupts: int = 0  # signals that it has got


def fail(message: str, status: int = 2):
    print(f"suite.py: {message}", file=sys.stderr)
    raise SystemExit(status)


def said(text: str) -> str:
    """The line that says what went wrong: the last one, or the first in the box that tyro draws."""
    text = re.sub(r"\r[^\r\n\[]*\[[^\r\n\]]*\]", "\n", text)  # progress bars; a crash draws one after its traceback
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    box = [line.strip("│ ") for line in lines if line.startswith("│")]
    return (box[:1] or lines[-1:] or ["it ended without a word"])[0]


# --- What the scripts make of the command lines, and what there is already ---


class FineSoFar(Exception):
    """The script has checked all arguments, and would start to work now."""


def in_fresh_process(function, *args):
    quiet = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # Ctrl-C: no traceback
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **quiet) as pool:
        return pool.submit(function, *args).result()


def probe(script: Path, lines: list[list[str]], runs_dir: Path) -> list[dict | str]:
    """What becomes of each command line, as far as main() comes before it starts the environments, or its refusal.

    Games are tried by starting one environment. Belongs into a process of its own: scripts replace parts of others.
    """
    import torch

    def is_complete(path: Path) -> bool:  # others import one that is, and replace its parts
        return "\ndef check_args(" in path.read_text(errors="replace")

    os.environ["COLUMNS"] = "1000"  # one line of tyro's is one line
    sys.path[:0] = [str(script.resolve().parent), str(ROOT)]
    paths = [script] if is_complete(script) else [path for path in ROOT.glob("*.py") if is_complete(path)]
    modules = [importlib.import_module(path.stem) for path in paths]
    recorded, games, seen = {}, set(), []
    for path in sorted(runs_dir.glob("*/config.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what is no run is none of our business
            config = json.loads(path.read_text())
            recorded[path.parent] = config["script"], dict(config["args"])

    def look(module, main, args):
        """Stands in for the script's main()."""
        make_envs = module.make_envs

        def try_game(envs_args):
            if args.env_id not in games:
                make_envs(replace(envs_args, num_envs=1)).close()
            games.add(args.env_id)
            raise FineSoFar

        module.make_envs = try_game
        try:
            main(args)
        except FineSoFar:
            seen.append((module, args))
        finally:
            module.make_envs = make_envs

    def verdict(words):
        seen.clear()
        sys.argv = [str(script), *words]
        if len(modules) == 1:
            modules[0].main(modules[0].parse_args())
        else:
            runpy.run_path(str(script), run_name="__main__")
        if not seen:
            sys.exit(f"{script} does not call the main() of a script of this project")
        (module, args), own = seen[0], dict(zip(words[0:6:2], words[1:6:2], strict=True))
        for option, value in (own | {"--resume": "None"}).items():
            if str(getattr(args, option[2:].replace("-", "_"))) != value:
                sys.exit(f"{option} is for the suite to set: leave it out of --flags")
        # what may differ between two stretches of the same run; the folder may have been named in another way
        free = {"runs_dir", *module.RESUME_MAY_CHANGE.split()} - {"total_timesteps"}

        def identity(script, args):
            kept = {name: value for name, value in args.items() if name not in free}
            return json.dumps([script, kept], sort_keys=True)

        same = identity(Path(module.__file__).name, asdict(args))
        result = {"identity": same, "total": args.total_timesteps, "device": args.device, "folder": None, "step": 0}
        for folder, run in recorded.items():
            if identity(*run) == same and (folder / "checkpoint.pt").exists():
                step = module.load_checkpoint(str(folder / "checkpoint.pt"))["global_step"]
                if result["folder"] is None or step > result["step"]:  # of several, the one that is furthest
                    result |= {"folder": folder, "step": step}
        return result | {"gpus": torch.cuda.device_count()}

    for module in modules:
        module.main = partial(look, module, module.main)
    results = []
    for words in lines:
        errors, nowhere = io.StringIO(), open(os.devnull, "w", encoding="utf-8")  # tyro's boxes follow the encoding
        with nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(errors):
            try:
                results.append(verdict(words))
            except SystemExit as ending:
                results.append(ending.code if isinstance(ending.code, str) else said(errors.getvalue()))
            except Exception as error:  # an example may go wrong in any way
                results.append(f"{type(error).__name__}: {said(str(error))}")
    return results


# --- From the command line to the runs ---


def list_runs(args: Args) -> list[Run]:
    if not all((args.scripts, args.games, args.seeds, args.flags)):
        fail("--scripts, --games, --seeds and --flags: each needs at least one")
    if args.jobs is not None and args.jobs < 1:
        fail(f"--jobs {args.jobs}: it must be at least 1")
    for script in args.scripts:
        if not script.is_file():
            fail(f"--scripts {script}: there is no such file")
    flags = []
    for text in args.flags:
        name, equals, words = text.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not equals:
            fail(f"--flags {text!r}: it must be NAME=FLAGS, the name of letters, digits, '.', '_' and '-'")
        try:
            flags.append((name, shlex.split(words)))
        except ValueError as error:
            fail(f"--flags {text!r}: {error}")
    games = [game for word in args.games for game in {"atari10": ATARI10, "atari57": ATARI57}.get(word, [word])]
    games = [f"{game}NoFrameskip-v4" if re.fullmatch(r"[A-Z]\w*", game) else game for game in games]

    runs = []
    for seed, (flag, extra), script, game in product(args.seeds, flags, args.scripts, games):
        short = re.sub(r"[^\w.-]", "-", game.removesuffix("NoFrameskip-v4"))
        words = ["--env-id", game, "--seed", str(seed), "--runs-dir", str(args.runs_dir), *extra]
        runs.append(Run(f"{short}__{script.stem}__{flag}__{seed}", script, words, extra))
    name, count = Counter(run.name for run in runs).most_common(1)[0]
    if count > 1:
        fail(f"{name} comes {count} times: name each script, game, seed and flag set once")
    return runs


def check(runs: list[Run], runs_dir: Path) -> int:
    """Let the scripts check what they are given, and take up what there is already; returns the number of GPUs."""
    names = {}
    for script in dict.fromkeys(run.script for run in runs):
        own = [run for run in runs if run.script == script]
        for run, found in zip(own, in_fresh_process(probe, script, [run.words for run in own], runs_dir), strict=True):
            if isinstance(found, str):
                fail(f"{run.name}: {found}")
            if (other := names.setdefault(found["identity"], run.name)) != run.name:
                fail(f"{run.name} and {other} are the same run: they have the same arguments")
            run.total, run.device, run.folder, run.step = (found[k] for k in ("total", "device", "folder", "step"))
            if run.folder and run.step >= run.total:
                run.status = "done"
                look_up(run)
    return found["gpus"]


def command(run: Run) -> list[str]:
    if run.folder:
        return [str(run.script), "--resume", str(run.folder / "checkpoint.pt"), *run.flags]
    return [str(run.script), *run.words]


def environment(run: Run, slot: int, jobs: int, cores: int, gpus: int) -> dict[str, str]:
    """An equal share of the machine for each of the runs at once."""
    env = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ
    env |= {"PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "60"}  # logs keep the order of what is said, and stay short
    if gpus and run.device in ("auto", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = visible[slot % gpus]
    return env


# --- Running ---


def look_up(run: Run) -> None:
    """How far the run is, by the last whole line of its metrics.csv."""
    if run.log and not run.folder:
        folders = re.findall(r"this run is in (.*)\n", new_log(run))
        run.folder = Path(folders[-1]) if folders else None
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):  # there may be no such line yet
        text = (run.folder or Path()).joinpath("metrics.csv").read_text()
        header, *rows = [line.split(",") for line in text[: text.rindex("\n")].split("\n")]
        row = dict(zip(header, rows[-1], strict=True))
        run.step, score = int(row["global_step"]), row["charts/episodic_return"]
        run.score, run.speed = float(score) if score else None, run.step / float(row["charts/seconds"])


def new_log(run: Run) -> str:
    return run.log.read_bytes()[run.log_start :].decode(errors="replace")


def cells(run: Run) -> list[str]:
    score = "" if run.score is None else f"{run.score:,.1f}"
    speed = "" if run.speed is None else f"{run.speed:,.0f}"
    return [run.name, run.status, f"{run.step:,}", score, speed]


def describe(run: Run) -> str:
    name, status, step, score, speed = cells(run)
    parts = [status, f"{step} steps", score and f"return {score}", speed and f"{speed} steps/s", run.note]
    return f"{name}: " + ", ".join(part for part in parts if part)


def table(runs: list[Run], title: str) -> Table:
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("run", "status", "steps", "return", "steps/s"):
        result.add_column(column, justify="left" if column in ("run", "status") else "right", no_wrap=True)
    for run in runs:
        result.add_row(*cells(run))
    return result


def summary(runs: list[Run]) -> str:
    return ", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).items())


def start(run: Run, env: dict[str, str], runs_dir: Path, lock: io.IOBase) -> None:
    run.log, run.status = runs_dir / "logs" / f"{run.name}.log", "running"
    with run.log.open("ab") as log:
        run.log_start = log.tell()
        output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # in a session of its own, so that the terminal's Ctrl-C reaches it through us, and once
        own = {"start_new_session": True, "pass_fds": [lock.fileno()]}
        run.process = subprocess.Popen([sys.executable, *command(run)], env=env, **output, **own)


def end(run: Run) -> None:
    look_up(run)
    code = run.process.returncode
    if code == 0 and run.step >= run.total:
        run.status = "done"
    elif code == 0 or run.interrupts:
        run.status = "interrupted"
    else:
        run.status, run.note = "failed", f"exit status {code}: {said(new_log(run))} ({run.log})"


def work(runs: list[Run], args: Args, gpus: int, lock: io.IOBase) -> int:
    """Run what waits; returns the exit status."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpus = gpus and any(run.device != "cpu" for run in runs)
    jobs = args.jobs or (gpus if on_gpus else max(1, cores // 2))
    console = Console(width=None if sys.stdout.isatty() else 160)
    say = partial(console.out, highlight=False)
    waiting, running, interrupts = deque(run for run in runs if run.status == "waiting"), {}, 0
    pause = 2 if console.is_terminal else 60  # seconds
    next_look = time.monotonic() + pause

    def interrupt(signum, frame):
        nonlocal interrupts
        interrupts += 1

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    say(f"{summary(runs)}; {jobs} at once; logs are in {args.runs_dir / 'logs'}")
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:  # shows nothing but on a terminal
            while running or (waiting and not interrupts):
                for slot in sorted(set(range(jobs)) - running.keys()):
                    if waiting and not interrupts:
                        run = waiting.popleft()
                        start(run, environment(run, slot, jobs, cores, gpus), args.runs_dir, lock)
                        running[slot] = run
                        say(f"{run.name}: {'goes on' if run.folder else 'starts'} at step {run.step:,}")
                time.sleep(0.2)
                for slot, run in list(running.items()):
                    if run.process.poll() is not None:
                        end(run)
                        say(describe(running.pop(slot)))
                    elif run.interrupts < interrupts:
                        run.process.send_signal(signal.SIGINT)
                        run.interrupts += 1
                        say(f"{run.name}: told to finish its iteration and save (Ctrl-C again: to end at once)")
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + pause
                    for run in running.values():
                        look_up(run)
                        if not console.is_terminal:
                            say(describe(run))
                    live.update(table(list(running.values()), summary(runs)), refresh=True)
    finally:  # whatever happens here, no run is left alone
        for run in running.values():
            run.process.send_signal(signal.SIGINT)
    console.print(table(runs, ""))
    for run in runs:
        if run.status == "failed":
            say(describe(run))
    say(summary(runs))
    return 130 if interrupts else int(any(run.status != "done" for run in runs))


def main(args: Args) -> int:
    runs = list_runs(args)
    gpus = check(runs, args.runs_dir)
    if args.print:
        for run in runs:
            if run.status != "done":
                print(shlex.join(["python", *command(run)]))
        return 0
    try:
        (args.runs_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (args.runs_dir / "logs" / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # runs inherit it, and hold it as long as they live
    except BlockingIOError:
        fail(f"--runs-dir {args.runs_dir}: another suite, or a run that one has left behind, is at work there")
    except OSError as error:
        fail(f"can't write to {args.runs_dir}: {error.strerror}")
    with lock:
        return work(runs, args, gpus, lock)


if __name__ == "__main__":
    try:
        raise SystemExit(main(tyro.cli(Args, description=__doc__)))
    except KeyboardInterrupt:
        fail("interrupted", 130)
