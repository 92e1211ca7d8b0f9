"""The algorithm of pqn_abs.py, against the same computed a second time in another way."""

import copy
import functools
import itertools
import math
import random
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import (
    FakeEnvs,
    ReusedArrays,
    SmallNetwork,
    column,
    config,
    expected_episodes,
    load,
    rows,
    same_weights,
    stacked,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pqn_abs
from pqn_abs import behavioral_divergence, lambda_returns, rollout_length

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
    """Guards BD from 0 to 1; Q-values that change without a change of their order do not count."""
    old_values = torch.tensor([[3.0, 1.0, 2.0]]).repeat(100, 1)
    values = 10 * old_values
    values[:changed, 2] = 31
    divergence = behavioral_divergence(lambda states: values, lambda states: old_values, None)
    assert divergence == pytest.approx(changed / 100)


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3, 2), ()])
def test_divergence_refuses_what_are_no_scores(shape):
    """Guards those who paste the function: one score for each action, and at least two actions."""
    with pytest.raises(ValueError, match=r"\(M, A\)"):
        behavioral_divergence(lambda states: torch.zeros(shape), lambda states: None, None)


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


@pytest.mark.parametrize("divergence, expected", [(0.0, 64), (1.0, 16)])
def test_rollout_length_at_the_ends_of_divergence(divergence, expected):
    """Guards the logarithm of 0: nothing changed is as stable as it gets."""
    assert rollout_length(divergence, 20.0, **EQ4, beta=1.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    "swapped",
    [
        {"rollout_min": 64, "rollout_max": 16},
        {"delta_min": 0.95, "delta_max": 0.05},
        {"delta_min": 0.0},
        {"rollout_min": 0},
    ],
)
def test_rollout_length_refuses_swapped_bounds(swapped):
    """Guards those who paste the function: swapped bounds would adapt the wrong way round."""
    with pytest.raises(ValueError):
        rollout_length(0.5, 32.0, **(EQ4 | swapped), beta=0.1)


# --- The network ---


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(1)
    envs = FakeEnvs(1)
    envs.single_action_space = Discrete(3)
    network = pqn_abs.QNetwork(envs)
    nn.init.normal_(network.body[0].bias)  # with 0, LayerNorm would hide the scale of the pixels
    return network


@pytest.fixture(scope="module")
def frames():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8, generator=generator)


def test_network_is_the_nature_cnn_with_layer_norm(network, frames):
    """Guards layers, strides, the pixels' scale and the norms' axes: the same in float64, NCHW."""
    weights = [parameter.detach().double() for parameter in network.parameters()]
    x = frames.double() / 255
    for stride in (4, 2, 1):
        kernel, bias, scale, shift = weights[:4]
        weights = weights[4:]
        x = F.conv2d(x, kernel, bias, stride)
        norm = (x - x.mean((1, 2, 3), keepdim=True)) / (
            x.var((1, 2, 3), correction=0, keepdim=True) + 1e-5
        ).sqrt()
        x = (norm * scale.permute(2, 0, 1) + shift.permute(2, 0, 1)).relu()
    kernel, bias, scale, shift, head, head_bias = weights
    x = F.layer_norm(x.flatten(1) @ kernel.T + bias, (512,), scale, shift).relu()
    expected = x @ head.T + head_bias
    assert expected.shape == (8, 3)
    torch.testing.assert_close(network(frames).double(), expected, rtol=1e-3, atol=1e-4)


def test_network_keeps_its_head_in_float32(network, frames):
    """Guards the action gaps: rounded to bfloat16, nearby Q-values would tie."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q_values = network(frames)
    assert q_values.dtype == torch.float32
    assert not torch.equal(q_values, q_values.bfloat16().float())


def test_layers_start_orthogonal_with_zero_biases():
    """Guards the initialisation: the rows are orthogonal, each of the gain's length."""
    layer = pqn_abs.layer_init(nn.Linear(20, 10))
    torch.testing.assert_close(layer.weight @ layer.weight.T, 2 * torch.eye(10), rtol=0, atol=1e-5)
    assert not layer.bias.any()


# --- One iteration, computed twice ---


class PlainRAdam:
    """RAdam (Liu et al., 2020, Algorithm 2), with PyTorch's default constants."""

    def __init__(self, parameters, lr):
        self.parameters = parameters
        self.lr = lr
        self.t = 0
        self.m = [torch.zeros_like(p) for p in parameters]
        self.v = [torch.zeros_like(p) for p in parameters]

    def step(self, gradients, b1=0.9, b2=0.999, eps=1e-8):
        self.t += 1
        longest = 2 / (1 - b2) - 1
        rho = longest - 2 * self.t * b2**self.t / (1 - b2**self.t)
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            update = m / (1 - b1**self.t)
            if rho > 5:
                r = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
                update = update * r**0.5 * (1 - b2**self.t) ** 0.5 / (v.sqrt() + eps)
            p.data -= self.lr * update


def second_computation(network, steps, orders, args):
    """Update network (float64) as an iteration on the recorded steps should.

    orders holds the shuffled indices of each epoch. Returns loss and gradient norm of the last
    mini-batch.
    """
    rewards = np.sign(stacked(steps, "reward"))
    true_next = torch.from_numpy(stacked(steps, "true_next")).flatten(0, 1)
    with torch.no_grad():
        next_values = network(true_next).amax(1).numpy().reshape(rewards.shape)
    endings = (stacked(steps, "terminated"), stacked(steps, "truncated"))
    returns = forward_view(rewards, next_values, *endings, args.gamma, args.q_lambda).flatten()
    obs = torch.from_numpy(stacked(steps, "obs")).flatten(0, 1)
    actions = stacked(steps, "action").flatten()
    parameters = list(network.parameters())
    optimizer = PlainRAdam(parameters, args.learning_rate)
    for order in orders:
        for minibatch in np.array_split(order.numpy(), args.num_minibatches):
            taken = network(obs[minibatch])[range(len(minibatch)), actions[minibatch]]
            loss = ((taken - torch.from_numpy(returns[minibatch])) ** 2).mean()
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            optimizer.step([g * min(1.0, args.max_grad_norm / norm) for g in gradients])
    return loss.item(), norm.item()


@pytest.fixture
def watch(train, monkeypatch):
    """Train for one iteration; keep the first network in float64 and the shuffled orders."""

    def run(envs, network=SmallNetwork, **arguments):
        seen = SimpleNamespace(envs=envs, orders=[])
        torch_randperm = torch.randperm

        def make_network(envs):
            made = network(envs)
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


class NumberFlags(FakeEnvs):
    """Its flags are numbers, which would index where they should mask."""

    def __init__(self, kind, *args, **options):
        super().__init__(*args, **options)
        self.kind = kind

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, terminated.astype(self.kind), truncated.astype(self.kind), info


class FlippedEnvs(FakeEnvs):
    """Its observations are views that run backwards through memory, as of a mirrored image."""

    def reset(self, **options):
        obs, info = super().reset(**options)
        return self.flipped(obs), info

    def step(self, actions):
        obs, *rest, info = super().step(actions)
        return self.flipped(obs), *rest, info | {"final_obs": self.flipped(info["final_obs"])}

    def flipped(self, obs):
        return np.flip(np.flip(obs, 1).copy(), 1)


class SummedNetwork(SmallNetwork):
    """Two parameters that are added to each other: autograd gives both the same gradient tensor."""

    def __init__(self, envs):
        super().__init__(envs)
        self.shift = nn.Parameter(torch.zeros(4))
        self.other_shift = nn.Parameter(torch.ones(4))

    def forward(self, frames):
        return super().forward(frames) + (self.shift + self.other_shift)


ONE = {"num_steps": 7, "rollout_min": 5, "rollout_max": 9, "learning_rate": 0.01}
CHUNKED = {"num_steps": 16, "num_minibatches": 2, "learning_rate": 0.01}  # 2 x 1280 transitions


@pytest.mark.parametrize(
    "envs, network, arguments",
    [
        (FakeEnvs(4), SmallNetwork, ONE),
        (FakeEnvs(3), SmallNetwork, ONE | {"num_minibatches": 5}),  # sizes 5, 4, 4, 4, 4
        (FakeEnvs(3, truncate=0.5), SmallNetwork, ONE | {"gamma": 0.9, "q_lambda": 0.9}),
        (FakeEnvs(3), SmallNetwork, ONE | {"max_grad_norm": 0.05, "update_epochs": 3}),
        (FakeEnvs(3, lives=3, terminate=0.4), SmallNetwork, ONE | {"episodic_life": True}),
        (FakeEnvs(160), SmallNetwork, CHUNKED),
        (FakeEnvs(160), SummedNetwork, CHUNKED),
        (ReusedArrays(3, lives=3, terminate=0.4), SmallNetwork, ONE | {"episodic_life": True}),
        (NumberFlags(np.uint8, 3, lives=3, terminate=0.4), SmallNetwork, ONE),
        (NumberFlags(np.int64, 3, truncate=0.5), SmallNetwork, ONE),
        (FlippedEnvs(3, truncate=0.5), SmallNetwork, ONE),
    ],
    ids="""even uneven truncated clipped lives chunks summed-parameters
        reused-arrays uint8-flags int64-flags flipped-views""".split(),
)
def test_iteration_computed_twice(watch, envs, network, arguments):
    """Guards the whole of an iteration: what is stored, targets, epochs, chunks, clipping, RAdam.

    A mini-batch of 1280 is learned in chunks, and its gradient and loss are the whole mini-batch's.
    """
    seen = watch(envs, network, adapt_frequency=1, reference_states=10**6, **arguments)
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


def test_a_network_may_compute_in_bfloat16_throughout(watch):
    """Guards networks without a float32 head: no crash at cut episodes, and much the same loss."""
    seen = watch(FakeEnvs(3, truncate=0.3), precision="bfloat16", **ONE)
    td_loss, _ = second_computation(seen.network, seen.envs.steps, seen.orders, seen.args)
    (row,) = rows(seen.folder / "metrics.csv")
    assert float(row["losses/td_loss"]) == pytest.approx(td_loss, rel=0.1)


def test_a_parameter_may_have_no_gradient(train):
    """Guards networks with a part that the loss does not reach."""

    class Unused(SmallNetwork):
        def __init__(self, envs):
            super().__init__(envs)
            self.unused = nn.Parameter(torch.ones(3))

    folder = train(FakeEnvs(4), Unused, total_timesteps=300)
    assert load(folder)["network"]["unused"].tolist() == [1, 1, 1]


# --- What goes into the targets ---


@pytest.fixture
def targets_of(train, monkeypatch):
    """Train, and return the arguments of each call of lambda_returns, each with its network."""

    def run(envs, network=SmallNetwork, **arguments):
        calls, networks = [], []

        def make_network(envs):
            networks.append(network(envs))
            return networks[0]

        def spy(*given):
            calls.append((copy.deepcopy(networks[0]), *(one.clone() for one in given[:4])))
            return lambda_returns(*given)

        with monkeypatch.context() as patch:
            patch.setattr(pqn_abs, "lambda_returns", spy)
            train(envs, make_network, **arguments)
        return calls

    return run


def test_learning_sees_the_sign_of_rewards(targets_of):
    """Guards games of all scales: rewards of -5, 0.5 and 7 are -1, 1 and 1."""
    envs = FakeEnvs(4)
    (call,) = targets_of(envs, total_timesteps=1)
    assert np.array_equal(call[1], np.sign(stacked(envs.steps, "reward")))
    assert set(call[1].unique().tolist()) == {-1, 0, 1}


class TypedEnvs(FakeEnvs):
    """Observations of one type, and the last ones of another or as an array of objects."""

    def __init__(self, kind, last_kind, *args, **options):
        super().__init__(*args, **options)
        self.kind = kind
        self.last_kind = last_kind

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(self.kind), info

    def step(self, actions):
        obs, *rest, info = super().step(actions)
        last = info["final_obs"].astype(self.last_kind)
        if self.last_kind is object:  # as in Gymnasium's own vectors: None where nothing ended
            last = np.full(self.num_envs, None)
            for i in np.flatnonzero(self.steps[-1].truncated):
                last[i] = info["final_obs"][i].astype(np.float32)
        return obs.astype(self.kind), *rest, info | {"final_obs": last}


class DoubleNetwork(SmallNetwork):
    """Takes float64 as it comes, and nothing else."""

    def __init__(self, envs):
        super().__init__(envs)
        self.double()

    def forward(self, frames):
        return self.head(torch.tanh(self.hidden(frames.flatten(1) / 255)))


class LookupNetwork(nn.Module):
    """Takes int64 as it comes, and nothing else."""

    def __init__(self, envs):
        super().__init__()
        self.table = nn.Embedding(256, 4)

    def forward(self, frames):
        assert frames.dtype == torch.int64
        return self.table(frames).sum(1)


@pytest.mark.parametrize(
    "kind, last_kind, network",
    [
        (np.uint8, np.uint8, SmallNetwork),
        (np.float64, np.float32, DoubleNetwork),
        (np.float64, object, DoubleNetwork),
        (np.int64, np.int32, LookupNetwork),
        (np.int64, object, LookupNetwork),
    ],
)
def test_a_cut_episode_bootstraps_from_its_own_last_observation(
    targets_of, kind, last_kind, network
):
    """Guards time limits: the next episode's first observation says nothing about the state."""
    envs = TypedEnvs(kind, last_kind, 8, terminate=0.0, truncate=0.3)
    calls = targets_of(envs, network, total_timesteps=1)
    learned, _, next_values, terminated, truncated = calls[0]
    assert not terminated.any() and truncated.sum() > 30
    frames = torch.from_numpy(stacked(envs.steps, "true_next").astype(kind))
    with torch.no_grad():
        expected = learned(frames.flatten(0, 1)).amax(1).view(32, 8)
    torch.testing.assert_close(next_values, expected.float())


# --- Networks that behave in another way while they learn ---


class Layered(SmallNetwork):
    """A layer between body and head; notes for each call its mode and whether it is for learning.

    A layer with dropout gives one state two greedy actions; a batch norm that takes its statistics
    from the batch at hand gives one state as many as there are batches.
    """

    def __init__(self, envs, layer):
        super().__init__(envs)
        self.layer = layer
        self.calls = []

    def forward(self, frames):
        self.calls.append((torch.is_grad_enabled(), self.training))
        x = frames.flatten(1) / 255
        return self.head(self.layer(torch.tanh(self.hidden(x))))


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(16, momentum=1e-9)], ids=["dropout", "batch-norm"]
)
def test_networks_act_and_are_measured_in_eval_mode(train, layer):
    """Guards BD, acting and targets from dropout and batches; learning has them."""
    made = []

    def make_network(envs):
        made.append(Layered(envs, copy.deepcopy(layer)))
        return made[0]

    envs = FakeEnvs(8)
    arguments = {"start_e": 0.0, "end_e": 0.0, "learning_rate": 1e-9, "adapt_frequency": 1}
    folder = train(envs, make_network, total_timesteps=2000, **arguments)
    divergences = column(folder / "metrics.csv", "abs/behavioral_divergence")
    assert len(divergences) > 5 and set(divergences) == {0.0}
    (network,) = made
    is_learning = [learning for learning, _ in network.calls[1:]]  # the first is for the shape
    assert is_learning == [training for _, training in network.calls[1:]]
    assert sum(is_learning) == column(folder / "metrics.csv", "charts/updates", int)[-1]
    with torch.no_grad():
        obs = torch.from_numpy(stacked(envs.steps, "obs")).flatten(0, 1)
        greedy = network.eval()(obs).argmax(1)
    assert greedy.tolist() == stacked(envs.steps, "action").flatten().tolist()


# --- The learning rate ---


@pytest.fixture
def rates():
    """A list that gets the learning rate of each gradient step."""
    seen = []

    def note(optimizer, *given):
        seen.append(optimizer.param_groups[0]["lr"])

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_the_learning_rate_falls_with_the_steps_or_stays(train, rates, anneal_lr):
    """Guards --anneal-lr: a line to 0 at total_timesteps, and never below in the last rollout.

    L changes here, so that the share of steps is not the share of iterations.
    """
    arguments = {"total_timesteps": 1000, "adapt_frequency": 1, "beta": 1.0}
    folder = train(FakeEnvs(4), learning_rate=0.02, anneal_lr=anneal_lr, **arguments)
    steps = column(folder / "metrics.csv", "global_step", int)
    assert steps[-1] > 1000 and len(set(np.diff(steps))) > 1
    begins = np.array([0, *steps[:-1]])
    expected = 0.02 * (1 - begins / 1000) if anneal_lr else np.full(len(steps), 0.02)
    assert rates == pytest.approx(np.repeat(expected, 8))  # two epochs of four mini-batches
    assert min(rates) > 0


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


@pytest.mark.parametrize("first", [-1, 0, 5])
def test_actions_count_from_where_their_space_starts(watch, first):
    """Guards Discrete(4, start=-1): the environment gets -1 to 2, the network learns 0 to 3."""
    envs = FakeEnvs(3)
    envs.single_action_space = Discrete(4, start=first)
    seen = watch(envs, start_e=0.5, **ONE)
    actions = stacked(envs.steps, "action")
    assert set(actions.flatten().tolist()) == set(range(first, first + 4))
    for step in envs.steps:
        step.action = step.action - first
    second_computation(seen.network, envs.steps, seen.orders, seen.args)
    learned = load(seen.folder)["network"]
    for name, expected in seen.network.state_dict().items():
        torch.testing.assert_close(learned[name].double(), expected, rtol=1e-6, atol=1e-6)


def test_each_iteration_explores_anew(train):
    """Guards the seed of an iteration: two iterations do not draw the same random actions."""
    envs = FakeEnvs(4)
    train(envs, total_timesteps=256, start_e=1.0, end_e=1.0, adapt_rollout=False)
    actions = stacked(envs.steps, "action")
    assert not np.array_equal(actions[:32], actions[32:])


@pytest.mark.parametrize("lives", [0, 4])
@pytest.mark.parametrize(
    "kind",
    [
        FakeEnvs,
        ReusedArrays,
        functools.partial(NumberFlags, np.uint8),
        functools.partial(NumberFlags, np.int64),
    ],
    ids=["plain", "reused-arrays", "uint8-flags", "int64-flags"],
)
def test_scores_are_those_of_whole_games(train, lives, kind):
    """Guards the scores: unclipped, and of the whole game where lost lives end the learner's."""
    envs = kind(8, terminate=0.2, truncate=0.02, lives=lives)
    folder = train(envs, total_timesteps=4000, episodic_life=lives > 0)
    if lives:
        assert stacked(envs.steps, "lost_life").sum() > 100
    expected = expected_episodes(envs.steps)
    assert len(expected) > 100
    for row in rows(folder / "metrics.csv"):
        until_now = [score for step, score in expected if step <= int(row["global_step"])]
        mean = np.mean(until_now[-100:])
        assert float(row["charts/episodic_return"]) == pytest.approx(mean)
    assert load(folder)["scores"] == [score for _, score in expected[-100:]]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int8, bool])
def test_scores_do_not_depend_on_the_type_of_rewards(train, kind):
    """Guards sums: float16 rounds them, int8 ends at 127, bool at 1."""

    class Typed(FakeEnvs):
        def step(self, actions):
            obs, _, *rest = super().step(actions)
            reward = np.full(self.num_envs, 100.1).astype(kind)
            self.steps[-1].reward = reward.astype(float)
            return obs, reward, *rest

    envs = Typed(4)
    folder = train(envs, total_timesteps=1)
    assert load(folder)["scores"] == [score for _, score in expected_episodes(envs.steps)]


@pytest.mark.parametrize("episodic_life", [True, False])
def test_fire_follows_a_lost_life(train, episodic_life):
    """Guards games that wait for FIRE, from one rollout to the next too; off, nothing fires."""
    envs = ReusedArrays(8, terminate=0.3, truncate=0.02, lives=5)
    train(envs, total_timesteps=3000, episodic_life=episodic_life)
    lost_life = stacked(envs.steps[:-1], "lost_life")
    after = stacked(envs.steps[1:], "action")
    assert lost_life.sum() > 300
    fired = set(after[lost_life].tolist())
    assert fired == ({envs.fire_action} if episodic_life else {0, 1, 2, 3})
    assert set(after[~lost_life].tolist()) == {0, 1, 2, 3}


# --- Adapting ---


@pytest.fixture
def measured(train, monkeypatch):
    """Train, and return the old and the new weights of each measurement of BD, and the folder."""

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


@pytest.mark.parametrize("frequency", [1, 3, 4])
def test_divergence_is_measured_at_every_kth_iteration(train, frequency):
    """Guards K, and that the first iterations, with hardly an update behind them, do not count."""
    folder = train(FakeEnvs(4), adapt_frequency=frequency, **FIXED)
    cells = [row["abs/behavioral_divergence"] for row in rows(folder / "metrics.csv")]
    assert [i for i, cell in enumerate(cells, 1) if cell] == list(range(frequency, 10, frequency))


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


def test_measuring_does_not_change_what_is_learned(train):
    """Guards a seed for each iteration: plain PQN is the same, bit for bit, with and without BD."""
    often = train(FakeEnvs(4), adapt_frequency=1, **FIXED)
    never = train(FakeEnvs(4), adapt_frequency=1000, **FIXED)
    assert same_weights(load(often)["network"], load(never)["network"])
    assert not column(never / "metrics.csv", "abs/behavioral_divergence")


@pytest.mark.parametrize("batch, expected", [(512, 50), (32, 32)])
def test_reference_states_are_a_sample_of_the_rollout(measured, batch, expected):
    """Guards B_ref: M different states, from all over the rollout; all of it where it is short."""
    envs = FakeEnvs(batch // 16)
    arguments = {"num_steps": 16, "reference_states": 50, "total_timesteps": 1}
    ((_, _, states),), _ = measured(envs, adapt_frequency=1, **arguments)
    rollout = stacked(envs.steps, "obs").reshape(-1, 6).tolist()
    drawn = [rollout.index(state) for state in states.tolist()]
    assert len(drawn) == len(set(drawn)) == expected
    assert max(drawn) > 0.8 * batch and min(drawn) < 0.2 * batch


def driven(monkeypatch, train, divergences, **arguments):
    """Train with these measurements of BD; returns the table's rollout lengths and updates."""
    given = iter(divergences)
    with monkeypatch.context() as patch:
        patch.setattr(pqn_abs, "behavioral_divergence", lambda *networks: next(given))
        folder = train(FakeEnvs(2), num_minibatches=2, **arguments)
    table = folder / "metrics.csv"
    lengths = column(table, "abs/rollout_length", int)
    assert column(table, "abs/batch_size", int) == [2 * length for length in lengths]
    assert column(table, "global_step", int) == (2 * np.cumsum(lengths)).tolist()
    return lengths, column(table, "charts/updates", int)


@pytest.mark.parametrize("divergence, expected", [(0.0, 64), (0.3, 35), (1.0, 16)])
def test_rollouts_go_where_the_divergence_leads(train, monkeypatch, divergence, expected):
    """Guards the direction: stable is long. From 32, a tenth of the way with each measurement."""
    arguments = {"total_timesteps": 5000, "adapt_frequency": 1}
    lengths, updates = driven(monkeypatch, train, [divergence] * 500, **arguments)
    assert lengths[0] == 32 and abs(lengths[-1] - expected) <= 1
    assert lengths == sorted(lengths, reverse=expected < 32)
    assert np.abs(np.diff(lengths)).max() <= 4
    assert updates == list(range(4, 4 * len(lengths) + 1, 4))  # two epochs of two, whatever L


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
    assert load(folder)["adaptive_length"] == pytest.approx(adaptive_length)


def test_fixed_rollouts_stay(train, monkeypatch):
    """Guards the baseline: with --no-adapt-rollout, BD is measured and changes nothing."""
    arguments = {"total_timesteps": 500, "adapt_frequency": 1, "num_steps": 10}
    lengths, _ = driven(monkeypatch, train, [0.0] * 500, adapt_rollout=False, **arguments)
    assert lengths == [10] * 25


@pytest.mark.parametrize("length, expected", [(16, 3), (32, 3), (33, 3), (43, 4), (64, 6)])
def test_longer_rollouts_can_have_more_epochs(train, length, expected):
    """Guards --scale-epochs: gradient steps for each transition stay much the same above L = 32."""
    arguments = {"num_steps": length, "scale_epochs": True, "update_epochs": 3}
    folder = train(FakeEnvs(4), num_minibatches=2, total_timesteps=1, **arguments)
    assert column(folder / "metrics.csv", "charts/updates") == [expected * 2]


# --- Seeds ---


class Drawing(FakeEnvs):
    """Its observations come from a generator that it does not own."""

    draw = None

    def frames(self):
        return np.array([[self.draw() for _ in range(6)] for _ in range(self.num_envs)], np.uint8)


def draws_from_python(envs):
    return random.randrange(256)


def draws_from_numpy(envs):
    return np.random.randint(256)


def draws_from_its_space(envs):
    return envs.single_observation_space.sample()[0]


def draws_from_its_vectors_space(envs):
    return envs.observation_space.sample()[0, 0]


def draws_actions(envs):
    return envs.single_action_space.sample() + 4 * envs.action_space.sample()[0]


DRAWS = [
    draws_from_python,
    draws_from_numpy,
    draws_from_its_space,
    draws_from_its_vectors_space,
    draws_actions,
]


@pytest.mark.parametrize("draw", DRAWS)
def test_environments_that_draw_elsewhere_are_seeded(train, draw):
    """Guards reproducibility where an environment uses Python's, NumPy's or a space's generator."""
    kind = type("Drawn", (Drawing,), {"draw": draw})
    first, again, other = kind(2), kind(2), kind(2)
    for envs, seed in ((first, 1), (again, 1), (other, 2)):
        train(envs, seed=seed, total_timesteps=300)
    assert np.array_equal(stacked(first.steps, "obs"), stacked(again.steps, "obs"))
    assert not np.array_equal(stacked(first.steps, "obs"), stacked(other.steps, "obs"))


class OneGame(gymnasium.Env):
    """A single environment that draws from its action space, which Gymnasium does not seed."""

    observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)

    def __init__(self):
        self.action_space = Discrete(4)
        self.drawn = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(6, np.uint8), {}

    def step(self, action):
        self.drawn.append(int(self.action_space.sample()))
        return np.full(6, self.drawn[-1], np.uint8), 1.0, False, len(self.drawn) % 9 == 0, {}


def test_spaces_of_single_environments_are_seeded(train):
    """Guards Gymnasium's vector of single environments, each with a space and a seed of its own."""
    drawn = []
    for wrapper in (None, None, gymnasium.wrappers.vector.RecordEpisodeStatistics):
        games = [OneGame() for _ in range(3)]
        makers = [lambda game=game: game for game in games]
        envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        train(wrapper(envs) if wrapper else envs, total_timesteps=200)
        drawn.append([game.drawn for game in games])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({tuple(game) for game in drawn[0]}) == 3
