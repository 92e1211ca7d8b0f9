"""ppo_abs_continuous.py: Gaussians, normalisation, and a run computed twice."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode
from helpers import FakeEnvs, ReusedArrays, column, config, load, rows, same_weights, stacked
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


@pytest.fixture
def train(tmp_path):
    """train(envs, **arguments) runs the script on envs, or on real ones where envs is None."""
    count = iter(range(1000))

    def run(envs, network=script.ActorCritic, rollout_length=script.rollout_length, **arguments):
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


# --- Gaussians ---


def distribution(mean, log_std):
    return Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)


def test_gaussians_are_those_of_torch_distributions():
    """Guards the formulas: log-probability, entropy, and the direction of KL."""
    torch.manual_seed(0)
    mean, old_mean = torch.randn((2, 50, 6), dtype=torch.float64)
    log_std, old_log_std = torch.randn((2, 6), dtype=torch.float64)
    new, old = distribution(mean, log_std), distribution(old_mean, old_log_std)
    actions = old.sample()
    log_probs = script.gaussian_log_prob(mean, log_std, actions)
    torch.testing.assert_close(log_probs, new.log_prob(actions))
    entropy = script.gaussian_entropy(log_std)
    torch.testing.assert_close(entropy.expand(50), new.entropy())
    kl = script.gaussian_kl(mean, log_std, old_mean, old_log_std)
    torch.testing.assert_close(kl, kl_divergence(new, old))
    assert (kl - kl_divergence(old, new)).abs().min() > 1e-3


def test_network_is_the_usual_one():
    """Guards the gains: a policy near 0 with standard deviation 1."""
    network = script.ActorCritic(ToyEnvs(1))
    for layers, last in ((network.actor, 0.01), (network.critic, 1.0)):
        for layer, gain in zip(layers[::2], (math.sqrt(2), math.sqrt(2), last), strict=True):
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full_like(singular, gain))
    assert not network.log_std.any()


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


def test_measuring_changes_nothing_that_is_learned(train):
    """Guards comparisons: K = 1 and K = 1000 give the same weights, and plain PPO's L stays."""
    often = train(ToyEnvs(3), adapt_frequency=1, burn_in=0, beta=1.0)
    never = train(ToyEnvs(3), adapt_frequency=1000)
    assert len(column(often / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(never / "metrics.csv", "abs/kl_divergence") == []
    assert column(often / "metrics.csv", "abs/rollout_length", int) == [21] * 4
    assert same_weights(load(often)["network"], load(never)["network"])


def test_networks_act_and_are_measured_in_eval_mode(train):
    """Guards KL and acting from dropout, which takes part in learning."""
    calls = []

    def network(envs):
        made = script.ActorCritic(envs)
        made.actor.insert(2, nn.Dropout(0.5))
        made.actor.register_forward_hook(
            lambda actor, *_: calls.append((torch.is_grad_enabled(), actor.training))
        )
        return made

    folder = train(ToyEnvs(3), network, learning_rate=1e-9, adapt_frequency=1)
    assert np.abs(column(folder / "metrics.csv", "abs/kl_divergence")).max() < 1e-7
    assert all(is_learning == training for is_learning, training in calls[1:])  # 0: for the shapes
    assert sum(training for _, training in calls) == 4 * 3


def test_rollouts_and_epochs_follow_the_authors_rule(train):
    """Guards K, the burn-in, the mean of the last ones, Eq. 4, epochs, and L / E steps."""
    kls = np.exp(np.random.default_rng(0).uniform(np.log(0.003), np.log(0.3), size=11)).tolist()
    chosen = iter(kls)
    given = []

    def rule(divergence, adaptive_length, **limits):
        given.append(divergence)
        return script.rollout_length(next(chosen), adaptive_length, **limits)

    length = 1450.0
    lengths, epochs = [], []
    for iteration in range(1, 29):
        lengths.append(round(length / 100) * 100)
        epochs.append(max(2, 2 * lengths[-1] // 2048))
        if iteration % 2 == 0 and iteration >= 8:  # before, the author takes δ_max: L_min
            kl = np.clip(kls[iteration // 2 - 4], 0.01, 0.1)
            target = 9000 - (np.log(kl) - np.log(0.01)) / np.log(10) * (9000 - 1450)
            length = 0.7 * length + 0.3 * target
    arguments = {"rollout_min": 1450, "rollout_max": 9000, "beta": 0.3, "divergence_window": 6}
    arguments |= {"burn_in": 4, "update_epochs": 2, "total_timesteps": sum(lengths)}
    folder = train(ToyEnvs(100), rollout_length=rule, adapt_rollout=True, **arguments)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    assert len(set(epochs)) > 2
    assert column(folder / "metrics.csv", "charts/updates", int) == np.cumsum(epochs).tolist()
    measured = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(set(measured)) == 14
    assert given == pytest.approx([np.mean(measured[max(i - 6, 0) : i]) for i in range(4, 15)])


def test_moments_measurements_and_length_survive_a_resume(train):
    """Guards normalisation and ABS across a stop: moments, burn-in, mean and L span both parts."""
    given = []

    def rule(divergence, adaptive_length, **limits):
        given.append((divergence, adaptive_length))
        return adaptive_length + 3.3

    envs = [ToyEnvs(3), ToyEnvs(3)]
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "burn_in": 3}
    folder = train(envs[0], rollout_length=rule, **arguments)
    assert len(given) == 2
    arguments = {**config(folder)["args"], "resume": str(folder), "total_timesteps": 300}
    train(envs[1], rollout_length=rule, **arguments)
    measured = column(folder / "metrics.csv", "abs/kl_divergence")
    means = [np.mean(measured[:i]) for i in range(3, len(measured) + 1)]
    assert [divergence for divergence, _ in given] == pytest.approx(means)
    before = [21 + 3.3 * i for i in range(len(given))]
    assert [length for _, length in given] == pytest.approx(before) and len(given) > 5
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[3:] == [3 * round(length / 3) for length in before[1:]]
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


def test_pendulum_and_its_resume(train):
    """Guards Gymnasium's own vector: object arrays in final_obs, whole real episodes as scores."""
    arguments = {"env_id": "Pendulum-v1", "rollout_min": 450, "num_minibatches": 4}
    folder = train(None, num_envs=2, total_timesteps=900, **arguments)
    assert len(load(folder)["scores"]) == 4  # 450 steps in each environment, 200 an episode
    train(None, **{**config(folder)["args"], "resume": str(folder), "total_timesteps": 1800})
    table = rows(folder / "metrics.csv")
    assert [row["global_step"] for row in table] == ["450", "900", "1350", "1800"]
    scores = load(folder)["scores"]
    assert len(scores) == 8 and all(-2000 < score < 0 for score in scores)
    returns = [float(row["charts/episodic_return"]) for row in table]
    ended = [2, 4, 6, 8]  # 225 steps, 450, and the same again after the resume
    assert returns == pytest.approx([np.mean(scores[:count]) for count in ended])


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
        ({"env_id": "no_such_module:Nonsense-v9"}, "no_such_module"),
        ({"num_minibatches": 513}, "--num-minibatches"),
        ({"delta_min": 0.1}, "--delta-max"),
        ({"clip_coef": math.nan}, "--clip-coef"),
        ({"burn_in": 21}, "--burn-in"),
    ],
)
def test_bad_input(train, tmp_path, arguments, word):
    assert word in refused(train, tmp_path, **arguments)


class ColumnOfValues(script.ActorCritic):
    def forward(self, obs):
        means, values = super().forward(obs)
        return means, values[:, None]  # would be broadcast to (N, N)


def test_parts_that_it_cannot_learn_with(train, tmp_path):
    """Guards users' environments and networks: a line before the first step, not a wrong loss."""
    network = script.ActorCritic(ToyEnvs(3))
    for space in (Box(-1, 1, (2, 2)), Discrete(3), MultiBinary(2)):
        envs = ToyEnvs(3)
        envs.single_action_space = space
        line = refused(train, tmp_path, envs, network=lambda envs: network)
        assert "Box (A,)" in line
    envs = ToyEnvs(3)
    envs.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    assert "same-step autoreset" in refused(train, tmp_path, envs)
    assert "[(2, 2), (2,)], not [(3, 2), (3,)]" in refused(train, tmp_path, ToyEnvs(3), num_envs=2)
    line = refused(train, tmp_path, ToyEnvs(3), network=ColumnOfValues)
    assert "[(3, 2), (3,)], not [(3, 2), (3, 1)]" in line
