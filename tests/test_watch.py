"""What is watched is the saved agent, in whole games with real scores, and one that is named."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import ROOT, FakeEnvs, end_of, load, start
from PIL import Image
from torch.distributions import Normal

import ppo_abs_continuous
import pqn_abs
from tools import watch

sys.path.append(str(ROOT / "examples"))
import cartpole_abs

TOOL = ROOT / "tools" / "watch.py"


def train(script, folder, *words):
    """A tiny run of a script."""
    end_of(start(script, *words, "--runs-dir", folder.parent, "--run-name", folder.name))
    return folder


@pytest.mark.parametrize("lives", [1, 2])
def test_each_environment_plays_its_share_of_whole_games(lives):
    """Taking the games that end first would favour short ones. A lost life ends none."""
    inner = FakeEnvs(3, 0.2, 0.05, lives)
    envs = pqn_abs.EpisodicLife(RecordEpisodeStatistics(inner), fire_action=2)
    args = watch.Args(Path(), episodes=8)
    scores = watch.play(envs, lambda observations: np.ones(3, int), args)
    played, totals = [[] for _ in range(3)], np.zeros(3)
    for step in inner.steps:
        totals += step.reward
        for i in np.flatnonzero(step.over):
            played[i].append(totals[i])
            totals[i] = 0
    assert sorted(scores) == sorted([*played[0][:3], *played[1][:3], *played[2][:2]])
    assert any((step.action == 2).any() for step in inner.steps) == (lives > 1)


def test_the_likeliest_action():
    """Of an actor-critic the logits decide, not the values."""
    weights = torch.tensor([[1.0, 2.0, -3.0]])
    act = watch.make_actor(Discrete(3), lambda obs: (obs @ weights, -obs))
    assert act(np.array([[1], [-1]], np.float32)).tolist() == [1, 2]


def test_a_continuous_policy_sees_scaled_observations_and_stays_in_its_space():
    normalizer = SimpleNamespace(scale=lambda observations: (observations - 10).astype(np.float32))
    act = watch.make_actor(Box(-2, 2, (1,)), lambda obs: (Normal(obs, 1), None), normalizer)
    assert act(np.array([[11.0], [20.0], [9.5]])).tolist() == [[1], [2], [-0.5]]


PARTS = {
    "pqn_abs": ("pqn_abs",) * 3,
    "pqn_abs_xl": ("pqn_abs_xl",) * 3,
    "gns_baseline": ("gns_baseline",) * 3,
    "ppo_abs": ("ppo_abs",) * 3,
    "author_rules": ("author_rules", "pqn_abs", "pqn_abs"),
    "open_loop": ("minatar_abs", "open_loop", "minatar_abs"),
    "truncation_as_end": ("ppo_abs_continuous",) * 3,
}


@pytest.mark.parametrize("script", PARTS)
def test_parts_are_the_scripts_own_or_those_that_it_imports(script, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    parts = watch.find_parts(script, Path())
    network = parts.get("ActorCritic", parts.get("QNetwork"))
    names = [part.__module__ for part in (parts["Args"], parts["make_envs"], network)]
    assert tuple(name.removeprefix("examples.") for name in names) == PARTS[script]


def test_scores_are_those_of_the_saved_network(tmp_path):
    """The same games, played once more without watch.py. One iteration has hardly taught it."""
    words = ["--total-timesteps", "1024", "--no-adapt-rollout", "--seed", "5"]
    run = train(ROOT / "examples" / "cartpole_abs.py", tmp_path / "run", *words)
    out, error = end_of(start(TOOL, run, "--episodes", "3"))
    assert "first checkpoint" in error
    network = cartpole_abs.QNetwork(gymnasium.make_vec("CartPole-v1"), None)
    network.load_state_dict(load(run)["network"])
    scores = []
    for seed in (1, 2, 3):
        env = gymnasium.make("CartPole-v1")
        obs, _ = env.reset(seed=seed)
        scores.append(0)
        over = False
        while not over:
            action = network(torch.from_numpy(obs)).argmax().item()
            obs, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            scores[-1] += 1
    agent, summary = out.splitlines()[-2:]
    expected = {"script": "cartpole_abs", "env_id": "CartPole-v1", "seed": 5}
    assert json.loads(agent) == expected | {"global_step": 1024, "adapt_rollout": False}
    spread = f"standard deviation {np.std(scores):.2f}, min {min(scores)}, max {max(scores)}"
    assert summary == f"3 games: mean {np.mean(scores):.2f}, {spread}"


def test_a_continuous_run_is_watched_with_its_moments(tmp_path):
    """The same game once more: means of the policy, observations scaled as at the run's end."""
    words = ["--env-id", "Pendulum-v1", "--total-timesteps", "1024"]
    run = train(ROOT / "ppo_abs_continuous.py", tmp_path / "run", *words)
    out, _ = end_of(start(TOOL, run, "--episodes", "1"))
    moments = {name: np.array(value) for name, value in load(run)["observations"].items()}
    args = ppo_abs_continuous.Args("Pendulum-v1")
    network = ppo_abs_continuous.ActorCritic(ppo_abs_continuous.make_envs(args), args)
    network.load_state_dict(load(run)["network"])
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=1)
    score = 0.0
    for _ in range(200):  # its time limit
        scaled = (obs - moments["mean"]) / np.sqrt(moments["var"] + 1e-8)
        means = network.actor(torch.tensor(scaled.clip(-10, 10), dtype=torch.float32))
        obs, reward, *_ = env.step(means.detach().numpy().clip(-2, 2))
        score += float(reward)
    assert abs(float(out.partition("mean ")[2].partition(",")[0]) - score) < 0.1


def test_a_video_of_the_first_environments_first_game(tmp_path):
    """And a progress bar before the first game has ended."""
    pytest.importorskip("minatar")
    words = ["--env-id", "breakout", "--total-timesteps", "2048"]
    run = train(ROOT / "examples" / "minatar_abs.py", tmp_path / "run", *words)
    out, error = end_of(start(TOOL, run, "--episodes", "3", "--video", tmp_path / "a.gif"))
    assert "0/3 [" in error and "3/3 [" in error and "checkpoint" not in error
    assert out.splitlines()[-1] == str(tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as film:
        assert film.size == (420, 420)
        assert 3 < film.n_frames <= watch.LONGEST


def test_a_script_of_ones_own_is_run_as_the_copy_in_the_runs_folder(tmp_path):
    """Without RecordEpisodeStatistics no game would ever end, so it is refused."""
    shutil.copy(ROOT / "examples" / "cartpole_abs.py", tmp_path / "my_abs.py")
    run = train(tmp_path / "my_abs.py", tmp_path / "run", "--total-timesteps", "1024")
    (tmp_path / "my_abs.py").unlink()
    out, _ = end_of(start(TOOL, run, "--episodes", "1"))
    assert json.loads(out.splitlines()[0])["script"] == "my_abs"
    copy = (run / "my_abs.py").read_text()
    (run / "my_abs.py").write_text(copy.replace("RecordEpisodeStatistics(envs)", "envs"))
    assert "lacks RecordEpisodeStatistics" in end_of(start(TOOL, run), status=1)[1]


@pytest.mark.parametrize(
    "words, says",
    [
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--video", "a.avi"], "--video end in .gif"),
        ([], "a run of p3o_tokens.py, which has no environments"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"script": "p3o_tokens", "args": {}}))
    out, error = end_of(start(TOOL, tmp_path, *words), status=1)
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("watch.py: ") and says in error


def test_the_colour_film_is_of_the_game_that_is_played():
    """The same rewards, from the same seed and actions: so both press FIRE after the same lives."""
    args = pqn_abs.Args(num_envs=2)
    envs = pqn_abs.make_envs(args)
    filmed = watch.atari_in_colour(args, vars(pqn_abs), envs)
    rng = np.random.default_rng(1)
    envs.reset(seed=1)
    filmed.reset(seed=1)
    points = 0
    for _ in range(400):
        actions = rng.integers(4, size=2)
        rewards = envs.step(actions)[1]
        screen, reward, *_ = filmed.step(actions[:1])
        assert rewards[0] == reward[0]
        points += reward[0]
    assert screen.shape == (1, 1, 210, 160, 3) and points > 2
