"""A run of pqn_abs.py from outside: its files, resuming, signals, failures, and what it refuses."""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from subprocess import PIPE
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from filelock import Timeout
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
    on,
    rows,
    same_weights,
    start,
    wait_for,
)

import pqn_abs

ON_A_CPU = ["--device", "cpu", "--precision", "float32"]
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def without_clock(path):
    table = rows(path)
    for row in table:
        del row["charts/SPS"]
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


def stops(result):
    signal.raise_signal(signal.SIGTERM)


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
    files = {path.name for path in folder.iterdir()} - {"lock"}
    assert files == set("checkpoint.pt config.json metrics.csv my_study.py pqn_abs.py".split())
    for source in (program, ROOT / "pqn_abs.py"):
        assert (folder / source.name).read_bytes() == source.read_bytes()
    written = config(folder)
    assert written["script"] == "my_study" and written["torch"] == torch.__version__
    assert pqn_abs.Args(**written["args"]).seed == 3
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"] >= 1000
    columns = """global_step charts/updates charts/epsilon abs/rollout_length abs/batch_size
        abs/behavioral_divergence losses/td_loss losses/q_values losses/grad_norm charts/SPS
        charts/episodic_return""".split()
    table = rows(folder / "metrics.csv")
    assert list(table[0]) == columns
    for name in columns:
        count = len(table) // 2 if name == "abs/behavioral_divergence" else len(table)
        assert np.isfinite(column(folder / "metrics.csv", name)).sum() == count


def test_same_seed_same_numbers(train):
    """Guards reproducibility: on one machine, a seed is a run, bit for bit.

    Environment i gets reset's seed plus i; those of two runs must not overlap.
    """
    arguments = {"total_timesteps": 2000, "adapt_frequency": 2}
    envs = [FakeEnvs(4) for _ in range(3)]
    one, again, other = (
        train(env, seed=seed, **arguments) for env, seed in zip(envs, (7, 7, 8), strict=True)
    )
    tables = [without_clock(folder / "metrics.csv") for folder in (one, again, other)]
    assert tables[0] == tables[1] != tables[2]
    assert same_weights(load(one)["network"], load(again)["network"])
    assert abs(envs[0].seed - envs[2].seed) >= 128


def test_a_program_may_pass_numpy_numbers_and_paths(train, resume, tmp_path):
    """Guards sweeps: the run's arguments are Python's own, and it can be resumed."""
    numbers = {"seed": np.int64(3), "gamma": np.float32(0.5), "anneal_lr": np.bool_(True)}
    folder = train(FakeEnvs(4), total_timesteps=np.int32(300), runs_dir=tmp_path / "p", **numbers)
    written = config(folder)["args"]
    assert written.items() >= {"seed": 3, "gamma": 0.5, "anneal_lr": True}.items()
    assert written["total_timesteps"] == 300 and written["runs_dir"] == str(tmp_path / "p")
    resume(folder, "--total-timesteps", 600)
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
    whole = train(Bandit(), total_timesteps=5000, **arguments)
    half = train(Bandit(stops), total_timesteps=5000, **arguments)
    assert steps_without_gap(half)[-1] < 300
    resume(half, envs=Bandit())
    assert without_clock(half / "metrics.csv") == without_clock(whole / "metrics.csv")
    assert same_weights(load(half)["network"], load(whole)["network"])
    assert load(half)["scores"] == load(whole)["scores"]
    assert len({*column(whole / "metrics.csv", "abs/rollout_length")}) > 5


def test_a_resumed_run_has_the_runs_options(train, resume):
    """Guards also those on top, which the defaults would not allow, and the rows of metrics.csv."""
    folder = train(FakeEnvs(4), total_timesteps=1000, num_steps=100, rollout_max=128)
    folder = folder.rename(folder.with_name("moved"))
    with open(folder / "metrics.csv", "a") as table:
        table.write("1,2,3\n" * 50 + "4,")  # a killed run may leave a torn row
    envs = resume(folder, "--total-timesteps", 2000, "--rollout-min", 70)
    assert len(envs.steps) == 3000 + 200  # 3,000 come before it learns
    assert steps_without_gap(folder) == [400, 800, 1200, 1600, 2000]
    expected = {"rollout_min": 70, "rollout_max": 128, "total_timesteps": 2000}
    assert config(folder)["args"].items() >= expected.items()
    assert [path.name for path in folder.parent.iterdir()] == ["moved"]
    plain = ["--no-adapt-rollout", "--num-steps", 25, "--rollout-min", 16]
    network = SmallNetwork(envs, None)
    network.load_state_dict(load(folder)["network"])
    envs = resume(folder, "--total-timesteps", 2100, *plain)
    assert len(envs.steps) == 3000 + 25
    for t, step in enumerate(envs.steps[:3000]):  # greedy, but for a game in turn: no learning
        expected = network(torch.tensor(step.obs)).argmax(1).numpy()
        assert np.array_equal(np.delete(step.action, t % 4), np.delete(expected, t % 4))
    given = [step.action[0] for step in envs.steps[:3000:4]]
    assert np.bincount(given, minlength=envs.single_action_space.n).min() > 100


@pytest.mark.parametrize("kept, torn", [(None, ""), (0, ""), (3, ""), (3, "384,7")])
def test_a_table_that_lost_rows_goes_on(train, resume, kept, torn):
    """Guards metrics.csv that is gone, or shorter than the checkpoint says: it is not padded."""
    folder = train(FakeEnvs(4), total_timesteps=640, adapt_rollout=False)
    table = folder / "metrics.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:kept]) + torn)
    if kept is None:
        table.unlink()
    resume(folder, "--total-timesteps", 896)
    expected = [128, 256, 768, 896] if kept else [768, 896]
    assert column(table, "global_step", int) == expected
    assert table.read_text().startswith(lines[0]) and "\0" not in table.read_text()


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
    """A rule of one's own for L; after this many calls, no checkpoint can hold its state."""

    def __init__(self, unsafe_at=None):
        self.calls = 0
        self.unsafe_at = unsafe_at

    def __call__(self, divergence, length, **limits):
        self.calls += 1
        return np.float64(20 + self.calls)

    def state_dict(self):
        return {"calls": Path("x") if self.calls == self.unsafe_at else self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_rule_of_ones_own_keeps_its_state(train, tmp_path, resume):
    """Guards days of training: what no resumed run could read fails when it is saved."""
    arguments = {"num_steps": 20, "adapt_frequency": 1, "checkpoint_every": 1e-6}
    with pytest.raises(UnpicklingError):
        train(FakeEnvs(4), rollout_length=Rule(unsafe_at=3), **arguments)
    (folder,) = tmp_path.iterdir()
    resume(folder, "--total-timesteps", 300, rollout_length=Rule())
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [20, 21, 22, 23]


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_ends(running, number):
    """Guards the work since the last checkpoint: status 0, and every row is in the checkpoint."""
    process, folder = running("--checkpoint-every", 300)
    process.send_signal(number)
    _, errors = end_of(process)
    assert f"--resume '{folder}'" in errors and "Traceback" not in errors
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_answered_at_once_and_a_second_one_too(running, tmp_path, number):
    """Guards the impatient: the iteration is held, the answer comes, and a second one ends it."""
    held, errors = tmp_path / "held", tmp_path / "errors"
    with errors.open("w") as file:
        process, folder = running(env={"HOLD": str(held)}, stderr=file)
    held.touch()
    wait_for((tmp_path / "held.reached").exists, process)
    before = load(folder)["global_step"]
    process.send_signal(number)
    wait_for(lambda: "finishing the iteration" in errors.read_text(), process)
    process.send_signal(number)
    assert process.wait(LIMIT) == -number
    assert load(folder)["global_step"] == before


def test_ctrl_c_in_a_later_cell_leaves_the_session_alive(tmp_path):
    """Guards notebooks and %run: after a run, Ctrl-C is theirs again."""
    options = ["--num-envs", 4, "--total-timesteps", 300, "--runs-dir", tmp_path, *ON_A_CPU]
    process = start("-i", SMALL_RUN, *options, stdin=PIPE, cwd=tmp_path)
    process.stdin.write("import time; open('begun', 'w').close(); time.sleep(600)\n")
    process.stdin.flush()
    wait_for((tmp_path / "begun").exists, process)
    process.send_signal(signal.SIGINT)
    process.stdin.write("print('still', 'alive')\n")
    output, errors = end_of(process)
    assert "KeyboardInterrupt" in errors and "still alive" in output


def test_a_second_process_on_a_run_is_refused(running):
    """Guards the table against doubled rows; the first process goes on."""
    process, folder = running()
    written = (folder / "config.json").read_bytes()
    args = pqn_abs.Args(**config(folder)["args"] | {"resume": str(folder)})
    with pytest.raises(Timeout):
        pqn_abs.main(args, **on(FakeEnvs(4)))
    assert (folder / "config.json").read_bytes() == written
    process.send_signal(signal.SIGINT)
    end_of(process)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


def test_an_exception_takes_down_what_the_run_set_up(train, tmp_path):
    """Guards the next run of the process: signals are the caller's again, and the lock is gone."""
    before = handlers()
    with pytest.raises(ZeroDivisionError) as kept:
        train(EventEnvs(fails), total_timesteps=5000, adapt_rollout=False)
    assert handlers() == before
    (folder,) = tmp_path.iterdir()
    assert load(folder)["global_step"] == 128
    train(FakeEnvs(4), resume=str(folder), total_timesteps=1000)
    assert handlers() == before
    assert kept.tb is not None  # a notebook keeps the failed run's error, too


def test_a_run_off_the_main_thread(train):
    """Guards schedulers and notebooks: only the main thread may handle signals."""
    folders = []
    thread = threading.Thread(target=lambda: folders.append(train(FakeEnvs(4), total_timesteps=1)))
    thread.start()
    thread.join(LIMIT)
    assert load(folders[0])["global_step"] == 128


# --- Failing ---


@pytest.mark.parametrize("what", ["obs", "final_obs", "reward"])
def test_what_is_not_finite_ends_the_run(train, tmp_path, what):
    """Guards the last good checkpoint: the run can go on from there."""
    envs = EventEnvs(lambda result: result[what].fill(np.nan), steps=100, truncate=0.5)
    with pytest.raises(FloatingPointError, match="gradient is not finite at step 512"):
        train(envs, adapt_rollout=False, checkpoint_every=1e-6, total_timesteps=5000)
    (folder,) = tmp_path.iterdir()
    saved = load(folder)
    assert saved["global_step"] == steps_without_gap(folder)[-1] == 3 * 128
    assert all(weights.isfinite().all() for weights in saved["network"].values())


def test_a_diverging_run_of_three_ends_alone(train, tmp_path):
    """Guards programs that call main in a loop: it raises what they can catch."""
    before = handlers()
    for envs in (FakeEnvs(4), EventEnvs(diverges), FakeEnvs(4)):
        with suppress(FloatingPointError):
            train(envs, total_timesteps=300)
    assert handlers() == before
    reached = [load(folder)["global_step"] for folder in sorted(tmp_path.iterdir())]
    assert reached == [384, 128, 384]


@pytest.mark.parametrize("module, name", [(os, "replace"), (torch, "save")], ids=str)
def test_a_full_disk_leaves_what_there_was(train, monkeypatch, module, name):
    """Guards an old run, wherever the disk is full, and its lock."""
    old = train(FakeEnvs(4), total_timesteps=1)
    before = contents(old)

    def write(*given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(module, name, write)
        train(FakeEnvs(4), total_timesteps=600, resume=str(old))
    assert (old / "checkpoint.pt").read_bytes() == before[old / "checkpoint.pt"]
    train(FakeEnvs(4), total_timesteps=600, resume=str(old))
    assert load(old)["global_step"] == steps_without_gap(old)[-1] >= 600


# --- What is refused ---


class Bomb:
    """Pickled, it is code that runs where it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("bomb"),)


def test_a_checkpoint_that_would_run_code_is_refused(train, tmp_path, monkeypatch):
    """Guards those who resume a run from someone else."""
    monkeypatch.chdir(tmp_path)
    folder = train(FakeEnvs(2), total_timesteps=1)
    torch.save({"network": Bomb()}, folder / "checkpoint.pt")
    before = contents(tmp_path)
    with pytest.raises(UnpicklingError):
        train(FakeEnvs(2), resume=str(folder), total_timesteps=1000)
    assert contents(tmp_path) == before


def test_a_wrong_folder_or_game_gets_one_line(launch, train, tmp_path):
    """Guards typing errors, an earlier run from a second one with its name, and its checkpoint."""
    folder = train(FakeEnvs(2), total_timesteps=1, run_name="mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    before = contents(tmp_path)
    wrong = {
        "nothing": ["--resume", tmp_path / "nothing"],
        "empty": ["--resume", empty],
        "mine": ["--runs-dir", tmp_path, "--run-name", "mine"],
        "metrics.csv": ["--runs-dir", folder / "metrics.csv"],
        "Brakeout": ["--env-id", "Brakeout-v4"],
        "v5": ["--env-id", "BreakoutNoFrameskip-v5"],
        "CartPole": ["--env-id", "CartPole-v1"],
        "ALE/Breakout-v5": ["--env-id", "Breakout-v4"],  # which skips 2 to 4 frames, at random
    }
    for words, arguments in wrong.items():
        parts = {} if "--env-id" in arguments else on(FakeEnvs(2))
        status, errors = launch(*arguments, "--num-envs", 2, *ON_A_CPU, **parts)
        assert status == 1 and errors.startswith("pqn_abs.py: ")
        assert words in errors and "\n" not in errors
    assert contents(tmp_path) == before


COUNTS = """total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min
    adapt_frequency reference_states""".split()
SHARES = "gamma q_lambda start_e end_e exploration_fraction beta".split()
BAD = [
    *[{name: 0} for name in COUNTS],
    *[{name: value} for name in SHARES for value in (-0.1, 1.1, float("nan"))],
    *[{name: 0.0} for name in ("max_grad_norm", "delta_min")],
    {"num_steps": 15},
    {"num_steps": 65},
    {"delta_min": 0.95},
    {"num_minibatches": 128 * 16 + 1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_arguments_that_make_no_run_are_refused(bad):
    """Guards each bound: a short line that names the option."""
    (name,) = bad
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*must be "):
        pqn_abs.Args(**bad)


@pytest.mark.parametrize("words", [["--nonsense"], ["--num-envs", "many"], ["--gamma", "2"]])
def test_a_wrong_argument_gets_no_traceback(launch, words):
    """Guards the command line: the words are tyro's, around those of check_args."""
    status, errors = launch(*words)
    assert status == 2 and words[0] in errors


def test_defaults_are_the_papers():
    """Guards the paper's table; only episodic_life is another, so that games go on."""
    args = vars(pqn_abs.Args())
    paper = {"total_timesteps": 2e7, "num_envs": 128, "learning_rate": 2.5e-4, "num_steps": 32}
    paper |= {"num_minibatches": 4, "update_epochs": 2, "max_grad_norm": 10.0, "q_lambda": 0.65}
    paper |= {"start_e": 1.0, "end_e": 0.001, "exploration_fraction": 0.1, "gamma": 0.99}
    paper |= {"adapt_rollout": True, "adapt_frequency": 50, "rollout_min": 16, "rollout_max": 64}
    paper |= {"delta_min": 0.05, "delta_max": 0.95, "episodic_life": True, "anneal_lr": False}
    assert {name: args[name] for name in paper} == paper


@pytest.mark.parametrize(
    "attribute, value",
    [
        ("num_envs", 3),
        ("single_action_space", Discrete(3)),  # the network has an action more
        ("metadata", {"autoreset_mode": AutoresetMode.NEXT_STEP}),
    ],
)
def test_parts_that_do_not_fit_are_refused(train, tmp_path, attribute, value):
    """Guards those who bring environments or a network: a line, not wrong targets or a hang."""
    envs = FakeEnvs(2)
    setattr(envs, attribute, value)
    with pytest.raises(ValueError, match="must"):
        train(envs, lambda envs, args: SmallNetwork(FakeEnvs(2), args), num_envs=2)
    assert list(tmp_path.iterdir()) == []
