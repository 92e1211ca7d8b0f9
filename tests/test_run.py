"""A run of pqn_abs.py from outside: its files, resuming, signals, failures, and what it refuses."""

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import deque
from multiprocessing import get_context
from pathlib import Path
from pickle import UnpicklingError
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from helpers import (
    LIMIT,
    ROOT,
    SMALL_RUN,
    FakeEnvs,
    SmallNetwork,
    column,
    config,
    contents,
    end_of,
    load,
    next_line,
    on,
    rows,
    same_weights,
    start,
    wait_for,
)

import pqn_abs

ON_A_CPU = ["--device", "cpu", "--precision", "float32"]
SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP"]


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in SIGNALS]


def without_clock(path):
    table = rows(path)
    for row in table:
        del row["charts/seconds"], row["charts/SPS"]
    return table


def steps_without_gap(folder):
    """metrics.csv's global_step, after a check that each row continues the one before it."""
    steps = column(folder / "metrics.csv", "global_step", int)
    sizes = column(folder / "metrics.csv", "abs/batch_size", int)
    assert steps == np.cumsum(sizes).tolist()
    return steps


class EventEnvs(FakeEnvs):
    """Float observations; after this many steps, event happens to what a step returns."""

    def __init__(self, event, num_envs=4, steps=40, **options):
        super().__init__(num_envs, **options)
        self.event = event
        self.event_at = steps

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float32), info

    def step(self, actions):
        obs, reward, *flags, info = super().step(actions)
        final_obs = info["final_obs"].astype(np.float32)
        result = {"obs": obs.astype(np.float32), "reward": reward, "final_obs": final_obs}
        if len(self.steps) == self.event_at:
            self.event(result)
        return result["obs"], reward, *flags, {"final_obs": final_obs}


def raises(name):
    return lambda result: signal.raise_signal(getattr(signal, name))


def fails(result):
    raise ZeroDivisionError("a bug of one's own")


def diverges(result):
    result["reward"][:] = np.nan


# --- A run's files ---


def test_a_run_leaves_its_files(train, tmp_path, monkeypatch):
    """Guards the contract that the tools read; the code that made the numbers is part of it."""
    program = tmp_path / "my_study.py"
    program.write_text("import pqn_abs")
    monkeypatch.setattr(sys, "argv", [str(program)])
    folder = train(FakeEnvs(4), total_timesteps=1000, seed=3, adapt_frequency=2)
    files = sorted(path.name for path in folder.iterdir())
    assert files == "checkpoint.pt config.json metrics.csv my_study.py pqn_abs.py".split()
    for source in (program, ROOT / "pqn_abs.py"):
        assert (folder / source.name).read_bytes() == source.read_bytes()
    written = config(folder)
    assert written["script"] == pqn_abs.SCRIPT
    assert written["device"] == "cpu" and written["bfloat16"] is False
    assert pqn_abs.Args(**written["args"]).seed == 3
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    assert written["versions"].items() >= versions.items()
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"] >= 1000
    columns = """global_step charts/updates charts/epsilon abs/rollout_length abs/batch_size
        abs/behavioral_divergence losses/td_loss losses/q_values losses/grad_norm charts/seconds
        charts/SPS charts/episodic_return""".split()
    table = rows(folder / "metrics.csv")
    assert list(table[0]) == columns
    for name in columns:
        count = len(table) // 2 if name == "abs/behavioral_divergence" else len(table)
        assert np.isfinite(column(folder / "metrics.csv", name)).sum() == count
    seconds = column(folder / "metrics.csv", "charts/seconds")
    assert seconds == sorted(seconds)


def test_same_seed_same_numbers(train):
    """Guards reproducibility: on one machine, a seed is a run, bit for bit."""
    arguments = {"total_timesteps": 2000, "adapt_frequency": 2}
    one, again, other = (train(FakeEnvs(4), seed=seed, **arguments) for seed in (7, 7, 8))
    tables = [without_clock(folder / "metrics.csv") for folder in (one, again, other)]
    assert tables[0] == tables[1] != tables[2]
    assert same_weights(load(one)["network"], load(again)["network"])


def test_environments_of_two_runs_share_no_seed():
    """Guards runs with seeds 1 and 2: environment i gets reset's seed plus i."""
    seeds = [pqn_abs.seed_all(seed, iteration=0) for seed in (*range(1, 8), 2**63)]
    assert np.diff(sorted(seeds)).min() >= 128
    assert 0 <= min(seeds) and max(seeds) < 2**31 - 128


def test_a_program_may_pass_numpy_numbers_and_paths(train, launch, tmp_path):
    """Guards sweeps: the run's arguments are Python's own, and it can be resumed."""
    numbers = {"seed": np.int64(3), "gamma": np.float32(0.5), "anneal_lr": np.bool_(True)}
    folder = train(FakeEnvs(4), total_timesteps=np.int32(300), runs_dir=tmp_path / "p", **numbers)
    written = config(folder)["args"]
    assert written.items() >= {"seed": 3, "gamma": 0.5, "anneal_lr": True}.items()
    assert written["total_timesteps"] == 300 and written["runs_dir"] == str(tmp_path / "p")
    status, errors = launch("--resume", folder, "--total-timesteps", 600, **on(FakeEnvs(4)))
    assert status == 0, errors
    assert steps_without_gap(folder)[-1] >= 600


# --- Weights & Biases ---


@pytest.fixture
def wandb(monkeypatch):
    """A wandb that notes what it is asked; wandb.run is what its init() returns."""
    fake = Mock()
    fake.run = fake.init.return_value
    fake.run.id = "made-by-wandb"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_rows(train, wandb):
    """Guards --track: metrics.csv's numbers, and W&B's own id of a run that is resumed.

    With step=, W&B would drop the rows that a resumed run sends again.
    """
    folder = train(FakeEnvs(4), total_timesteps=1000, track=True)
    names = {"name": folder.name, "id": None, "resume": "allow", "reinit": "create_new"}
    wandb.init.assert_called_once_with(config=config(folder), **names)
    wandb.run.define_metric.assert_called_once_with("*", step_metric="global_step")
    wandb.run.finish.assert_called_once_with(exit_code=0)
    table = rows(folder / "metrics.csv")
    expected = [call({name: float(row[name]) for name in row if row[name]}) for row in table]
    assert wandb.run.log.call_args_list == expected
    train(FakeEnvs(4), total_timesteps=2000, resume=str(folder))
    train(FakeEnvs(4), total_timesteps=3000, resume=str(folder), track=True)
    assert wandb.init.call_args.kwargs["id"] == "made-by-wandb"


@pytest.mark.parametrize("event", [fails, diverges])
def test_wandb_shows_a_failed_run_as_failed(train, wandb, event):
    """Guards W&B's page from runs that "finished" with a NaN or an exception."""
    with pytest.raises(ArithmeticError):
        train(EventEnvs(event), track=True)
    wandb.run.finish.assert_called_once_with(exit_code=1)


CALLERS_OWN = """
import pqn_abs, wandb
from helpers import FakeEnvs, on
own = wandb.init(project="own")
names = {"runs_dir": "runs", "run_name": "run", "device": "cpu"}
pqn_abs.main(pqn_abs.Args(num_envs=4, total_timesteps=300, track=True, **names), **on(FakeEnvs(4)))
assert wandb.run is own
own.log({"still": "open"})
"""


def test_wandb_leaves_a_callers_own_run_open(tmp_path):
    """Guards the real package's calls, offline: what a run did not start, it does not end."""
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    offline["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    end_of(start("-c", CALLERS_OWN, env=offline, cwd=tmp_path))
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2


# --- Resuming ---


@pytest.fixture
def resume(launch):
    """resume(folder, *arguments) goes on with a run on new environments; returns these."""

    def run(folder, *arguments, envs=None, **parts):
        envs = envs or FakeEnvs(4)
        status, errors = launch("--resume", folder, *arguments, **on(envs), **parts)
        assert status == 0, errors
        return envs

    return run


class Bandit(EventEnvs):
    """Each step is a game, so that there is nothing that a resumed run cannot know."""

    def __init__(self, event=lambda result: None):
        super().__init__(event, num_envs=1, terminate=1, truncate=0)

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        reward[:] = actions - 1
        return obs, reward, *rest

    def frames(self):
        return np.arange(6 * self.num_envs, dtype=np.uint8).reshape(-1, 6)


def test_a_resumed_run_is_the_uninterrupted_one(train, resume):
    """Guards all that a checkpoint keeps, bit for bit: weights, RAdam, L, counters, ε, scores."""
    arguments = {"adapt_frequency": 2, "learning_rate": 0.01, "anneal_lr": True}
    before = handlers()
    whole = train(Bandit(), total_timesteps=5000, **arguments)
    half = train(Bandit(raises("SIGTERM")), total_timesteps=5000, **arguments)
    assert steps_without_gap(half)[-1] < 300 and handlers() == before
    resume(half, envs=Bandit())
    assert without_clock(half / "metrics.csv") == without_clock(whole / "metrics.csv")
    assert same_weights(load(half)["network"], load(whole)["network"])
    assert load(half)["scores"] == load(whole)["scores"]
    assert len({*column(whole / "metrics.csv", "abs/rollout_length")}) > 5
    seconds = column(half / "metrics.csv", "charts/seconds")
    assert seconds == sorted(seconds)


def test_a_resumed_run_plays_new_games_with_the_runs_options(train, resume):
    """Guards the run's options, those that are given on top, and rows after the checkpoint."""
    first = FakeEnvs(4)
    folder = train(first, total_timesteps=1000, adapt_frequency=1, gamma=0.9)
    folder = folder.rename(folder.with_name("moved"))
    before = load(folder)["global_step"]
    with open(folder / "metrics.csv", "a") as table:
        table.write("1,2,3\n" * 50 + "4,")  # a killed run may leave a torn row
    limits = ["--rollout-max", 20, "--num-steps", 16, "--adapt-frequency", 1000]
    envs = resume(folder, "--total-timesteps", 2000, *limits)
    assert envs.seed != first.seed
    assert len(envs.steps) * 4 == steps_without_gap(folder)[-1] - before
    assert column(folder / "metrics.csv", "abs/rollout_length", int)[-1] == 20  # L within limits
    assert config(folder)["args"]["gamma"] == 0.9
    assert config(folder)["args"]["total_timesteps"] == 2000
    assert [path.name for path in folder.parent.iterdir()] == ["moved"]


def test_killed_at_any_moment_it_goes_on(tmp_path):
    """Guards files against kill -9: with a save an iteration, saving is what it mostly does."""
    folder = tmp_path / "run"
    new = ["--runs-dir", tmp_path, "--run-name", "run", "--num-envs", 4, "--num-steps", 16]
    process = start(SMALL_RUN, *new, "--checkpoint-every", 1e-6, *ON_A_CPU)
    for kill in (True, True, True, False):
        wait_for((folder / "checkpoint.pt").exists, process)
        reached = load(folder)["global_step"]
        wait_for(lambda reached=reached: load(folder)["global_step"] > reached, process)
        if kill:
            time.sleep(random.uniform(0, 0.3))
            process.kill()
            process.communicate()
            process = start(SMALL_RUN, "--resume", folder)
    process.send_signal(signal.SIGINT)
    end_of(process)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


class Rule:
    """A rule of one's own for L, with a state; what it holds changes with the calls."""

    def __init__(self, *states):
        self.states = states
        self.calls = 0

    def __call__(self, divergence, adaptive_length, **limits):
        self.calls += 1
        return np.float64(20 + self.calls)

    def state_dict(self):
        return {"calls": self.calls, "more": self.states[min(self.calls, len(self.states) - 1)]}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_rule_of_ones_own_keeps_its_state(train, resume):
    """Guards objects in the place of rollout_length; their numbers may be NumPy's."""
    arguments = {"num_steps": 20, "adapt_frequency": 1, "rollout_length": Rule([1.5, "text"])}
    folder = train(FakeEnvs(4), total_timesteps=300, **arguments)
    resume(folder, "--total-timesteps", 900, rollout_length=Rule([2.5, "text"]))
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths == list(range(20, 20 + len(lengths)))


@pytest.mark.parametrize("state", [deque([1]), np.ones(3), np.float32(1), Path("x")], ids=repr)
def test_a_state_that_no_resume_could_read_is_said_at_once(train, tmp_path, resume, state):
    """Guards days of training: at the first save, or at the first one that holds such a state."""
    arguments = {"adapt_frequency": 1, "checkpoint_every": 1e-6, "total_timesteps": 5000}
    with pytest.raises(UnpicklingError):
        train(FakeEnvs(4), rollout_length=Rule(state), **arguments)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnpicklingError):
        train(FakeEnvs(4), rollout_length=Rule(1, 1, 1, state), **arguments)
    (folder,) = tmp_path.iterdir()
    assert load(folder)["iteration"] == 2
    resume(folder, "--total-timesteps", 1000, rollout_length=Rule(1))
    assert steps_without_gap(folder)[-1] >= 1000


# --- Signals and processes ---


@pytest.fixture
def running(tmp_path):
    """running(*arguments) starts a run and returns its process and folder, once it has rows."""

    def run(*arguments, **options):
        names = ["--runs-dir", tmp_path, "--run-name", "run", "--checkpoint-every", 1e-6]
        process = start(SMALL_RUN, *names, "--num-envs", 4, *arguments, *ON_A_CPU, **options)
        wait_for((tmp_path / "run" / "checkpoint.pt").exists, process)
        return process, tmp_path / "run"

    return run


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_saves_and_ends(running, name):
    """Guards the work since the last checkpoint: status 0, and every row is in the checkpoint."""
    process, folder = running("--checkpoint-every", 300)
    process.send_signal(getattr(signal, name))
    _, errors = end_of(process)
    assert f"--resume '{folder}'" in errors and "Traceback" not in errors
    assert errors.count("it/s") <= 3  # without a terminal, the bar is a line a minute
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


def test_ctrl_c_is_answered_at_once_and_a_second_one_too(running, tmp_path):
    """Guards the impatient: the iteration is held, the answer comes, and a second one ends it."""
    held = tmp_path / "held"
    process, folder = running(env={"HOLD": str(held)})
    held.touch()
    wait_for((tmp_path / "held.reached").exists, process)
    before = load(folder)["global_step"]
    process.send_signal(signal.SIGINT)
    answer = "".join(next_line(process) for _ in range(3))
    assert "finishing the iteration" in answer and "Ctrl-C again" in answer
    process.send_signal(signal.SIGINT)
    end_of(process, status=-signal.SIGINT)
    assert load(folder)["global_step"] == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has none")
def test_a_terminal_that_closes(running, tmp_path):
    """Guards the work since the last checkpoint: nobody reads stderr, and SIGHUP comes twice."""
    held = tmp_path / "held"
    process, folder = running("--checkpoint-every", 300, env={"HOLD": str(held)})
    held.touch()
    wait_for((tmp_path / "held.reached").exists, process)
    before = load(folder)["global_step"]
    process.stderr.close()
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
    held.unlink()
    process.wait(LIMIT)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"] > before


def test_nohup(running):
    """Guards runs that are to outlive the terminal: SIGHUP, ignored at the start, stays so."""
    process, folder = running(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    reached = load(folder)["global_step"]
    wait_for(lambda: load(folder)["global_step"] > reached + 20 * 128, process)


def test_ctrl_c_while_games_load(tmp_path):
    """Guards against tracebacks, and against a run's folder without a run."""
    process = start(ROOT / "pqn_abs.py", "--num-envs", 1000, "--runs-dir", tmp_path / "runs")
    assert next_line(process).startswith("loading 1000 x")
    process.send_signal(signal.SIGINT)
    _, errors = end_of(process, status=-signal.SIGINT)
    assert errors == "" and not list(tmp_path.glob("runs/*"))


def test_a_second_process_on_a_run_is_refused(running):
    """Guards the table against doubled rows: one line, and the first process goes on."""
    process, folder = running()
    written = (folder / "config.json").read_bytes()
    args = pqn_abs.Args(**config(folder)["args"])
    args.resume = str(folder)
    with pytest.raises(pqn_abs.UsageError, match=f"another process .*{folder}"):
        pqn_abs.main(args, **on(FakeEnvs(4)))
    assert (folder / "config.json").read_bytes() == written
    process.send_signal(signal.SIGINT)
    end_of(process)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


def test_an_exception_takes_down_what_the_run_set_up(train, tmp_path):
    """Guards the next run of the process; before its first checkpoint, a run leaves no folder."""
    before = handlers()
    for steps in (5, 40):
        with pytest.raises(ZeroDivisionError) as kept:
            train(EventEnvs(fails, steps=steps), total_timesteps=5000, adapt_rollout=False)
        assert handlers() == before
    (folder,) = tmp_path.iterdir()
    assert load(folder)["global_step"] == 128
    # The failed run's lock is gone, although its error is kept, as a notebook does.
    train(FakeEnvs(4), resume=str(folder), total_timesteps=1000)
    assert kept.tb is not None


def test_a_run_off_the_main_thread(train):
    """Guards schedulers and notebooks: only the main thread may handle signals."""
    folders = []
    thread = threading.Thread(target=lambda: folders.append(train(FakeEnvs(4), total_timesteps=1)))
    thread.start()
    thread.join(LIMIT)
    assert load(folders[0])["global_step"] == 128


# --- Failing ---


@pytest.mark.parametrize("what", ["obs", "final_obs", "reward"])
def test_what_is_not_finite_ends_the_run(launch, tmp_path, what):
    """Guards the last good checkpoint: status 1, one line, and the run can go on from there."""
    envs = EventEnvs(lambda result: result[what].fill(np.nan), steps=100, truncate=0.5)
    arguments = ["--num-envs", 4, "--checkpoint-every", 1e-6, "--no-adapt-rollout"]
    names = ["--runs-dir", tmp_path, "--run-name", "run"]
    status, errors = launch(*names, *arguments, *ON_A_CPU, **on(envs))
    assert status == 1 and "Traceback" not in errors
    assert f"\n{pqn_abs.SCRIPT}: the gradient is not finite" in errors
    saved = load(tmp_path / "run")
    assert saved["global_step"] == steps_without_gap(tmp_path / "run")[-1] == 3 * 128
    assert all(weights.isfinite().all() for weights in saved["network"].values())


def one_of_three(seed):
    """A run of a sweep; the one with seed 2 diverges."""
    envs = EventEnvs(diverges) if seed == 2 else FakeEnvs(4)
    args = pqn_abs.Args(seed=seed, num_envs=4, total_timesteps=300, device="cpu")
    args.run_name = f"{seed}-{os.getpid()}"
    pqn_abs.main(args, **on(envs))


def test_a_diverging_run_of_three_ends_alone(tmp_path, monkeypatch):
    """Guards programs: main raises what they can catch. After SystemExit, a pool would hang."""
    monkeypatch.chdir(tmp_path)
    ended = []
    with get_context("fork").Pool(1) as pool:

        def in_a_pool(seed):
            pool.apply_async(one_of_three, (seed,)).get(LIMIT)

        for run in (one_of_three, in_a_pool):
            for seed in (1, 2, 3):
                try:
                    run(seed)
                except FloatingPointError:
                    ended.append(seed)
    assert ended == [2, 2]
    reached = [load(path)["global_step"] for path in tmp_path.glob("runs/*")]
    assert sorted(reached) == [128, 128, 384, 384, 384, 384]


@pytest.mark.parametrize(
    "module, name", [(os, "replace"), (shutil, "copyfile"), (torch, "save")], ids=str
)
def test_a_full_disk_leaves_what_there_was(train, tmp_path, monkeypatch, module, name):
    """Guards a new run's name, and an old run, wherever the disk is full."""
    old = train(FakeEnvs(4), total_timesteps=1)
    before = contents(tmp_path)

    def write(*given):
        raise OSError(28, "No space left on device")

    for options in ({"run_name": "new"}, {"resume": str(old)}):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(module, name, write)
            train(FakeEnvs(4), total_timesteps=600, **options)
        assert not (tmp_path / "new").exists()
        assert (old / "checkpoint.pt").read_bytes() == before[old / "checkpoint.pt"]
    train(FakeEnvs(4), total_timesteps=600, resume=str(old))
    assert load(old)["global_step"] == steps_without_gap(old)[-1] >= 600


def test_a_run_that_has_just_gone_on_is_not_cut(train, monkeypatch):
    """Guards the rows of a process that ends after a second one has loaded the checkpoint."""
    folder = train(FakeEnvs(4), total_timesteps=1)
    old = load(folder)
    train(FakeEnvs(4), total_timesteps=600, resume=str(folder))
    before = contents(folder)
    real_load = torch.load
    answers = iter([old])

    def load_late(*given, **options):
        return next(answers, None) or real_load(*given, **options)

    monkeypatch.setattr(torch, "load", load_late)
    with pytest.raises(pqn_abs.UsageError, match="resume it again"):
        train(FakeEnvs(4), total_timesteps=900, resume=str(folder))
    assert contents(folder) == before


# --- What is refused: one line, status 2, nothing written ---


class Bomb:
    """Pickled, it is code that runs where it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("bomb"),)


def test_a_checkpoint_that_would_run_code_is_refused(train, launch, tmp_path, monkeypatch):
    """Guards those who resume a run from someone else."""
    monkeypatch.chdir(tmp_path)
    folder = train(FakeEnvs(2), total_timesteps=1)
    torch.save({"network": Bomb()}, folder / "checkpoint.pt")
    before = contents(tmp_path)
    with pytest.raises(UnpicklingError):
        launch("--resume", folder, **on(FakeEnvs(2)))
    assert contents(tmp_path) == before


def test_resuming_what_is_no_run_is_refused(refused, train):
    """Guards typing errors, folders without a checkpoint, and runs of another script."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    assert "--resume nothing" in refused("--resume", "nothing", **on(FakeEnvs(2)))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace(pqn_abs.SCRIPT, "minatar_abs.py"))
    assert "start minatar_abs.py" in refused("--resume", folder, **on(FakeEnvs(2)))
    (folder / "config.json").write_text(text)
    another = ["--resume", folder, "--env-id", "PongNoFrameskip-v4"]
    assert "--env-id: a run of Breakout" in refused(*another, **on(FakeEnvs(2)))
    fewer = ["--resume", folder, "--total-timesteps", 1]
    assert "no steps left: give a larger --total-timesteps" in refused(*fewer, **on(FakeEnvs(2)))
    (folder / "checkpoint.pt").unlink()
    assert "checkpoint.pt" in refused("--resume", folder, **on(FakeEnvs(2)))


def test_a_folder_that_cannot_be_made_is_refused(refused, train, tmp_path):
    """Guards an earlier run from a second one with its name, and the user from a traceback."""
    train(FakeEnvs(2), total_timesteps=1, run_name="mine")
    line = refused("--runs-dir", tmp_path, "--run-name", "mine", *ON_A_CPU)
    assert "mine" in line and "--run-name" in line
    arguments = ["--runs-dir", "mine/metrics.csv", "--num-envs", 2, *ON_A_CPU]
    assert "mine/metrics.csv" in refused(*arguments, **on(FakeEnvs(2)))


COUNTS = """total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min
    adapt_frequency reference_states""".split()
SHARES = "gamma q_lambda start_e end_e exploration_fraction beta learning_rate".split()
BAD = [
    *[{name: 0} for name in COUNTS],
    *[{name: -1} for name in ("seed", "rollout_max")],
    *[{name: value} for name in SHARES for value in (-0.1, 1.1, float("nan"))],
    *[{name: 0.0} for name in ("max_grad_norm", "checkpoint_every", "delta_min")],
    {"rollout_max": 15},
    {"num_steps": 15},
    {"num_steps": 65},
    {"delta_max": 1.01},
    {"delta_max": 0.04},
    {"num_minibatches": 128 * 16 + 1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_arguments_that_make_no_run_are_refused(tmp_path, bad):
    """Guards each bound: a short line that names the option, and no folder."""
    (name,) = bad
    with pytest.raises(pqn_abs.UsageError) as error:
        pqn_abs.main(pqn_abs.Args(**bad, runs_dir=str(tmp_path / "runs")))
    assert str(error.value).startswith(f"--{name.replace('_', '-')} must be ")
    assert list(tmp_path.iterdir()) == []


def test_a_device_or_a_game_that_is_none_is_refused(refused):
    """Guards --device and --env-id, with a line that names the nearest game there is."""
    for device in ("tpu", "cuda:99"):
        assert f"--device {device}" in refused("--device", device)
    for game in ("BreakoutNoFrameskip-v5", "Breakout-v4", "Brakeout"):
        line = refused("--env-id", game, "--device", "cpu")
        assert f"--env-id {game}" in line and "did you mean BreakoutNoFrameskip-v4?" in line
    refused("--env-id", "CartPole-v1", "--device", "cpu")


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--num-envs", "many"], ["--resume", "nothing"], ["--gamma", "2"]]
)
def test_refusals_of_a_process(tmp_path, arguments):
    """Guards the same from a real command line; where it does not parse, the words are tyro's."""
    process = start(ROOT / "pqn_abs.py", *arguments, cwd=tmp_path)
    _, errors = end_of(process, status=2)
    assert "Traceback" not in errors and list(tmp_path.iterdir()) == []
    if arguments[0] in ("--resume", "--gamma"):
        assert errors.startswith("pqn_abs.py: --") and errors.count("\n") == 1


def test_help_names_every_option():
    """Guards the help text, also on consoles without Greek letters."""
    process = start(ROOT / "pqn_abs.py", "--help", env={"PYTHONIOENCODING": "ascii"})
    text, _ = end_of(process)
    for name in vars(pqn_abs.Args()):
        assert f"--{name.replace('_', '-')}" in text


def test_defaults_are_the_papers():
    """Guards the paper's table; only episodic_life is another, so that games go on."""
    args = vars(pqn_abs.Args())
    paper = {"total_timesteps": 2e7, "num_envs": 128, "learning_rate": 2.5e-4, "num_steps": 32}
    paper |= {"num_minibatches": 4, "update_epochs": 2, "max_grad_norm": 10.0, "q_lambda": 0.65}
    paper |= {"start_e": 1.0, "end_e": 0.001, "exploration_fraction": 0.1, "gamma": 0.99}
    paper |= {"adapt_rollout": True, "adapt_frequency": 50, "rollout_min": 16, "rollout_max": 64}
    paper |= {"delta_min": 0.05, "delta_max": 0.95, "episodic_life": True, "anneal_lr": False}
    assert {name: args[name] for name in paper} == paper


class OneMore(SmallNetwork):
    """A network with an action that the game does not have."""

    def __init__(self, envs):
        super().__init__(envs)
        self.head = torch.nn.Linear(16, 5)


@pytest.mark.parametrize(
    "num_envs, network, attribute, value",
    [
        (2, OneMore, "seed", 1),
        (3, SmallNetwork, "seed", 1),
        (2, SmallNetwork, "metadata", {"autoreset_mode": AutoresetMode.NEXT_STEP}),
        (2, SmallNetwork, "metadata", {}),
        (2, SmallNetwork, "single_action_space", Discrete(4, start=1)),
    ],
)
def test_parts_that_do_not_fit_are_refused(refused, num_envs, network, attribute, value):
    """Guards those who bring environments or a network: a line, not wrong targets or a hang."""
    envs = FakeEnvs(num_envs)
    setattr(envs, attribute, value)
    refused("--num-envs", 2, "--num-minibatches", 1, *ON_A_CPU, **on(envs, network))


def test_a_part_that_main_does_not_have_is_named():
    with pytest.raises(TypeError, match=r"QNetwork, rollout_length, not make_env$"):
        pqn_abs.launch(make_env=FakeEnvs)
