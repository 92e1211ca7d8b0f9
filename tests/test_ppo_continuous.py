"""ppo_abs_continuous.py: Gaussians, normalisation, and a run computed twice."""

import copy
import inspect
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box
from helpers import FakeEnvs, column, load, rows, same_weights, stacked
from torch.distributions import Independent, Normal, kl_divergence

import ppo_abs
import ppo_abs_continuous as script


class ToyEnvs(FakeEnvs):
    """Three random numbers of unlike size as observation, two as action."""

    def __init__(self, num_envs, limit=0.5, **ends):
        super().__init__(num_envs, **ends)
        self.single_observation_space = Box(-np.inf, np.inf, (3,), np.float64)
        self.single_action_space = Box(-limit, limit, (2,), np.float32)
        self.first = []

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.first = obs
        return obs, info

    def frames(self):
        return self.rng.normal([5, 0, -300], [0.1, 1, 100], size=(self.num_envs, 3))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(envs, **arguments) runs the script on envs, or on real ones where envs is None."""
    count = iter(range(1000))

    def run(envs, **arguments):
        defaults = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        if envs is not None:
            monkeypatch.setattr(script, "make_envs", lambda args: envs)
            defaults |= {"num_envs": envs.num_envs, "num_minibatches": 1, "num_steps": 21}
            defaults |= {"rollout_min": 21, "rollout_max": 60, "base_steps": 21}
            defaults |= {"adapt_rollout": False, "adapt_frequency": 2, "total_timesteps": 84}
            defaults |= {"update_epochs": 3, "learning_rate": 0.01}
        return script.main(script.Args(**(defaults | arguments)))

    return run


@pytest.fixture
def networks(monkeypatch):
    """A list that gets the network of each run that begins."""
    made = []

    class Recorded(script.ActorCritic):
        def __init__(self, envs):
            super().__init__(envs)
            made.append(self)

    monkeypatch.setattr(script, "ActorCritic", Recorded)
    return made


@pytest.fixture
def rollouts(monkeypatch, networks):
    """A list that gets each rollout's advantages' inputs, and the network that collected it."""
    seen = []
    gae = script.gae

    def recorded(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
        rollout = {"rewards": rewards, "values": values, "next_values": next_values}
        seen.append(SimpleNamespace(**rollout, network=copy.deepcopy(networks[-1])))
        return gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)

    monkeypatch.setattr(script, "gae", recorded)
    return seen


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
    "name", ["gae", "clipped_surrogate", "clipped_value_loss", "rollout_length", "layer_init"]
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


@pytest.mark.parametrize("num_envs", [1, 3])
def test_values_are_of_normalised_states_of_the_same_episode(train, rollouts, num_envs):
    """Guards final_obs: normalised by the same moments, a cut episode bootstraps from it."""
    envs = ToyEnvs(num_envs)
    train(envs)
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


def test_outliers_are_clipped(train, monkeypatch):
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
    train(envs[1], **{**saved["args"], "resume": str(folder), "total_timesteps": 168})
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


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_iterations_computed_twice(train, rollouts, anneal_lr):
    """Guards all between the environment and the weights: ends, losses, Adam, schedule."""
    envs = ToyEnvs(3, limit=100)  # no action is clipped
    folder = train(envs, anneal_lr=anneal_lr, ent_coef=0.03)
    args = script.Args(**load(folder)["args"])
    network = copy.deepcopy(rollouts[0].network).double()
    network.optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    obs, _, _ = normalized(envs, args.gamma, Naive(), Naive())
    for count, rollout in enumerate(rollouts):
        part = slice(count * 7, (count + 1) * 7)
        rate = 0.01 * (1 - count / 4) if anneal_lr else 0.01
        network.optimizer.param_groups[0]["lr"] = rate
        inputs = torch.tensor(obs[part].astype(np.float32)).double().flatten(0, 1)
        actions = torch.tensor(stacked(envs.steps[part], "action")).double().flatten(0, 1)
        ends = [stacked(envs.steps[part], name) for name in ("terminated", "truncated")]
        second_computation(args, network, rollout, inputs, actions, *ends)
        assert rows(folder / "metrics.csv")[count]["charts/learning_rate"] == str(rate)
    first = rollouts[0].network.state_dict()
    for name, weight in load(folder)["network"].items():
        reference = network.state_dict()[name]
        torch.testing.assert_close(weight.double(), reference, rtol=1e-3, atol=1e-4)
        assert (weight - first[name]).abs().max() > 0.01


def test_drawn_actions_are_learned_and_clipped_ones_played(train, networks, rollouts, monkeypatch):
    """Guards the action space's limits, and the draw: means + std · standard normal."""
    learned = []
    log_prob = script.gaussian_log_prob

    def recorded(means, log_std, actions):
        if actions.ndim == 3:  # a whole rollout
            learned.append((actions - means) / log_std.exp())
            learned.append(actions)
        return log_prob(means, log_std, actions)

    monkeypatch.setattr(script, "gaussian_log_prob", recorded)
    envs = ToyEnvs(3)
    train(envs, num_steps=1500, total_timesteps=1500)
    noise, actions = learned
    assert noise.mean().abs() < 0.1 and (noise.std() - 1).abs() < 0.1
    assert actions.abs().max() > 1
    played = stacked(envs.steps, "action")
    np.testing.assert_array_equal(played, np.clip(actions.numpy(), -0.5, 0.5))


def test_measuring_changes_nothing_that_is_learned(train):
    """Guards comparisons: K = 1 and K = 1000 give the same weights, bit for bit."""
    often = train(ToyEnvs(3), adapt_frequency=1)
    never = train(ToyEnvs(3), adapt_frequency=1000)
    assert len(column(often / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(never / "metrics.csv", "abs/kl_divergence") == []
    assert same_weights(load(often)["network"], load(never)["network"])


def test_kl_is_of_one_iterations_updates(train, networks, rollouts):
    """Guards θ_old, B_ref and the order of the two: K = 2 measures in the second iteration."""
    envs = ToyEnvs(3)
    folder = train(envs, total_timesteps=42)
    obs, _, _ = normalized(envs, 0.99, Naive(), Naive())
    states = torch.tensor(obs[7:]).float()
    new, old = networks[0], rollouts[1].network
    policies = [distribution(network.actor(states), network.log_std) for network in (new, old)]
    first, second = rows(folder / "metrics.csv")
    assert first["abs/kl_divergence"] == ""
    expected = kl_divergence(*policies).mean().item()
    assert float(second["abs/kl_divergence"]) == pytest.approx(expected, rel=1e-3)
    assert abs(kl_divergence(*policies[::-1]).mean().item() / expected - 1) > 0.01


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollouts_and_epochs_follow_the_authors_rule(train, monkeypatch, num_envs):
    """Guards K, the burn-in, the mean of the last ones, Eq. 4, epochs, and L / E steps."""
    rng = np.random.default_rng(0)
    kls = np.exp(rng.uniform(np.log(0.003), np.log(0.3), size=14)).tolist()
    measured = iter(kls)
    monkeypatch.setattr(script, "policy_divergence", lambda *args: next(measured))
    length, history = 20.0, []
    lengths, epochs = [], []
    for iteration in range(1, 2 * len(kls) + 1):
        steps = round(length / num_envs)
        lengths.append(steps * num_envs)
        epochs.append(max(2, 2 * lengths[-1] // 12))
        if iteration % 2 == 0:
            history.append(kls[iteration // 2 - 1])
        if iteration % 2 == 0 and len(history) >= 4:  # before, the author takes δ_max: L_min
            kl = np.clip(np.mean(history[-6:]), 0.01, 0.1)
            target = 100 - (np.log(kl) - np.log(0.01)) / np.log(10) * (100 - 20)
            length = 0.7 * length + 0.3 * target
    arguments = {"rollout_min": 20, "rollout_max": 100, "beta": 0.3, "divergence_window": 6}
    arguments |= {"burn_in": 4, "update_epochs": 2, "base_steps": 12, "num_steps": 25}
    arguments |= {"total_timesteps": sum(lengths)}
    folder = train(ToyEnvs(num_envs), adapt_rollout=True, **arguments)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    assert len(set(epochs)) > 2
    assert lengths[:8] == [num_envs * round(20 / num_envs)] * 8 and max(lengths) > 40
    assert column(folder / "metrics.csv", "charts/updates", int) == np.cumsum(epochs).tolist()


def test_defaults_are_the_authors():
    """Guards the numbers of ABS's own code for MuJoCo."""
    args = script.Args()
    assert (args.rollout_min, args.rollout_max, args.num_steps) == (1024, 8192, 2048)
    assert (args.delta_min, args.delta_max, args.beta) == (0.01, 0.1, 0.1)
    assert (args.adapt_frequency, args.divergence_window, args.burn_in) == (10, 20, 10)
    assert (args.scale_epochs, args.base_steps, args.update_epochs) == (True, 2048, 10)


# --- Real environments, and bad input ---


def test_pendulum_and_its_resume(train):
    """Guards Gymnasium's own vector: object arrays in final_obs, whole real episodes as scores."""
    arguments = {"env_id": "Pendulum-v1", "rollout_min": 450, "num_minibatches": 4}
    folder = train(None, num_envs=2, total_timesteps=900, **arguments)
    args = load(folder)["args"]
    train(None, **{**args, "resume": str(folder), "total_timesteps": 1800})
    table = rows(folder / "metrics.csv")
    assert [row["global_step"] for row in table] == ["450", "900", "1350", "1800"]
    assert [row["abs/rollout_length"] for row in table] == ["450"] * 4
    episodes = rows(folder / "episodes.csv")
    assert [row["episodic_length"] for row in episodes] == ["200"] * 8
    assert all(-2000 < float(row["episodic_return"]) < 0 for row in episodes)


def test_half_cheetah(train):
    """Guards the run that the docstring shows, for its first 2,048 steps."""
    pytest.importorskip("mujoco")
    folder = train(None, total_timesteps=2048, update_epochs=1)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [1024, 1024]
    episodes = rows(folder / "episodes.csv")
    assert [row["episodic_length"] for row in episodes] == ["1000", "1000"]
    assert load(folder)["network"]["actor.0.weight"].shape == (64, 17)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(*arguments) expects status 2 and one line, which it returns, and no run."""

    def run(*arguments):
        command = ["ppo_abs_continuous.py", "--runs-dir", str(tmp_path), *arguments]
        command += ["--total-timesteps", "1"]  # where it is not refused, it is soon over
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as error:
            script.launch()
        assert error.value.code == 2
        assert list(tmp_path.iterdir()) == []
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ppo_abs_continuous.py: ")
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
        (["--delta-min", "0.1"], "--delta-min 0.1"),
        (["--rollout-max", "1023"], "--rollout-max 1023"),
        (["--clip-coef", "nan"], "--clip-coef nan"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(refused, arguments, word):
    assert word in refused(*arguments)


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
