"""ppo_abs_continuous.py: Gaussians, normalisation, and a run computed twice."""

import copy
import inspect
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Discrete, MultiBinary
from gymnasium.vector.utils import batch_space
from helpers import (
    FakeEnvs,
    ReusedArrays,
    column,
    config,
    contents,
    load,
    rows,
    same_weights,
    stacked,
)
from torch.distributions import Independent, Normal, kl_divergence

import ppo_abs
import ppo_abs_continuous as script


class ToyEnvs(FakeEnvs):
    """Three random numbers of unlike size as observation, two as action."""

    def __init__(self, num_envs, limit=0.5, **ends):
        super().__init__(num_envs, **ends)
        self.use(Box(-limit, limit, (2,), np.float32))
        self.first = []

    def use(self, action_space, observation_space=None):
        self.single_observation_space = observation_space or Box(-np.inf, np.inf, (3,), float)
        self.single_action_space = action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        return self

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.first = obs
        return obs, info

    def frames(self):
        return self.rng.normal([5, 0, -300], [0.1, 1, 100], size=(self.num_envs, 3))


@pytest.fixture
def train(tmp_path):
    """train(envs, **arguments) runs the script on envs, or on real ones where envs is None."""
    count = iter(range(1000))

    def run(
        envs,
        network=script.ActorCritic,
        rollout_length=script.rollout_length,
        gae=script.gae,
        **arguments,
    ):
        parts = {"ActorCritic": network, "rollout_length": rollout_length, "gae": gae}
        defaults = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        if envs is not None:
            parts["make_envs"] = lambda args: envs
            defaults |= {"num_envs": envs.num_envs, "num_minibatches": 1, "num_steps": 21}
            defaults |= {"rollout_min": 21, "rollout_max": 60, "base_steps": 21}
            defaults |= {"adapt_rollout": False, "adapt_frequency": 2, "total_timesteps": 84}
            defaults |= {"update_epochs": 3, "learning_rate": 0.01}
        return script.main(script.Args(**(defaults | arguments)), **parts)

    return run


class Recorder:
    """Parts that keep each rollout's values and rewards, and the network that collected it."""

    def __init__(self):
        self.rollouts = []
        self.parts = {"network": self.make_network, "gae": self.gae}

    def make_network(self, envs):
        self.network = script.ActorCritic(envs)
        return self.network

    def gae(self, rewards, values, next_values, *ends):
        rollout = SimpleNamespace(rewards=rewards, values=values, next_values=next_values)
        rollout.network = copy.deepcopy(self.network)
        self.rollouts.append(rollout)
        return script.gae(rewards, values, next_values, *ends)


@pytest.fixture
def noises(monkeypatch):
    """A list that gets the standard normal numbers of each rollout's actions."""
    drawn = []
    randn = torch.randn

    def recorded(*size):
        drawn.append(randn(*size))
        return drawn[-1].clone()

    monkeypatch.setattr(torch, "randn", recorded)
    return drawn


# --- Functions ---


def gaussians():
    mean, log_std, other_mean, other_log_std = torch.randn((4, 50, 6), dtype=torch.float64)
    return mean, log_std[0], other_mean, other_log_std[0]


def distribution(mean, log_std):
    return Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)


def test_gaussians_are_those_of_torch_distributions():
    """Guards the formulas: log-probability, entropy, and the direction of KL."""
    torch.manual_seed(0)
    mean, log_std, old_mean, old_log_std = gaussians()
    new, old = distribution(mean, log_std), distribution(old_mean, old_log_std)
    actions = old.sample()
    log_probs = script.gaussian_log_prob(mean, log_std, actions)
    torch.testing.assert_close(log_probs, new.log_prob(actions))
    entropy = script.gaussian_entropy(log_std)
    torch.testing.assert_close(entropy.expand(50), new.entropy())
    kl = script.gaussian_kl(mean, log_std, old_mean, old_log_std)
    torch.testing.assert_close(kl, kl_divergence(new, old))
    assert (kl - kl_divergence(old, new)).abs().min() > 1e-3
    network = SimpleNamespace(actor=lambda states: mean, log_std=log_std)
    old_network = SimpleNamespace(actor=lambda states: old_mean, log_std=old_log_std)
    measured = script.policy_divergence(network, old_network, None)
    assert measured == pytest.approx(kl_divergence(new, old).mean().item())
    assert script.policy_divergence(network, network, None) == 0


@pytest.mark.parametrize(
    "name",
    "gae clipped_surrogate clipped_value_loss normalize rollout_length layer_init".split(),
)
def test_what_is_tested_for_atari_is_the_same_here(name):
    """Guards the tests in test_ppo.py and test_pqn.py: they are of this text, too."""
    assert inspect.getsource(getattr(script, name)) == inspect.getsource(getattr(ppo_abs, name))


def test_network_is_the_usual_one():
    """Guards sizes and gains: orthogonal layers, a policy near 0 with deviation 1."""
    torch.manual_seed(0)
    network = script.ActorCritic(ToyEnvs(1))
    sizes = [tuple(weight.shape) for weight in network.parameters() if weight.ndim == 2]
    assert sizes == [(64, 3), (64, 64), (2, 64), (64, 3), (64, 64), (1, 64)]
    for layers, last in ((network.actor, 0.01), (network.critic, 1.0)):
        for layer, gain in zip(layers[::2], (math.sqrt(2), math.sqrt(2), last), strict=True):
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full_like(singular, gain))
            assert not layer.bias.any()
    assert not network.log_std.any()
    x = torch.randn(7, 3)
    w = dict(network.named_parameters())
    for name, output in (("actor", network(x)[0]), ("critic", network(x)[1][:, None])):
        hidden = torch.tanh(x @ w[f"{name}.0.weight"].T)
        hidden = torch.tanh(hidden @ w[f"{name}.2.weight"].T)
        torch.testing.assert_close(hidden @ w[f"{name}.4.weight"].T, output)


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


def normalized(envs, gamma, moments, returns):
    """What learning should see of envs.steps: observations, those that followed, and rewards."""

    def scaled(obs):
        mean, std = moments.mean_and_std()
        return np.clip((obs - mean) / std, -10, 10)

    moments.add(envs.first)
    seen, following, rewards = [scaled(envs.first)], [], []
    discounted = np.zeros(envs.num_envs)
    for step, after in zip(envs.steps, [*envs.steps[1:], None], strict=True):
        moments.add(step.true_next)
        following.append(scaled(step.true_next))
        seen.append(following[-1].copy())
        if step.over.any():
            first = (envs.obs if after is None else after.obs)[step.over]
            moments.add(first)
            seen[-1][step.over] = scaled(first)
        discounted = gamma * discounted + step.reward
        returns.add(discounted)
        rewards.append(np.clip(step.reward / returns.mean_and_std()[1], -10, 10))
        discounted = np.where(step.over, 0, discounted)
    return np.array(seen[:-1]), np.array(following), np.array(rewards)


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 1, 30, 6]])
def test_running_moments_are_those_of_all_rows(sizes):
    """Guards the update for one row and for several at once."""
    rng = np.random.default_rng(0)
    moments, naive = script.RunningMoments((2,)), Naive()
    for size in sizes:
        batch = rng.normal([1e3, -1], [1, 50], size=(size, 2))
        moments.update(batch)
        naive.add(batch)
        mean, std = naive.mean_and_std()
        np.testing.assert_allclose(moments.mean, mean, rtol=1e-9)
        np.testing.assert_allclose(moments.std(), std, rtol=1e-9)


class Reused(ReusedArrays, ToyEnvs):
    pass


class OtherTypes(ToyEnvs):
    """Flags are numbers, which would index where they should mask; the last observations differ."""

    flags = np.uint8
    last = np.float32

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        final_obs = info["final_obs"].astype(np.float32)
        if self.last is object:  # as in Gymnasium's own vectors: None where nothing ended
            final_obs = np.full(self.num_envs, None)
            for i in np.flatnonzero(self.steps[-1].over):
                final_obs[i] = info["final_obs"][i]
        flags = terminated.astype(self.flags), truncated.astype(self.flags)
        return obs, reward.astype(np.float32), *flags, {"final_obs": final_obs}


class OtherTypesAgain(OtherTypes):
    flags = np.int64
    last = object


KINDS = [ToyEnvs, Reused, OtherTypes, OtherTypesAgain]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_values_are_of_normalised_states_of_the_same_episode(train, num_envs, kind):
    """Guards final_obs: normalised by the same moments, a cut episode bootstraps from it."""
    envs = kind(num_envs, terminate=0.2, truncate=0.2)
    recorder = Recorder()
    train(envs, **recorder.parts)
    rollouts = recorder.rollouts
    seen, following, rewards = normalized(envs, 0.99, Naive(), Naive())
    assert stacked(envs.steps, "truncated").any() and stacked(envs.steps, "terminated").any()
    assert abs(following).max() > 2
    length = 21 // num_envs
    assert len(rollouts) == 4
    for count, rollout in enumerate(rollouts):
        part = slice(count * length, (count + 1) * length)
        for obs, values in ((seen, rollout.values), (following, rollout.next_values)):
            expected = rollout.network(torch.tensor(obs[part]).float())[1]
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rollout.rewards, rewards[part], rtol=1e-4, atol=1e-5)


def test_outliers_are_clipped():
    """Guards the limits of ±10 for observations and rewards."""
    normalizer = script.Normalizer(ToyEnvs(1), 0.9)
    over = np.array([False])
    for value in range(200):
        normalizer.observe(np.array([[value % 2, 0.0, 1.0]]))
        normalizer.reward(np.array([value % 2 - 0.5]), over)
    assert normalizer.observe(np.array([[1e4, 0.0, -1e4]])).tolist() == [[10, 0, -10]]
    assert normalizer.reward(np.array([-1e4]), over).tolist() == [-10]


def test_moments_survive_a_resume(train):
    """Guards the statistics: the second part goes on with those of all rows of the first."""
    envs = [ToyEnvs(3), ToyEnvs(3)]
    folder = train(envs[0])
    saved = load(folder)
    assert type(saved["observations"]["count"]) is float
    assert type(saved["returns"]["mean"]) is float
    train(envs[1], **{**config(folder)["args"], "resume": str(folder), "total_timesteps": 168})
    moments, returns = Naive(), Naive()
    for part in envs:
        normalized(part, 0.99, moments, returns)
    resumed = load(folder)
    for name, naive in (("observations", moments), ("returns", returns)):
        state = resumed[name]
        mean, std = naive.mean_and_std()
        assert state["count"] == pytest.approx(len(naive.rows) + 1e-4)
        np.testing.assert_allclose(state["mean"], mean, rtol=1e-7)
        squares = np.array(state["squares"]) / state["count"]
        np.testing.assert_allclose(np.sqrt(squares + 1e-8), std, rtol=1e-7)
    assert column(folder / "metrics.csv", "global_step", int) == list(range(21, 169, 21))


@pytest.fixture
def not_continued(train, tmp_path, capsys):
    """not_continued(**contents) replaces parts of a checkpoint, which --resume must then refuse."""

    def run(**new):
        folder = train(ToyEnvs(3))
        checkpoint = load(folder)
        for name, part in new.items():
            checkpoint[name] = checkpoint[name] | part
        torch.save(checkpoint, folder / "checkpoint.pt")
        before = contents(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            train(ToyEnvs(3), **{**config(folder)["args"], "resume": str(folder)})
        assert error.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{script.SCRIPT}: --resume {folder}: no checkpoint")
        assert contents(tmp_path) == before

    return run


@pytest.mark.parametrize("moments", ["observations", "returns"])
@pytest.mark.parametrize(
    "part",
    [
        {"mean": [0.0, 1.0]},
        {"mean": [[0.0, 1.0, 2.0]]},
        {"squares": [1.0] * 4},
        {"squares": "text"},
        {"count": "text"},
    ],
    ids=str,
)
def test_moments_of_another_shape_are_refused(not_continued, moments, part):
    """Guards learning from observations that NumPy would scale by broadcasting."""
    not_continued(**{moments: part})


# --- Whole iterations ---


def second_computation(args, network, rollout, obs, actions, terminated, truncated):
    """The updates of one rollout, (L, E) flat or not, in float64, by CleanRL's formulas."""
    values, next_values = rollout.values.double(), rollout.next_values.double()
    advantages = torch.zeros_like(values)
    for env in range(values.shape[1]):
        last = 0.0
        for t in reversed(range(len(values))):
            ahead = 0.0 if terminated[t, env] else args.gamma * next_values[t, env]
            delta = rollout.rewards[t, env] + ahead - values[t, env]
            goes_on = not (terminated[t, env] or truncated[t, env])
            last = delta + args.gamma * args.gae_lambda * goes_on * last
            advantages[t, env] = last
    returns = (advantages + values).flatten()
    advantages, old_values = advantages.flatten(), values.flatten()
    advantages = (advantages - advantages.mean()) / (advantages.numpy().std() + 1e-8)
    with torch.no_grad():
        old_log_probs = distribution(network(obs)[0], network.log_std).log_prob(actions)
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
        network.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
        network.optimizer.step()


@pytest.mark.parametrize("limit", [100, 0.5])
@pytest.mark.parametrize("anneal_lr", [True, False])
def test_iterations_computed_twice(train, noises, anneal_lr, limit):
    """Guards all between the environment and the weights: ends, losses, Adam, schedule.

    Actions are played within their space's limits, and learned as they were drawn.
    """
    envs = ToyEnvs(3, limit=limit)
    recorder = Recorder()
    folder = train(envs, **recorder.parts, anneal_lr=anneal_lr, ent_coef=0.03)
    rollouts = recorder.rollouts
    args = script.Args(**config(folder)["args"])
    network = copy.deepcopy(rollouts[0].network).double()
    network.optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    obs, _, _ = normalized(envs, args.gamma, Naive(), Naive())
    for count, rollout in enumerate(rollouts):
        part = slice(count * 7, (count + 1) * 7)
        rate = 0.01 * (1 - count / 4) if anneal_lr else 0.01
        network.optimizer.param_groups[0]["lr"] = rate
        inputs = torch.tensor(obs[part].astype(np.float32))
        with torch.no_grad():
            means, std = rollout.network.actor(inputs), rollout.network.log_std.exp()
        actions = means + std * noises[count]
        assert (actions.abs().max() > limit) == (limit == 0.5)
        played = torch.tensor(stacked(envs.steps[part], "action"))
        torch.testing.assert_close(played, actions.clamp(-limit, limit), rtol=1e-4, atol=1e-5)
        inputs, actions = inputs.double().flatten(0, 1), actions.double().flatten(0, 1)
        ends = [stacked(envs.steps[part], name) for name in ("terminated", "truncated")]
        second_computation(args, network, rollout, inputs, actions, *ends)
        assert rows(folder / "metrics.csv")[count]["charts/learning_rate"] == str(rate)
    first = rollouts[0].network.state_dict()
    for name, weight in load(folder)["network"].items():
        reference = network.state_dict()[name]
        torch.testing.assert_close(weight.double(), reference, rtol=1e-3, atol=1e-4)
        assert (weight - first[name]).abs().max() > 0.01


def test_actions_are_drawn_from_the_policy(train):
    """Guards the draw: means + std · standard normal, where no limit clips it."""
    envs, recorder = ToyEnvs(3, limit=100), Recorder()
    train(envs, **recorder.parts, num_steps=1500, total_timesteps=1500)
    (rollout,) = recorder.rollouts
    obs, _, _ = normalized(envs, 0.99, Naive(), Naive())
    with torch.no_grad():
        means, std = rollout.network.actor(torch.tensor(obs).float()), rollout.network.log_std.exp()
    drawn = (torch.tensor(stacked(envs.steps, "action")) - means) / std
    assert drawn.mean().abs() < 0.1 and (drawn.std() - 1).abs() < 0.1 and drawn.abs().max() > 2


def test_measuring_changes_nothing_that_is_learned(train):
    """Guards comparisons: K = 1 and K = 1000 give the same weights, bit for bit."""
    often = train(ToyEnvs(3), adapt_frequency=1)
    never = train(ToyEnvs(3), adapt_frequency=1000)
    assert len(column(often / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(never / "metrics.csv", "abs/kl_divergence") == []
    assert same_weights(load(often)["network"], load(never)["network"])


def test_kl_is_of_one_iterations_updates(train):
    """Guards θ_old, B_ref and the order of the two: K = 2 measures in the second iteration."""
    envs, recorder = ToyEnvs(3), Recorder()
    folder = train(envs, **recorder.parts, total_timesteps=42)
    obs, _, _ = normalized(envs, 0.99, Naive(), Naive())
    states = torch.tensor(obs[7:]).float()
    new, old = recorder.network, recorder.rollouts[1].network
    policies = [distribution(network.actor(states), network.log_std) for network in (new, old)]
    first, second = rows(folder / "metrics.csv")
    assert first["abs/kl_divergence"] == ""
    expected = kl_divergence(*policies).mean().item()
    assert float(second["abs/kl_divergence"]) == pytest.approx(expected, rel=1e-3)
    assert abs(kl_divergence(*policies[::-1]).mean().item() / expected - 1) > 0.01


class WithDropout(script.ActorCritic):
    """Notes for each call of the actor whether it is for learning, and its mode."""

    def __init__(self, envs):
        super().__init__(envs)
        self.actor.insert(2, nn.Dropout(0.5))
        self.calls = calls = []

        def note(actor, inputs, outputs):
            calls.append((torch.is_grad_enabled(), actor.training))

        self.actor.register_forward_hook(note)


def test_networks_act_and_are_measured_in_eval_mode(train):
    """Guards KL and acting from dropout, which takes part in learning."""
    made = []

    def network(envs):
        made.append(WithDropout(envs))
        return made[0]

    folder = train(ToyEnvs(3), network, learning_rate=1e-9, adapt_frequency=1)
    kls = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(kls) == 4 and np.abs(kls).max() < 1e-7
    calls = made[0].calls[1:]  # the first is for the shapes
    assert all(is_learning == training for is_learning, training in calls)
    updates = column(folder / "metrics.csv", "charts/updates", int)[-1]
    assert sum(training for _, training in calls) == updates > 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollouts_and_epochs_follow_the_authors_rule(train, num_envs):
    """Guards K, the burn-in, the mean of the last ones, Eq. 4, epochs, and L / E steps."""
    rng = np.random.default_rng(0)
    kls = np.exp(rng.uniform(np.log(0.003), np.log(0.3), size=11)).tolist()
    chosen = iter(kls)
    given = []

    def rule(divergence, adaptive_length, **limits):
        given.append(divergence)
        return script.rollout_length(next(chosen), adaptive_length, **limits)

    length = 20.0
    lengths, epochs = [], []
    for iteration in range(1, 29):
        steps = round(length / num_envs)
        lengths.append(steps * num_envs)
        epochs.append(max(2, 2 * lengths[-1] // 12))
        if iteration % 2 == 0 and iteration >= 8:  # before, the author takes δ_max: L_min
            kl = np.clip(kls[iteration // 2 - 4], 0.01, 0.1)
            target = 100 - (np.log(kl) - np.log(0.01)) / np.log(10) * (100 - 20)
            length = 0.7 * length + 0.3 * target
    arguments = {"rollout_min": 20, "rollout_max": 100, "beta": 0.3, "divergence_window": 6}
    arguments |= {"burn_in": 4, "update_epochs": 2, "base_steps": 12, "num_steps": 25}
    arguments |= {"total_timesteps": sum(lengths), "adapt_rollout": True}
    folder = train(ToyEnvs(num_envs), rollout_length=rule, **arguments)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    assert column(folder / "metrics.csv", "abs/batch_size", int) == lengths
    assert len(set(epochs)) > 2
    assert lengths[:8] == [num_envs * round(20 / num_envs)] * 8 and max(lengths) > 40
    assert column(folder / "metrics.csv", "charts/updates", int) == np.cumsum(epochs).tolist()
    measured = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(measured) == 14 and len(set(measured)) == 14
    assert given == pytest.approx([np.mean(measured[max(i - 6, 0) : i]) for i in range(4, 15)])


def test_measurements_and_length_survive_a_resume(train):
    """Guards ABS across a stop: burn-in and mean span both parts, even if K is another one then."""
    given = []

    def rule(divergence, adaptive_length, **limits):
        given.append((divergence, adaptive_length))
        return adaptive_length + 3.3

    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "burn_in": 4, "num_steps": 21}
    folder = train(ToyEnvs(3), rollout_length=rule, **arguments)
    again = {**config(folder)["args"], "resume": str(folder), "total_timesteps": 500}
    again["adapt_frequency"] = 2
    train(ToyEnvs(3), rollout_length=rule, **again)
    measured = column(folder / "metrics.csv", "abs/kl_divergence")
    means = [np.mean(measured[:i]) for i in range(4, len(measured) + 1)]
    assert [divergence for divergence, _ in given] == pytest.approx(means)
    before = [21 + 3.3 * i for i in range(len(given))]
    assert [length for _, length in given] == pytest.approx(before) and len(given) > 5
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    moved = [0, 0, 0, 0, *(i for i in range(1, len(given) + 1) for _ in range(2))]  # by row
    expected = [3 * round((21 + 3.3 * i) / 3) for i in moved]
    assert lengths[4:] == expected[4 : len(lengths)] and lengths[:4] == [21] * 4


def test_fixed_rollouts_stay(train):
    """Guards plain PPO: with --no-adapt-rollout, what is measured changes no rollout."""
    folder = train(ToyEnvs(3), adapt_frequency=1, burn_in=0, beta=1.0)
    assert len(column(folder / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [21] * 4


def test_defaults_are_the_authors():
    """Guards the numbers of ABS's own code for MuJoCo."""
    args = script.Args()
    assert (args.rollout_min, args.rollout_max, args.num_steps) == (1024, 8192, 2048)
    assert (args.delta_min, args.delta_max, args.beta) == (0.01, 0.1, 0.1)
    assert (args.adapt_frequency, args.divergence_window, args.burn_in) == (10, 20, 10)
    assert (args.scale_epochs, args.base_steps, args.update_epochs) == (True, 2048, 10)


# --- Environments, and bad input ---


def test_pendulum_and_its_resume(train):
    """Guards Gymnasium's own vector: object arrays in final_obs, whole real episodes as scores."""
    arguments = {"env_id": "Pendulum-v1", "rollout_min": 450, "num_minibatches": 4}
    folder = train(None, num_envs=2, total_timesteps=900, **arguments)
    assert len(load(folder)["scores"]) == 4  # 450 steps in each environment, 200 an episode
    train(None, **{**config(folder)["args"], "resume": str(folder), "total_timesteps": 1800})
    table = rows(folder / "metrics.csv")
    assert [row["global_step"] for row in table] == ["450", "900", "1350", "1800"]
    assert [row["abs/rollout_length"] for row in table] == ["450"] * 4
    scores = load(folder)["scores"]
    assert len(scores) == 8 and all(-2000 < score < 0 for score in scores)
    returns = [float(row["charts/episodic_return"]) for row in table]
    ended = [2, 4, 6, 8]  # 225 steps, 450, and the same again after the resume
    assert returns == pytest.approx([np.mean(scores[:count]) for count in ended])


def test_half_cheetah(train):
    """Guards the run that the docstring shows, for its first 2,048 steps."""
    pytest.importorskip("mujoco")
    folder = train(None, total_timesteps=2048, update_epochs=1)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [1024, 1024]
    scores = load(folder)["scores"]  # of the two episodes of 1,000 steps
    returns = column(folder / "metrics.csv", "charts/episodic_return")
    assert len(scores) == 2 and returns == pytest.approx([scores[0], np.mean(scores)])
    assert load(folder)["network"]["actor.0.weight"].shape == (64, 17)


class Drawing(ToyEnvs):
    """Its observations come from a generator that reset(seed=...) does not seed."""

    def frames(self):
        return np.full((self.num_envs, 3), self.draw(), float)


DRAWS = [
    lambda envs: random.random(),
    lambda envs: np.random.random(),
    lambda envs: envs.single_observation_space.sample()[0],
    lambda envs: envs.observation_space.sample()[0, 0],
    lambda envs: envs.single_action_space.sample()[0],
    lambda envs: envs.action_space.sample()[0, 0],
]


@pytest.mark.parametrize("draw", DRAWS)
def test_environments_that_draw_elsewhere_are_seeded(train, draw):
    """Guards reproducibility where an environment uses Python's, NumPy's or a space's generator."""
    kind = type("Drawn", (Drawing,), {"draw": draw})
    first, again, other = kind(2), kind(2), kind(2)
    for envs, seed in ((first, 1), (again, 1), (other, 2)):
        train(envs, seed=seed)
    assert np.array_equal(stacked(first.steps, "obs"), stacked(again.steps, "obs"))
    assert not np.array_equal(stacked(first.steps, "obs"), stacked(other.steps, "obs"))


class FirstNotFinite(ToyEnvs):
    """In the third rollout, the first observation of an episode is not finite."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if len(self.steps) > 14 and self.steps[-1].over[1]:
            self.spoil(obs, info["final_obs"])
        return obs, reward, terminated, truncated, info

    def spoil(self, obs, final_obs):
        obs[1, 2] = np.nan


class LastNotFinite(FirstNotFinite):
    def spoil(self, obs, final_obs):
        final_obs[1, 2] = np.inf


class Spoiled(script.ActorCritic):
    """In the third iteration, the gradient of the value is NaN."""

    updates = 0

    def forward(self, obs):
        means, values = super().forward(obs)
        self.updates += self.training
        return means, values * (math.nan if self.updates > 6 and self.training else 1)


@pytest.mark.parametrize(
    "envs, network, words",
    [
        (FirstNotFinite, script.ActorCritic, "an observation that is not finite"),
        (LastNotFinite, script.ActorCritic, "an observation that is not finite"),
        (ToyEnvs, Spoiled, "no longer finite"),
    ],
)
def test_what_is_not_finite_ends_the_run(train, tmp_path, capsys, envs, network, words):
    """Guards the user and the last checkpoint: one line, and status 1."""
    with pytest.raises(SystemExit) as error:
        train(envs(3, truncate=0.5), network, checkpoint_every=1e-9)
    assert error.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith(f"{script.SCRIPT}: "))
    assert words in line
    saved = load(tmp_path / "run0")
    assert saved["global_step"] == 42
    assert all(weights.isfinite().all() for weights in saved["network"].values())
    assert np.isfinite(saved["observations"]["mean"]).all()


class StartNotFinite(ToyEnvs):
    def frames(self):
        return np.full((self.num_envs, 3), np.nan)


def test_a_start_that_is_not_finite_makes_no_run(train, tmp_path, capsys):
    """Guards the same where there is nothing to keep."""
    with pytest.raises(SystemExit) as error:
        train(StartNotFinite(3))
    assert error.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "an observation that is not finite" in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(*arguments, **parts) expects status 2 and one line, which it returns, and no run."""

    def run(*arguments, **parts):
        command = ["ppo_abs_continuous.py", "--runs-dir", str(tmp_path), *arguments]
        command += ["--total-timesteps", "1"]  # where it is not refused, it is soon over
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as error:
            script.launch(**parts)
        assert error.value.code == 2
        assert list(tmp_path.iterdir()) == []
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{script.SCRIPT}: ")
        return line

    return run


def test_without_mujoco(refused, monkeypatch):
    """Guards the user: one line that says how to install it."""
    for name in list(sys.modules):
        if name.startswith("gymnasium.envs.mujoco"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    assert 'pip install "gymnasium[mujoco]"' in refused("--env-id", "HalfCheetah-v5")


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--env-id", "Nonsense-v9"], "Nonsense"),
        (["--env-id", "CartPole-v1"], "Discrete(2)"),
        (["--env-id", "no_such_module:Nonsense-v9"], "no_such_module"),
        (["--num-minibatches", "513"], "--num-minibatches 513"),
        (["--num-envs", "1025"], "--num-envs 1025"),
        (["--num-envs", "0"], "--num-envs 0"),
        (["--delta-min", "0.1"], "--delta-min 0.1"),
        (["--rollout-max", "1023"], "--rollout-max 1023"),
        (["--no-adapt-rollout", "--rollout-max", "1023"], "--rollout-max 1023"),
        (["--clip-coef", "nan"], "--clip-coef nan"),
        (["--clip-coef", "1.5"], "--clip-coef 1.5"),
        (["--ent-coef", "-1"], "--ent-coef -1"),
        (["--divergence-window", "0"], "--divergence-window 0"),
        (["--burn-in", "-1"], "--burn-in -1"),
        (["--burn-in", "21"], "--burn-in 21"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(refused, arguments, word):
    assert word in refused(*arguments)


REAL = Box(-1, 1, (2,), np.float32)
SPACES = {
    "integers": (Box(-3, 3, (2,), np.int64), REAL),
    "bounded above only": (Box(np.array([-1, -np.inf]), 1, (2,), np.float32), REAL),
    "bounded below only": (Box(0, np.inf, (2,), np.float32), REAL),
    "a matrix of actions": (Box(-1, 1, (2, 2), np.float32), REAL),
    "discrete actions": (Discrete(3), REAL),
    "an image": (REAL, Box(0, 255, (4, 4), np.uint8)),
    "discrete observations": (REAL, Discrete(3)),
    "bits": (REAL, MultiBinary(3)),
}


@pytest.mark.parametrize("kind", SPACES)
def test_spaces_that_it_cannot_learn_in(refused, kind):
    """Guards the user: a line that says what is needed, before the first step."""
    envs = ToyEnvs(3).use(*SPACES[kind])
    line = refused("--num-envs", "3", make_envs=lambda args: envs)
    assert "needs" in line and envs.steps == []


@pytest.mark.parametrize(
    "space, bounds",
    [
        (Box(10, 20, (2,), np.float32), "from 10 to 20"),
        (Box(-1000, 1000, (2,), np.float32), "from -1000 to 1000"),
        (Box(np.array([-1, -40]), np.array([1, -30]), dtype=np.float64), "from -40 to 1"),
        (Box(-2, 2, (2,), np.float32), None),
        (Box(0, 1, (2,), np.float64), None),
        (Box(-np.inf, np.inf, (2,), np.float32), None),
    ],
    ids=str,
)
def test_badly_scaled_actions_get_a_warning(train, capsys, space, bounds):
    """Guards the user of a space that the first policy misses: one line, and training goes on."""
    envs = ToyEnvs(3).use(space)
    folder = train(envs)
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if "RescaleAction" in line]
    assert len(warnings) == (bounds is not None)
    if bounds:
        assert bounds in warnings[0] and warnings[0].startswith(f"{script.SCRIPT}: ")
        assert "gymnasium.wrappers.RescaleAction" in warnings[0]
    assert column(folder / "metrics.csv", "global_step", int)[-1] == 84
    played = stacked(envs.steps, "action")
    assert ((space.low <= played) & (played <= space.high)).all()


class OneOutput(script.ActorCritic):
    def forward(self, obs):
        return super().forward(obs)[0]


class ColumnOfValues(script.ActorCritic):
    def forward(self, obs):
        means, values = super().forward(obs)
        return means, values[:, None]  # would be broadcast to (N, N)


@pytest.mark.parametrize("network", [OneOutput, ColumnOfValues])
def test_networks_that_break_the_promise(refused, network):
    """Guards users' networks: an error at the start, not a silent wrong loss."""
    line = refused("--num-envs", "3", make_envs=lambda args: ToyEnvs(3), ActorCritic=network)
    assert "means and values of shapes [(3, 2), (3,)]" in line


# --- Learning ---


class Target(ToyEnvs):
    """Each step is an episode; the nearer the actions to 0.3 and -0.3, the better."""

    def step(self, actions):
        obs, _, terminated, truncated, info = super().step(actions)
        self.steps.clear()
        return obs, -np.abs(actions - [0.3, -0.3]).sum(1), terminated, truncated, info


def test_a_target_is_found(train):
    """Guards the sign of it all."""
    arguments = {"num_steps": 256, "total_timesteps": 256 * 40, "learning_rate": 0.003}
    envs = Target(8, limit=2, terminate=1, truncate=0)
    folder = train(envs, num_minibatches=8, scale_epochs=False, **arguments)
    scores = column(folder / "metrics.csv", "charts/episodic_return")
    assert scores[0] < -1 and scores[-1] > -0.5
