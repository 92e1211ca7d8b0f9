"""What is watched is the saved agent, in whole games with real scores, and one that is named."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import ROOT, FakeEnvs, end_of, load, start
from PIL import Image

import ppo_abs_continuous
import pqn_abs
from tools import watch

TOOL = ROOT / "tools" / "watch.py"


def train_example(folder, example, *words):
    """A tiny run of an example."""
    words = ["--total-timesteps", "1024", "--num-minibatches", "4", *words]
    words += ["--runs-dir", folder.parent, "--run-name", folder.name]
    end_of(start(ROOT / "examples" / example, *words))
    return folder


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train_example(folder, "cartpole_abs.py", "--no-adapt-rollout", "--seed", "5")


@pytest.fixture(scope="module")
def minatar_run(tmp_path_factory):
    pytest.importorskip("minatar")
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train_example(folder, "minatar_abs.py", "--env-id", "breakout")


# --- Games ---


@pytest.mark.parametrize("lives", [0, 2])
def test_each_environment_plays_its_share_of_whole_games(lives):
    """Taking the games that end first would favour short ones. A lost life ends none."""
    inner = FakeEnvs(3, 0.2, 0.05, lives)
    envs = pqn_abs.EpisodicLife(inner, fire_action=2) if lives else inner
    args = watch.Args(Path(), episodes=8)
    scores = watch.play(envs, lambda observations: np.ones(3, int), args)
    played, totals = [[] for _ in range(3)], np.zeros(3)
    for step in inner.steps:
        totals += step.reward
        for i in np.flatnonzero(step.over):
            played[i].append(totals[i])
            totals[i] = 0
    assert sorted(scores) == sorted([*played[0][:3], *played[1][:3], *played[2][:2]])
    assert any((step.action == 2).any() for step in inner.steps) == bool(lives)


def test_the_likeliest_action():
    """Of an actor-critic the logits decide, not the values."""
    weights = torch.tensor([[1.0, 2.0, -3.0]])

    def actor_critic(observations):
        return observations @ weights, -observations.squeeze(1)

    observations = np.array([[1], [-1]], np.float32)
    assert watch.make_actor(Discrete(3), actor_critic)(observations).tolist() == [1, 2]


def test_a_continuous_policy_sees_scaled_observations_and_stays_in_its_space():
    normalizer = SimpleNamespace(scale=lambda observations: (observations - 10).astype(np.float32))
    act = watch.make_actor(Box(-2, 2, (1,)), lambda obs: (obs, None), normalizer)
    assert act(np.array([[11.0], [20.0], [9.5]])).tolist() == [[1], [2], [-0.5]]


# --- Whose game and network ---

PARTS = {
    "pqn_abs.py": ("pqn_abs", "pqn_abs", "pqn_abs"),
    "pqn_abs_xl.py": ("pqn_abs_xl", "pqn_abs_xl", "pqn_abs_xl"),
    "gns_baseline.py": ("gns_baseline", "gns_baseline", "gns_baseline"),
    "ppo_abs.py": ("ppo_abs", "ppo_abs", "ppo_abs"),
    "p3o_abs.py": ("p3o_abs", "p3o_abs", "p3o_abs"),
    "ppo_abs_continuous.py": ("ppo_abs_continuous",) * 3,
    "author_rules.py": ("author_rules", "pqn_abs", "pqn_abs"),
    "cartpole_abs.py": ("cartpole_abs",) * 3,
    "open_loop.py": ("minatar_abs", "open_loop", "minatar_abs"),
    "truncation_as_end.py": ("ppo_abs_continuous",) * 3,
}


@pytest.mark.parametrize("script", PARTS)
def test_parts_are_the_scripts_own_or_those_that_it_imports(script, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    parts = watch.find_parts(script)
    network = parts.get("ActorCritic", parts.get("QNetwork"))
    names = [part.__module__ for part in (parts["Args"], parts["make_envs"], network)]
    assert tuple(name.removeprefix("examples.") for name in names) == PARTS[script]


# --- Real runs ---


def test_scores_are_those_of_the_saved_network(cartpole):
    """The same games, played once more without watch.py."""
    out, _ = end_of(start(TOOL, cartpole, "--episodes", "3"))
    weights = load(cartpole)["network"]

    def layer_norm(x, i):
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
        return (x * weights[f"layers.{i}.weight"] + weights[f"layers.{i}.bias"]).relu()

    scores = []
    for seed in (1, 2, 3):
        env = gymnasium.make("CartPole-v1")
        x, _ = env.reset(seed=seed)
        steps = 0
        over = False
        while not over:
            x = torch.from_numpy(x)
            for i in (0, 3):
                x = weights[f"layers.{i}.weight"] @ x + weights[f"layers.{i}.bias"]
                x = layer_norm(x, i + 1)
            q_values = weights["layers.6.weight"] @ x + weights["layers.6.bias"]
            x, _, terminated, truncated, _ = env.step(q_values.argmax().item())
            over = terminated or truncated
            steps += 1
        scores.append(steps)
    agent, summary = out.splitlines()[-2:]
    expected = {"script": "cartpole_abs.py", "env_id": "CartPole-v1", "seed": 5}
    assert json.loads(agent) == expected | {"global_step": 1024, "adapt_rollout": False}
    spread = f"standard deviation {np.std(scores):.2f}, min {min(scores)}, max {max(scores)}"
    assert summary == f"3 games: mean {np.mean(scores):.2f}, {spread}"


def test_a_continuous_run_is_watched_with_its_moments(tmp_path):
    """The same game once more: means of the policy, observations scaled as at the run's end."""
    words = ["--env-id", "Pendulum-v1", "--total-timesteps", "1024", "--run-name", "run"]
    end_of(start(ROOT / "ppo_abs_continuous.py", *words, "--runs-dir", tmp_path))
    out, _ = end_of(start(TOOL, tmp_path / "run", "--episodes", "1"))
    checkpoint = load(tmp_path / "run")
    moments = {name: np.array(value) for name, value in checkpoint["observations"].items()}
    env = gymnasium.make("Pendulum-v1")
    spaces = {"observation": env.observation_space, "action": env.action_space}
    spaces = {f"single_{name}_space": space for name, space in spaces.items()}
    network = ppo_abs_continuous.ActorCritic(SimpleNamespace(**spaces))
    network.load_state_dict(checkpoint["network"])
    obs, _ = env.reset(seed=1)
    score, over = 0.0, False
    while not over:
        scaled = (obs - moments["mean"]) / np.sqrt(moments["squares"] / moments["count"] + 1e-8)
        means, _ = network(torch.tensor(scaled.clip(-10, 10), dtype=torch.float32)[None])
        obs, reward, terminated, truncated, _ = env.step(means[0].detach().numpy().clip(-2, 2))
        score += float(reward)
        over = terminated or truncated
    assert abs(float(out.partition("mean ")[2].partition(",")[0]) - score) < 0.1


def test_a_video_of_the_first_environments_first_game(minatar_run, tmp_path):
    """And a progress bar before the first game has ended."""
    process = start(TOOL, minatar_run, "--episodes", "3", "--video", tmp_path / "a.gif")
    out, error = end_of(process)
    assert "0/3 [" in error and "3/3 [" in error
    agent, path, _ = out.splitlines()
    agent = json.loads(agent)
    assert (agent["script"], agent["env_id"]) == ("minatar_abs.py", "breakout")
    assert path == str(tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as film:
        assert film.size == (420, 420)
        assert 3 < film.n_frames <= watch.LONGEST


@pytest.mark.parametrize(
    "words, says",
    [
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--video", "a.avi"], "--video end in .gif"),
        (["--video", "nowhere/a.gif"], "--video nowhere/a.gif: there is no such folder"),
        ([], "a run of p3o_tokens.py, which has no environments"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"script": "p3o_tokens.py", "args": {}}))
    out, error = end_of(start(TOOL, tmp_path, *words), status=2)
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("watch.py: ") and says in error
    with pytest.raises(ValueError, match="is not the folder of a run"):
        watch.load_run(watch.Args(tmp_path.parent))
    (tmp_path / "config.json").write_text(json.dumps({"script": "pqn_abs.py", "args": {"old": 1}}))
    with pytest.raises(ValueError, match="its options are not those of this pqn_abs"):
        watch.load_run(watch.Args(tmp_path))


def test_the_colour_film_is_of_the_game_that_is_played():
    """Guards the film from another game: the same rewards, from the same seed and actions."""
    envs = pqn_abs.make_envs(pqn_abs.Args(num_envs=2))
    filmed = watch.atari_in_colour("BreakoutNoFrameskip-v4")
    rng = np.random.default_rng(1)
    envs.reset(seed=1)
    filmed.reset(seed=1)
    seen = []
    for _ in range(400):
        _, rewards, *_, info = envs.step(rng.integers(4, size=2))
        screen, reward, *_ = filmed.step(info["executed_actions"][:1])
        seen.append((np.sign(rewards[0]), reward[0]))
    assert screen.shape == (1, 1, 210, 160, 3)
    assert all(one == other for one, other in seen) and sum(one for one, _ in seen) > 2
