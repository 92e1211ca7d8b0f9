"""The real games: what make_envs asks of the emulator, and a run as a user starts it."""

import inspect
import itertools
import os

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import ROOT, SmallNetwork, column, config, end_of, load, on, start

import pqn_abs


def make(**arguments):
    return pqn_abs.make_envs(pqn_abs.Args(**arguments))


def play(envs, steps, seed=1):
    """Random actions; returns what each step gave, (obs, reward, terminated, truncated, info)."""
    rng = np.random.default_rng(seed)
    obs, info = envs.reset(seed=seed)
    seen = [(obs.copy(), None, None, None, info)]
    for _ in range(steps):
        obs, *rest = envs.step(rng.integers(envs.single_action_space.n, size=envs.num_envs))
        seen.append((obs.copy(), *rest))
    return seen


@pytest.mark.parametrize(
    "game, rom, sticky, buttons",
    [
        ("BreakoutNoFrameskip-v4", "breakout", 0.0, "NOOP FIRE RIGHT LEFT"),
        ("BreakoutNoFrameskip-v0", "breakout", 0.25, "NOOP FIRE RIGHT LEFT"),
        ("ALE/Pong-v5", "pong", 0.25, "NOOP FIRE RIGHT LEFT RIGHTFIRE LEFTFIRE"),
        ("FreewayNoFrameskip-v4", "freeway", 0.0, "NOOP UP DOWN"),
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
    assert asked["game"] == rom and asked["repeat_action_probability"] == sticky
    assert asked["frameskip"] == 4 and asked["maxpool"] and asked["grayscale"]
    assert asked["max_num_frames_per_episode"] == 108_000
    assert not asked["reward_clipping"] and not asked["episodic_life"]
    assert not asked["life_loss_info"] and not asked["full_action_space"]
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    names = [button.name for button in envs.ale.get_action_set()]
    assert names == buttons.split() and envs.single_action_space.n == len(names)
    assert names[envs.fire_action] == ("FIRE" if "FIRE" in names else "NOOP")


def test_observations_are_the_last_four_frames():
    """Guards the stack: each step pushes one new frame of uint8 behind the last three."""
    seen = play(make(num_envs=3), 40)
    for (before, *_), (after, _, terminated, *_) in itertools.pairwise(seen):
        assert after.shape == (3, 4, 84, 84) and after.dtype == np.uint8
        assert np.array_equal(after[~terminated, :3], before[~terminated, 1:])
    assert len({obs.tobytes() for obs, *_ in seen}) == len(seen)


def test_a_lost_life_terminates_without_a_reset():
    """Guards --episodic-life's reading of the emulator: fewer lives, and the game goes on."""
    lost, over = 0, 0
    seen = play(make(num_envs=4, episodic_life=True), 700)
    for last, step in itertools.pairwise(seen):
        before, *_, info = last
        after, _, terminated, truncated, new_info = step
        lives, new_lives = info["lives"], new_info["lives"]
        lost_life = terminated & (new_lives < lives)
        assert np.array_equal(terminated, new_lives != lives)
        assert np.array_equal(
            after[~terminated | lost_life, :3], before[~terminated | lost_life, 1:]
        )
        assert (new_lives[terminated & ~lost_life] == 5).all()  # a new game
        assert not truncated.any()
        lost += lost_life.sum()
        over += (terminated & ~lost_life).sum()
    assert over >= 8 and 4 * over <= lost <= 4 * over + 4 * 4


def test_fire_follows_a_lost_life_in_breakout(train):
    """Guards training on the real game: the ball is served again, and scores are whole games'."""
    envs = make(num_envs=4, episodic_life=True)
    actions, rewards, lives, terminated = [], [], [], []
    step = envs.step

    def recorded(given):
        result = step(given)
        actions.append(np.array(given))
        rewards.append(result[1].copy())
        terminated.append(result[2].copy())
        lives.append(result[4]["lives"].copy())
        return result

    envs.step = recorded
    small = {"num_minibatches": 2, "rollout_min": 8, "num_steps": 16, "rollout_max": 24}
    folder = train(envs, AtariNetwork, total_timesteps=2400, episodic_life=True, **small)
    lives_before = np.stack([np.full(4, 5), *lives[:-1]])
    lost_life = np.stack(terminated) & (np.stack(lives) < lives_before)
    fired = np.stack(actions)[1:][lost_life[:-1]]
    assert len(fired) > 20 and set(fired.tolist()) == {envs.fire_action}
    expected = []
    score = np.zeros(4)
    for reward, over in zip(rewards, np.stack(terminated) & ~lost_life, strict=True):
        score += reward
        expected += score[over].tolist()
        score[over] = 0
    assert load(folder)["scores"] == expected and max(expected) > 0


class AtariNetwork(SmallNetwork):
    """Sees a few of the pixels, so that it takes no time."""

    def __init__(self, envs):
        super().__init__(envs)
        self.hidden = torch.nn.Linear(4 * 7 * 7, 16)

    def forward(self, frames):
        return super().forward(frames[:, :, ::12, ::12])


def test_a_network_with_too_many_outputs_is_refused(refused):
    """Guards against a hang: the emulator waits for ever after an action that it does not have."""

    class OneMore(AtariNetwork):
        def __init__(self, envs):
            super().__init__(envs)
            self.head = torch.nn.Linear(16, 5)

    parts = on(make(num_envs=2), OneMore)
    refused("--num-envs", 2, "--num-minibatches", 1, "--device", "cpu", **parts)


NATIVE = pqn_abs.pick_device(pqn_abs.Args(device="cpu"))[1]


@pytest.mark.skipif(not NATIVE, reason="bfloat16 is emulated here")
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="bfloat16 may be emulated here")
def test_bfloat16_agrees_with_float32_on_real_frames():
    """Guards the float32 head over a bfloat16 body: almost all greedy actions are the same."""
    envs = make(num_envs=8)
    frames = torch.from_numpy(np.concatenate([obs for obs, *_ in play(envs, 40)]))
    torch.manual_seed(1)
    network = pqn_abs.QNetwork(envs)
    with torch.no_grad():
        full = network(frames)
        with torch.autocast("cpu", torch.bfloat16):
            half = network(frames)
    assert half.dtype == torch.float32
    assert (full.argmax(1) == half.argmax(1)).float().mean() > 0.97
    assert len(full.argmax(1).unique()) > 1


def test_a_run_from_the_command_line(tmp_path):
    """Guards the script as a user starts it, on a real game with its real network."""
    options = ["--num-envs", 4, "--num-minibatches", 2, "--episodic-life", "--adapt-frequency", 3]
    options += ["--rollout-min", 8, "--num-steps", 16, "--rollout-max", 24]
    options += ["--update-epochs", 1, "--total-timesteps", 1200, "--runs-dir", tmp_path]
    _, errors = end_of(start(ROOT / "pqn_abs.py", *options))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("BreakoutNoFrameskip-v4__pqn_abs__1__")
    assert errors.startswith("loading 4 x BreakoutNoFrameskip-v4\n")
    resume = f"python {ROOT / 'pqn_abs.py'} --resume {folder}"
    assert resume in errors
    table = folder / "metrics.csv"
    lengths = column(table, "abs/rollout_length", int)
    assert 8 <= min(lengths) < max(lengths) <= 24
    assert len(column(table, "abs/behavioral_divergence")) == len(lengths) // 3
    assert np.isfinite(column(table, "losses/td_loss")).all()
    assert 1200 <= load(folder)["global_step"] == column(table, "global_step", int)[-1]
    assert 0 < len(load(folder)["scores"]) < 1200 / 100  # games, of 5 lives with 35 steps or so
    assert config(folder)["script"] == "pqn_abs.py" and config(folder)["args"]["episodic_life"]

    _, *command = resume.split()
    end_of(start(*command, "--total-timesteps", 1300))
    assert load(folder)["global_step"] >= 1300
