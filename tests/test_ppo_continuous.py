"""ppo_abs_continuous.py: normalisation, and a run computed twice."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from helpers import FakeEnvs, ReusedArrays, column, config, load, rows, stacked
from torch.distributions import Independent, Normal, kl_divergence

import ppo_abs_continuous as script

# gae, the clipped losses, normalize and rollout_length are those of ppo_abs.py: test_ppo.py.


class ToyEnvs(FakeEnvs):
    """Three random numbers of unlike size as observation, two as action."""

    def __init__(self, num_envs, limit=0.5, **ends):
        super().__init__(num_envs, **ends)
        self.single_observation_space = Box(-np.inf, np.inf, (3,), float)
        self.single_action_space = Box(-limit, limit, (2,), np.float32)

    def frames(self):
        return self.rng.normal([5, 0, -300], [0.1, 1, 100], size=(self.num_envs, 3))


class Reused(ReusedArrays, ToyEnvs):
    pass


def in_eval_mode(actor, inputs):
    assert torch.is_grad_enabled() or not actor.training


class Network(script.ActorCritic):
    """Fails where it acts or is measured with dropout on."""

    def __init__(self, envs):
        super().__init__(envs)
        self.actor.register_forward_pre_hook(in_eval_mode)


@pytest.fixture
def train(tmp_path):
    """train(envs, **arguments) runs the script on envs, or on real ones where envs is None."""
    count = iter(range(1000))

    def run(envs, network=Network, rollout_length=script.rollout_length, **arguments):
        parts = {"ActorCritic": network, "rollout_length": rollout_length}
        defaults = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        if envs is not None:
            parts["make_envs"] = lambda args: envs
            defaults |= {"num_envs": envs.num_envs, "num_minibatches": 1, "num_steps": 21}
            defaults |= {"rollout_min": 21, "rollout_max": 60, "adapt_rollout": False}
            defaults |= {"adapt_frequency": 2, "total_timesteps": 84}
            defaults |= {"update_epochs": 3, "learning_rate": 0.01}
        return script.main(script.Args(**(defaults | arguments)), **parts)

    return run


# --- Normalisation ---


class Naive:
    """Mean and deviation of all rows so far, computed anew each time; starts as in Gymnasium."""

    def __init__(self):
        self.rows = []

    def add(self, rows):
        self.rows += list(rows)

    def mean_and_std(self):
        rows = np.array(self.rows)
        weights = [1e-4, *np.ones(len(rows))]
        rows = np.concatenate([np.zeros((1, *rows.shape[1:])), rows])
        mean = np.average(rows, axis=0, weights=weights)
        squares = (rows - mean) ** 2
        squares[0] += 1
        return mean, np.sqrt(np.average(squares, axis=0, weights=weights) + 1e-8)


def normalized(envs, moments, returns):
    """What learning should see of envs.steps: observations, those that followed, and rewards."""

    def scaled(obs):
        mean, std = moments.mean_and_std()
        return np.clip((obs - mean) / std, -10, 10)

    moments.add(envs.steps[0].obs)
    seen, following, rewards = [scaled(envs.steps[0].obs)], [], []
    discounted = np.zeros(envs.num_envs)
    for step, after in zip(envs.steps, [*envs.steps[1:], None], strict=True):
        moments.add(step.true_next)
        following.append(scaled(step.true_next))
        seen.append(following[-1].copy())
        if step.over.any():
            first = (envs.obs if after is None else after.obs)[step.over]
            moments.add(first)
            seen[-1][step.over] = scaled(first)
        discounted = 0.99 * discounted + step.reward
        returns.add(discounted)
        rewards.append(np.clip(step.reward / returns.mean_and_std()[1], -10, 10))
        discounted = np.where(step.over, 0, discounted)
    return np.array(seen[:-1]), np.array(following), np.array(rewards)


def test_outliers_are_clipped():
    """Guards the limits of ±10 for observations and rewards."""
    normalizer = script.Normalizer(ToyEnvs(1), 0.9)
    over = np.array([False])
    for value in range(200):
        normalizer.count_and_scale(np.array([[value % 2, 0.0, 1.0]]))
        normalizer.scale_rewards(np.array([value % 2 - 0.5]), over)
    assert normalizer.count_and_scale(np.array([[1e4, 0.0, -1e4]])).tolist() == [[10, 0, -10]]
    assert normalizer.scale_rewards(np.array([-1e4]), over).tolist() == [-10]


# --- Whole iterations ---


def distribution(mean, log_std):
    return Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)


def learn(args, network, optimizer, obs, actions, rewards, next_values, terminated, truncated):
    """The updates of one rollout, (L, E, ...), in one mini-batch, by CleanRL's formulas."""
    with torch.no_grad():
        mean, old_values = network(obs)
        old_log_probs = distribution(mean, network.log_std).log_prob(actions)
    advantages = torch.zeros_like(old_values)
    for env in range(rewards.shape[1]):
        last = 0.0
        for t in reversed(range(len(rewards))):
            ahead = 0.0 if terminated[t, env] else args.gamma * next_values[t, env]
            delta = rewards[t, env] + ahead - old_values[t, env]
            goes_on = not (terminated[t, env] or truncated[t, env])
            last = delta + args.gamma * args.gae_lambda * goes_on * last
            advantages[t, env] = last
    returns = advantages + old_values
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    clip = args.clip_coef
    for _ in range(args.update_epochs):
        mean, value = network(obs)
        policy = distribution(mean, network.log_std)
        ratio = (policy.log_prob(actions) - old_log_probs).exp()
        losses = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
        near = old_values + (value - old_values).clamp(-clip, clip)
        value_loss = torch.max((value - returns) ** 2, (near - returns) ** 2).mean() / 2
        loss = torch.max(*losses).mean() + args.vf_coef * value_loss
        loss = loss - args.ent_coef * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
        optimizer.step()


@pytest.mark.parametrize(
    "kind, num_envs, limit, anneal_lr",
    [(ToyEnvs, 3, 100, True), (Reused, 1, 0.5, False), (Reused, 3, 0.5, True)],
)
def test_iterations_computed_twice(train, monkeypatch, kind, num_envs, limit, anneal_lr):
    """Guards all between the environment and the weights, in float64: normalisation, ends, losses,
    Adam, schedule, KL. Actions are played within their limits, and learned as they were drawn.
    """
    noises = []
    randn = torch.randn

    def recorded(*size):
        noises.append(randn(*size))
        return noises[-1].clone()

    made = []

    def make_network(envs):
        made.append(script.ActorCritic(envs))
        made.append(copy.deepcopy(made[0]).double())
        return made[0]

    monkeypatch.setattr(torch, "randn", recorded)
    envs = kind(num_envs, limit, terminate=0.2, truncate=0.2)
    folder = train(envs, make_network, anneal_lr=anneal_lr, ent_coef=0.03, adapt_frequency=1)
    args = script.Args(**config(folder)["args"])
    network = made[1]
    first = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    obs, following, rewards = normalized(envs, Naive(), Naive())
    table = rows(folder / "metrics.csv")
    length = 21 // num_envs
    assert len(table) == 4
    for count, row in enumerate(table):
        part = slice(count * length, (count + 1) * length)
        rate = 0.01 * (1 - count / 4) if anneal_lr else 0.01
        assert float(row["charts/learning_rate"]) == rate
        optimizer.param_groups[0]["lr"] = rate
        before = copy.deepcopy(network)
        states = torch.tensor(obs[part])
        with torch.no_grad():
            next_values = network(torch.tensor(following[part]))[1]
            actions = network.actor(states) + network.log_std.exp() * noises[count]
        assert (actions.abs().max() > limit) == (limit == 0.5)
        played = torch.tensor(stacked(envs.steps[part], "action")).double()
        torch.testing.assert_close(played, actions.clamp(-limit, limit), rtol=1e-3, atol=1e-4)
        ends = [stacked(envs.steps[part], name) for name in ("terminated", "truncated")]
        learn(args, network, optimizer, states, actions, rewards[part], next_values, *ends)
        with torch.no_grad():
            policies = [distribution(one(states)[0], one.log_std) for one in (network, before)]
        kl, other_kl = (kl_divergence(*pair).mean().item() for pair in (policies, policies[::-1]))
        assert float(row["abs/kl_divergence"]) == pytest.approx(kl, rel=1e-2)
        assert abs(other_kl / kl - 1) > 0.02 or count > 0
    for name, weight in load(folder)["network"].items():
        torch.testing.assert_close(
            weight.double(), network.state_dict()[name], rtol=1e-3, atol=1e-4
        )
        assert (weight - first.state_dict()[name]).abs().max() > 0.01


def test_longer_rollouts_have_more_epochs(train):
    """Guards N_epochs: 2 L / 2048, and at least 2."""
    for length, epochs in ((1400, 2), (5000, 4)):
        arguments = {"num_steps": length, "update_epochs": 2, "total_timesteps": length}
        folder = train(ToyEnvs(100), **arguments)
        assert column(folder / "metrics.csv", "charts/updates", int) == [epochs]


def test_moments_and_the_authors_rule_survive_a_resume(train):
    """Guards normalisation and ABS across a stop: moments, K, burn-in, mean of the last ones, L.

    The stop is after the second measurement, and the rule begins with the third.
    """
    limits = {"rollout_min": 21, "rollout_max": 60}
    limits |= {"delta_min": 0.01, "delta_max": 0.1, "beta": 0.3}
    given = []

    def rule(divergence, adaptive_length, **options):
        assert options == limits
        given.append((divergence, adaptive_length))
        return adaptive_length + 3.3

    envs = [ToyEnvs(3), ToyEnvs(3)]
    arguments = {"adapt_rollout": True, "burn_in": 3, "divergence_window": 5} | limits
    folder = train(envs[0], rollout_length=rule, **arguments)
    assert given == []
    arguments = {**config(folder)["args"], "resume": str(folder), "total_timesteps": 600}
    train(envs[1], rollout_length=rule, **arguments)
    length = 21.0
    measured, expected = [], []
    for i, row in enumerate(rows(folder / "metrics.csv"), 1):
        assert int(row["abs/rollout_length"]) == 3 * round(length / 3)  # steps of all three
        assert bool(row["abs/kl_divergence"]) == (i % 2 == 0)
        if i % 2 == 0:
            measured.append(float(row["abs/kl_divergence"]))
            if len(measured) >= 3:
                expected.append((pytest.approx(np.mean(measured[-5:])), pytest.approx(length)))
                length += 3.3
    assert given == expected and len(measured) > 6
    moments, returns = Naive(), Naive()
    for part in envs:
        normalized(part, moments, returns)
    for name, naive in (("observations", moments), ("returns", returns)):
        state = load(folder)[name]
        mean, std = naive.mean_and_std()
        assert state["count"] == pytest.approx(len(naive.rows) + 1e-4)
        np.testing.assert_allclose(state["mean"], mean, rtol=1e-7)
        variance = np.array(state["squares"]) / state["count"]
        np.testing.assert_allclose(np.sqrt(variance + 1e-8), std, rtol=1e-7)


# --- Environments, and bad input ---


def test_pendulum(train):
    """Guards Gymnasium's own vector: object arrays in final_obs, whole real episodes as scores."""
    arguments = {"env_id": "Pendulum-v1", "rollout_min": 450, "num_minibatches": 4}
    folder = train(None, num_envs=2, total_timesteps=900, **arguments)
    scores = load(folder)["scores"]
    assert len(scores) == 4  # 450 steps in each environment, 200 an episode
    assert all(-2000 < score < 0 for score in scores)
    returns = column(folder / "metrics.csv", "charts/episodic_return")
    assert returns == pytest.approx([np.mean(scores[:2]), np.mean(scores)])


class NotFinite(ToyEnvs):
    """In the third rollout, something is not finite where an episode ends."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if len(self.steps) > 14 and self.steps[-1].over[1]:
            {"obs": obs, "reward": reward, **info}[self.spoiled][1] = np.inf
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("spoiled", ["obs", "final_obs", "reward"])
def test_what_is_not_finite_ends_the_run(train, tmp_path, spoiled):
    """Guards the user and the last checkpoint."""
    envs = NotFinite(3, truncate=0.5)
    envs.spoiled = spoiled
    with np.errstate(invalid="ignore"):
        with pytest.raises(FloatingPointError, match="not finite at step 63"):
            train(envs, checkpoint_every=1e-9)
    saved = load(tmp_path / "run0")
    assert saved["global_step"] == 42
    assert all(weights.isfinite().all() for weights in saved["network"].values())
    assert np.isfinite(saved["observations"]["mean"]).all()


def refused(train, tmp_path, envs=None, **arguments):
    """The line of a UsageError; nothing is written."""
    with pytest.raises(script.UsageError) as error:
        train(envs, **arguments)
    assert list(tmp_path.iterdir()) == []
    return str(error.value)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"env_id": "Nonsense-v9"}, "Nonsense"),
        ({"env_id": "CartPole-v1"}, "Discrete(2)"),
        ({"num_minibatches": 513}, "--num-minibatches"),
        ({"delta_min": 0.1}, "--delta-max"),
        ({"clip_coef": math.nan}, "--clip-coef"),
        ({"burn_in": 21}, "--burn-in"),
    ],
)
def test_bad_input(train, tmp_path, arguments, word):
    assert word in refused(train, tmp_path, **arguments)


def test_parts_that_it_cannot_learn_with(train, tmp_path):
    """Guards users' environments and networks: a line before the first step, not a wrong loss."""
    network = script.ActorCritic(ToyEnvs(3))
    envs = ToyEnvs(3)
    envs.single_action_space = Box(-1, 1, (2, 2))
    assert "Box (A,)" in refused(train, tmp_path, envs, network=lambda envs: network)
    envs = ToyEnvs(3)
    envs.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    assert "autoreset_mode SAME_STEP" in refused(train, tmp_path, envs)
    assert "[(2, 2), (2,)], not [(3, 2), (3,)]" in refused(train, tmp_path, ToyEnvs(3), num_envs=2)
