"""What is watched is the saved agent, in whole games with real scores, and one that is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector.utils import batch_space

from tools import watch

ROOT = Path(watch.__file__).parents[1]


def python(*words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def train(folder, example, *words):
    """A tiny run of an example."""
    words = ["--total-timesteps", "1024", "--num-minibatches", "4", *words]
    script = ROOT / "examples" / example
    done = python(script, *words, "--runs-dir", folder.parent, "--run-name", folder.name)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", ["p3o_abs.py", "annealed.py", "truncation_as_end.py"])
def test_scripts_are_found_wherever_they_are(name):
    """Guards runs of the root's scripts and of results/'s, which change one of them."""
    code = f"import watch; watch.load_script({name!r}).Args().total_timesteps"
    done = python("-c", f"import sys; sys.path.append({str(ROOT / 'tools')!r}); {code}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train(folder, "cartpole_abs.py", "--no-adapt-rollout", "--seed", "5")


class Planned:
    """Games that end as planned, with the action as reward, and 100 at the end."""

    fire_action = 2

    def __init__(self, *lengths, life_lost_at=(), life_won_at=()):
        self.lengths = np.array(lengths)
        self.num_envs = len(lengths)
        self.single_action_space = Discrete(4)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.life_lost_at = life_lost_at
        self.life_won_at = life_won_at
        self.actions = []

    def reset(self, *, seed):
        self.step_count = np.zeros(self.num_envs, int)
        return np.zeros((self.num_envs, 1)), {"lives": self.lives()}

    def lives(self):
        return np.array([self.lives_after(count) for count in self.step_count])

    def lives_after(self, count):
        lost = sum(count >= step for step in self.life_lost_at)
        won = sum(count >= step for step in self.life_won_at)
        return 3 - lost + won

    def step(self, actions):
        self.actions.append(actions.copy())
        self.step_count += 1
        ended = self.step_count == self.lengths
        self.step_count[ended] = 0
        rewards = actions + 100.0 * ended
        cut = ended & (self.lengths == 7)
        return np.zeros((self.num_envs, 1)), rewards, ended & ~cut, cut, {"lives": self.lives()}


def always(action):
    return lambda observations: np.full(len(observations), action)


# --- Games ---


def test_each_environment_plays_its_share_whatever_ends_first():
    """Taking the games that end first would favour short ones."""
    scores = watch.play(Planned(2, 7, 3), always(1), watch.Args(Path(), episodes=8))
    assert sorted(scores) == [102] * 3 + [103] * 2 + [107] * 3


def test_fire_follows_a_lost_life_and_the_game_goes_on():
    envs = Planned(6, life_lost_at=(2, 5))
    scores = watch.play(envs, always(0), watch.Args(Path(), episodes=2), fire=True)
    assert np.concatenate(envs.actions).tolist() == [0, 0, 2, 0, 0, 2] * 2
    assert scores == [104] * 2


def test_a_new_game_with_fewer_lives_is_no_lost_life():
    envs = Planned(6, life_won_at=(2,))
    watch.play(envs, always(0), watch.Args(Path(), episodes=2), fire=True)
    assert np.concatenate(envs.actions).tolist() == [0] * 12


def test_without_episodic_life_the_policy_presses_fire_itself():
    envs = Planned(6, life_lost_at=(2, 5))
    watch.play(envs, always(0), watch.Args(Path(), episodes=1))
    assert np.concatenate(envs.actions).tolist() == [0] * 6


def test_the_likeliest_action():
    """Of an actor-critic the logits decide, not the values."""
    weights = torch.tensor([[1.0, 2.0, -3.0]])

    def actor_critic(observations):
        return observations @ weights, -observations.squeeze(1)

    envs = SimpleNamespace(single_action_space=Discrete(3))
    act = watch.make_actor(None, None, {}, envs, actor_critic)
    assert act(np.array([[1], [-1]], np.float32)).tolist() == [1, 2]


def test_a_continuous_policy_sees_scaled_observations_and_stays_in_its_space():
    class Normalizer:
        def __init__(self, envs, gamma):
            self.observations = self

        def load_state_dict(self, state):
            self.mean = state

        def scale(self, observations):
            return (observations - self.mean).astype(np.float32)

    envs = SimpleNamespace(single_action_space=Box(-2, 2, (1,)))
    script = SimpleNamespace(Normalizer=Normalizer)
    run = SimpleNamespace(gamma=0.9)
    act = watch.make_actor(script, run, {"observations": 10}, envs, lambda obs: (obs, None))
    assert act(np.array([[11.0], [20.0], [9.5]])).tolist() == [[1], [2], [-0.5]]


# --- Real runs ---


def test_scores_are_those_of_the_saved_network(cartpole, tmp_path):
    """The same games, played once more without watch.py."""
    done = python(ROOT / "tools/watch.py", cartpole, "--episodes", "3")
    assert done.returncode == 0, done.stderr
    weights = torch.load(cartpole / "checkpoint.pt", weights_only=True)["network"]

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
    agent, summary = done.stdout.splitlines()[-2:]
    expected = {"script": "cartpole_abs.py", "env_id": "CartPole-v1", "seed": 5}
    assert json.loads(agent) == expected | {"global_step": 1024, "adapt_rollout": False}
    spread = f"standard deviation {np.std(scores):.2f}, min {min(scores)}, max {max(scores)}"
    assert summary == f"3 games: mean {np.mean(scores):.2f}, {spread}"


def test_a_video_with_its_agent_beside_it(tmp_path):
    pytest.importorskip("minatar")
    run = train(tmp_path / "run", "minatar_abs.py", "--env-id", "breakout")
    done = python(ROOT / "tools/watch.py", run, "--episodes", "1", "--video", tmp_path / "a.gif")
    assert done.returncode == 0, done.stderr
    frames = imageio.mimread(tmp_path / "a.gif", memtest=False)
    assert frames[0].shape[:2] == (420, 420)
    assert 3 < len(frames) <= watch.LONGEST
    agent = json.loads((tmp_path / "a.txt").read_text())
    assert (agent["script"], agent["env_id"]) == ("minatar_abs.py", "breakout")
    assert agent["global_step"] >= 1024 and agent["adapt_rollout"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.gif", "a.txt"}


class Frames:
    """Counts what is filmed."""

    def __init__(self):
        self.frames = []

    def append_data(self, frame):
        self.frames.append(frame)


def test_the_film_ends_with_the_first_environments_first_game(monkeypatch):
    monkeypatch.setattr(watch, "picture", lambda envs, observations: len(envs.actions))
    film = Frames()
    watch.play(Planned(4, 2), always(0), watch.Args(Path(), episodes=6), video=film)
    assert film.frames == [0, 1, 2, 3]


# --- What is refused ---


def refusal(run, *words):
    done = python(ROOT / "tools/watch.py", run, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"watch.py: {run}: ")
    return done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--video", "a.avi"], "--video end in .gif"),
        (["--video", "nowhere/a.gif"], "No such file or directory: 'nowhere/a.txt'"),
    ],
)
def test_bad_options_are_one_line(words, says, cartpole):
    assert says in refusal(cartpole, *words)


@pytest.mark.parametrize("config", ["", "null", '{"script": 5}', '{"script": "../x.py"}'])
def test_what_is_no_run_is_one_line(config, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises((ValueError, TypeError)):
        watch.main(watch.Args(tmp_path))


@pytest.mark.parametrize("contents", ["missing", "torn", "other network", "other args"])
def test_a_foreign_checkpoint_is_one_line(contents, cartpole, tmp_path):
    checkpoint = torch.load(cartpole / "checkpoint.pt", weights_only=True)
    (tmp_path / "config.json").write_text((cartpole / "config.json").read_text())
    path = tmp_path / "checkpoint.pt"
    if contents == "torn":
        path.write_bytes((cartpole / "checkpoint.pt").read_bytes()[:5000])
    elif contents == "other network":
        torch.save(checkpoint | {"network": {"weight": torch.zeros(1)}}, path)
    elif contents == "other args":
        torch.save(checkpoint | {"args": {"env_id": 5}}, path)
    refusal(tmp_path)
