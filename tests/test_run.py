"""A run of pqn_abs.py from outside: its files, resuming, signals, bad input, and what it says."""

import importlib.util
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
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
    expected_episodes,
    load,
    next_line,
    on,
    rows,
    same_weights,
    start,
    wait_for,
)
from tqdm import tqdm

import pqn_abs

ON_A_CPU = ["--device", "cpu", "--precision", "float32"]
posix = pytest.mark.skipif(os.name == "nt", reason="signals and file limits of POSIX")
SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP"]


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


# --- A run's files ---


def test_a_run_leaves_three_files(train):
    """Guards the contract that the tools read."""
    folder = train(FakeEnvs(4), total_timesteps=1000, seed=3, adapt_frequency=2)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["checkpoint.pt", "config.json", "metrics.csv"]
    written = config(folder)
    assert written["script"] == pqn_abs.SCRIPT and written["device"] == "cpu"
    assert pqn_abs.Args(**written["args"]).seed == 3
    versions = {"torch": torch.__version__, "gymnasium": gymnasium.__version__}
    assert written["provenance"].items() >= versions.items()
    assert set(written["provenance"]) >= {"python", "ale_py", "commit"}
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"] >= 1000
    columns = """global_step charts/seconds charts/SPS charts/updates charts/epsilon
        charts/episodic_return abs/rollout_length abs/batch_size abs/behavioral_divergence
        losses/td_loss losses/q_values losses/grad_norm""".split()
    table = rows(folder / "metrics.csv")
    assert set(table[0]) == set(columns)
    for name in columns:
        if name != "abs/behavioral_divergence":
            assert np.isfinite(column(folder / "metrics.csv", name)).sum() == len(table)
    seconds = column(folder / "metrics.csv", "charts/seconds")
    assert seconds == sorted(seconds)


def test_the_commit_is_the_scripts(tmp_path, monkeypatch):
    """Guards provenance: null outside of a repository, the commit in one, and -dirty on top."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    copied = tmp_path / "copied_pqn.py"
    shutil.copy(ROOT / "pqn_abs.py", copied)
    spec = importlib.util.spec_from_file_location("copied_pqn", copied)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_pqn", copy)
    spec.loader.exec_module(copy)

    def git(*words):
        who = ["-c", "user.name=Test", "-c", "user.email=test@localhost"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert copy.provenance()["commit"] is None
    git("init")
    git("add", ".")
    git("commit", "-m", "a script")
    git("tag", "-a", "a-tag", "-m", "a tag")
    commit = git("rev-parse", "HEAD")
    assert len(commit) == 40 and copy.provenance()["commit"] == commit
    with open(copied, "a") as file:
        file.write("# changed\n")
    assert copy.provenance()["commit"] == f"{commit}-dirty"


def test_same_seed_same_numbers(train):
    """Guards reproducibility: on one machine, a seed is a run, bit for bit."""
    arguments = {"total_timesteps": 2000, "adapt_frequency": 2}
    one, again, other = (train(FakeEnvs(4), seed=seed, **arguments) for seed in (7, 7, 8))
    tables = [without_clock(folder / "metrics.csv") for folder in (one, again, other)]
    assert tables[0] == tables[1] != tables[2]
    assert same_weights(load(one)["network"], load(again)["network"])


def test_environments_of_two_runs_share_no_seed(train):
    """Guards runs with seeds 1 and 2: environment i gets reset's seed plus i."""
    seeds = []
    for seed in (*range(1, 8), 2**63):
        envs = FakeEnvs(128)
        arguments = {"num_steps": 1, "adapt_rollout": False, "total_timesteps": 1}
        train(envs, seed=seed, **arguments)
        seeds.append(envs.seed)
    assert np.diff(sorted(seeds)).min() >= 128
    assert 0 <= min(seeds) and max(seeds) < 2**31 - 128


def test_a_name_that_is_taken_is_refused(train, refused, tmp_path):
    """Guards an earlier run from a second one with its name."""
    train(FakeEnvs(2), total_timesteps=1, run_name="mine")
    line = refused("--runs-dir", tmp_path, "--run-name", "mine", *ON_A_CPU)
    assert "mine" in line and "--run-name" in line


@pytest.mark.parametrize("runs_dir", ["file", "file/runs", "x" * 300])
def test_a_runs_folder_that_cannot_be_made_is_refused(refused, tmp_path, runs_dir):
    """Guards the user from a traceback, before the first step."""
    (tmp_path / "file").touch()
    parts = on(FakeEnvs(2))
    assert runs_dir in refused("--runs-dir", runs_dir, "--num-envs", 2, *ON_A_CPU, **parts)


# --- Weights & Biases ---


@pytest.fixture
def wandb(monkeypatch):
    """A wandb that notes what it is asked, one entry for each run."""

    class Started(SimpleNamespace):
        def define_metric(self, name, step_metric):
            self.metrics.append((name, step_metric))

        def log(self, row):
            self.rows.append(dict(row))

        def finish(self):
            self.finished += 1

    def init(**options):
        if fake.error:
            raise fake.error
        name = options["id"] or f"made-by-wandb-{len(fake.runs)}"
        run = Started(id=name, options=options, metrics=[], rows=[], finished=0)
        fake.runs.append(run)
        return run

    fake = SimpleNamespace(runs=[], init=init, error=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_rows(train, wandb):
    """Guards --track: metrics.csv's numbers without empty cells, drawn over global_step.

    With step=, W&B would drop the rows that a resumed run sends again.
    """
    folder = train(FakeEnvs(4), total_timesteps=1000, track=True, run_name="mod:Env-v0, a=b")
    (run,) = wandb.runs
    assert run.options["name"] == folder.name and run.options["id"] is None
    assert run.options["config"] == config(folder)
    assert run.metrics == [("*", "global_step")] and run.finished == 1
    table = rows(folder / "metrics.csv")
    assert run.rows == [{name: float(row[name]) for name in row if row[name]} for row in table]


def test_wandb_knows_a_resumed_run_again(train, launch, wandb):
    """Guards the id that W&B made: the checkpoint keeps it, also over a resume without --track."""
    folder = train(FakeEnvs(4), total_timesteps=300, track=True)
    made = wandb.runs[0].id
    assert load(folder)["wandb_id"] == made == "made-by-wandb-0"
    for total, track in ((600, "--track"), (900, "--no-track"), (1200, "--track")):
        arguments = ["--resume", folder, "--total-timesteps", total, track]
        status, errors = launch(*arguments, **on(FakeEnvs(4)))
        assert status == 0, errors
    assert [run.options["id"] for run in wandb.runs] == [None, made, made]
    assert {run.options["resume"] for run in wandb.runs} == {"allow"}
    assert wandb.runs[-1].rows[-1]["global_step"] >= 1200


@pytest.mark.parametrize("error", [ValueError("no such name:\nmod:Env-v0"), "no package"], ids=str)
def test_a_wandb_that_does_not_start_is_refused(refused, train, wandb, monkeypatch, error):
    """Guards --track without a login or the package: one line, no new folder, no old one lost."""
    wandb.error = error
    if error == "no package":
        monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = ["--num-envs", 2, *ON_A_CPU]
    line = refused(*arguments, "--runs-dir", ".", "--track", **on(FakeEnvs(2)))
    assert "--track" in line
    folder = train(FakeEnvs(2), total_timesteps=300)
    refused("--resume", folder, "--track", **on(FakeEnvs(2)))


def test_wandb_finishes_where_a_run_fails(train, wandb):
    """Guards a second run in the same process: its rows must not go to the first one."""
    with pytest.raises(ZeroDivisionError):
        train(FailingEnvs(2), total_timesteps=1000, track=True)
    assert wandb.runs[0].finished == 1


def test_wandb_works_offline(tmp_path):
    """Guards the real package's calls, without the network."""
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    arguments = ["--num-envs", 4, "--total-timesteps", 300, "--runs-dir", tmp_path, *ON_A_CPU]
    end_of(start(SMALL_RUN, *arguments, "--track", env=offline))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_without_track_wandb_is_not_imported():
    """Guards the second that it takes, and those who have not installed it."""
    end_of(start("-c", "import sys, pqn_abs; sys.exit('wandb' in sys.modules)"))


# --- Resuming ---


@pytest.fixture
def resume(launch):
    """resume(folder, *arguments) goes on with a run on new environments; returns these."""

    def run(folder, *arguments, envs=None):
        envs = envs or FakeEnvs(4)
        status, errors = launch("--resume", folder, *arguments, **on(envs))
        assert status == 0, errors
        return envs

    return run


def test_a_run_goes_on_where_it_stopped(train, resume):
    """Guards --resume, the counters, and the options given on top."""
    first = FakeEnvs(4)
    folder = train(first, total_timesteps=1000, adapt_frequency=1, gamma=0.9)
    before = load(folder)
    envs = resume(folder, "--total-timesteps", 2000)
    assert envs.seed != first.seed  # the same games would be nothing new
    after = load(folder)
    assert steps_without_gap(folder)[-1] == after["global_step"] >= 2000
    assert len(envs.steps) * 4 == after["global_step"] - before["global_step"]
    assert len(rows(folder / "metrics.csv")) == after["iteration"] > before["iteration"]
    assert column(folder / "metrics.csv", "charts/updates", int)[-1] == 8 * after["iteration"]
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[before["iteration"]] == round(before["adaptive_length"])
    seconds = column(folder / "metrics.csv", "charts/seconds")
    assert seconds == sorted(seconds)
    in_a_rollout = 4 * lengths[before["iteration"]]
    new = [score for step, score in expected_episodes(envs.steps) if step <= in_a_rollout]
    means = column(folder / "metrics.csv", "charts/episodic_return")
    assert means[before["iteration"]] == pytest.approx(np.mean((before["scores"] + new)[-100:]))
    assert config(folder)["args"]["gamma"] == 0.9  # from the run
    assert config(folder)["args"]["total_timesteps"] == 2000  # given on top


def test_weights_and_optimiser_come_back(train, resume):
    """Guards learning across a stop: an iteration without learning saves what it loaded."""
    folder = train(FakeEnvs(4), total_timesteps=1000)
    before = load(folder)
    resume(folder, "--total-timesteps", 1100, "--learning-rate", 1e-9)
    after = load(folder)
    for name, weights in before["network"].items():
        torch.testing.assert_close(after["network"][name], weights, rtol=0, atol=1e-6)
    assert after["optimizer"]["state"][0]["step"] == before["optimizer"]["state"][0]["step"] + 8


def test_a_fixed_length_counts_from_a_resume_on(train, resume):
    """Guards --no-adapt-rollout and --num-steps, given on top of a run that has adapted L."""
    folder = train(FakeEnvs(4), total_timesteps=1000, adapt_frequency=1)
    before = len(rows(folder / "metrics.csv"))
    resume(folder, "--total-timesteps", 2000, "--no-adapt-rollout", "--num-steps", 10)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert set(lengths[before:]) == {10}


def test_l_is_brought_within_new_limits(train, resume):
    """Guards options given on a resume: the saved L may be outside the limits of now."""
    for limits, expected in (
        (["--rollout-max", 20, "--num-steps", 16], 20),
        (["--rollout-min", 60, "--num-steps", 60], 60),
    ):
        folder = train(FakeEnvs(4), num_steps=40, total_timesteps=300, adapt_frequency=100)
        before = len(rows(folder / "metrics.csv"))
        resume(folder, "--total-timesteps", 600, *limits)
        lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
        assert set(lengths[:before]) == {40} and set(lengths[before:]) == {expected}


def test_a_schedule_may_return_a_numpy_number(train, resume):
    """Guards the checkpoint: weights_only=True would refuse one."""
    schedule = {"rollout_length": lambda divergence, length, **limits: np.float64(length)}
    folder = train(FakeEnvs(4), total_timesteps=1000, adapt_frequency=1, **schedule)
    resume(folder, "--total-timesteps", 2000)
    assert load(folder)["global_step"] >= 2000


def test_the_optimisers_step_stays_on_its_device(tmp_path):
    """Guards Adam(fused=True) on a GPU: its step is there, and that of RAdam on the CPU."""
    weights = torch.zeros(3)
    state = {"step": torch.zeros((), device="meta"), "exp_avg": torch.ones(3)}
    optimizer = SimpleNamespace(
        state={weights: state}, state_dict=dict, load_state_dict=lambda saved: None
    )
    torch.save({"optimizer": {}}, tmp_path / "checkpoint.pt")
    args = pqn_abs.Args(resume=str(tmp_path))
    pqn_abs.load_checkpoint(args, tmp_path, {"optimizer": optimizer})
    assert state["step"].device.type == "meta" and state["exp_avg"].tolist() == [1, 1, 1]


def test_another_folder_of_the_same_run(train, resume, tmp_path):
    """Guards folders that were moved: the run goes on there, and nothing appears elsewhere."""
    folder = train(FakeEnvs(4), total_timesteps=300, runs_dir=str(tmp_path / "old"))
    folder.rename(tmp_path / "moved")
    (tmp_path / "old").rmdir()
    resume(tmp_path / "moved", "--total-timesteps", 600)
    assert steps_without_gap(tmp_path / "moved")[-1] >= 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]


def test_rows_after_the_checkpoint_are_written_again(train, resume):
    """Guards the table of a killed run: what follows the checkpoint goes, a torn row too."""
    folder = train(FakeEnvs(4), total_timesteps=300)
    for total in (600, 900, 1200):
        with open(folder / "metrics.csv", "a") as table:
            table.write("1,2,3\n" * 50 + "4,")
        resume(folder, "--total-timesteps", total)
        assert steps_without_gap(folder)[-1] >= total


@pytest.mark.parametrize("edit", ["emptied", "shortened", "removed", "a column more"])
def test_a_table_that_a_hand_has_touched_stops_nothing(train, resume, edit):
    """Guards users who look at metrics.csv with a spreadsheet."""
    folder = train(FakeEnvs(4), total_timesteps=1000)
    table = folder / "metrics.csv"
    lines = table.read_text().splitlines(keepends=True)
    edited = {"emptied": "", "shortened": "".join(lines[:3]), "a column more": "x," + lines[1]}
    table.unlink()
    if edit != "removed":
        table.write_text(edited[edit])
    resume(folder, "--total-timesteps", 2000)
    assert load(folder)["global_step"] >= 2000


@posix
def test_killed_at_any_moment_it_goes_on(tmp_path):
    """Guards files against kill -9: with a save an iteration, saving is what it mostly does."""
    folder = tmp_path / "run"
    new = ["--runs-dir", tmp_path, "--run-name", "run", "--num-envs", 4, "--num-steps", 16]
    process = start(SMALL_RUN, *new, "--checkpoint-every", 1e-6, *ON_A_CPU)
    for kill in (True, True, False):
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
    assert not (folder / "checkpoint.tmp").exists()


# --- Checkpoints that are none ---


class Bomb:
    """Pickled, it is code that runs where it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("bomb"),)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, about such files
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"not at all " * 99,
        {"weights": torch.ones(3)},
        [1, 2],
        torch.ones(3),
        {"network": Bomb()},
        pickle.dumps(Bomb()),
    ],
    ids="missing empty text weights list tensor bomb raw-bomb".split(),
)
def test_a_file_that_is_no_checkpoint_is_refused(refused, train, content):
    """Guards against foreign files, and against code in them."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    (folder / "checkpoint.pt").unlink()
    if isinstance(content, bytes):
        (folder / "checkpoint.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, folder / "checkpoint.pt")
    assert str(folder) in refused("--resume", folder, **on(FakeEnvs(2)))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_torn_checkpoint_is_refused(refused, train, share):
    """Guards copies that broke off."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    whole = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(whole[: int(share * len(whole))])
    assert "no checkpoint" in refused("--resume", folder, **on(FakeEnvs(2)))


CONFIGS = [None, "", '{"script": "pq', "[]", "{}", "\udcff", "7", "[" * 99_999]


@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: ascii(text)[:9])
def test_a_folder_without_a_runs_config_is_refused(refused, train, text):
    """Guards foreign, older and torn folders."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text, errors="surrogateescape")
    assert str(folder) in refused("--resume", folder, **on(FakeEnvs(2)))


@pytest.mark.parametrize("arguments", [{"of_another_version": 1}, [1], None])
def test_a_run_with_other_arguments_is_refused(refused, train, arguments):
    """Guards runs of older versions, whose options are not these."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    changed = json.dumps(config(folder) | {"args": arguments})
    (folder / "config.json").write_text(changed)
    assert str(folder) in refused("--resume", folder, **on(FakeEnvs(2)))


@pytest.mark.parametrize("name", ["", "nothing", "run0/checkpoint.pt", "run0/typo.pt"])
def test_resuming_nothing_is_refused(refused, train, name):
    """Guards typing errors: no new run starts instead."""
    train(FakeEnvs(2), total_timesteps=1)
    assert "--resume" in refused("--resume", name, **on(FakeEnvs(2)))


def test_a_run_of_another_script_is_refused(refused, train):
    """Guards who starts pqn_abs.py on an example's run: the line says what to start.

    The other script's options are not known here, and are not what the line is about.
    """
    folder = train(FakeEnvs(2), total_timesteps=1)
    foreign = {"script": "minatar_abs.py", "args": {"of_another_script": 1}}
    (folder / "config.json").write_text(json.dumps(config(folder) | foreign))
    assert "minatar_abs.py" in refused("--resume", folder, **on(FakeEnvs(2)))


class Wider(SmallNetwork):
    def __init__(self, envs):
        super().__init__(envs)
        self.hidden = torch.nn.Linear(6, 17)


class Deeper(SmallNetwork):
    def __init__(self, envs):
        super().__init__(envs)
        self.more = torch.nn.Linear(6, 17)


@pytest.mark.parametrize("network", [Wider, Deeper])
def test_a_checkpoint_of_another_network_is_refused(refused, train, network):
    """Guards checkpoints of another game or size: the shapes differ."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    assert "no checkpoint" in refused("--resume", folder, **on(FakeEnvs(2), network))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (10**6,), (17, 6), (0,)], ids=str)
def test_a_forged_optimiser_is_refused_or_harmless(train, launch, name, shape):
    """Guards memory: PyTorch's fast optimisers trust their state's shapes, and read beyond it.

    A tensor of one number, which fits by repetition, trains as one of the right shape does.
    """
    folder = train(FakeEnvs(2), total_timesteps=1)
    checkpoint = load(folder)
    state = checkpoint["optimizer"]["state"][0]
    right = torch.zeros(state[name].shape)
    results = []
    for forged in (right, torch.zeros(shape)):
        state[name] = forged
        torch.save(checkpoint, folder / "checkpoint.pt")
        before = contents(folder)
        status, errors = launch("--resume", folder, "--total-timesteps", 600, **on(FakeEnvs(2)))
        results.append((status, contents(folder) == before, load(folder)["network"]))
    assert results[0][:2] == (0, False)
    if np.prod(shape) == 1:
        assert results[1][0] == 0 and same_weights(results[0][2], results[1][2])
    else:
        assert results[1][:2] == (2, True) and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    "step", [torch.zeros(5), torch.zeros(()).expand(3), "text", None], ids=lambda step: str(step)
)
def test_a_forged_step_is_refused(refused, train, step):
    """Guards the line: such a step is an error in the first update."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    checkpoint = load(folder)
    checkpoint["optimizer"]["state"][0]["step"] = step
    torch.save(checkpoint, folder / "checkpoint.pt")
    refused("--resume", folder, "--total-timesteps", 600, **on(FakeEnvs(2)))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_an_optimiser_state_of_strides_0_is_harmless(train, resume, name):
    """Guards memory: such a tensor has one number behind all of its elements."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    checkpoint = load(folder)
    results = []
    for stride_0 in (False, True):
        state = checkpoint["optimizer"]["state"][0]
        zero = torch.zeros(1)
        shape = state[name].shape
        state[name] = zero.expand(shape) if stride_0 else torch.zeros(shape)
        torch.save(checkpoint, folder / "checkpoint.pt")
        assert (load(folder)["optimizer"]["state"][0][name].stride() == (0, 0)) == stride_0
        resume(folder, "--total-timesteps", 600, envs=FakeEnvs(2))
        results.append(load(folder)["network"])
    assert same_weights(*results)


# --- Bad arguments ---

COUNTS = """total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min
    adapt_frequency reference_states""".split()
SHARES = "gamma q_lambda start_e end_e exploration_fraction beta learning_rate".split()
POSITIVE = "max_grad_norm checkpoint_every".split()
HUGE = (10**24, 10**399)
BAD = [
    *[{name: value} for name in COUNTS for value in (0, -1, *HUGE)],
    *[{name: value} for name in ("seed", "rollout_max") for value in (-1, *HUGE)],
    *[{name: value} for name in SHARES for value in (-0.1, 1.1, float("nan"))],
    *[{name: value} for name in POSITIVE for value in (0.0, -1.0, float("inf"), float("nan"))],
    *[{name: float("nan")} for name in ("delta_min", "delta_max")],
    {"rollout_min": 65},
    {"rollout_min": 40, "rollout_max": 33},
    {"num_steps": 15},
    {"num_steps": 65},
    {"num_steps": 10**12, "adapt_rollout": False},
    {"delta_min": 0.0},
    {"delta_min": 0.95},
    {"delta_max": 1.01},
    {"delta_max": 0.0},
    {"delta_min": 0.5, "delta_max": 0.4},
    {"num_minibatches": 128 * 16 + 1},
    {"num_minibatches": 9, "num_envs": 1, "num_steps": 8, "adapt_rollout": False},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:60])
def test_arguments_that_make_no_run_are_refused(tmp_path, capsys, bad):
    """Guards each bound: a short line that names the option, and no folder."""
    with pytest.raises(SystemExit) as ended:
        pqn_abs.main(pqn_abs.Args(**bad, runs_dir=str(tmp_path / "runs")))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"{pqn_abs.SCRIPT}: --") and len(line) < 150
    named = [f"--{name.replace('_', '-')} {str(value)[:20]}" for name, value in bad.items()]
    if "rollout_min" in bad:  # which does not fit the two that it must not exceed
        named += ["--num-steps 32", "--rollout-max 64", "--rollout-max 33"]
    assert any(name in line for name in named)
    assert not (tmp_path / "runs").exists()


def test_the_bounds_themselves_are_fine():
    """Guards against bounds that are too narrow: ends and defaults make a run."""
    at_the_ends = {"gamma": 1, "q_lambda": 0, "start_e": 0, "end_e": 1, "beta": 0, "seed": 0}
    at_the_ends |= {"num_steps": 64, "rollout_min": 64, "num_envs": 1, "num_minibatches": 64}
    at_the_ends |= {"exploration_fraction": 0, "delta_max": 1.0}
    for arguments in ({}, at_the_ends, {"num_steps": 5, "adapt_rollout": False}):
        pqn_abs.check_args(pqn_abs.Args(**arguments))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "meta", "cuda:99"])
def test_a_device_that_is_none_is_refused(refused, device):
    """Guards --device: what PyTorch does not have here, or cannot learn on."""
    assert "--device" in refused("--device", device)


@pytest.mark.parametrize("game", ["BreakoutNoFrameskip-v5", "Breakout-v4", "", "CartPole-v1"])
def test_a_game_that_is_none_is_refused(refused, game):
    """Guards --env-id, with a line that shows a game there is."""
    line = refused("--env-id", game)
    assert f"--env-id {game}" in line and "ALE/Pong-v5" in line


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--num-envs", "many"], ["7"], ["--seed", "9" * 5000]]
)
def test_a_command_line_that_does_not_parse(launch, tmp_path, monkeypatch, arguments):
    """Guards the status; the message is tyro's, in a box."""
    monkeypatch.chdir(tmp_path)
    status, errors = launch(*arguments)
    assert status == 2 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--resume", "nothing"], ["--num-steps", "9" * 400]], ids=lambda words: words[0]
)
def test_refusals_of_a_process(tmp_path, arguments):
    """Guards the same from a real command line: nothing else is on stderr, nothing is left."""
    process = start(ROOT / "pqn_abs.py", *arguments, cwd=tmp_path)
    _, errors = end_of(process, status=2)
    assert errors.startswith("pqn_abs.py: ") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_option():
    """Guards the help text, also on consoles without Greek letters."""
    process = start(ROOT / "pqn_abs.py", "--help", env={"PYTHONIOENCODING": "ascii"})
    text, _ = end_of(process)
    for name in vars(pqn_abs.Args()):
        assert f"--{name.replace('_', '-')}" in text


def test_defaults_are_the_papers():
    """Guards the paper's table."""
    args = vars(pqn_abs.Args())
    paper = {"total_timesteps": 2e7, "num_envs": 128, "learning_rate": 2.5e-4, "num_steps": 32}
    paper |= {"num_minibatches": 4, "update_epochs": 2, "max_grad_norm": 10.0, "q_lambda": 0.65}
    paper |= {"start_e": 1.0, "end_e": 0.001, "exploration_fraction": 0.1, "gamma": 0.99}
    paper |= {"adapt_rollout": True, "adapt_frequency": 50, "rollout_min": 16, "rollout_max": 64}
    paper |= {"delta_min": 0.05, "delta_max": 0.95, "episodic_life": False, "anneal_lr": False}
    assert {name: args[name] for name in paper} == paper


# --- Parts of one's own ---


class OneMore(SmallNetwork):
    """A network with an action that the game does not have."""

    def __init__(self, envs):
        super().__init__(envs)
        self.head = torch.nn.Linear(16, 5)


class Flat(SmallNetwork):
    """A network that gives one number for each observation."""

    def forward(self, frames):
        return super().forward(frames)[:, 0]


class DictEnvs(FakeEnvs):
    def reset(self, **options):
        obs, info = super().reset(**options)
        return {"pixels": obs}, info


class TupleEnvs(FakeEnvs):
    def reset(self, **options):
        obs, info = super().reset(**options)
        return (obs, obs), info


def other(**attributes):
    envs = FakeEnvs(2)
    vars(envs).update(attributes)
    return envs


@pytest.mark.parametrize(
    "envs, network, arguments",
    [
        (FakeEnvs(2), OneMore, []),
        (FakeEnvs(2), Flat, []),
        (FakeEnvs(3), SmallNetwork, []),
        (other(metadata={"autoreset_mode": AutoresetMode.NEXT_STEP}), SmallNetwork, []),
        (other(metadata={"autoreset_mode": AutoresetMode.DISABLED}), SmallNetwork, []),
        (other(metadata={}), SmallNetwork, []),
        (FakeEnvs(2), SmallNetwork, ["--episodic-life"]),
        (other(single_action_space=Discrete(1)), lambda envs: torch.nn.Linear(6, 1), []),
        (other(single_action_space=MultiDiscrete([4, 4])), SmallNetwork, []),
        (other(single_action_space=Box(-1, 1, (4,))), SmallNetwork, []),
        (other(single_action_space=Dict(a=Discrete(4))), SmallNetwork, []),
        (DictEnvs(2), SmallNetwork, []),
        (TupleEnvs(2), SmallNetwork, []),
    ],
    ids="""output-more flat envs-more next-step disabled no-mode no-lives one-action multi-discrete
        box dict-of-actions dict-of-observations tuple-of-observations""".split(),
)
def test_parts_that_do_not_fit_are_refused(refused, envs, network, arguments):
    """Guards those who bring environments or a network: a line, not wrong targets or a hang."""
    small = ["--num-envs", 2, "--num-minibatches", 1, *ON_A_CPU]
    refused(*small, *arguments, **on(envs, network))


# --- Signals and processes ---


@pytest.fixture
def running(tmp_path):
    """running(*arguments) starts a run and returns its process and folder, once it has rows."""

    def run(*arguments, rows=3, **options):
        names = ["--runs-dir", tmp_path, "--run-name", "run"]
        process = start(SMALL_RUN, *names, "--num-envs", 4, *arguments, *ON_A_CPU, **options)
        table = tmp_path / "run" / "metrics.csv"
        wait_for(lambda: table.exists() and table.read_text().count("\n") > rows, process)
        return process, table.parent

    return run


@posix
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_saves_and_ends(running, name):
    """Guards the work since the last checkpoint: status 0, and every row is in the checkpoint.

    The terminal sends signals to a whole group of processes, so to environments' workers too. A
    worker that stayed would keep the pipes open. Without a terminal, the bar is a line a minute.
    """
    process, folder = running(rows=20, env={"ASYNC": "1"}, start_new_session=True)
    os.killpg(process.pid, getattr(signal, name))
    _, errors = end_of(process)
    assert "Traceback" not in errors and "stopped after" in errors
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]
    assert errors.count("it/s") <= 3


@posix
@pytest.mark.parametrize("workers, again", [(False, False), (True, True)])
def test_ctrl_c_is_answered_at_once_and_a_second_one_too(running, tmp_path, workers, again):
    """Guards the impatient: the iteration is held, the answer comes, and a second one ends it."""
    held = tmp_path / "held"
    environment = {"HOLD": str(held)} | ({"ASYNC": "1"} if workers else {})
    process, folder = running("--checkpoint-every", 1e-6, env=environment, start_new_session=True)
    held.touch()
    wait_for((tmp_path / "held.reached").exists, process)
    before = load(folder)["global_step"]
    os.killpg(process.pid, signal.SIGINT)
    answer = next_line(process) + next_line(process)
    assert "finishing the iteration" in answer and "once more" in answer
    assert process.poll() is None and load(folder)["global_step"] == before
    if again:
        os.killpg(process.pid, signal.SIGINT)
        end_of(process, status=-signal.SIGINT)
        assert load(folder)["global_step"] == before
    else:
        held.unlink()
        end_of(process)
        assert steps_without_gap(folder)[-1] == load(folder)["global_step"] > before


@posix
def test_nohup_and_a_closed_pipe(running):
    """Guards nohup: SIGHUP, ignored at the start, stays so; nobody needs to read the output."""
    process, folder = running(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    lines = (folder / "metrics.csv").read_text().count("\n")
    wait_for(lambda: (folder / "metrics.csv").read_text().count("\n") > lines + 20, process)
    process.stderr.close()  # as in pqn_abs.py 2>&1 | tee, with tee gone
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LIMIT) == 0
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


@posix
def test_ctrl_c_while_games_load(tmp_path):
    """Guards against tracebacks, and against a run's folder without a run."""
    process = start(ROOT / "pqn_abs.py", "--num-envs", 1000, "--runs-dir", tmp_path / "runs")
    assert next_line(process).startswith("loading 1000 x")
    process.send_signal(signal.SIGINT)
    _, errors = end_of(process, status=-signal.SIGINT)
    assert errors == ""
    assert not list(tmp_path.glob("runs/*"))


class SignallingEnvs(FakeEnvs):
    """Sends a signal to its own process in a step of the second rollout."""

    def __init__(self, name, *args, **options):
        super().__init__(*args, **options)
        self.number = getattr(signal, name)

    def step(self, actions):
        if len(self.steps) == 40:
            signal.raise_signal(self.number)
        return super().step(actions)


class FailingEnvs(FakeEnvs):
    """Raises an error in a step: of the first rollout, or of a later one."""

    def __init__(self, *args, steps=5, **options):
        super().__init__(*args, **options)
        self.steps_before = steps

    def step(self, actions):
        if len(self.steps) == self.steps_before:
            raise ZeroDivisionError("a bug of one's own")
        return super().step(actions)


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in SIGNALS]


@posix
@pytest.mark.parametrize("name", SIGNALS)
def test_one_process_can_have_two_runs(train, name):
    """Guards notebooks and scripts of one's own: an interrupted run leaves nothing to the next."""
    before = handlers()
    for _ in range(2):
        try:
            folder = train(SignallingEnvs(name, 4), total_timesteps=5000, adapt_rollout=False)
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("Ctrl-C was not taken for a wish to stop")
        assert handlers() == before and not tqdm._instances
        assert load(folder)["global_step"] == steps_without_gap(folder)[-1] == 256
    folder = train(FakeEnvs(4), total_timesteps=1000)
    assert load(folder)["global_step"] >= 1000


def test_an_exception_takes_down_what_the_run_set_up(train, tmp_path):
    """Guards the next run of the process; before its first checkpoint, a run leaves no folder."""
    before = handlers()
    for steps in (5, 40):
        with pytest.raises(ZeroDivisionError) as kept:
            train(FailingEnvs(4, steps=steps), total_timesteps=5000, adapt_rollout=False)
        assert handlers() == before and not tqdm._instances
    (folder,) = tmp_path.iterdir()
    assert load(folder)["global_step"] == 128
    # The failed run's lock is gone, although its error is kept, as a notebook does.
    train(FakeEnvs(4), resume=str(folder), total_timesteps=1000)
    assert kept.tb is not None


def test_a_run_off_the_main_thread(train):
    """Guards schedulers and notebooks: only the main thread may handle signals."""
    folders = []
    before = handlers()
    thread = threading.Thread(target=lambda: folders.append(train(FakeEnvs(4), total_timesteps=1)))
    thread.start()
    thread.join(LIMIT)
    assert load(folders[0])["global_step"] == 128
    assert handlers() == before


@posix
def test_a_second_process_on_a_run_is_refused(running, capsys):
    """Guards the table against doubled rows: one line, and the first process goes on."""
    process, folder = running("--checkpoint-every", 1e-6)
    wait_for((folder / "checkpoint.pt").exists, process)
    written = (folder / "config.json").read_bytes()
    args = pqn_abs.Args(**config(folder)["args"])
    args.resume = str(folder)
    args.total_timesteps = load(folder)["global_step"] + 1000
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        pqn_abs.main(args, **on(FakeEnvs(4)))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "another process" in line and str(folder) in line
    assert (folder / "config.json").read_bytes() == written
    process.send_signal(signal.SIGINT)
    end_of(process)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


# --- Failing ---


def message(errors):
    """The script's own line among those of the progress bar."""
    lines = [line for line in errors.splitlines() if line.startswith(f"{pqn_abs.SCRIPT}: ")]
    assert len(lines) == 1 and "Traceback" not in errors, errors
    return lines[0]


class BrokenEnvs(FakeEnvs):
    """Float observations; one of them, or a reward, is not finite in the step with this number."""

    def __init__(self, what, value, *args, at=100, **options):
        super().__init__(*args, **options)
        self.what = what
        self.value = value
        self.at = at

    def reset(self, **options):
        obs, info = super().reset(**options)
        return self.broken("obs", obs.astype(np.float32)), info

    def step(self, actions):
        obs, reward, *rest, info = super().step(actions)
        final_obs = self.broken("final_obs", info["final_obs"].astype(np.float32))
        obs = self.broken("obs", obs.astype(np.float32))
        return obs, self.broken("reward", reward), *rest, info | {"final_obs": final_obs}

    def broken(self, what, values):
        if what == self.what and len(self.steps) == self.at:
            values[:] = self.value
        return values


@pytest.mark.parametrize(
    "what, value",
    [
        ("obs", np.nan),
        ("obs", np.inf),
        ("obs", -np.inf),
        ("final_obs", np.nan),
        ("final_obs", np.inf),
        ("reward", np.nan),
    ],
)
def test_what_is_not_finite_ends_the_run(launch, tmp_path, what, value):
    """Guards the last good checkpoint: status 1, one line, and the run can go on from there."""
    envs = BrokenEnvs(what, value, 4, truncate=0.5)
    arguments = ["--num-envs", 4, "--checkpoint-every", 1e-6, "--no-adapt-rollout"]
    names = ["--runs-dir", tmp_path, "--run-name", "run"]
    status, errors = launch(*names, *arguments, *ON_A_CPU, **on(envs))
    assert status == 1 and "finite" in message(errors)
    assert ("observation" in message(errors)) == (what == "obs")
    saved = load(tmp_path / "run")
    assert saved["global_step"] == 3 * 128
    assert all(weights.isfinite().all() for weights in saved["network"].values())


def test_a_first_observation_that_is_not_finite(launch, tmp_path):
    """Guards against a folder without a checkpoint, and against a traceback."""
    envs = BrokenEnvs("obs", np.nan, 4, at=0)
    names = ["--runs-dir", tmp_path, "--num-envs", 4]
    status, errors = launch(*names, *ON_A_CPU, **on(envs))
    assert status == 1 and "finite" in message(errors)
    assert list(tmp_path.iterdir()) == []


def test_the_last_update_counts_too(train, tmp_path):
    """Guards against weights that only an iteration's last update has spoiled."""

    class Spoiled(SmallNetwork):
        """A gradient that is not finite, in the last of the third iteration's eight updates."""

        updates = 0

        def forward(self, frames):
            scores = super().forward(frames)
            if torch.is_grad_enabled() and self.training:
                self.updates += 1
            return scores * (torch.inf if self.updates == 24 and self.training else 1)

    arguments = {"checkpoint_every": 1e-6, "adapt_rollout": False, "run_name": "run"}
    with pytest.raises(SystemExit) as ended:
        train(FakeEnvs(4), Spoiled, **arguments)
    assert ended.value.code == 1
    assert load(tmp_path / "run")["global_step"] == 2 * 128


@posix
@pytest.mark.parametrize("file", ["checkpoint.pt", "metrics.csv", "config.json"])
def test_a_full_disk_leaves_the_old_checkpoint(train, launch, file):
    """Guards what there is; a limit of a file's size stands for the full disk.

    It lets this file grow no more, or not be replaced, and the smaller ones are written first.
    """
    import resource

    total = 5000 if file == "metrics.csv" else 1  # so that this is larger than config.json
    folder = train(FakeEnvs(2), SmallNetwork, total_timesteps=total)
    before = contents(folder)
    size = (folder / file).stat().st_size
    most = size + 10 if file == "metrics.csv" else size * 3 // 4
    assert file == "config.json" or most > (folder / "config.json").stat().st_size + 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = ["--resume", folder, "--total-timesteps", total + 999]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        status, errors = launch(*arguments, **on(FakeEnvs(2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and message(errors)
    assert file in message(errors) or file == "metrics.csv"
    kept = [folder / "checkpoint.pt"] + [folder / file] * (file == "config.json")
    assert all(path.read_bytes() == before[path] for path in kept)
    assert not (folder / "checkpoint.tmp").exists()
    status, errors = launch(*arguments, **on(FakeEnvs(2)))
    assert status == 0 and load(folder)["global_step"] == steps_without_gap(folder)[-1] > total


@posix
def test_a_rollout_that_does_not_fit_memory_is_one_line(tmp_path):
    """Guards against a traceback and a folder."""

    def bounded():
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (20 * 2**30, 20 * 2**30))

    big = ["--num-envs", 20_000, "--num-steps", 1_000_000, "--no-adapt-rollout"]
    process = start(SMALL_RUN, "--runs-dir", tmp_path, *big, *ON_A_CPU, preexec_fn=bounded)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode in (1, 2) and "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if line.startswith("small_run.py: "))
    assert "memory" in line and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc"), OSError(12, "x")])
def test_environments_that_do_not_fit_memory_are_one_line(launch, tmp_path, error):
    """Guards against a traceback, and against a line that says nothing."""

    def make_envs(args):
        raise error

    status, errors = launch("--runs-dir", tmp_path, *ON_A_CPU, make_envs=make_envs)
    assert status == 1 and len(message(errors)) > len(f"{pqn_abs.SCRIPT}: ")
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_a_stderr_that_takes_nothing_stops_nothing(running, tmp_path, stderr):
    """Guards runs whose log is on a full disk, or that were started with 2>&-."""
    if stderr == "full":
        options = {"stderr": open("/dev/full", "w")}
    else:
        options = {"preexec_fn": lambda: os.close(2)}
    process, folder = running(**options)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


@pytest.mark.parametrize("writes", [0, 1, 5, 20])
def test_a_terminal_that_goes_away_stops_nothing(train, monkeypatch, writes):
    """Guards the bar: at whichever of its writes the terminal is gone, the run goes on and ends."""

    class Terminal(io.StringIO):
        left = writes

        def isatty(self):
            return True

        def write(self, text):
            self.left -= 1
            if self.left < 0:
                raise BrokenPipeError(32, "Broken pipe")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    folder = train(FakeEnvs(4), total_timesteps=30000)
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"] >= 30000


# --- What a run says ---


def test_the_end_says_what_happened_and_what_to_do_next(train, launch, tmp_path, monkeypatch):
    """Guards the last lines: steps, seconds, score, and commands with the program's own path."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = ["--runs-dir", tmp_path, "--run-name", "my run", "--num-envs", 4, *ON_A_CPU]
    _, errors = launch(*names, "--total-timesteps", 1000, **on(FakeEnvs(4)))
    folder = tmp_path / "my run"
    last = rows(folder / "metrics.csv")[-1]
    bar, *lines = errors.splitlines()[-5:]
    assert "100%" in bar  # though the last rollout goes beyond 1000 steps
    what, *commands = lines
    score = float(last["charts/episodic_return"])
    seconds = float(last["charts/seconds"])
    assert what.startswith(f"finished after 1,024 steps and {seconds:.0f} s") and "return" in what
    assert float(re.search(r"return (-?[\d.]+)", what)[1]) == pytest.approx(score, rel=1e-3)
    resume, plot, watch = (command.strip() for command in commands)
    python = "OMP_NUM_THREADS=1 python"  # with two threads beside other work it may crawl
    assert resume == f"{python} pqn_abs.py --resume '{folder}'"
    assert "tools/plot.py" in plot and "tools/watch.py" in watch
    assert plot.endswith(f" '{folder}'") and watch.endswith(f" '{folder}'")
    _, errors = launch("--resume", folder, "--total-timesteps", 1000, **on(FakeEnvs(4)))
    assert "finished after 1,024 steps" in errors
    with pytest.raises(ZeroDivisionError):
        train(FailingEnvs(4, steps=40), total_timesteps=5000)


def test_a_run_that_has_seen_no_episode_end(launch, tmp_path):
    """Guards the score's place in the bar and the last lines: words, and no None or nan."""
    envs = FakeEnvs(4, terminate=0, truncate=0)
    names = ["--runs-dir", tmp_path, "--run-name", "run", "--num-envs", 4, *ON_A_CPU]
    _, errors = launch(*names, "--total-timesteps", 1000, **on(envs))
    assert "no episode yet" in errors and "None" not in errors and "nan" not in errors
    assert column(tmp_path / "run" / "metrics.csv", "charts/episodic_return") == []


@posix
def test_a_stopped_run_says_so(launch, tmp_path):
    """Guards who pressed Ctrl-C from taking the run for a finished one."""
    names = ["--runs-dir", tmp_path, "--run-name", "run", "--num-envs", 4, *ON_A_CPU]
    status, errors = launch(*names, **on(SignallingEnvs("SIGTERM", 4)))
    assert status == 0 and "stopped after" in errors and "finished" not in errors


def test_a_name_that_cannot_be_printed(tmp_path):
    """Guards the last lines of a run on a console that has not all letters."""
    name = "λ \udcff"
    names = ["--runs-dir", tmp_path, "--run-name", name, "--num-envs", 4]
    environment = {"PYTHONIOENCODING": "ascii"}
    process = start(SMALL_RUN, *names, "--total-timesteps", 300, *ON_A_CPU, env=environment)
    _, errors = end_of(process)
    assert "finished after" in errors and "Traceback" not in errors
    assert load(tmp_path / name)["global_step"] >= 300
