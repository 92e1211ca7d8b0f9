"""The algorithm of pqn_abs.py, against the same computed a second time in another way."""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from helpers import (
    FakeEnvs,
    SmallNetwork,
    column,
    config,
    expected_episodes,
    load,
    rows,
    same_weights,
    stacked,
)

import pqn_abs
from pqn_abs import EpisodicLife, behavioral_divergence, lambda_returns, rollout_length

EQ4 = {"rollout_min": 16, "rollout_max": 64, "delta_min": 0.05, "delta_max": 0.95}

# --- The pure functions ---


def forward_view(rewards, next_values, terminated, truncated, gamma, q_lambda):
    """The λ-return by its definition: n-step returns with weights (1-λ) λ^(n-1), the last the rest.

    All arrays are (L, E).
    """
    returns = np.empty(rewards.shape)
    for start, env in np.ndindex(rewards.shape):
        n_step_returns = []
        rewards_so_far = 0.0
        for t in range(start, len(rewards)):
            rewards_so_far += gamma ** (t - start) * rewards[t, env]
            bootstrap = gamma ** (t - start + 1) * next_values[t, env] * (not terminated[t, env])
            n_step_returns.append(rewards_so_far + bootstrap)
            if terminated[t, env] or truncated[t, env]:
                break
        weights = (1 - q_lambda) * q_lambda ** np.arange(len(n_step_returns), dtype=float)
        weights[-1] = q_lambda ** (len(n_step_returns) - 1)
        returns[start, env] = weights @ n_step_returns
    return returns


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("terminate, truncate", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3)])
def test_targets_are_lambda_returns(q_lambda, terminate, truncate):
    """Guards the backward recursion, at both ends of λ and for each kind of ending."""
    rng = np.random.default_rng(1)
    rewards, next_values = rng.normal(size=(2, 12, 20))
    terminated = rng.random((12, 20)) < terminate
    truncated = rng.random((12, 20)) < truncate
    arrays = (rewards, next_values, terminated, truncated)
    computed = lambda_returns(*map(torch.from_numpy, arrays), 0.9, q_lambda)
    np.testing.assert_allclose(computed, forward_view(*arrays, 0.9, q_lambda), atol=1e-6)


@pytest.mark.parametrize("changed", [0, 1, 25, 100])
def test_divergence_is_the_share_of_changed_actions(changed):
    """Guards δ from 0 to 1; Q-values that change without a change of their order do not count."""
    old_values = torch.tensor([[3.0, 1.0, 2.0]]).repeat(100, 1)
    values = 10 * old_values
    values[:changed, 2] = 31
    divergence = behavioral_divergence(lambda states: values, lambda states: old_values, None)
    assert divergence == pytest.approx(changed / 100)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("low, high", [(0.05, 0.95), (0.001, 0.3)])
def test_rollout_length_is_equation_4(beta, low, high):
    """Guards the logarithm, the clipping and the smoothing, against geometric interpolation.

    α is the share of the way from δ_min to δ_max in equal factors: δ = δ_min (δ_max / δ_min)^α.
    """
    for share in np.linspace(-0.5, 1.5, 41):
        divergence = low * (high / low) ** share
        target = 64 + (16 - 64) * np.clip(share, 0, 1)
        for current in (16.0, 30.7, 64.0):
            thresholds = {"delta_min": low, "delta_max": high}
            length = rollout_length(divergence, current, **(EQ4 | thresholds), beta=beta)
            assert length == pytest.approx(current + beta * (target - current), abs=1e-9)
    assert rollout_length(0.0, 20.0, **EQ4, beta=1.0) == pytest.approx(64)  # no logarithm of 0


# --- The network ---


def network_and_frames(precision):
    torch.manual_seed(1)
    envs = FakeEnvs(1)
    envs.single_action_space = Discrete(3)
    network = pqn_abs.QNetwork(envs, pqn_abs.Args(device="cpu", precision=precision))
    nn.init.normal_(network.body[0].bias)  # with 0, LayerNorm would hide the scale of the pixels
    return network, torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)


def test_network_is_the_nature_cnn_with_layer_norm():
    """Guards layers, strides, the pixels' scale and the norms' axes: the same in float64."""
    network, frames = network_and_frames("float32")
    weights = [parameter.detach().double() for parameter in network.parameters()]
    x = frames.double() / 255
    for stride in (4, 2, 1):
        kernel, bias, scale, shift = weights[:4]
        weights = weights[4:]
        x = F.conv2d(x, kernel, bias, stride)
        mean = x.mean((1, 2, 3), keepdim=True)
        variance = ((x - mean) ** 2).mean((1, 2, 3), keepdim=True)
        x = ((x - mean) / (variance + 1e-5).sqrt() * scale + shift).relu()
    kernel, bias, scale, shift, head, head_bias = weights
    x = F.layer_norm(x.flatten(1) @ kernel.T + bias, (512,), scale, shift).relu()
    expected = x @ head.T + head_bias
    assert expected.shape == (8, 3)
    torch.testing.assert_close(network(frames).double(), expected, rtol=1e-3, atol=1e-4)


def test_network_keeps_its_head_in_float32():
    """Guards the action gaps: rounded to bfloat16, nearby Q-values would tie."""
    exact, frames = network_and_frames("float32")
    network, _ = network_and_frames("bfloat16")
    with torch.no_grad():
        q_values = network(frames)
        assert 0 < (q_values - exact(frames)).abs().max() < 0.1  # the body is in bfloat16
    assert q_values.dtype == torch.float32
    assert not torch.equal(q_values, q_values.bfloat16().float())


def test_layers_start_orthogonal_with_zero_biases():
    """Guards the initialisation: the rows are orthogonal, each of the gain's length."""
    layer = pqn_abs.layer_init(nn.Linear(20, 10))
    torch.testing.assert_close(layer.weight @ layer.weight.T, 2 * torch.eye(10), rtol=0, atol=1e-5)
    assert not layer.bias.any()


# --- One iteration, computed twice ---


def second_computation(network, steps, orders, args):
    """Update network (float64) as an iteration on the recorded steps should.

    orders holds the shuffled indices of each epoch. Returns loss and gradient norm of the last
    mini-batch.
    """
    rewards = np.sign(stacked(steps, "reward"))
    true_next = torch.from_numpy(stacked(steps, "true_next")).flatten(0, 1)
    with torch.no_grad():
        next_values = network(true_next).amax(1).numpy().reshape(rewards.shape)
    endings = [stacked(steps, "terminated") | stacked(steps, "lost_life")]
    endings.append(stacked(steps, "truncated"))
    returns = forward_view(rewards, next_values, *endings, args.gamma, args.q_lambda).flatten()
    obs = torch.from_numpy(stacked(steps, "obs")).flatten(0, 1)
    actions = stacked(steps, "action").flatten()
    parameters = list(network.parameters())
    optimizer = torch.optim.RAdam(parameters, args.learning_rate)
    for order in orders:
        for minibatch in np.array_split(order.numpy(), args.num_minibatches):
            taken = network(obs[minibatch])[range(len(minibatch)), actions[minibatch]]
            loss = ((taken - torch.from_numpy(returns[minibatch])) ** 2).mean()
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient * min(1.0, args.max_grad_norm / norm)
            optimizer.step()
    return loss.item(), norm.item()


@pytest.fixture
def watch(train, monkeypatch):
    """Train for one iteration; keep the first network in float64 and the shuffled orders."""

    def run(envs, network=SmallNetwork, **arguments):
        seen = SimpleNamespace(envs=envs, orders=[])
        torch_randperm = torch.randperm

        def make_network(envs, args):
            made = network(envs, args)
            if not hasattr(seen, "network"):  # the second one is θ_old
                seen.network = copy.deepcopy(made).double()
            return made

        def randperm(*args, **options):
            seen.orders.append(torch_randperm(*args, **options))
            return seen.orders[-1]

        with monkeypatch.context() as patch:
            patch.setattr(torch, "randperm", randperm)
            seen.folder = train(envs, make_network, total_timesteps=1, **arguments)
        seen.args = pqn_abs.Args(**config(seen.folder)["args"])
        seen.orders = seen.orders[: seen.args.update_epochs]
        return seen

    return run


class ObjectEnvs(FakeEnvs):
    """Last observations as in Gymnasium's own vectors: objects, None where nothing ended."""

    def step(self, actions):
        *results, info = super().step(actions)
        last = np.full(self.num_envs, None)
        for i in np.flatnonzero(self.steps[-1].over):
            last[i] = info["final_obs"][i]
        return *results, {"final_obs": last}


ONE = {"num_steps": 7, "rollout_min": 5, "rollout_max": 9, "learning_rate": 0.01}


@pytest.mark.parametrize(
    "envs, arguments",
    [
        (FakeEnvs(4), ONE),
        (FakeEnvs(3), ONE | {"num_minibatches": 5}),  # sizes 5, 4, 4, 4, 4
        (ObjectEnvs(3, truncate=0.5), ONE | {"gamma": 0.9, "q_lambda": 0.9}),
        (FakeEnvs(3), ONE | {"max_grad_norm": 0.05, "update_epochs": 3}),
        (FakeEnvs(3, lives=3, terminate=0.4), ONE),
    ],
    ids="even uneven objects clipped lives".split(),
)
def test_iteration_computed_twice(watch, envs, arguments):
    """Guards the whole of an iteration: what is stored, targets, epochs, clipping, RAdam.

    Rewards of all sizes count by their sign. A cut episode's last state is its own.
    """
    seen = watch(envs, adapt_frequency=1, reference_states=10**6, **arguments)
    before = copy.deepcopy(seen.network)
    batch = envs.num_envs * seen.args.num_steps
    for order in seen.orders:
        assert sorted(order.tolist()) == list(range(batch))
    td_loss, grad_norm = second_computation(seen.network, envs.steps, seen.orders, seen.args)

    learned = load(seen.folder)["network"]
    for name, expected in seen.network.state_dict().items():
        torch.testing.assert_close(learned[name].double(), expected, rtol=1e-6, atol=1e-6)
        assert (learned[name] - before.state_dict()[name]).abs().max() > 1e-4
    (row,) = rows(seen.folder / "metrics.csv")
    assert float(row["losses/grad_norm"]) == pytest.approx(grad_norm, rel=1e-4)
    assert float(row["losses/td_loss"]) == pytest.approx(td_loss, rel=1e-4)
    states = torch.from_numpy(stacked(envs.steps, "obs")).flatten(0, 1)
    changed = (before(states).argmax(1) != seen.network(states).argmax(1)).double().mean().item()
    assert float(row["abs/behavioral_divergence"]) == pytest.approx(changed, abs=1e-6)


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_the_learning_rate_falls_with_the_steps_or_stays(train, anneal_lr):
    """Guards --anneal-lr: a line to 0 at total_timesteps, as in the last iteration."""
    folder = train(FakeEnvs(4), total_timesteps=1000, learning_rate=0.02, anneal_lr=anneal_lr)
    begins = column(folder / "metrics.csv", "global_step", int)[-2]
    expected = 0.02 * (1 - begins / 1000) if anneal_lr else 0.02
    rate = load(folder)["optimizer"]["param_groups"][0]["lr"]
    assert rate == pytest.approx(expected) and rate > 0


# --- Acting ---


def test_epsilon_falls_over_the_first_part_of_the_run(train):
    """Guards the schedule: a line from start to end over a share of the run, then the end."""
    folder = train(FakeEnvs(4), total_timesteps=1280, exploration_fraction=0.5, end_e=0.1)
    steps = np.array([0, *column(folder / "metrics.csv", "global_step")[:-1]])
    expected = 1 - 0.9 * np.minimum(1, steps / 640)
    assert column(folder / "metrics.csv", "charts/epsilon") == pytest.approx(expected)
    folder = train(FakeEnvs(4), total_timesteps=1, exploration_fraction=0, end_e=0.1)
    assert column(folder / "metrics.csv", "charts/epsilon") == [1.0]


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_actions_are_greedy_but_for_the_share_epsilon(watch, epsilon):
    """Guards ε-greedy acting; of the random actions, one in four happens to be the greedy one."""
    seen = watch(FakeEnvs(64), start_e=epsilon, end_e=epsilon)
    obs = torch.from_numpy(stacked(seen.envs.steps, "obs"))
    greedy = seen.network(obs.flatten(0, 1)).argmax(1).numpy()
    differing = (greedy != stacked(seen.envs.steps, "action").flatten()).mean()
    assert differing == pytest.approx(0.75 * epsilon, abs=0.05 if epsilon else 0)


def test_each_iteration_explores_anew(train):
    """Guards the seed of an iteration: two iterations do not draw the same random actions."""
    envs = FakeEnvs(4)
    train(envs, total_timesteps=256, start_e=1.0, end_e=1.0, adapt_rollout=False)
    actions = stacked(envs.steps, "action")
    assert not np.array_equal(actions[:32], actions[32:])


@pytest.mark.parametrize("lives", [1, 4])
@pytest.mark.parametrize("episodic_life", [True, False])
def test_scores_are_those_of_whole_games(train, lives, episodic_life):
    """Guards the scores: unclipped, and of the whole game where lost lives end the learner's.

    Some games end with more lives than the next one begins with.
    """
    envs = FakeEnvs(8, terminate=0.2, truncate=0.02, lives=lives)
    folder = train(envs, total_timesteps=4000, episodic_life=episodic_life)
    expected = expected_episodes(envs.steps)
    assert len(expected) > 100
    for row in rows(folder / "metrics.csv"):
        until_now = [score for step, score in expected if step <= int(row["global_step"])]
        mean = np.mean(until_now[-100:])
        assert float(row["charts/episodic_return"]) == pytest.approx(mean)
    assert load(folder)["scores"] == [score for _, score in expected[-100:]]


@pytest.mark.parametrize("episodic_life", [True, False])
def test_fire_follows_a_lost_life(train, episodic_life):
    """Guards games that wait for FIRE, from one rollout to the next too; a new game needs none."""
    envs = FakeEnvs(8, terminate=0.3, truncate=0.02, lives=5)
    train(envs, total_timesteps=3000, episodic_life=episodic_life)
    lost_life = stacked(envs.steps[:-1], "lost_life")
    after = stacked(envs.steps[1:], "executed")
    assert lost_life.sum() > 300
    assert set(after[lost_life].tolist()) == ({2} if episodic_life else {0, 1, 2, 3})
    assert set(after[~lost_life].tolist()) == {0, 1, 2, 3}


class LivesAsPlayed(FakeEnvs):
    """A bonus life, a lost one, two bonuses, a new game, and a bonus."""

    def reset(self, **options):
        self.played = iter([4, 3, 5, 1, 2])
        return super().reset(**options)[0], {"lives": np.array([3])}

    def step(self, actions):
        *results, _, truncated, _ = super().step(actions)
        lives = np.array([next(self.played)])
        return *results, lives == 1, truncated, {"lives": lives}


def test_a_bonus_life_is_no_lost_one():
    """Guards EpisodicLife step by step: lives that rise or fall, in a game and between games."""
    envs = LivesAsPlayed(1, truncate=0)
    wrapped = EpisodicLife(envs, fire_action=2)
    wrapped.reset(seed=1)
    terminated = [wrapped.step(np.array([0]))[2].item() for _ in range(5)]
    assert terminated == [False, True, False, True, False]
    assert [step.executed.item() for step in envs.steps] == [0, 0, 2, 0, 0]


# --- Adapting ---


@pytest.fixture
def measured(train, monkeypatch):
    """Train, and return the old and the new weights of each measurement of δ, and the folder."""

    def run(envs, **arguments):
        seen = []

        def spy(network, old_network, states):
            pair = (old_network.state_dict(), network.state_dict())
            seen.append((*copy.deepcopy(pair), states.clone()))
            return behavioral_divergence(network, old_network, states)

        with monkeypatch.context() as patch:
            patch.setattr(pqn_abs, "behavioral_divergence", spy)
            folder = train(envs, **arguments)
        return seen, folder

    return run


FIXED = {"total_timesteps": 128 * 9, "adapt_rollout": False, "learning_rate": 0.01}


def test_divergence_is_measured_at_every_kth_iteration(train):
    """Guards K, and that the first iterations, with hardly an update behind them, do not count."""
    folder = train(FakeEnvs(4), adapt_frequency=4, **FIXED)
    cells = [row["abs/behavioral_divergence"] for row in rows(folder / "metrics.csv")]
    assert [i for i, cell in enumerate(cells, 1) if cell] == [4, 8]


def test_divergence_compares_before_and_after_one_iterations_updates(measured):
    """Guards θ_old: it is the network that the iteration before left, whatever K is."""
    each, _ = measured(FakeEnvs(4), adapt_frequency=1, **FIXED)
    assert len(each) == 9
    for (_, last, _), (before, after, _) in itertools.pairwise(each):
        assert same_weights(last, before) and not same_weights(before, after)
    thirds, _ = measured(FakeEnvs(4), adapt_frequency=3, **FIXED)
    assert len(thirds) == 3
    for (before, after, _), (expected_before, expected_after, _) in zip(
        thirds, each[2::3], strict=True
    ):
        assert same_weights(before, expected_before) and same_weights(after, expected_after)


class Closure(SmallNetwork):
    """Keeps a function of itself."""

    def __init__(self, envs, args):
        super().__init__(envs, args)
        self.of = lambda frames: SmallNetwork.forward(self, frames)

    def forward(self, frames):
        return self.of(frames)


def test_divergence_of_a_network_with_a_function_of_itself(train):
    """Guards θ_old: in a deep copy, this function would still be that of the new network."""
    plain, closure = (
        train(FakeEnvs(4), network, adapt_frequency=1, **FIXED)
        for network in (SmallNetwork, Closure)
    )
    divergences = column(plain / "metrics.csv", "abs/behavioral_divergence")
    assert column(closure / "metrics.csv", "abs/behavioral_divergence") == divergences
    assert max(divergences) > 0


def test_measuring_does_not_change_what_is_learned(train):
    """Guards plain PQN: L stays, and all is the same, bit for bit, with and without δ."""
    often = train(FakeEnvs(4), adapt_frequency=1, **FIXED)
    never = train(FakeEnvs(4), adapt_frequency=1000, **FIXED)
    assert same_weights(load(often)["network"], load(never)["network"])
    assert not column(never / "metrics.csv", "abs/behavioral_divergence")
    assert column(often / "metrics.csv", "abs/rollout_length", int) == [32] * 9


@pytest.mark.parametrize("batch, expected", [(512, 50), (32, 32)])
def test_reference_states_are_a_sample_of_the_rollout(measured, batch, expected):
    """Guards the sample: M different states, from all over the rollout; all, if it has fewer."""
    envs = FakeEnvs(batch // 16)
    arguments = {"num_steps": 16, "reference_states": 50, "total_timesteps": 1}
    ((_, _, states),), _ = measured(envs, adapt_frequency=1, **arguments)
    rollout = stacked(envs.steps, "obs").reshape(-1, 6).tolist()
    drawn = [rollout.index(state) for state in states.tolist()]
    assert len(drawn) == len(set(drawn)) == expected
    assert max(drawn) > 0.8 * batch and min(drawn) < 0.2 * batch


def test_rollouts_are_equation_4_of_what_was_logged(train):
    """Guards L_adapt, which stays a real number, and L, its nearest integer, in each rollout.

    The learning rate falls to 0, so that divergences are of all sizes.
    """
    arguments = {"total_timesteps": 8000, "learning_rate": 0.05, "anneal_lr": True}
    folder = train(FakeEnvs(4), adapt_frequency=2, **arguments)
    adaptive_length = 32.0
    expected = []
    divergences = []
    for row in rows(folder / "metrics.csv"):
        expected.append(math.floor(adaptive_length + 0.5))
        if row["abs/behavioral_divergence"]:
            divergences.append(float(row["abs/behavioral_divergence"]))
            logarithm = np.log(max(divergences[-1], 1e-9))
            target = np.interp(logarithm, np.log([0.05, 0.95]), [64, 16])
            adaptive_length += 0.1 * (target - adaptive_length)
    assert len({*divergences}) > 7 and min(divergences) < 0.05 and max(divergences) > 0.3
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == expected
    updates = column(folder / "metrics.csv", "charts/updates", int)
    assert updates == list(range(8, 8 * len(updates) + 1, 8))  # two epochs of four, whatever L
    assert load(folder)["adaptive_length"] == pytest.approx(adaptive_length)


@pytest.mark.parametrize("length, expected", [(16, 3), (32, 3), (33, 3), (43, 4), (64, 6)])
def test_longer_rollouts_can_have_more_epochs(train, length, expected):
    """Guards --scale-epochs: gradient steps for each transition stay much the same above L = 32."""
    arguments = {"num_steps": length, "scale_epochs": True, "update_epochs": 3}
    folder = train(FakeEnvs(4), num_minibatches=2, total_timesteps=1, **arguments)
    assert column(folder / "metrics.csv", "charts/updates") == [expected * 2]
