"""The suite runs what it is told to, once, goes on where it was, and refuses what the scripts refuse."""

import fcntl
import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import ale_py
import gymnasium
import pytest
from helpers import ROOT, Noise, column, load, start, wait_for

import pqn_abs
from tools import suite

SUITE = ROOT / "tools" / "suite.py"
TINY = """
import os
import time

from helpers import Noise, SmallNetwork

import pqn_abs


class Envs(Noise):
    def step(self, actions):
        if self.game == "Tiny/Broken-v0":
            raise RuntimeError("this game is broken")
        if self.game == "Tiny/Slow-v0":
            time.sleep(float(os.environ["PAUSE"]))
        return super().step(actions)


def make_envs(args):
    if not args.env_id.startswith("Tiny/"):
        pqn_abs.fail(f"--env-id {args.env_id} is unknown")
    envs = Envs(args.num_envs)
    envs.game = args.env_id
    return envs


pqn_abs.make_envs, pqn_abs.QNetwork = make_envs, SmallNetwork
pqn_abs.main(pqn_abs.parse_args())
"""
SMALL = "--num-envs 4 --num-minibatches 2 --total-timesteps 2000 --precision float32 --device cpu"


@pytest.fixture
def in_this_process(monkeypatch):
    """Probe scripts without another process, which saves its start, and put back what that changes."""
    for module in map(importlib.import_module, "pqn_abs pqn_abs_xl gns_baseline ppo_abs p3o_abs".split()):
        monkeypatch.setattr(module, "main", module.main)
    for owner, name in ((pqn_abs, "make_envs"), (pqn_abs, "QNetwork"), (sys, "argv")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(suite, "in_fresh_process", lambda function, *args: function(*args))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A script that imports pqn_abs.py and replaces its parts, as users may write them."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    (tmp_path / "tiny.py").write_text(TINY)
    return tmp_path / "tiny.py"


def refusal(args, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        suite.main(suite.Args(**args))
    output, error = capsys.readouterr()
    assert (ended.value.code, output, error.count("\n")) == (2, "", 1)
    return error


def words(folder, *more, env_id="BreakoutNoFrameskip-v4", seed=1):
    return ["--env-id", env_id, "--seed", str(seed), "--runs-dir", str(folder), *map(str, more)]


# --- What is run ---


def test_games_are_those_of_the_registry():
    gymnasium.register_envs(ale_py)
    for name, count in (("atari10", 10), ("atari57", 57)):
        games = [run.words[1] for run in suite.list_runs(suite.Args((SUITE,), (name,), (1,)))]
        assert len(set(games)) == count
        assert all(gymnasium.spec(game).entry_point == "ale_py.env:AtariEnv" for game in games)
        assert [game for game in games if not game.endswith("NoFrameskip-v4")] == ["ALE/Surround-v5"] * (count == 57)
    assert set(suite.ATARI10) < set(suite.ATARI57)


def test_short_names_are_atari_games_and_others_are_passed_on():
    """A script of one's own may call its games as it likes."""
    runs = suite.list_runs(suite.Args((SUITE,), ("MsPacman", "breakout", "CartPole-v1"), (1,)))
    assert [run.words[1] for run in runs] == ["MsPacmanNoFrameskip-v4", "breakout", "CartPole-v1"]


def test_every_combination_is_a_run(tmp_path):
    scripts = ROOT / "pqn_abs.py", ROOT / "ppo_abs.py"
    flags = ("a=", "b=--gamma 0.9 --track")
    runs = suite.list_runs(suite.Args(scripts, ("Pong", "ALE/Pong-v5", "A/B"), (1, 2), flags, tmp_path))
    assert len(runs) == len({run.name for run in runs}) == 2 * 3 * 2 * 2
    assert {run.name for run in runs} >= {"Pong__pqn_abs__a__1", "ALE-Pong-v5__ppo_abs__b__2"}
    (run,) = (run for run in runs if run.name == "Pong__ppo_abs__b__2")
    line = f"{scripts[1]} --env-id PongNoFrameskip-v4 --seed 2 --runs-dir {tmp_path} --gamma 0.9 --track"
    assert suite.command(run) == line.split()
    run.folder = tmp_path / "run"
    line = f"{scripts[1]} --resume {tmp_path}/run/checkpoint.pt --gamma 0.9 --track"
    assert suite.command(run) == line.split()


def test_each_run_gets_its_share_of_the_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def share(device, slot, jobs, gpus):
        env = suite.environment(suite.Run("a", SUITE, [], [], device=device), slot, jobs, 16, gpus)
        return env["OMP_NUM_THREADS"], env.get("CUDA_VISIBLE_DEVICES")

    assert share("auto", 0, 8, 0) == ("2", None)
    assert share("auto", 0, 32, 0) == ("1", None)
    assert [share("auto", slot, 4, 2)[1] for slot in range(4)] == ["0", "1", "0", "1"]
    assert share("cpu", 1, 4, 2)[1] is None and share("cuda:1", 0, 4, 2)[1] is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share("cuda", 1, 4, 2) == ("3", "7")


# --- What is refused, before anything starts ---


@pytest.mark.parametrize(
    "args, says",
    [
        ({"scripts": (Path("nowhere.py"),)}, "--scripts nowhere.py: there is no such file"),
        ({"scripts": (ROOT,)}, "no such file"),
        ({"scripts": ()}, "at least one"),
        ({"games": ()}, "at least one"),
        ({"seeds": ()}, "at least one"),
        ({"flags": ()}, "at least one"),
        ({"jobs": 0}, "--jobs 0"),
        ({"flags": ("abs",)}, "NAME=FLAGS"),
        ({"flags": ("=--track",)}, "NAME=FLAGS"),
        ({"flags": ("a/b=",)}, "NAME=FLAGS"),
        ({"flags": ("a='",)}, "quotation"),
        ({"flags": ("a=", "a=--track")}, "comes 2 times"),
        ({"seeds": (1, 2, 1)}, "comes 2 times"),
        ({"games": ("atari10", "Qbert")}, "Qbert__pqn_abs__default__1 comes 2 times"),
        ({"games": ("Pong", "PongNoFrameskip-v4")}, "comes 2 times"),
        ({"scripts": (ROOT / "pqn_abs.py",) * 2}, "comes 2 times"),
    ],
    ids=str,
)
def test_refused_at_once(tmp_path, capsys, args, says):
    assert says in refusal({"scripts": (ROOT / "pqn_abs.py",), "runs_dir": tmp_path / "runs"} | args, capsys)
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "--num-envs 0": "pqn_abs.py: --num-envs 0: it must be at least 1",
    "--delta-min 0.97": "--delta-min 0.97",  # a rule of main's own
    "--nonsense": "--nonsense",
    "--num-envs many": "--num-envs",
    "--device tpu": "--device tpu",
    "--help": "without a word",
    "--seed 7": "--seed is for the suite",
    "--env-id ALE/Pong-v5": "--env-id is for the suite",
    "--runs-dir elsewhere": "--runs-dir is for the suite",
    "--resume nowhere.pt": "no such file",
}


def test_refused_by_the_script_and_known_by_its_arguments(tmp_path, train, capfd):
    """One process for many command lines, as in a suite."""
    small = "--num-envs 2 --precision float32 --total-timesteps".split()
    runs = tmp_path / "runs"
    done = train(Noise(2), total_timesteps=1, runs_dir=str(runs))
    reached = load(done)["global_step"]
    further = train(Noise(2), total_timesteps=100, runs_dir=str(runs), seed=2)
    checkpoint = train(Noise(2), total_timesteps=1, runs_dir=str(tmp_path / "other"), seed=2) / "checkpoint.pt"
    for name in ("A", "z"):  # the same run again, not as far; one is found before it, one after it
        shutil.copytree(further, runs / name)
        shutil.copy(checkpoint, runs / name)
    torn = train(Noise(2), total_timesteps=1, runs_dir=str(runs), seed=3) / "checkpoint.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    young = train(Noise(2), total_timesteps=1, runs_dir=str(runs), seed=4)  # killed before its first checkpoint
    (young / "checkpoint.pt").unlink()
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"script": "pqn_abs.py", "args": 5}'), ("d", "{}")):
        (runs / name).mkdir()
        (runs / name / "config.json").write_text(text)
    before = sorted(runs.rglob("*"))

    lines = [words(runs, *flags.split()) for flags in REFUSED] + [words(runs, env_id="Pung")]
    lines += [words(runs, *small, 1), words(runs, *small, 1, "--checkpoint-every", 7), words(runs, *small, 2)]
    lines += [words(runs, *small, 100, seed=2), words(runs, *small, 1, seed=3), words(runs, *small, 1, seed=4)]
    lines += [words(f"{runs}/../runs", *small, 1)]
    capfd.readouterr()
    found = suite.in_fresh_process(suite.probe, ROOT / "pqn_abs.py", lines, runs)
    assert capfd.readouterr() == ("", "")
    for (flags, says), line in zip(REFUSED.items(), found, strict=False):
        assert says in line and "\n" not in line, flags
    unknown, complete, saved_more, longer, twice, torn, young, other_name = found[len(REFUSED) :]
    assert "Pung is unknown; try" in unknown
    assert (complete["folder"], complete["step"], complete["total"]) == (done, reached, 1)
    assert saved_more["folder"] == other_name["folder"] == done
    assert saved_more["identity"] == complete["identity"] != longer["identity"]
    assert longer["folder"] is None  # its schedules would be others
    assert (twice["folder"], twice["step"]) == (further, load(further)["global_step"])
    assert "not a whole one" in torn
    assert (young["folder"], young["step"]) == (None, 0)
    assert sorted(runs.rglob("*")) == before


def test_two_names_of_the_same_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "in_fresh_process", lambda probe, script, lines, folder: [{"identity": "x"} | FOUND] * 2)
    args = {"games": ("Pong",), "seeds": (1,), "flags": ("a=", "b=--device auto"), "scripts": (ROOT / "pqn_abs.py",)}
    line = refusal(args | {"runs_dir": tmp_path / "runs"}, capsys)
    assert "Pong__pqn_abs__b__1 and Pong__pqn_abs__a__1 are the same run" in line
    assert list(tmp_path.iterdir()) == []


FOUND = {"total": 1000, "device": "cpu", "folder": None, "step": 0, "gpus": 0}


def test_script_that_is_no_training_script(tmp_path, in_this_process):
    (tmp_path / "idle.py").write_text("import sys\nif '1' in sys.argv:\n    import nothing_of_that_name")
    lines = [words(tmp_path, seed=seed) for seed in (1, 2)]
    broken, idle = suite.probe(tmp_path / "idle.py", lines, tmp_path)
    assert broken == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert "idle.py does not call the main() of" in idle


def test_one_suite_a_folder(tmp_path, monkeypatch, capsys):
    """The folder is taken as long as the suite or one of its runs lives."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "sleep.py").write_text("import time; print('this run is in nowhere', flush=True); time.sleep(60)")
    run = suite.Run("sleeper", tmp_path / "sleep.py", [], [])
    with (tmp_path / "logs" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        suite.start(run, dict(os.environ), tmp_path, lock)
    monkeypatch.setattr(suite, "check", lambda runs, folder: 0)
    monkeypatch.setattr(suite, "work", lambda *args: "works")
    args = {"scripts": (ROOT / "pqn_abs.py",), "runs_dir": tmp_path}
    assert "another suite" in refusal(args, capsys)
    run.process.kill()
    run.process.wait()
    assert suite.main(suite.Args(**args)) == "works"
    (tmp_path / "file").touch()
    assert "can't write to" in refusal(args | {"runs_dir": tmp_path / "file"}, capsys)


# --- What is said ---


@pytest.mark.parametrize(
    "text, says",
    [
        ("starting\n\r  0%| | 0/2 [00:00<?]Traceback:\n  x\nValueError: no\n\r 5%| | 1/2 [00:00]\n", "ValueError: no"),
        ("\r  0%|  | 0/2 [00:00<?, ?step/s]\r2.1kstep [00:04, L=35]terminate called\n", "terminate called"),
        ("╭─ Error ─╮\n│ No such flag │\n│ ── │\n│ See --help │\n╰───╯\n", "No such flag"),
        ("", "it ended without a word"),
    ],
)
def test_line_that_says_what_went_wrong(text, says):
    assert suite.said(text) == says


HEADER = "global_step,charts/seconds,charts/episodic_return\n"


@pytest.mark.parametrize(
    "metrics, says",
    [
        (HEADER + "1000,2.0,\n1500,3.0,-12.25\n", "a: running, 1,500 steps, return -12.2, 500 steps/s"),
        (HEADER + "1000,2.0,\n1500,3.0,-12", "a: running, 1,000 steps, 500 steps/s"),
        (HEADER, "a: running, 7 steps"),
        ("", "a: running, 7 steps"),
        (HEADER + "x,y\n", "a: running, 7 steps"),
        ("global_step,other\n8,9\n", "a: running, 7 steps"),
        (None, "a: running, 7 steps"),
    ],
)
def test_progress_by_the_last_whole_line(tmp_path, metrics, says):
    if metrics is not None:
        (tmp_path / "metrics.csv").write_text(metrics)
    run = suite.Run("a", SUITE, [], [], status="running", folder=tmp_path, step=7)
    suite.look_up(run)
    assert suite.describe(run) == says


# --- All of it ---


def run_suite(*arguments):
    return start(SUITE, *arguments, PYTHONPATH=os.environ.get("PYTHONPATH", ""))


def last_table(output: str) -> dict[str, list[str]]:
    """The cells of the table at the end, by the runs' names."""
    lines = [line.split() for line in output[output.rindex("steps/s\n") :].splitlines()[1:]]
    return {line[0]: line[1:] for line in lines if "__" in line[0] and ":" not in line[0]}


def test_suite_of_runs_that_end_fail_and_are_interrupted(tmp_path, tiny, in_this_process, monkeypatch, capsys):
    games = ["Tiny/Quick-v0", "Tiny/Slow-v0", "Tiny/Broken-v0"]
    folder = tmp_path / "runs"
    arguments = ["--scripts", tiny, "--games", *games, "--seeds", 3, "--flags", f"a={SMALL}", "--runs-dir", folder]
    quick, slow, broken = (f"Tiny-{name}-v0__tiny__a__3" for name in "Quick Slow Broken".split())
    log = folder / "logs" / f"{broken}.log"

    monkeypatch.setenv("PAUSE", "0.05")
    process = run_suite(*arguments, "--jobs", 2)
    while "failed" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    (started,) = wait_for(lambda: list(folder.glob("Tiny-Slow*/metrics.csv")), process)
    wait_for(lambda: started.read_text().count("\n") > 1, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    table = last_table(output)
    assert [table[name][0] for name in (quick, slow, broken)] == ["done", "interrupted", "failed"]
    (reason,) = (line for line in output.splitlines() if line.startswith(f"{broken}: failed"))
    assert reason.endswith(f"exit status 1: RuntimeError: this game is broken ({log})")
    assert "Traceback" in log.read_text() and "this run is in" in (folder / "logs" / f"{quick}.log").read_text()
    first = next(folder.glob("Tiny-Quick*"))
    complete = {path: path.read_bytes() for path in first.iterdir()}
    reached = load(started.parent)["global_step"]
    assert 0 < reached < 2000

    monkeypatch.setenv("PAUSE", "0")
    process = run_suite(*arguments, "--jobs", 1)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
    table = last_table(output)
    assert [table[name][0] for name in (quick, slow, broken)] == ["done", "done", "failed"]
    assert f"{slow}: goes on at step {reached:,}" in output and f"{quick}: " not in output
    assert {path: path.read_bytes() for path in first.iterdir()} == complete
    assert len(list(folder.glob("Tiny-Slow*"))) == 1
    steps = column(started, "global_step", int)
    assert steps[-1] == load(started.parent)["global_step"] >= 2000 and reached in steps
    assert table[slow][1] == f"{steps[-1]:,}"
    score = column(started, "charts/episodic_return")[-1]
    assert table[slow][2] == f"{score:,.1f}"
    assert log.read_text().count("RuntimeError: this") == 2  # a log goes on too

    suite.main(suite.Args((tiny,), (*games, "Tiny/New-v0"), (3,), (f"a={SMALL}",), folder, print=True))
    left = next(folder.glob("Tiny-Broken*")) / "checkpoint.pt"  # it saved one at its start
    new = f"--env-id Tiny/New-v0 --seed 3 --runs-dir {folder}"
    assert capsys.readouterr().out == f"python {tiny} --resume {left} {SMALL}\npython {tiny} {new} {SMALL}\n"


def test_suite_of_a_real_script(tmp_path):
    flags = "--num-envs 2 --num-minibatches 2 --total-timesteps 100 --device cpu"
    arguments = ["--scripts", ROOT / "pqn_abs.py", "--games", "Pong", "--seeds", 1, "--flags", f"a={flags}"]
    process = run_suite(*arguments, "--runs-dir", tmp_path)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    (folder,) = tmp_path.glob("PongNoFrameskip-v4__pqn_abs__1__*")
    table = last_table(output)
    assert list(table) == ["Pong__pqn_abs__a__1"]
    assert table["Pong__pqn_abs__a__1"][:2] == ["done", str(load(folder)["global_step"])]
    config = json.loads((folder / "config.json").read_text())
    assert config["args"]["total_timesteps"] == 100 and config["args"]["num_envs"] == 2
