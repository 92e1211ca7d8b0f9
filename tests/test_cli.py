"""Bad input gives one line on stderr and exit status 2, and leaves nothing behind."""

import pickle
from pathlib import Path

import pytest
import torch
from helpers import SCRIPT, Noise, start

import pqn_abs


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, recwarn):
    """refused(*arguments) runs the script in an empty folder, expects a refusal and returns its line."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        before = contents(tmp_path)
        capsys.readouterr(), recwarn.clear()
        with pytest.raises(SystemExit) as error:
            pqn_abs.main(pqn_abs.parse_args([str(argument) for argument in arguments]))
        assert error.value.code == 2
        assert contents(tmp_path) == before
        assert recwarn.list == []  # a warning would be a line of its own
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pqn_abs.py: ")
        return line

    return run


@pytest.mark.parametrize(
    "game, expected",
    [
        ("BreakoutNoFrameskip-v5", ["unknown", "BreakoutNoFrameskip-v4"]),
        ("breakoutnoframeskip-v4", ["unknown", "BreakoutNoFrameskip-v4"]),
        ("Pong-v5", ["unknown", "ALE/Pong-v5"]),
        ("", ["unknown", "BreakoutNoFrameskip-v4"]),
        ("CartPole-v1", ["Atari"]),
        ("Breakout-v4", ["at random", "BreakoutNoFrameskip-v4"]),
        ("../../tmp", ["unknown"]),
    ],
)
def test_game(refused, game, expected):
    line = refused("--env-id", game)
    assert all(part in line for part in [game, *expected])


COUNTS = """--total-timesteps --num-envs --num-minibatches --update-epochs --num-steps --rollout-min --adapt-frequency
    --reference-states""".split()
SHARES = "--gamma --q-lambda --start-e --end-e --exploration-fraction --beta".split()
POSITIVE = "--learning-rate --max-grad-norm --checkpoint-every".split()
DELTAS = "--delta-min --delta-max".split()


@pytest.mark.parametrize("option", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_count_below_one(refused, option, value):
    assert f"{option} {value}" in refused(option, value)


@pytest.mark.parametrize("option", SHARES)
@pytest.mark.parametrize("value", [-0.1, 1.1, "inf"])
def test_share_outside_0_to_1(refused, option, value):
    assert f"{option} {value}" in refused(option, value)


@pytest.mark.parametrize("option", POSITIVE)
@pytest.mark.parametrize("value", [0.0, -1.0, "inf"])
def test_value_that_is_not_positive(refused, option, value):
    assert f"{option} {value}" in refused(option, value)


@pytest.mark.parametrize("option", SHARES + POSITIVE + DELTAS)
def test_not_a_number(refused, option):
    assert "nan" in refused(option, "nan")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rollout-min", 65],
        ["--rollout-min", 40, "--rollout-max", 33],
        ["--num-steps", 15],
        ["--num-steps", 65],
        ["--delta-min", 0.0],
        ["--delta-min", 0.95],
        ["--delta-max", 1.01],
        ["--delta-min", 0.5, "--delta-max", 0.4],
        ["--num-minibatches", 128 * 16 + 1],
        ["--num-minibatches", 9, "--num-envs", 1, "--num-steps", 8, "--no-adapt-rollout"],
        ["--seed", -1],
        ["--seed", 2**70],
        ["--device", "tpu"],
        ["--device", "cuda:x"],
        ["--device", ""],
        ["--precision", "float16"],
    ],
    ids=str,
)
def test_arguments_that_make_no_run(refused, arguments):
    line = refused(*arguments)
    assert any(option.removeprefix("--") in line for option in arguments[:3:2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_where_there_is_none(refused, device):
    assert "--device cpu" in refused("--device", device)


@pytest.mark.parametrize("runs_dir", ["file", "file/runs", "x" * 300])
def test_runs_folder_that_cannot_be_made(refused, tmp_path, runs_dir):
    (tmp_path / "file").touch()
    assert runs_dir in refused(
        "--env-id", "PongNoFrameskip-v4", "--num-envs", 1, "--num-minibatches", 1, "--runs-dir", runs_dir
    )


# --- Checkpoints ---


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("bomb"),)


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "no such file"),
        ("folder", "no checkpoint"),
        (b"", "no checkpoint"),
        (b"not at all " * 99, "no checkpoint"),
        ({"weights": torch.ones(3)}, "no checkpoint"),
        ([1, 2], "no checkpoint"),
        (torch.ones(3), "no checkpoint"),
        ({"script": "pqn_abs.py"}, "no checkpoint"),
        ({"script": "pqn_abs.py", "args": {"of_another_version": 1}}, "version"),
        ({"script": "ppo_abs.py", "args": {}}, "ppo_abs.py"),
        ({"script": Bomb()}, "no checkpoint"),
        (pickle.dumps(Bomb()), "no checkpoint"),
    ],
    ids="missing folder empty foreign weights list tensor half other-version other-script bomb raw-bomb".split(),
)
def test_checkpoint_that_is_none(refused, tmp_path, content, expected):
    path = tmp_path / "checkpoint.pt"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    line = refused("--resume", path)
    assert str(path) in line and expected in line


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_torn_checkpoint(refused, train, share):
    path = train(Noise(2), total_timesteps=1) / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "not a whole one" in refused("--resume", path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-envs", 3],
        ["--seed", 9],
        ["--env-id", "ALE/Pong-v5"],
        ["--no-adapt-rollout"],
        ["--runs-dir", "elsewhere"],
    ],
    ids=str,
)
def test_resume_with_another_argument(refused, train, arguments):
    path = train(Noise(2), total_timesteps=1) / "checkpoint.pt"
    line = refused("--resume", path, *arguments)
    assert "contradicts" in line and arguments[0].replace("no-", "") in line


# --- The same in processes of their own ---


@pytest.mark.parametrize(
    "arguments",
    [["--num-envs", "0"], ["--env-id", "Pong"], ["--resume", "nothing.pt"], ["--env-id", "Pong", "--seed", "1"]],
)
def test_refusal_of_a_process(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    process = start(SCRIPT, *arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1 and errors.startswith("pqn_abs.py: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--num-envs", "many"], ["7"]])
def test_command_line_that_does_not_parse(tmp_path, monkeypatch, capsys, arguments):
    """Here the line is tyro's, and it draws a box around it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        pqn_abs.parse_args(arguments)
    assert error.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_argument(capsys):
    with pytest.raises(SystemExit) as ending:
        pqn_abs.parse_args(["--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in pqn_abs.asdict(pqn_abs.Args()))


def test_defaults_are_the_papers():
    args = pqn_abs.parse_args([])
    paper = {"total_timesteps": 2e7, "num_envs": 128, "learning_rate": 2.5e-4, "num_steps": 32, "gamma": 0.99}
    paper |= {"num_minibatches": 4, "update_epochs": 2, "max_grad_norm": 10.0, "q_lambda": 0.65, "adapt_rollout": True}
    paper |= {"start_e": 1.0, "end_e": 0.001, "exploration_fraction": 0.1, "adapt_frequency": 50}
    paper |= {"rollout_min": 16, "rollout_max": 64, "delta_min": 0.05, "delta_max": 0.95, "episodic_life": False}
    assert {name: getattr(args, name) for name in paper} == paper
