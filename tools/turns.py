"""Which version of a script is faster, and by how much: they take turns.

    git worktree add ../before HEAD~1
    python tools/turns.py "before=python ../before/pqn_abs.py" "after=python pqn_abs.py"
    python tools/turns.py "as it is=python pqn_abs.py" "spinning=env GOMP_SPINCOUNT=100000 python pqn_abs.py"
        --flags="--num-envs 32 --num-minibatches 16" --iterations 6

A machine whose speed varies by a fifth within minutes hides what a change is worth from whole runs, one after the
other. Here all versions start, and one at a time goes on for a few iterations and is stopped again (SIGSTOP), in an
order drawn anew in each round; ratios are taken within a round. Rollouts have a fixed length, nearly all actions are
random, and each version keeps its memory while it waits. Runs on Linux and macOS.
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
from statistics import median, quantiles

import tyro


@dataclass
class Args:
    versions: tyro.conf.Positional[tuple[str, ...]]  # NAME=COMMAND each; the first is what the others are compared with
    flags: str = ""  # further flags for all of them
    rounds: int = 6
    iterations: int = 3  # that count in a turn; one more goes before them, torn by the stop
    out: Path | None = None  # a CSV file to add the samples to


def fail(message: str, status: int = 2):
    print(f"turns.py: {message}", file=sys.stderr)
    raise SystemExit(status)


class Version:
    """A run that is stopped unless it is its turn."""

    def __init__(self, name: str, command: list[str], folder: Path):
        self.name, self.folder, self.samples = name, folder, []
        folder.mkdir()
        self.errors = (folder / "stderr").open("w+", errors="replace")
        command = [*command, "--no-adapt-rollout", "--total-timesteps", "1000000000", "--checkpoint-every", "1000000"]
        command += ["--runs-dir", str(folder)]
        nowhere = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=self.errors)

    def rows(self) -> list[dict]:
        """The whole rows of metrics.csv so far."""
        text = "".join(path.read_text() for path in self.folder.glob("*/metrics.csv"))
        return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))

    def wait(self, count: int) -> list[dict]:
        while len(rows := self.rows()) < count:
            if self.process.poll() is not None:
                lines = (self.folder / "stderr").read_text(errors="replace").strip().splitlines() or ["no message"]
                fail(f"{self.name} ended: {lines[-1]}", 1 if rows else 2)
            time.sleep(0.02)
        return rows

    def turn(self, iterations: int) -> float:
        """Goes on for some iterations; seconds for 4,096 steps in all but the first of them."""
        first = len(self.rows())
        self.process.send_signal(signal.SIGCONT)
        rows = self.wait(first + 1 + iterations)
        self.process.send_signal(signal.SIGSTOP)
        seconds, steps = (
            float(rows[first + iterations][key]) - float(rows[first][key]) for key in ("charts/seconds", "global_step")
        )
        return seconds / steps * 4096


def table(samples: dict[str, list[float]]) -> str:
    """Markdown, of seconds for 4,096 steps; ratios are of times, to the first version's in the same round."""
    reference = next(iter(samples.values()))
    lines = [["", "s / 4,096 steps", "min to max", "× time", "quartiles"], ["---"] * 5]
    for name, times in samples.items():
        ratios = [ours / theirs for ours, theirs in zip(times, reference, strict=True)]
        low, _, high = quantiles(ratios, method="inclusive")
        cells = [f"{median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"]
        lines.append([name, *cells, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(args: Args) -> None:
    named = dict(text.partition("=")[::2] for text in args.versions)
    for name, command in named.items():
        if not (name and command.strip()):
            fail(f"{name!r}: a version is given as NAME=COMMAND")
    if len(args.versions) < 2 or len(named) < len(args.versions):
        fail("it takes two or more versions, with different names")
    if args.rounds < 2 or args.iterations < 1:
        fail("it takes two rounds or more, of one iteration or more")
    versions = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.out:
                args.out.open("a").close()
            for number, (name, command) in enumerate(named.items()):
                versions.append(Version(name, shlex.split(f"{command} {args.flags}"), Path(folder, str(number))))
                if "charts/seconds" not in versions[-1].wait(2)[0]:
                    fail(f"{name}: its metrics.csv has no charts/seconds")
                versions[-1].process.send_signal(signal.SIGSTOP)
            for number in range(args.rounds):
                for version in random.sample(versions, len(versions)):
                    version.samples.append(version.turn(args.iterations))
                seconds = ", ".join(f"{version.name} {version.samples[-1]:.2f} s" for version in versions)
                print(f"round {number + 1}: {seconds}", flush=True)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}")
        except ValueError as error:
            fail(f"{error} in {command} {args.flags}")
        finally:
            for version in versions:
                version.process.kill()
                version.process.wait()
    print(table({version.name: version.samples for version in versions}))
    if args.out:
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(["setting", "round", "variant", "seconds_per_4096_steps"])
            for version in versions:
                for number, seconds in enumerate(version.samples, 1):
                    writer.writerow([args.flags or "defaults", number, version.name, f"{seconds:.3f}"])


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        fail("interrupted", 130)
