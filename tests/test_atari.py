"""The real games: what make_envs asks of the emulator, and a run as a user starts it."""

import inspect

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import ROOT, SmallNetwork, column, config, end_of, load, start

import pqn_abs


def make(**arguments):
    return pqn_abs.make_envs(pqn_abs.Args(**arguments))


@pytest.mark.parametrize(
    "game, rom, sticky, buttons",
    [
        ("BreakoutNoFrameskip-v4", "breakout", 0.0, "NOOP FIRE RIGHT LEFT"),
        ("ALE/Pong-v5", "pong", 0.25, "NOOP FIRE RIGHT LEFT RIGHTFIRE LEFTFIRE"),
        ("FreewayNoFrameskip-v4", "freeway", 0.0, "NOOP UP DOWN"),  # has no FIRE
    ],
)
def test_a_game_is_the_registrys(monkeypatch, game, rom, sticky, buttons):
    """Guards the settings that the emulator gets, its own defaults included, and the actions."""
    real = pqn_abs.AtariVectorEnv
    asked = {}

    class Spy(real):
        def __init__(self, *args, **options):
            bound = inspect.signature(real.__init__).bind(self, *args, **options)
            bound.apply_defaults()
            asked.update(bound.arguments)
            super().__init__(*args, **options)

    monkeypatch.setattr(pqn_abs, "AtariVectorEnv", Spy)
    envs = make(env_id=game, num_envs=2)
    whole = make(env_id=game, num_envs=2, episodic_life=False)
    assert [type(whole), type(whole.env)] == [RecordEpisodeStatistics, Spy]
    assert asked["game"] == rom and asked["repeat_action_probability"] == sticky
    assert asked["frameskip"] == 4 and asked["maxpool"] and asked["grayscale"]
    assert asked["stack_num"] == 4 and asked["max_num_frames_per_episode"] == 108_000
    assert asked["use_fire_reset"] and asked["noop_max"] == 30
    assert not asked["reward_clipping"] and not asked["episodic_life"]
    assert not asked["life_loss_info"] and not asked["full_action_space"]
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    names = [button.name for button in envs.unwrapped.ale.get_action_set()]
    assert names == buttons.split() and envs.single_action_space.n == len(names)
    assert names[envs.fire_action] == ("FIRE" if "FIRE" in names else "NOOP")


def test_a_lost_life_terminates_and_fire_follows(tmp_path):
    """Guards training on the real game: the ball is served again, and scores are whole games'."""
    envs = make(num_envs=4)
    steps = []
    game_step, learners_step = envs.unwrapped.step, envs.step

    def recorded_game(actions):
        steps.append([np.array(actions), *game_step(actions)])
        return steps[-1][1:]

    def recorded(actions):
        result = learners_step(actions)
        steps[-1].append(result[2].copy())
        return result

    envs.unwrapped.step, envs.step = recorded_game, recorded
    small = {"num_minibatches": 2, "rollout_min": 8, "num_steps": 16, "rollout_max": 24}
    args = pqn_abs.Args(num_envs=4, total_timesteps=2400, runs_dir=str(tmp_path), **small)
    folder = pqn_abs.main(args, make_envs=lambda args: envs, QNetwork=SmallNetwork)
    score, lives, fires = np.zeros(4), np.full(4, 5), np.zeros(4, bool)
    expected, lost = [], 0
    for actions, _, reward, over, truncated, info, learners in steps:
        assert (actions[fires] == envs.fire_action).all()
        fires = (info["lives"] < lives) & ~over
        assert np.array_equal(learners, over | fires)
        assert (info["lives"][over] == 5).all() and not truncated.any()
        lives = info["lives"]
        lost += fires.sum()
        score += reward
        expected += score[over].tolist()
        score[over] = 0
    assert load(folder)["scores"] == expected and max(expected) > 0 and lost > 20


def test_a_run_from_the_command_line(tmp_path):
    """Guards the script as a user starts it, on a real game with its real network."""
    options = ["--num-envs", 4, "--num-minibatches", 2, "--adapt-frequency", 3]
    options += ["--rollout-min", 8, "--num-steps", 16, "--rollout-max", 24]
    options += ["--update-epochs", 1, "--total-timesteps", 1200, "--runs-dir", tmp_path]
    _, errors = end_of(start(ROOT / "pqn_abs.py", *options))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("BreakoutNoFrameskip-v4__pqn_abs__1__")
    assert f"--resume '{folder}'" in errors and "Warning" not in errors
    table = folder / "metrics.csv"
    lengths = column(table, "abs/rollout_length", int)
    assert 8 <= min(lengths) < max(lengths) <= 24
    assert len(column(table, "abs/behavioral_divergence")) == len(lengths) // 3
    assert np.isfinite(column(table, "losses/td_loss")).all()
    assert 1200 <= load(folder)["global_step"] == column(table, "global_step", int)[-1]
    assert 0 < len(load(folder)["scores"]) < 1200 / 100  # games, of 5 lives with 35 steps or so
    assert config(folder)["script"] == "pqn_abs" and config(folder)["args"]["episodic_life"]
    script = folder / "pqn_abs.py"  # the copy, which made the run as the original did
    end_of(start(script, "--resume", folder, "--total-timesteps", 1300))
    assert load(folder)["global_step"] >= 1300
