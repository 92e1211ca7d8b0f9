"""What is watched is the saved agent, in whole games with real scores, and one that is named."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import ROOT, FakeEnvs, SmallNetwork, config, end_of, load, start
from PIL import Image
from test_plot import without

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


class Planned:
    """Games that end as planned. Rewards are the action times its worth, and a bonus at the end."""

    fire_action = 2

    def __init__(
        self, *lengths, life_lost_at=(), life_won_at=(), first_action=0, worth=1, bonus=100.0
    ):
        self.lengths = np.array(lengths)
        self.worth = worth
        self.bonus = bonus
        self.num_envs = len(lengths)
        self.single_action_space = Discrete(4, start=first_action)
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
        rewards = self.worth * actions + self.bonus * ended
        actions[:] = 9  # as environments may
        cut = ended & (self.lengths == 7)
        return np.zeros((self.num_envs, 1)), rewards, ended & ~cut, cut, {"lives": self.lives()}


def always(action):
    return lambda observations: np.full(len(observations), action)


def play(envs, act, episodes, **options):
    return watch.play(envs, act, watch.Args(Path(), episodes=episodes), **options)


# --- Games ---


def test_each_environment_plays_its_share_whatever_ends_first():
    """Taking the games that end first would favour short ones."""
    scores = play(Planned(2, 7, 3), always(1), 8)
    assert sorted(scores) == [102] * 3 + [103] * 2 + [107] * 3


def test_fire_follows_a_lost_life_and_the_game_goes_on():
    envs = Planned(6, life_lost_at=(2, 5))
    scores = play(envs, always(0), 2, fire=True)
    assert np.concatenate(envs.actions).tolist() == [0, 0, 2, 0, 0, 2] * 2
    assert scores == [104] * 2


def test_fire_is_counted_from_the_first_action():
    envs = Planned(6, life_lost_at=(2,), first_action=-1)
    play(envs, always(0), 1, fire=True)
    assert np.concatenate(envs.actions).tolist() == [0, 0, 1, 0, 0, 0]


def test_a_new_game_with_fewer_lives_is_no_lost_life():
    envs = Planned(6, life_won_at=(2,))
    play(envs, always(0), 2, fire=True)
    assert np.concatenate(envs.actions).tolist() == [0] * 12


def test_without_episodic_life_the_policy_presses_fire_itself():
    envs = Planned(6, life_lost_at=(2, 5))
    play(envs, always(0), 1)
    assert np.concatenate(envs.actions).tolist() == [0] * 6


def test_the_likeliest_action():
    """Of an actor-critic the logits decide, not the values; actions may not start at 0."""
    weights = torch.tensor([[1.0, 2.0, -3.0]])

    def actor_critic(observations):
        return observations @ weights, -observations.squeeze(1)

    observations = np.array([[1], [-1]], np.float32)
    assert watch.make_actor(Discrete(3), actor_critic)(observations).tolist() == [1, 2]
    assert watch.make_actor(Discrete(3, start=-1), actor_critic)(observations).tolist() == [0, 1]


def test_a_continuous_policy_sees_scaled_observations_and_stays_in_its_space():
    normalizer = SimpleNamespace(scale=lambda observations: (observations - 10).astype(np.float32))
    act = watch.make_actor(Box(-2, 2, (1,)), lambda obs: (obs, None), normalizer)
    assert act(np.array([[11.0], [20.0], [9.5]])).tolist() == [[1], [2], [-0.5]]


def test_numbers_that_are_not_finite_choose_no_action():
    act = watch.make_actor(Discrete(3), lambda observations: observations)
    with pytest.raises(ValueError, match="not finite"):
        act(np.array([[1, np.nan, 2]]))


# --- What it says while it plays ---


def lines_of(capsys):
    """What stands on stderr beside the progress bar."""
    written = capsys.readouterr().err.replace("\r", "\n").splitlines()
    return [line for line in written if line.strip() and "step [" not in line]


@pytest.mark.parametrize("has_fire", [True, False])
def test_an_agent_that_waits_is_mentioned_once(has_fire, capsys, monkeypatch):
    """A greedy Breakout agent that never presses FIRE plays to the time limit."""
    monkeypatch.setattr(watch, "STUCK", 5)
    envs = Planned(3, 20, 17)
    envs.fire_action = 2 * has_fire
    play(envs, always(0), 6)
    (line,) = lines_of(capsys)
    assert "same action and no reward for 5 steps" in line
    assert line.endswith("waiting for FIRE" if has_fire else "stuck")


@pytest.mark.parametrize("reason", ["rewards", "other actions", "short games"])
def test_an_agent_that_plays_is_not_called_stuck(reason, capsys, monkeypatch):
    monkeypatch.setattr(watch, "STUCK", 5)
    if reason == "rewards":
        play(Planned(20), always(1), 1)
    elif reason == "other actions":
        alternating = iter([0, 1] * 10)
        play(Planned(20, worth=0), lambda observations: np.array([next(alternating)]), 1)
    else:
        play(Planned(4, 5, bonus=0.0), always(0), 6)
    assert not lines_of(capsys)


def test_it_does_not_play_in_silence(minatar_run):
    """The bar is there before the first game has ended, and counts games."""
    process = start(TOOL, minatar_run, "--episodes", "3")
    out, error = end_of(process)
    assert "0step [" in error and "3 of 3 games" in error.splitlines()[-1]
    assert len(out.splitlines()) == 2


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


TOY = """
import torch.nn as nn
from gymnasium.spaces import Discrete
from helpers import ReusedArrays, SmallNetwork
import pqn_abs

made = []


class Envs(ReusedArrays):
    def __init__(self, count):
        super().__init__(count)
        self.single_action_space = Discrete(4, start=-3)


def make_envs(args):
    made.append(Envs(args.num_envs))
    return made[-1]


class QNetwork(SmallNetwork):
    def __init__(self, envs):
        super().__init__(envs)
        self.dropout = nn.Dropout(0.9)

    def forward(self, frames):
        return self.dropout(super().forward(frames))
"""


def test_an_example_is_watched_as_it_acts(tmp_path, train, monkeypatch, capsys):
    """Its own environments and network, without dropout, and Args that it does not define."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(watch, "ROOT", tmp_path)
    (tmp_path / "pqn_abs.py").touch()  # by this name, its import is recognised
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    toy = importlib.import_module("toy")
    run = train(toy.Envs(4), toy.QNetwork, total_timesteps=500, num_minibatches=2, seed=3)
    (run / "config.json").write_text(json.dumps(config(run) | {"script": "toy.py"}))
    watch.main(watch.Args(run, episodes=15))
    agent, summary = capsys.readouterr().out.splitlines()
    assert json.loads(agent)["seed"] == 3
    (envs,) = toy.made
    assert envs.num_envs == 10
    network = toy.QNetwork(envs).eval()
    network.load_state_dict(load(run)["network"])
    scores, totals = [[] for _ in range(10)], np.zeros(10)
    for step in envs.steps:
        greedy = network(torch.tensor(step.obs)).argmax(1).numpy()
        assert step.action.tolist() == (greedy - 3).tolist()
        totals += step.reward
        for i in np.flatnonzero(step.over):
            scores[i].append(totals[i])
            totals[i] = 0
    played = [score for i in range(10) for score in scores[i][: 2 if i < 5 else 1]]
    assert summary.startswith(f"15 games: mean {np.mean(played):.2f}, ")


def test_games_are_whole_where_a_lost_life_ended_an_episode(tmp_path, monkeypatch):
    seen = []

    def make_envs(args):
        seen.append(args)
        return FakeEnvs(args.num_envs)

    parts = {"Args": pqn_abs.Args, "make_envs": make_envs, "QNetwork": SmallNetwork}
    monkeypatch.setattr(watch, "find_parts", lambda name: parts)
    args = asdict(pqn_abs.Args(episodic_life=True))
    (tmp_path / "config.json").write_text(json.dumps({"script": "x.py", "args": args}))
    weights = SmallNetwork(FakeEnvs(1)).state_dict()
    torch.save({"network": weights, "global_step": 5}, tmp_path / "checkpoint.pt")
    envs, _, fire, _ = watch.load_run(watch.Args(tmp_path, episodes=3))
    assert fire and envs.num_envs == 3
    assert seen[0].episodic_life is False


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


def test_a_video_with_its_agent_beside_it(minatar_run, tmp_path):
    end_of(start(TOOL, minatar_run, "--episodes", "1", "--video", tmp_path / "a.gif"))
    with Image.open(tmp_path / "a.gif") as film:
        assert film.size == (420, 420)
        assert 3 < film.n_frames <= watch.LONGEST
    agent = json.loads((tmp_path / "a.txt").read_text())
    assert (agent["script"], agent["env_id"]) == ("minatar_abs.py", "breakout")
    assert agent["global_step"] >= 1024 and agent["adapt_rollout"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"a.gif", "a.txt"}


def test_a_video_on_a_full_disk_is_one_line(minatar_run, tmp_path):
    (tmp_path / "a.gif").symlink_to("/dev/full")
    words = ["--episodes", "1", "--video", tmp_path / "a.gif"]
    _, error = end_of(start(TOOL, minatar_run, *words), status=2)
    *bar, line = error.splitlines()
    assert "No space left" in line and all("step [" in text for text in bar if text.strip())
    assert not (tmp_path / "a.txt").exists()  # it would name an agent that is not in the picture


def test_the_film_ends_with_the_first_environments_first_game(monkeypatch):
    monkeypatch.setattr(watch, "picture", lambda envs, observations: len(envs.actions))
    film = []
    play(Planned(4, 2), always(0), 6, film=film)
    assert film == [0, 1, 2, 3]


# --- What is refused ---


def refusal(run, *words):
    """The one line of a run that is refused, without the progress bar."""
    _, error = end_of(start(TOOL, run, *words), status=2)
    (line,) = error.splitlines()
    assert line.startswith(f"watch.py: {run}: ")
    return line


@pytest.mark.parametrize(
    "words, says",
    [
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--video", "a.avi"], "--video end in .gif"),
        (["--video", "nowhere/a.gif"], "--video nowhere/a.gif: there is no such folder"),
    ],
)
def test_bad_options_are_one_line(words, says, cartpole):
    assert says in refusal(cartpole, *words)


@pytest.mark.parametrize("text", ["", "null", '{"script": 5}', '{"script": "../x.py"}'])
def test_what_is_no_run_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ValueError, TypeError)):
        watch.main(watch.Args(tmp_path))


def test_a_run_of_p3o_tokens_has_no_episodes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"script": "p3o_tokens.py", "args": {}}))
    line = refusal(tmp_path)
    assert line.endswith("a run of p3o_tokens.py, which has no episodes of an environment")


def test_a_missing_package_of_the_game_is_one_line(minatar_run):
    assert "MinAtar is not installed: pip install MinAtar" in without(
        "minatar", "watch.py", minatar_run
    )


@pytest.mark.parametrize(
    "contents", ["missing", "torn", "other network", "other options", "nested"]
)
def test_a_foreign_run_is_one_line(contents, cartpole, tmp_path):
    checkpoint = load(cartpole)
    settings = json.dumps(config(cartpole))
    path = tmp_path / "checkpoint.pt"
    if contents == "torn":
        path.write_bytes((cartpole / "checkpoint.pt").read_bytes()[:5000])
    elif contents == "other network":
        torch.save(checkpoint | {"network": {"weight": torch.zeros(1)}}, path)
    elif contents == "other options":
        settings = settings.replace('"gamma"', '"no_such_option"')
    elif contents == "nested":
        settings = "[" * 100_000
    (tmp_path / "config.json").write_text(settings)
    refusal(tmp_path)
