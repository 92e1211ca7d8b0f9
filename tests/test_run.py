"""A run of pqn_abs.py from outside: its files, resuming, signals, and bad input."""

import json
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import (
    ROOT,
    SMALL_RUN,
    FakeEnvs,
    SmallNetwork,
    column,
    load,
    rows,
    same_weights,
    start,
    wait_for,
)

import pqn_abs

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_A_CPU = ["--device", "cpu", "--precision", "float32"]
posix = pytest.mark.skipif(os.name == "nt", reason="signals and file limits of POSIX")


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


def test_a_run_leaves_four_files(train):
    """Guards the contract that the tools read."""
    folder = train(FakeEnvs(4), total_timesteps=1000, seed=3, adapt_frequency=2)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["checkpoint.pt", "config.json", "episodes.csv", "metrics.csv"]
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == "pqn_abs.py"
    assert config["args"]["seed"] == 3 and config["args"] == load(folder)["args"]
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
    assert list(rows(folder / "episodes.csv")[0]) == [
        "global_step",
        "episodic_return",
        "episodic_length",
    ]


def test_same_seed_same_numbers(train):
    """Guards reproducibility: on one machine, a seed is a run, bit for bit."""
    arguments = {"total_timesteps": 2000, "adapt_frequency": 2}
    one, again, other = (train(FakeEnvs(4), seed=seed, **arguments) for seed in (7, 7, 8))
    for table in ("metrics.csv", "episodes.csv"):
        read = rows if table == "episodes.csv" else without_clock
        assert read(one / table) == read(again / table) != read(other / table)
    assert same_weights(load(one)["network"], load(again)["network"])


def test_a_seed_may_be_of_any_size(train):
    """Guards --seed: PyTorch's own stop at 64 bits."""
    assert load(train(FakeEnvs(2), seed=2**70, total_timesteps=1))["args"]["seed"] == 2**70


def test_environments_of_two_runs_share_no_seed(train):
    """Guards runs with seeds 1 and 2: environment i gets reset's seed plus i."""
    seeds = []
    for seed in range(1, 9):
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
    assert runs_dir in refused("--runs-dir", runs_dir, "--num-envs", 2, *ON_A_CPU)


# --- Weights & Biases ---


def test_wandb_gets_the_rows(train, monkeypatch):
    """Guards --track: the numbers of metrics.csv, at their steps, without empty cells."""
    sent, started = [], []
    monkeypatch.setattr(pqn_abs.wandb, "init", lambda **options: started.append(options))
    monkeypatch.setattr(pqn_abs.wandb, "log", lambda row, step: sent.append((step, row)))
    folder = train(FakeEnvs(4), total_timesteps=1000, track=True)
    assert started[0]["name"] == started[0]["id"] == folder.name
    expected = []
    for row in rows(folder / "metrics.csv"):
        numbers = {name: float(cell) for name, cell in row.items() if cell}
        expected.append((int(row["global_step"]), numbers))
    assert sent == expected


def test_wandb_works_offline(tmp_path):
    """Guards the real package's calls, without the network."""
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    arguments = ["--num-envs", 4, "--total-timesteps", 300, "--runs-dir", tmp_path, *ON_A_CPU]
    process = start(SMALL_RUN, *arguments, "--track", env=offline)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


# --- Resuming ---


@pytest.fixture
def resume(launch, seams):
    """resume(folder, *arguments) goes on with a run on new environments; returns these."""

    def run(folder, *arguments, envs=None):
        envs = envs or FakeEnvs(4)
        seams(envs)
        status, errors = launch("--resume", folder, *arguments)
        assert status == 0, errors
        return envs

    return run


@pytest.mark.parametrize("file", ["", "checkpoint.pt"])
def test_a_run_goes_on_where_it_stopped(train, resume, file):
    """Guards --resume FOLDER and FILE, the counters, and the options given on top."""
    folder = train(FakeEnvs(4), total_timesteps=1000, adapt_frequency=1, gamma=0.9)
    before = load(folder)
    envs = resume(folder / file, "--total-timesteps", 2000)
    after = load(folder)
    assert steps_without_gap(folder)[-1] == after["global_step"] >= 2000
    assert len(envs.steps) * 4 == after["global_step"] - before["global_step"]
    assert len(rows(folder / "metrics.csv")) == after["iteration"] > before["iteration"]
    assert column(folder / "metrics.csv", "charts/updates", int)[-1] == 8 * after["iteration"]
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[before["iteration"]] == round(before["adaptive_length"])
    config = json.loads((folder / "config.json").read_text())
    assert config["args"]["gamma"] == 0.9  # from the checkpoint
    assert config["args"]["total_timesteps"] == 2000  # given on top
    assert config["args_before"]["total_timesteps"] == 1000


def test_weights_and_optimiser_come_back(train, resume):
    """Guards learning across a stop: an iteration without learning saves what it loaded."""
    folder = train(FakeEnvs(4), total_timesteps=1000)
    before = load(folder)
    resume(folder, "--total-timesteps", 1100, "--learning-rate", 1e-9)
    after = load(folder)
    for name, weights in before["network"].items():
        torch.testing.assert_close(after["network"][name], weights, rtol=0, atol=1e-6)
    assert after["optimizer"]["state"][0]["step"] == before["optimizer"]["state"][0]["step"] + 8


def test_another_folder_of_the_same_run(train, resume, tmp_path):
    """Guards folders that were moved: the run goes on there, and nothing appears elsewhere."""
    folder = train(FakeEnvs(4), total_timesteps=300, runs_dir=str(tmp_path / "old"))
    folder.rename(tmp_path / "moved")
    (tmp_path / "old").rmdir()
    resume(tmp_path / "moved", "--total-timesteps", 600)
    assert steps_without_gap(tmp_path / "moved")[-1] >= 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]


def test_rows_after_the_checkpoint_are_written_again(train, resume):
    """Guards the tables of killed runs, also where nothing follows the rows that are cut off."""
    no_endings = {"terminate": 0, "truncate": 0}
    folder = train(FakeEnvs(4), total_timesteps=300)
    episodes = (folder / "episodes.csv").read_text()
    for total in (600, 900, 1200):
        for name in ("metrics.csv", "episodes.csv"):
            with open(folder / name, "a") as table:
                table.write("1,2,3\n" * 50 + "4,")  # what a killed process left, the last row torn
        envs = FakeEnvs(4, **no_endings)
        resume(folder, "--total-timesteps", total, envs=envs)
        assert (folder / "episodes.csv").read_text() == episodes
        assert steps_without_gap(folder)[-1] >= total


@pytest.mark.parametrize("edit", ["emptied", "shortened", "removed", "a column more"])
def test_a_table_that_a_hand_has_touched_stops_nothing(train, resume, edit):
    """Guards users who look at metrics.csv with a spreadsheet."""
    folder = train(FakeEnvs(4), total_timesteps=1000)
    for name in ("metrics.csv", "episodes.csv"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        edited = {"emptied": "", "shortened": "".join(lines[:3]), "a column more": "x," + lines[1]}
        (folder / name).unlink()
        if edit != "removed":
            (folder / name).write_text(edited[edit])
    resume(folder, "--total-timesteps", 2000)
    assert load(folder)["global_step"] >= 2000


@posix
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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    last = steps_without_gap(folder)[-1]
    assert last == load(folder)["global_step"]
    ends = column(folder / "episodes.csv", "global_step", int)  # each step ends 4 episodes
    assert ends == np.repeat(range(4, last + 1, 4), 4).tolist()
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
        {"args": {"of_another_version": 1}},
        {"args": Bomb()},
        pickle.dumps(Bomb()),
    ],
    ids="missing empty text weights list tensor other-version bomb raw-bomb".split(),
)
def test_a_file_that_is_no_checkpoint_is_refused(refused, tmp_path, content):
    """Guards against foreign files, and against code in them."""
    folder = tmp_path / "folder"
    folder.mkdir()
    if isinstance(content, bytes):
        (folder / "checkpoint.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, folder / "checkpoint.pt")
    assert str(folder) in refused("--resume", folder)


@pytest.mark.parametrize("name", ["", "nothing", "nothing/checkpoint.pt"])
def test_resuming_nothing_is_refused(refused, name):
    """Guards typing errors: no new run starts instead."""
    assert "--resume" in refused("--resume", name)


def test_another_file_beside_a_checkpoint_is_refused(refused, train):
    """Guards --resume run/other.pt: it names no checkpoint of this run's."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    assert "typo.pt" in refused("--resume", folder / "typo.pt")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_torn_checkpoint_is_refused(refused, train, share):
    """Guards copies that broke off."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    whole = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(whole[: int(share * len(whole))])
    assert "no checkpoint" in refused("--resume", folder)


ENTRIES = """network optimizer global_step iteration updates adaptive_length divergences args scores
    seconds metrics_size episodes_size""".split()


@pytest.mark.parametrize("change", ["missing", "text", None], ids=str)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_checkpoint_with_wrong_contents_is_refused(refused, train, seams, name, change):
    """Guards a damaged run: one line, and its tables and config.json stay as they are."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    checkpoint = load(folder)
    checkpoint[name] = change
    if change == "missing":
        del checkpoint[name]
    torch.save(checkpoint, folder / "checkpoint.pt")
    seams(FakeEnvs(2))
    refused("--resume", folder, "--total-timesteps", 1000)


def test_a_checkpoint_of_another_script_is_refused(refused, train, seams):
    """Guards the tables: gns_baseline.py's network is the same, and its rows are others."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    checkpoint = load(folder)
    checkpoint["args"].pop("base_steps")  # as pqn_abs.py's options are to gns_baseline.py
    torch.save(checkpoint, folder / "checkpoint.pt")
    seams(FakeEnvs(2))
    refused("--resume", folder, "--total-timesteps", 1000)


def test_a_checkpoint_of_another_network_is_refused(refused, train, seams):
    """Guards checkpoints of another game or size: the shapes differ."""
    folder = train(FakeEnvs(2), total_timesteps=1)

    class Wider(SmallNetwork):
        def __init__(self, envs):
            super().__init__(envs)
            self.hidden = torch.nn.Linear(6, 17)

    seams(FakeEnvs(2), Wider)
    refused("--resume", folder)


# --- Bad arguments ---

COUNTS = """total_timesteps num_envs num_minibatches update_epochs num_steps rollout_min
    adapt_frequency reference_states divergence_window base_steps""".split()
SHARES = "gamma q_lambda start_e end_e exploration_fraction beta".split()
POSITIVE = "learning_rate max_grad_norm checkpoint_every".split()
BAD = [
    *[{name: value} for name in COUNTS for value in (0, -1)],
    *[{name: value} for name in SHARES for value in (-0.1, 1.1, float("nan"))],
    *[{name: value} for name in POSITIVE for value in (0.0, -1.0, float("inf"), float("nan"))],
    *[{name: float("nan")} for name in ("delta_min", "delta_max")],
    {"seed": -1},
    {"burn_in": -1},
    {"rollout_min": 65},
    {"rollout_min": 40, "rollout_max": 33},
    {"num_steps": 15},
    {"num_steps": 65},
    {"delta_min": 0.0},
    {"delta_min": 0.95},
    {"delta_max": 1.01},
    {"delta_min": 0.5, "delta_max": 0.4},
    {"num_minibatches": 128 * 16 + 1},
    {"num_minibatches": 9, "num_envs": 1, "num_steps": 8, "adapt_rollout": False},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_arguments_that_make_no_run_are_refused(tmp_path, capsys, bad):
    """Guards each bound: a line that names the option, and no folder."""
    with pytest.raises(SystemExit) as ended:
        pqn_abs.check(pqn_abs.Args(**bad, runs_dir=str(tmp_path / "runs")))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("pqn_abs.py: --")
    assert line.startswith("pqn_abs.py: --num-steps") or any(
        f"--{name.replace('_', '-')} {value}" in line for name, value in bad.items()
    )
    assert not (tmp_path / "runs").exists()


def test_the_bounds_themselves_are_fine(tmp_path):
    """Guards against bounds that are too narrow: ends and defaults make a run."""
    at_the_ends = {"gamma": 1, "q_lambda": 0, "start_e": 0, "end_e": 1, "beta": 0, "seed": 0}
    at_the_ends |= {"num_steps": 64, "rollout_min": 64, "num_envs": 1, "num_minibatches": 64}
    at_the_ends |= {"exploration_fraction": 0, "delta_max": 1.0, "burn_in": 0}
    for arguments in ({}, at_the_ends, {"num_steps": 5, "adapt_rollout": False}):
        pqn_abs.check(pqn_abs.Args(**arguments, runs_dir=str(tmp_path)))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "meta", "cuda:99"])
def test_a_device_that_is_none_is_refused(refused, device):
    """Guards --device: what PyTorch does not have here, or cannot learn on."""
    assert "--device" in refused("--device", device)


@pytest.mark.parametrize("game", ["BreakoutNoFrameskip-v5", "Breakout-v4", "", "CartPole-v1"])
def test_a_game_that_is_none_is_refused(refused, game):
    """Guards --env-id, with a line that shows a game there is."""
    line = refused("--env-id", game)
    assert f"--env-id {game}" in line and "BreakoutNoFrameskip-v4" in line


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--num-envs", "many"], ["7"]])
def test_a_command_line_that_does_not_parse(launch, tmp_path, monkeypatch, arguments):
    """Guards the status; the message is tyro's, in a box."""
    monkeypatch.chdir(tmp_path)
    status, errors = launch(*arguments)
    assert status == 2 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--num-envs", 0], ["--resume", "nothing"]])
def test_refusals_of_a_process(tmp_path, arguments):
    """Guards the same from a real command line: nothing else is on stderr, nothing is left."""
    process = start(ROOT / "pqn_abs.py", *arguments, cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.startswith("pqn_abs.py: ") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_option(launch, capsys, monkeypatch):
    """Guards the help text."""
    monkeypatch.setattr(sys, "argv", ["pqn_abs.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        pqn_abs.launch()
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in vars(pqn_abs.Args()):
        assert f"--{name.replace('_', '-')}" in text


def test_defaults_are_the_papers():
    """Guards the paper's table."""
    args = vars(pqn_abs.Args())
    paper = {"total_timesteps": 2e7, "num_envs": 128, "learning_rate": 2.5e-4, "num_steps": 32}
    paper |= {"num_minibatches": 4, "update_epochs": 2, "max_grad_norm": 10.0, "q_lambda": 0.65}
    paper |= {"start_e": 1.0, "end_e": 0.001, "exploration_fraction": 0.1, "gamma": 0.99}
    paper |= {"adapt_rollout": True, "adapt_frequency": 50, "rollout_min": 16, "rollout_max": 64}
    paper |= {"delta_min": 0.05, "delta_max": 0.95, "episodic_life": False}
    assert {name: args[name] for name in paper} == paper


# --- The two seams ---


class OneMore(SmallNetwork):
    """A network with an action that the game does not have."""

    def __init__(self, envs):
        super().__init__(envs)
        self.head = torch.nn.Linear(16, 5)


class Flat(SmallNetwork):
    """A network that gives one number for each observation."""

    def forward(self, frames):
        return super().forward(frames)[:, 0]


def other_autoreset(mode):
    envs = FakeEnvs(2)
    envs.metadata = {"autoreset_mode": mode} if mode else {}
    return envs


@pytest.mark.parametrize(
    "envs, network, arguments",
    [
        (FakeEnvs(2), OneMore, []),
        (FakeEnvs(2), Flat, []),
        (FakeEnvs(3), SmallNetwork, []),
        (other_autoreset(AutoresetMode.NEXT_STEP), SmallNetwork, []),
        (other_autoreset(AutoresetMode.DISABLED), SmallNetwork, []),
        (other_autoreset(None), SmallNetwork, []),
        (FakeEnvs(2), SmallNetwork, ["--episodic-life"]),
    ],
    ids="output-more flat envs-more next-step disabled no-mode no-lives".split(),
)
def test_parts_that_do_not_fit_are_refused(refused, seams, envs, network, arguments):
    """Guards those who replace make_envs or QNetwork: a line instead of wrong targets or a hang."""
    seams(envs, network)
    refused("--num-envs", 2, "--num-minibatches", 1, *arguments, *ON_A_CPU)


# --- Signals ---


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
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_and_ends(running, name):
    """Guards the work since the last checkpoint: status 0, and every row is in the checkpoint.

    Without a terminal, the progress bar is a line a minute, not ten a second.
    """
    process, folder = running(rows=50)
    process.send_signal(getattr(signal, name))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert str(folder) in output.splitlines()[-1]
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]
    assert errors.count("step/s") <= 3


@posix
def test_nohup_and_a_closed_pipe(running):
    """Guards nohup: SIGHUP, ignored at the start, stays so; nobody needs to read the output."""
    process, folder = running(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    lines = (folder / "metrics.csv").read_text().count("\n")
    wait_for(lambda: (folder / "metrics.csv").read_text().count("\n") > lines + 20, process)
    process.stdout.close()  # as in pqn_abs.py | head
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert "Traceback" not in process.stderr.read()
    assert steps_without_gap(folder)[-1] == load(folder)["global_step"]


@posix
def test_a_second_ctrl_c_ends_at_once(running):
    """Guards the impatient: an iteration takes over three seconds here."""
    slow = {"STEP_SECONDS": "0.1"}
    process, folder = running("--num-steps", 32, rows=1, env=slow)
    wait_for((folder / "checkpoint.pt").exists, process)
    before = load(folder)["global_step"]
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=2)
    assert process.returncode == -signal.SIGINT
    assert load(folder)["global_step"] == before


@posix
@pytest.mark.parametrize("path", [ROOT / "pqn_abs.py", *EXAMPLES], ids=lambda path: path.name)
def test_ctrl_c_while_modules_load(tmp_path, path):
    """Guards against tracebacks: PyTorch is a module here that never finishes loading."""
    (tmp_path / "torch.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    )
    process = start(path, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


@posix
def test_ctrl_c_while_games_load(tmp_path):
    """Guards against tracebacks, and against a run's folder without a run."""
    process = start("-u", ROOT / "pqn_abs.py", "--runs-dir", tmp_path / "runs")
    assert process.stdout.readline().startswith("loading 128 x")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGINT, "")
    assert not list(tmp_path.glob("runs/*"))


# --- Failing ---


def message(errors):
    """The script's own line among those of the progress bar."""
    lines = [line for line in errors.splitlines() if line.startswith("pqn_abs.py: ")]
    assert len(lines) == 1 and "Traceback" not in errors, errors
    return lines[0]


def test_rewards_that_are_not_finite_end_the_run(train, launch, seams, tmp_path):
    """Guards the last good checkpoint: status 1, one line, and the run can go on from there."""

    class Broken(FakeEnvs):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, reward * (np.nan if len(self.steps) == 100 else 1), *rest

    seams(Broken(4))
    arguments = ["--num-envs", 4, "--checkpoint-every", 1e-6, "--no-adapt-rollout"]
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "run", *arguments, *ON_A_CPU)
    assert status == 1 and "not finite" in message(errors)
    saved = load(tmp_path / "run")
    assert saved["global_step"] == 3 * 128
    assert all(weights.isfinite().all() for weights in saved["network"].values())


def test_the_last_update_counts_too(launch, seams, monkeypatch, tmp_path):
    """Guards against weights that only an iteration's last update has spoiled."""

    class Spoiling(torch.optim.RAdam):
        count = 0

        def step(self, closure=None):
            super().step(closure)
            self.count += 1
            if self.count == 3 * 8:
                self.param_groups[0]["params"][0].data[0] = np.inf

    seams(FakeEnvs(4))
    monkeypatch.setattr(torch.optim, "RAdam", Spoiling)
    arguments = ["--num-envs", 4, "--checkpoint-every", 1e-6, "--no-adapt-rollout"]
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "run", *arguments, *ON_A_CPU)
    assert status == 1 and "not finite" in message(errors)
    assert load(tmp_path / "run")["global_step"] == 2 * 128


@posix
def test_a_full_disk_leaves_the_old_checkpoint(train, launch, seams):
    """Guards the checkpoint that there is; a limit of a file's size stands for the full disk."""
    import resource

    folder = train(FakeEnvs(2), total_timesteps=1)
    before = (folder / "checkpoint.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seams(FakeEnvs(2))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) * 3 // 4, limits[1]))
        status, errors = launch("--resume", folder, "--total-timesteps", 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "checkpoint.pt" in message(errors)
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert not (folder / "checkpoint.tmp").exists()


def test_a_table_that_cannot_be_written_ends_with_a_line(train, launch, seams, monkeypatch):
    """Guards against tracebacks where the disk fills between two checkpoints."""
    folder = train(FakeEnvs(2), total_timesteps=1)
    before = (folder / "checkpoint.pt").read_bytes()
    seams(FakeEnvs(2))

    def full(*row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pqn_abs.Run, "log", full)
    status, errors = launch("--resume", folder, "--total-timesteps", 1000)
    assert status == 1 and "No space left on device" in message(errors)
    assert (folder / "checkpoint.pt").read_bytes() == before


@posix
def test_a_closed_stderr_stops_nothing(tmp_path):
    """Guards runs started with 2>&-: there is nobody to show the progress to."""
    names = ["--runs-dir", tmp_path, "--run-name", "run", "--num-envs", 4, "--total-timesteps", 300]
    process = start(SMALL_RUN, *names, *ON_A_CPU, preexec_fn=lambda: os.close(2))
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert load(tmp_path / "run")["global_step"] >= 300
