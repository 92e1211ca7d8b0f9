"""Whatever ends a run, it goes on from its last checkpoint; and the same seed makes the same run."""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, Bandit, Noise, column, load, record, rows, same, start, wait_for, without_clock

import pqn_abs

DRIVER = ROOT / "tests" / "driver.py"
# ε doesn't depend on the length of the run here, so that a longer run begins as a shorter one does
SHORT = {"adapt_frequency": 2, "start_e": 0.3, "end_e": 0.3, "learning_rate": 0.01, "seed": 5}


@pytest.fixture
def resume(train):
    """resume(envs, folder, more arguments) goes on with the run in folder, as its command line would."""

    def run(envs, folder, *arguments):
        args = pqn_abs.parse_args(["--resume", str(folder / "checkpoint.pt"), *map(str, arguments)])
        return train(envs, **{name: value for name, value in vars(args).items() if name != "device"})

    return run


def learner(checkpoint):
    return {name: checkpoint[name] for name in checkpoint if name not in ("args", "seconds")}


def without_gap(folder):
    """Each row begins where the one before it ended."""
    steps, batches = (column(folder / "metrics.csv", name, int) for name in ("global_step", "abs/batch_size"))
    episodes = column(folder / "episodes.csv", "global_step", int)
    return steps == np.cumsum(batches).tolist() and episodes == sorted(episodes)


# --- Resuming ---


def test_resumed_learner_equals_the_saved_one(train, resume):
    """A run that has reached its end saves again what it loaded."""
    folder = train(Noise(4), total_timesteps=1000, **SHORT)
    before = load(folder)
    tables = without_clock(folder / "metrics.csv"), rows(folder / "episodes.csv")
    assert before["adaptive_length"] != 32 and before["optimizer"]["state"][0]["step"] > 0
    assert before["recent_scores"] and before["global_step"] >= 1000 and before["iteration"] > 2
    saved_at = (folder / "checkpoint.pt").stat().st_mtime_ns
    assert resume(Noise(4), folder) == folder
    assert (folder / "checkpoint.pt").stat().st_mtime_ns > saved_at
    assert same(learner(load(folder)), learner(before))
    assert (without_clock(folder / "metrics.csv"), rows(folder / "episodes.csv")) == tables


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "crashed later"])
def test_interrupted_run_equals_a_straight_one(train, resume, crash):
    """In an environment without memory, to the last bit. A crash leaves rows from after the checkpoint behind."""
    straight = train(Bandit(5), total_timesteps=1500, **SHORT)
    folder = train(Bandit(5), total_timesteps=700, **SHORT)
    if crash:
        shutil.copy(folder / "checkpoint.pt", folder / "older.pt")
        resume(Bandit(5), folder, "--total-timesteps", 1200)
        with open(folder / "metrics.csv", "a") as table:
            table.write("1360,12.5,8")  # torn
        (folder / "older.pt").replace(folder / "checkpoint.pt")
    assert resume(Bandit(5), folder, "--total-timesteps", 1500) == folder
    assert same(learner(load(folder)), learner(load(straight)))
    for name in ("metrics.csv", "episodes.csv"):
        assert without_clock(folder / name) == without_clock(straight / name)
    seconds = column(folder / "metrics.csv", "charts/seconds")
    assert seconds == sorted(seconds)


def test_resumed_run_goes_on_where_it_was(train, resume):
    """Here the environments start anew, so the run is another one; yet no row is missing, doubled or changed."""
    folder = train(Noise(4), total_timesteps=1000, **SHORT)
    before = rows(folder / "metrics.csv"), rows(folder / "episodes.csv")
    resume(Noise(4), folder, "--total-timesteps", 2000)
    after = rows(folder / "metrics.csv"), rows(folder / "episodes.csv")
    assert all(new[: len(old)] == old and len(new) > len(old) for old, new in zip(before, after, strict=True))
    assert without_gap(folder)
    assert load(folder)["global_step"] == int(after[0][-1]["global_step"]) >= 2000
    measured = [i for i, row in enumerate(after[0]) if row["abs/behavioral_divergence"]]
    assert measured == list(range(0, len(after[0]), 2))


@pytest.mark.parametrize("kept", ["", "5,1\n", "5,1\n7,2\n"])
@pytest.mark.parametrize("cut", ["", "6,", "9,3\n", "9,3\n9,4\n10"])
def test_table_goes_on_after_its_last_whole_row(tmp_path, kept, cut):
    path = tmp_path / "table.csv"
    path.write_text("global_step,a\n" + kept + cut)
    pqn_abs.Table(path, last_step=7).write({"global_step": 8, "a": None})
    assert path.read_text() == "global_step,a\n" + kept + "8,\n"


@pytest.mark.parametrize("content", [None, "", "global_st"])
def test_table_begins_with_its_header(tmp_path, content):
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_text(content)
    pqn_abs.Table(path, last_step=0).write({"global_step": 8, "a": 0.5})
    assert path.read_text() == "global_step,a\n8,0.5\n"


# --- Interrupting ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_iteration(train, resume, number):
    class Interrupted(Noise):
        def step(self, actions):
            if len(self.steps) == 40:
                os.kill(os.getpid(), number)
            return super().step(actions)

    signal.signal(number, signal.SIG_IGN)
    folder = train(record(Interrupted(4)), total_timesteps=2000, adapt_rollout=False)
    assert signal.getsignal(number) == signal.SIG_IGN
    assert column(folder / "metrics.csv", "global_step", int) == [128, 256]
    assert load(folder)["global_step"] == 256
    resume(Noise(4), folder, "--total-timesteps", 500)
    assert column(folder / "metrics.csv", "global_step", int) == [128, 256, 384, 512]


def run_driver(tmp_path, kind, *arguments):
    process = start(DRIVER, kind, *arguments, "--precision", "float32", "--device", "cpu")
    return process, wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")), process)[0].parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_a_process(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    process, folder = run_driver(tmp_path, "noise", "--num-envs", 4)
    wait_for(lambda: (folder / "metrics.csv").read_text().count("\n") > 3, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert str(load(folder)["global_step"]) == rows(folder / "metrics.csv")[-1]["global_step"]
    assert without_gap(folder)
    assert folder.name in output.splitlines()[-1]


def test_second_interrupt_ends_at_once(tmp_path, monkeypatch):
    """An iteration takes over six seconds here."""
    monkeypatch.chdir(tmp_path)
    process, folder = run_driver(tmp_path, "slow", "--num-envs", 4, "--num-steps", 64)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=4)
    assert process.returncode == -signal.SIGINT
    assert load(folder)["global_step"] == 0


def test_interrupt_while_environments_start_ends_at_once_without_a_traceback(tmp_path):
    process = start("-u", ROOT / "pqn_abs.py", "--device", "cpu", "--runs-dir", tmp_path / "runs")
    assert process.stdout.readline().startswith("starting 128 x ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=8)
    assert (process.returncode, errors) == (-signal.SIGINT, "")
    assert not (tmp_path / "runs").exists()


def test_killed_at_any_moment_it_goes_on(tmp_path, monkeypatch, resume):
    """With a checkpoint after each iteration, saving is what it mostly does."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--num-envs", 4, "--num-steps", 16, "--checkpoint-every", 1e-6]
    process, folder = run_driver(tmp_path, "noise", *arguments)
    for kill in (True, True, True, True, False):
        reached = load(folder)["global_step"]
        wait_for(lambda reached=reached: load(folder)["global_step"] > reached, process)
        if kill:
            time.sleep(random.uniform(0, 0.3))
            process.kill()
            process.communicate()
            process, _ = run_driver(tmp_path, "noise", "--resume", folder / "checkpoint.pt")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert without_gap(folder)
    assert load(folder)["global_step"] == column(folder / "metrics.csv", "global_step", int)[-1]


# --- Failing ---


def test_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoint(train, resume, capsys):
    class Broken(Noise):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, reward * (math.nan if len(self.steps) == 100 else 1), *rest

    with pytest.raises(SystemExit) as error:
        train(record(Broken(4)), total_timesteps=10**6, adapt_rollout=False, checkpoint_every=1e-6)
    assert error.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "not finite at step 512" in line
    checkpoint = Path(line.split()[-1])
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == 384
    assert all(parameter.isfinite().all() for parameter in saved["network"].values())
    resume(Noise(4), checkpoint.parent, "--total-timesteps", 1000)
    assert without_gap(checkpoint.parent)


# --- The same seed, and others ---


def test_same_seed_gives_the_same_run(train):
    runs = [train(Noise(4), total_timesteps=2000, adapt_frequency=2, seed=seed) for seed in (7, 7, 8)]
    first, second, other = ((without_clock(run / "metrics.csv"), rows(run / "episodes.csv")) for run in runs)
    assert first == second
    assert first[0] != other[0] and first[1] != other[1]
    assert same(load(runs[0])["network"], load(runs[1])["network"])


def test_environments_of_two_runs_share_no_seed(train):
    """Environment i of a vector environment gets the seed that reset() gets, plus i."""
    seeds = []
    for seed in range(1, 6):
        envs = record(Noise(128))
        train(envs, seed=seed, total_timesteps=1, num_steps=1, adapt_rollout=False)
        seeds += range(envs.seed, envs.seed + 128)
    assert len(set(seeds)) == 5 * 128
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_tracking_sends_the_rows_of_both_tables(train, monkeypatch):
    sent, started, ended = [], [], []
    wandb = SimpleNamespace(init=lambda **options: started.append(options), define_metric=lambda *args, **options: None)
    wandb.log, wandb.finish = sent.append, lambda: ended.append(True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = train(Noise(4), total_timesteps=1000, track=True, wandb_project_name="project")
    tables = rows(folder / "metrics.csv"), rows(folder / "episodes.csv")
    for table in tables:
        expected = [{name: float(value) for name, value in row.items() if value} for row in table]
        assert [row for row in sent if row.keys() <= table[0].keys()] == expected
    assert len(sent) == len(tables[0]) + len(tables[1])
    assert started[0]["project"] == "project" and started[0]["name"] == folder.name and ended


def test_run_folder_says_what_it_holds(train):
    first, second = (train(Noise(2), total_timesteps=1, env_id="A/B", seed=3) for _ in range(2))
    assert first != second and first.name.startswith("A-B__pqn_abs__3__")
    config = json.loads((first / "config.json").read_text())
    assert config["args"] == load(first)["args"]
    assert config.keys() >= {"script", "args", "python", "torch", "gymnasium", "ale_py", "numpy", "device"}
    assert len(config["git_commit"] or 40 * "0") == 40
    assert sorted(path.name for path in first.iterdir()) == "checkpoint.pt config.json episodes.csv metrics.csv".split()
