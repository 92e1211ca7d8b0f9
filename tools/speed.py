"""The ruler: how fast pqn_abs.py trains, against the bare emulator and against other people's scripts.

    python tools/speed.py                                 all, at the paper's settings: half an hour
    python tools/speed.py --steps 16384:32768 --repeats 1 --skip-sweep --skip-breakdown           a first impression
    python tools/speed.py --modes "auto=" "compiled=--compile" "graphs=--compile --env-groups 1" --steps 131072:1179648
    python tools/speed.py --peer "CleanRL=python pqn_atari_envpool.py
        --num-envs 128 --num-steps 32 --num-minibatches 4 --update-epochs 2 --total-timesteps {steps}"

Every script, this one and the peers, runs as its user would run it, once for few steps and once for many. Its speed is
the extra steps over the extra seconds, so that imports, compilation and saving are left out. Repeats are interleaved,
and ratios are taken within a repeat, so that a machine that slows down slows all alike. Runs on Linux and macOS.
"""

import contextlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import tyro

# Nothing here imports torch: a process's peak memory counts from its parent's, so this one has to stay small.
SCRIPT = Path(__file__).resolve().parents[1] / "pqn_abs.py"
EMULATOR = "bare emulator"
PARTS = "emulator, acting, copies, targets, forward, backward, optimizer, adaptation, bookkeeping".split(", ")


@dataclass
class Args:
    """The defaults are the paper's settings."""

    env_id: str = "BreakoutNoFrameskip-v4"
    num_envs: int = 128
    num_steps: int = 32  # L, fixed
    num_minibatches: int = 4
    update_epochs: int = 2
    modes: tuple[str, ...] = ("auto=", "float32=--precision float32")
    """NAME=FLAGS each: pqn_abs.py is measured with these further flags; sweep and breakdown take the first,
    and the breakdown of a compiled one would mislead"""
    peer: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=COMMAND, once for each peer; {steps} in it becomes the number of steps; it runs in an empty folder"""
    steps: str = "16384:81920"  # SHORT:LONG, the two runs' lengths; a multiple of every batch size
    repeats: int = 3
    sweep: tuple[int, ...] = (16, 32, 64, 128)  # fixed rollout lengths L to measure
    skip_sweep: bool = False
    skip_breakdown: bool = False  # no profile of where an iteration's time goes
    out: Path | None = None  # the JSON file; by default results/speed-MACHINE.json


def fail(message: str, status: int = 2):
    print(f"speed.py: {message}", file=sys.stderr)
    raise SystemExit(status)


# --- The arithmetic ---


def extra_speed(steps: tuple[int, int], seconds: tuple[float, float]) -> float:
    """Steps per second between a short and a long run."""
    if seconds[1] <= seconds[0]:
        raise RuntimeError("the long run took no longer than the short one; raise --steps")
    return (steps[1] - steps[0]) / (seconds[1] - seconds[0])


def paired_ratio(row: dict, other: dict) -> float | None:
    """How many times as fast as the other, within a repeat: the median over the repeats that have both."""
    pairs = zip(row["steps_per_second"], other["steps_per_second"], strict=False)
    ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return median(ratios) if ratios else None


def summarise(rows: dict[str, dict], references: list[str]) -> None:
    """Puts the median and the ratios to the reference rows into each row."""
    for row in rows.values():
        samples = [sample for sample in row["steps_per_second"] if sample]
        row["median"] = median(samples) if samples else None
        row["times_as_fast_as"] = {name: paired_ratio(row, rows[name]) for name in references}


def table(rows: dict[str, dict]) -> str:
    """Markdown, of summarised rows."""
    references = next(iter(rows.values()))["times_as_fast_as"]
    lines = [["", "steps/s", "min to max", *(f"× {name}" for name in references), "peak memory"]]
    for name, row in rows.items():
        samples = [sample for sample in row["steps_per_second"] if sample]
        cells = [f"{row['median']:,.0f}", f"{min(samples):,.0f} to {max(samples):,.0f}"] if samples else ["", ""]
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in row["times_as_fast_as"].values()]
        memory = f"{row['peak_memory_mib']:,.0f} MiB" if row["peak_memory_mib"] else ""
        lines.append([name, *cells, f"failed: {row['failed']}" if row["failed"] else memory])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def without_folders(text: str) -> str:
    """Absolute paths cut to their last part: results are for others to read."""
    return re.sub(r"(?<![^\s=:'\"(])(~|\.{1,2})?/([^\s/'\"]+/)*", "", text)


def last_line(text: str) -> str:
    return ([line.strip() for line in re.split("[\r\n]", text) if line.strip()] or [""])[-1]


# --- Measuring ---


def in_fresh_process(function, *args):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def run_script(command: list[str], steps: int) -> tuple[float, float]:
    """Seconds and peak memory (MiB) of a command, from start to exit."""
    nowhere = subprocess.DEVNULL
    words = [word.replace("{steps}", str(steps)) for word in command]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(words, stdin=nowhere, stdout=nowhere, stderr=errors, cwd=folder)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # unlike process.wait(), it tells the memory
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()  # after a Ctrl-C; does nothing to a process that has ended
        seconds = time.perf_counter() - started
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(last_line(errors.read()) or f"exit status {process.returncode}")
    return seconds, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def script_speed(command: list[str], steps: tuple[int, int], row: dict) -> float:
    """Steps per second of a script; the runs' seconds and memory go into its row."""
    seconds = []
    for count in steps:
        took, memory = run_script(command, count)
        seconds.append(took)
        row["peak_memory_mib"] = max(memory, row["peak_memory_mib"] or 0.0)
    row["seconds"].append(seconds)
    return extra_speed(steps, seconds)


def emulator_speed(words: list[str], steps: tuple[int, int]) -> float:
    """Steps per second of pqn_abs.py's environments alone, with random actions, after SHORT steps to warm up."""
    import numpy as np

    import pqn_abs

    args = pqn_abs.parse_args(words)
    envs = pqn_abs.make_envs(args)
    envs.reset(seed=args.seed)
    rng = np.random.default_rng(args.seed)
    for count in (steps[0], steps[1] - steps[0]):
        started = time.perf_counter()
        for _ in range(count // args.num_envs):
            envs.step(rng.integers(envs.single_action_space.n, size=args.num_envs))
    seconds = time.perf_counter() - started
    envs.close()
    return (steps[1] - steps[0]) / seconds


def breakdown(words: list[str]) -> dict:
    """Where an iteration's time goes: pqn_abs.main with stop-watches put around its parts, from outside.

    Copies are the calls that move data: frames and actions from and to the device, and shuffled mini-batches. Where
    threads of the script play and learn, a part is their mean, and what else they do, copies included, counts, as all
    that no watch covers, as bookkeeping. On a GPU each watch waits for the device, and the environments are one group,
    so the parts add up, but to a slower whole.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    import pqn_abs

    spent, marks, thread = defaultdict(float), [], threading.local()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def timed(part, function):
        def watch(*args, **kwargs):
            if getattr(thread, "watched", False):  # within a watched call, time is that call's
                return function(*args, **kwargs)
            wait()
            thread.watched = True
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                wait()
                thread.watched = False
                spent[part, threading.get_ident()] += time.perf_counter() - started

        return watch

    def timed_envs(args, make_envs=pqn_abs.make_envs):
        envs = make_envs(args)
        envs.step = timed("emulator", envs.step)
        return envs

    def write(table, row, write=pqn_abs.Table.write):
        write(table, row)
        if "charts/seconds" in row:  # the row that ends an iteration
            wait()
            marks.append((time.perf_counter(), dict(spent)))

    class WatchCopies(TorchFunctionMode):
        names = "__getitem__ __setitem__ to cpu copy_ pin_memory index_select".split()
        moving = tuple(getattr(torch.Tensor, name) for name in names)

        def __torch_function__(self, function, types, args=(), kwargs=None):
            return (timed("copies", function) if function in self.moving else function)(*args, **(kwargs or {}))

    network = pqn_abs.QNetwork
    acting, learning = timed("acting", network.forward), timed("forward", network.forward)
    network.forward = lambda *args: (learning if torch.is_grad_enabled() else acting)(*args)
    network.load_state_dict = timed("adaptation", network.load_state_dict)
    pqn_abs.behavioral_divergence = timed("adaptation", pqn_abs.behavioral_divergence)
    pqn_abs.lambda_returns = timed("targets", pqn_abs.lambda_returns)
    pqn_abs.make_envs, pqn_abs.Table.write = timed_envs, write
    torch.autograd.grad = timed("backward", torch.autograd.grad)
    torch.optim.RAdam.step = timed("optimizer", torch.optim.RAdam.step)
    torch.nn.utils.clip_grad_norm_ = timed("optimizer", torch.nn.utils.clip_grad_norm_)

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), tempfile.TemporaryDirectory() as folder:
        try:
            args = pqn_abs.parse_args([*words, "--runs-dir", folder])
            with WatchCopies():
                pqn_abs.main(args)
        except SystemExit:
            raise RuntimeError(last_line(said.getvalue())) from None

    others = {ident for _, ident in spent} - {threading.get_ident()}  # threads of the script

    def seconds(mark, part):
        took = {ident: seconds for (name, ident), seconds in mark.items() if name == part}
        return sum(seconds / (len(others) if ident in others else 1) for ident, seconds in took.items())

    (start, before), (end, after) = marks[0], marks[-1]  # without the first iteration, which warms up
    iterations = len(marks) - 1
    parts = {part: (seconds(after, part) - seconds(before, part)) / iterations for part in PARTS}
    parts["bookkeeping"] = (end - start) / iterations - sum(parts.values())
    # BD is measured every K-th iteration, the first included, and a profile is too short for K of them
    parts["adaptation"] = seconds(after, "adaptation") / -(-len(marks) // args.adapt_frequency) / args.adapt_frequency
    total, on_gpu = sum(parts.values()), torch.cuda.is_available()
    return {
        "iterations": iterations,
        "ms_per_iteration": {part: 1000 * parts[part] for part in PARTS},
        "percent": {part: 100 * parts[part] / total for part in PARTS},
        "gpu_peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
    }


def machine(words: list[str]) -> dict:
    """What was measured on. Refuses arguments that pqn_abs.py refuses."""
    import ale_py
    import numpy as np
    import torch

    import pqn_abs

    args = pqn_abs.parse_args(words)
    pqn_abs.check_args(args)
    pqn_abs.make_envs(args).close()
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return {
        "cpu": (names or [platform.processor() or platform.machine()])[0].strip(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{module.__name__: str(module.__version__) for module in (torch, ale_py, np)},
    }


# --- From the command line to the file ---


def named(texts: tuple[str, ...], option: str) -> dict[str, list[str]]:
    """NAME=WORDS each, split as a shell would. Files named by a relative path are found from any folder."""
    result = {}
    for text in texts:
        name, equals, words = text.partition("=")
        try:
            split = [os.path.abspath(word) if os.path.isfile(word) else word for word in shlex.split(words)]
        except ValueError as error:
            fail(f"{option} {text!r}: {error}")
        if not (name and equals) or name in (*result, EMULATOR):
            fail(f"{option} {text!r}: it must be NAME=..., each name once")
        result[name] = split
    return result


def check(args: Args) -> tuple[dict, dict, tuple[int, int]]:
    """The modes' flags, the peers' commands and the two run lengths."""
    modes, peers = named(args.modes, "--modes"), named(args.peer, "--peer")
    if not modes or set(modes) & set(peers):
        fail("--modes: at least one is needed, and no peer may have its name")
    for name, words in peers.items():
        if "{steps}" not in " ".join(words):
            fail(f"--peer {name}: {{steps}} must stand where the command takes its number of steps")
    if min(args.repeats, args.num_envs, args.num_steps, *args.sweep) < 1:
        fail("--repeats, --num-envs, --num-steps and --sweep: they must be at least 1")
    numbers = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", args.steps)
    short, long = map(int, numbers.groups()) if numbers else (0, 0)
    if short >= long:
        fail(f"--steps {args.steps}: it must be SHORT:LONG, two numbers, the second larger")
    for length in (args.num_steps, *(() if args.skip_sweep else args.sweep)):
        if short % (args.num_envs * length) or long % (args.num_envs * length):
            fail(f"--steps {args.steps}: both must be multiples of {args.num_envs} x {length}, the batch")
    return modes, peers, (short, long)


def main(args: Args) -> None:
    modes, peers, steps = check(args)
    flags = ["--env-id", args.env_id, "--num-envs", str(args.num_envs), "--no-adapt-rollout"]
    flags += ["--num-minibatches", str(args.num_minibatches), "--update-epochs", str(args.update_epochs)]
    base = [*flags, "--num-steps", str(args.num_steps)]
    about = in_fresh_process(machine, base)
    label = re.sub(r"\W+", "-", f"{about['gpu'] or about['cpu']}-{about['cores']}-cores".lower())
    out = args.out or Path("results", f"speed-{label}.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        fail(f"can't write {out}: {error.strerror}")

    run = [sys.executable, str(SCRIPT), "--total-timesteps", "{steps}", "--runs-dir", "runs"]
    first, words = next(iter(modes.items()))
    commands = {first: [*run, *base, *words]} | peers  # next to each other in time
    commands |= {name: [*run, *base, *flags] for name, flags in modes.items() if name != first}
    swept = {} if args.skip_sweep else {length: f"{first}, L = {length}" for length in args.sweep}
    swept |= {args.num_steps: first} if args.num_steps in swept else {}  # that one is measured already
    for length, name in swept.items():
        commands.setdefault(name, [*run, *flags, "--num-steps", str(length), *words])

    rows = {EMULATOR: []} | commands
    for name, command in rows.items():
        row = {"command": without_folders(shlex.join(command)) or None, "steps_per_second": [], "seconds": []}
        rows[name] = row | {"peak_memory_mib": None, "failed": None}
    git = ["git", "-C", str(SCRIPT.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    result = {"date": str(date.today()), "command": without_folders(shlex.join(["python", *sys.argv]))}
    result |= {"commit": commit or None, "machine": about, "steps": steps, "rows": rows}
    result |= {"sweep": {}, "breakdown": None}

    for repeat in range(args.repeats):
        for name in list(rows)[:: -1 if repeat % 2 else 1]:  # there and back again, against drift
            row, speed = rows[name], None
            try:
                if name == EMULATOR:
                    speed = in_fresh_process(emulator_speed, base, steps)
                elif not row["failed"]:
                    if repeat == 0:  # fills the disk's cache and compilers' caches, and is forgotten
                        run_script(commands[name], args.num_envs * args.num_steps)
                    speed = script_speed(commands[name], steps, row)
            except Exception as error:
                row["failed"] = without_folders(str(error))
            row["steps_per_second"].append(speed)
            said = f"{speed:,.0f} steps/s" if speed else f"failed: {row['failed']}"
            print(f"repeat {repeat + 1}, {name}: {said}", file=sys.stderr)
        summarise(rows, [EMULATOR, *(name for name in peers if not rows[name]["failed"])])
        result["sweep"] = {length: rows[name]["median"] for length, name in sorted(swept.items())}
        out.write_text(json.dumps(result, indent=2) + "\n")  # whatever ends this early leaves the repeats so far

    print(f"\n{about['gpu'] or 'no GPU'}; {about['cpu']}, {about['cores']} cores; torch {about['torch']}", end="")
    print(f"; ale-py {about['ale_py']}; {args.env_id}\n\n{table(rows)}")
    if swept:
        speeds = (f"{length}: {f'{speed:,.0f}' if speed else 'failed'}" for length, speed in result["sweep"].items())
        print(f"\nSteps/s of {first} by rollout length: L =", ", ".join(speeds))
    if not args.skip_breakdown:
        try:
            one_group = ["--env-groups", "1"] if about["gpu"] else []
            profile = in_fresh_process(breakdown, [*base, *words, *one_group, "--total-timesteps", str(steps[1])])
            print(f"\nAn iteration of {first}, the mean of {profile['iterations']}:")
            for part in PARTS:
                print(f"{part:>15} {profile['ms_per_iteration'][part]:9,.1f} ms {profile['percent'][part]:5.1f}%")
            if profile["gpu_peak_memory_mib"]:
                print(f"GPU memory at its peak: {profile['gpu_peak_memory_mib']:,.0f} MiB")
        except Exception as error:
            profile = {"failed": without_folders(str(error) or type(error).__name__)}
            print(f"\nAn iteration of {first}: failed: {profile['failed']}")
        result["breakdown"] = profile
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{out}")


if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        fail("interrupted", 130)
