"""What is watched is the saved agent, in whole games with real scores, and one that is named."""

import csv
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

import pqn_abs
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
    games = watch.play(Planned(2, 7, 3), always(1), watch.Args(Path(), episodes=8))
    assert sorted(games) == [(102, 2, False)] * 3 + [(103, 3, False)] * 2 + [(107, 7, True)] * 3


def test_fire_follows_a_lost_life_and_the_game_goes_on():
    envs = Planned(6, life_lost_at=(2, 5))
    games = watch.play(envs, always(0), watch.Args(Path(), episodes=2), fire_after_lost_life=True)
    assert np.concatenate(envs.actions).tolist() == [0, 0, 2, 0, 0, 2] * 2
    assert games == [(104, 6, False)] * 2


def test_a_new_game_with_fewer_lives_is_no_lost_life():
    envs = Planned(6, life_won_at=(2,))
    watch.play(envs, always(0), watch.Args(Path(), episodes=2), fire_after_lost_life=True)
    assert np.concatenate(envs.actions).tolist() == [0] * 12


def test_without_episodic_life_the_policy_presses_fire_itself():
    envs = Planned(6, life_lost_at=(2, 5))
    watch.play(envs, always(0), watch.Args(Path(), episodes=1))
    assert np.concatenate(envs.actions).tolist() == [0] * 6


def test_epsilon_is_the_share_of_random_actions():
    envs = Planned(1000)
    watch.play(envs, always(1), watch.Args(Path(), episodes=1, epsilon=0.4))
    assert 0.65 < np.mean(np.concatenate(envs.actions) == 1) < 0.75  # a quarter of 0.4 are 1, too


def test_summary_of_known_scores():
    text = watch.summary([(1.0, 5, False), (3.0, 6, True), (3.0, 6, True)])
    assert text == (
        "3 games: mean 2.33, standard deviation 0.94, min 1, max 3; "
        "2 different by score and length, 2 cut by the time limit"
    )


def test_the_likeliest_action_of_a_policy_in_bfloat16():
    """Of an actor-critic the logits decide, not the values."""
    script = SimpleNamespace(pick_device=lambda run: (torch.device("cpu"), True))
    network = torch.nn.Linear(1, 3)
    network.weight.data = torch.tensor([[1.0], [2.0], [-3.0]])
    network.bias.data.zero_()

    def actor_critic(observations):
        return network(observations), observations.squeeze(1)

    actor_critic.to = lambda device: None
    act = watch.make_actor(script, None, {}, None, actor_critic)
    with torch.no_grad():
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
    words = ["--episodes", "3", "--num-envs", "3", "--seed", "7", "--csv", tmp_path / "scores.csv"]
    done = python(ROOT / "tools/watch.py", cartpole, *words)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    weights = torch.load(cartpole / "checkpoint.pt", weights_only=True)["network"]

    def layer_norm(x, i):
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
        return (x * weights[f"layers.{i}.weight"] + weights[f"layers.{i}.bias"]).relu()

    scores = []
    for seed in (7, 8, 9):
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
    assert sorted(float(row["score"]) for row in rows) == sorted(scores)
    agent = ("cartpole_abs.py", "CartPole-v1", "5", "1024", "False")
    names = ("script", "env_id", "seed", "global_step", "adapt_rollout")
    assert {tuple(row[name] for name in names) for row in rows} == {agent}
    assert f"3 games: mean {np.mean(scores):.2f}," in done.stdout


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


def test_the_picture_of_an_atari_game_is_the_first_environments(tmp_path, monkeypatch):
    """The twin in colour goes through the same game: equal rewards, and pictures of one kind."""
    monkeypatch.setattr(pqn_abs, "AtariVectorEnv", pqn_abs.AtariVectorEnv)  # put back in the end
    run = pqn_abs.Args(env_id="PongNoFrameskip-v4", num_envs=2)
    envs = pqn_abs.make_envs(run)
    args = watch.Args(tmp_path, seed=3, video=tmp_path / "a.gif")
    video = watch.Video(pqn_abs, run, args)
    frames, _ = envs.reset(seed=3)
    rng = np.random.default_rng(0)
    points = 0
    for _ in range(250):
        twin = video.observations[0, -1]
        assert twin.shape == (210, 160, 3)
        bright = twin.mean(2)[5::5, 2::4][:42, :40]  # every fifth line, every fourth column
        grey = frames[0, -1][2::2, 1::2][:41, :40]
        assert np.corrcoef(bright[:41].ravel(), grey.ravel())[0, 1] > 0.8
        actions = rng.integers(6, size=2)
        frames, rewards, *_ = envs.step(actions)
        _, twin_rewards, *_ = reward_of(video, actions)
        assert twin_rewards[0] == rewards[0]
        points += abs(rewards[0])
    assert points > 1
    video.close("an agent")
    assert len(imageio.mimread(tmp_path / "a.gif", memtest=False)) > 200


def reward_of(video, actions):
    """What the twin's step() returns while the video takes one."""
    step = video.envs.step
    returned = []

    def record(own):
        returned.append(step(own))
        return returned[-1]

    video.envs.step = record
    video.step(actions)
    video.envs.step = step
    return returned[-1]


# --- What is refused ---


def refusal(run, capsys, **options):
    with pytest.raises(SystemExit) as ended:
        watch.main(watch.Args(run, **options))
    out, error = capsys.readouterr()
    assert (ended.value.code, out, error.count("\n")) == (2, "", 1), error
    assert error.startswith("watch.py: ")
    return error


@pytest.mark.parametrize(
    "options, says",
    [
        ({"episodes": 0}, "--episodes 0: it must be from 1 to"),
        ({"num_envs": 1_000_000_000}, "--num-envs 1000000000: it must be"),
        ({"epsilon": float("nan")}, "--epsilon nan"),
        ({"seed": 2**65}, "--seed 36893488147419103232"),
        ({"seed": -1}, "--seed -1"),
        ({"video": Path("a.avi")}, ".gif or .mp4"),
        ({"video": Path("nowhere/a.gif")}, "nowhere/a.gif: no file can be written there"),
        ({"csv": Path(".")}, "no file can be written there"),
    ],
)
def test_bad_options_are_one_line(options, says, tmp_path, capsys):
    assert says in refusal(tmp_path, capsys, **options)


@pytest.mark.parametrize(
    "config",
    ["", "null", "[]", "{}", '{"script": 5}', '{"script": "../x.py"}', '{"script": "nowhere.py"}'],
)
def test_what_is_no_run_is_one_line(config, tmp_path, capsys):
    torch.save({"args": {}, "network": {}, "global_step": 1}, tmp_path / "checkpoint.pt")
    (tmp_path / "config.json").write_text(config)
    assert "holds no run that can be played" in refusal(tmp_path, capsys)
    assert "FileNotFoundError" in refusal(tmp_path / "nowhere", capsys)


@pytest.mark.parametrize("contents", ["torn", "other network", "other args"])
def test_a_foreign_checkpoint_is_one_line(contents, cartpole, tmp_path):
    checkpoint = torch.load(cartpole / "checkpoint.pt", weights_only=True)
    (tmp_path / "config.json").write_text((cartpole / "config.json").read_text())
    path = tmp_path / "checkpoint.pt"
    if contents == "torn":
        path.write_bytes((cartpole / "checkpoint.pt").read_bytes()[:5000])
    elif contents == "other network":
        torch.save(checkpoint | {"network": {"weight": torch.zeros(1)}}, path)
    else:
        torch.save(checkpoint | {"args": {"env_id": 5}}, path)
    done = python(ROOT / "tools/watch.py", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"watch.py: {tmp_path} holds no run")
