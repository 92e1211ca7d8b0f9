"""The real games: as a user starts them, and what the script asks of the emulator."""

import json

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import ROOT, column, load, record, rows, start, without_clock

import pqn_abs

POLICY_GRADIENTS = {"ppo_abs.py", "p3o_abs.py"}
SMALL = {"num_envs": 4, "num_minibatches": 2, "rollout_min": 8, "num_steps": 16, "rollout_max": 24}


@pytest.mark.parametrize(
    "script, game",
    [("pqn_abs.py", "ALE/Pong-v5"), *((path.name, "BreakoutNoFrameskip-v4") for path in sorted(ROOT.glob("*.py")))],
)
def test_a_run_from_the_command_line(tmp_path, monkeypatch, script, game):
    monkeypatch.chdir(tmp_path)
    options = {f"--{name.replace('_', '-')}": value for name, value in SMALL.items()}
    options |= {"--env-id": game, "--total-timesteps": 2500, "--adapt-frequency": 3}
    flags = ["--adapt-rollout"] if script in POLICY_GRADIENTS else ["--exploration-fraction", 1.0]
    process = start(ROOT / script, *(part for option in options.items() for part in option), *flags)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(folder.relative_to(tmp_path)) in output

    table = folder / "metrics.csv"
    lengths, batches = column(table, "abs/rollout_length", int), column(table, "abs/batch_size", int)
    assert 8 <= min(lengths) and max(lengths) <= 24 and len(set(lengths)) > 1
    assert batches == [4 * length for length in lengths]
    assert column(table, "global_step", int) == np.cumsum(batches).tolist()
    assert 2500 <= sum(batches) == load(folder)["global_step"]
    divergences = column(table, "abs/behavioral_divergence")
    assert len(divergences) == -(-len(batches) // 3) and 0 <= min(divergences) and max(divergences) <= 1
    names = "charts/seconds charts/SPS charts/epsilon losses/td_loss losses/q_values losses/grad_norm"
    if script in POLICY_GRADIENTS:
        names = "charts/SPS charts/learning_rate losses/policy_loss losses/value_loss losses/entropy losses/grad_norm"
    for name in names.split():
        assert len(column(table, name)) == len(batches) and np.isfinite(column(table, name)).all()
    assert rows(folder / "episodes.csv") or game == "ALE/Pong-v5"  # a game of Pong takes longer
    config = json.loads((folder / "config.json").read_text())
    assert config["args"] == json.loads(json.dumps(load(folder)["args"])) and config["args"]["env_id"] == game
    assert all(config[name] for name in ("script", "python", "torch", "gymnasium", "ale_py", "numpy", "device"))


@pytest.mark.parametrize(
    "game, rom, sticky",
    [
        ("BreakoutNoFrameskip-v4", "breakout", 0.0),
        ("BreakoutNoFrameskip-v0", "breakout", 0.25),
        ("ALE/Pong-v5", "pong", 0.25),
        ("MsPacmanNoFrameskip-v4", "ms_pacman", 0.0),
    ],
)
def test_game_is_the_registrys(monkeypatch, game, rom, sticky):
    asked = {}

    class Spy(pqn_abs.AtariVectorEnv):
        def __init__(self, name, num_envs, **options):
            asked.update(options, name=name)
            super().__init__(name, num_envs, **options)

    monkeypatch.setattr(pqn_abs, "AtariVectorEnv", Spy)
    envs = pqn_abs.make_envs(pqn_abs.Args(env_id=game, num_envs=3))
    assert asked["name"] == rom and asked["repeat_action_probability"] == sticky
    assert asked["frameskip"] == 4 and asked["max_num_frames_per_episode"] == 108_000
    assert not asked["reward_clipping"] and not asked.get("episodic_life") and not asked.get("life_loss_info")
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (3, *envs.single_observation_space.shape) == (3, 4, 84, 84) and obs.dtype == np.uint8
    assert envs.ale.get_action_set()[envs.fire_action].name == ("NOOP" if rom == "ms_pacman" else "FIRE")


def test_time_limit_is_a_truncation_with_its_own_last_frames(train, monkeypatch):
    """A limit of 100 frames is one of 25 steps; the value after it is that of the frames the learner never acted on."""
    seen = []

    def network(envs):
        seen.append(pqn_abs_network(envs))
        return seen[0]

    def lambda_returns(rewards, next_values, terminated, truncated, *rest):
        rollout = envs.steps[-len(rewards) :]
        assert np.array_equal(truncated.numpy(), [step["truncated"] for step in rollout])
        assert not terminated.any()
        for t, i in truncated.nonzero().tolist():
            frames = torch.from_numpy(rollout[t]["true_next"][i])[None]
            with torch.no_grad():
                torch.testing.assert_close(next_values[t, i], seen[0](frames).max(), rtol=1e-3, atol=1e-3)
            cut.append((t, i))
        return targets(rewards, next_values, terminated, truncated, *rest)

    cut, targets, pqn_abs_network, AtariVectorEnv = [], pqn_abs.lambda_returns, pqn_abs.QNetwork, pqn_abs.AtariVectorEnv
    limit = {"max_num_frames_per_episode": 100}
    monkeypatch.setattr(pqn_abs, "AtariVectorEnv", lambda *args, **options: AtariVectorEnv(*args, **options | limit))
    monkeypatch.setattr(pqn_abs, "lambda_returns", lambda_returns)
    envs = record(pqn_abs.make_envs(pqn_abs.Args(num_envs=4)))
    folder = train(envs, network, total_timesteps=300, **SMALL)
    assert len(cut) == len(rows(folder / "episodes.csv")) >= 8
    assert set(column(folder / "episodes.csv", "episodic_length", int)) == {25}


def test_fire_follows_a_lost_life_in_breakout(train):
    envs = record(pqn_abs.make_envs(pqn_abs.Args(num_envs=4)))
    train(envs, total_timesteps=800, episodic_life=True, **SMALL)
    fired = []
    for last, step, following in zip(envs.steps, envs.steps[1:], envs.steps[2:], strict=False):
        fired += following["action"][(step["lives"] < last["lives"]) & ~step["terminated"]].tolist()
    assert len(fired) > 5 and set(fired) == {envs.fire_action}


def test_same_seed_gives_the_same_game(train):
    runs = []
    for seed in (1, 1, 2):
        envs = pqn_abs.make_envs(pqn_abs.Args(env_id="ALE/Breakout-v5", num_envs=4))
        folder = train(envs, pqn_abs.QNetwork, seed=seed, total_timesteps=400, **SMALL)
        runs.append((without_clock(folder / "metrics.csv"), rows(folder / "episodes.csv")))
    assert runs[0] == runs[1] != runs[2]
