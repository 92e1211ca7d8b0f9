import copy
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from catch import Catch
from helpers import forward_view
from hypothesis import given, settings
from hypothesis import strategies as st

import pqn_abs
from pqn_abs import behavioral_divergence, lambda_returns, linear_schedule, rollout_length

THRESHOLDS, LENGTHS = (0.05, 0.95), (16, 64)
shares = st.floats(0, 1)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return pqn_abs.QNetwork(Catch(1))


@pytest.fixture(scope="module")
def frames():
    return torch.randint(256, (300, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# --- Q(λ) targets ---


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), st.integers(1, 4), shares, shares, shares, st.integers(0, 2**32 - 1))
def test_targets_equal_the_forward_view(length, num_envs, gamma, q_lambda, ends, seed):
    rng = np.random.default_rng(seed)
    rewards, next_values = rng.normal(size=(2, length, num_envs))
    terminated, truncated = rng.random((2, length, num_envs)) < ends
    rollout = rewards, next_values, terminated, truncated
    returns = lambda_returns(*map(torch.from_numpy, rollout), gamma, q_lambda)
    np.testing.assert_allclose(returns.numpy(), forward_view(*rollout, gamma, q_lambda), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "ending, expected", [("terminated", 1.0), ("truncated", 1 + 0.9 * 5), ("neither", 1 + 0.9 * 9)]
)
def test_target_of_a_step_that_ends_its_episode(ending, expected):
    """Monte Carlo, two steps: the second pays 4 and is worth 4 + 0.9 x 50/9 = 9; the value after the first is 5."""
    terminated, truncated = (torch.tensor([[ending == name], [False]]) for name in ("terminated", "truncated"))
    rewards, next_values = torch.tensor([[1.0], [4.0]]), torch.tensor([[5.0], [50 / 9]])
    returns = lambda_returns(rewards, next_values, terminated, truncated, 0.9, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[expected], [9.0]]))


def test_targets_of_float32_values_are_float32():
    flags = torch.zeros((3, 2), dtype=torch.bool)
    assert lambda_returns(torch.ones(3, 2), torch.ones(3, 2), flags, flags, 0.99, 0.65).dtype == torch.float32


# --- Behavioural Divergence ---


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_divergence_is_the_share_of_changed_greedy_actions(num_states, chunk_size, seed):
    generator = torch.Generator().manual_seed(seed)
    q, old_q = torch.randn((2, num_states, 3), generator=generator)
    changed = sum(q[i].tolist().index(max(q[i])) != old_q[i].tolist().index(max(old_q[i])) for i in range(num_states))
    divergence = behavioral_divergence(q.__getitem__, old_q.__getitem__, torch.arange(num_states), chunk_size)
    assert divergence == pytest.approx(changed / num_states)


def test_divergence_is_one_when_every_greedy_action_changed():
    def greedy(action):
        return lambda states: F.one_hot(torch.full((len(states),), action), 3)

    assert behavioral_divergence(greedy(0), greedy(2), torch.zeros(1000, 6), chunk_size=300) == 1.0


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_divergence_of_a_network_from_its_copy_is_exactly_zero(network, frames, precision):
    """300 states are no multiple of the chunk: the last chunk, of another size, may round otherwise, but in both."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        assert behavioral_divergence(network, copy.deepcopy(network), frames, chunk_size=128) == 0.0


# --- Rollout length, Eq. 4 ---


@pytest.mark.parametrize(
    "divergence, expected",
    [(0.05, 64), (0.95, 16), (math.sqrt(0.05 * 0.95), 40), (0.05**0.75 * 0.95**0.25, 52), (0.0, 64), (1.0, 16)],
    ids=["stable", "volatile", "geometric middle", "first quarter", "below the thresholds", "above them"],
)
def test_rollout_length_follows_the_logarithm_of_the_divergence(divergence, expected):
    assert rollout_length(divergence, 20.0, THRESHOLDS, LENGTHS, beta=1.0) == pytest.approx(expected)


@given(shares, shares, st.floats(16, 64), shares)
def test_rollout_never_gets_longer_from_more_divergence_and_stays_in_its_range(low, high, current, beta):
    low, high = sorted((low, high))
    longer, shorter = (rollout_length(d, current, THRESHOLDS, LENGTHS, beta) for d in (low, high))
    assert 16 - 1e-9 <= shorter <= longer + 1e-9 and longer <= 64 + 1e-9


@pytest.mark.parametrize("beta, expected", [(0.0, 32.0), (0.1, 0.9 * 32 + 0.1 * 64), (1.0, 64.0)])
def test_smoothing_goes_the_share_beta_of_the_way(beta, expected):
    assert rollout_length(0.01, 32.0, THRESHOLDS, LENGTHS, beta) == pytest.approx(expected)


# --- Exploration ---


@pytest.mark.parametrize("t, expected", [(0, 1.0), (50, 0.55), (100, 0.1), (101, 0.1), (10**9, 0.1)])
def test_schedule_is_a_line_and_then_its_end(t, expected):
    assert linear_schedule(1.0, 0.1, 100, t) == pytest.approx(expected)


def test_schedule_without_duration_is_its_end():
    assert linear_schedule(1.0, 0.1, 0, 1) == pytest.approx(0.1)


# --- The network ---


def test_network_has_the_papers_layers(network):
    """Convolutions of 32, 64 and 64 channels, 512 hidden units, a LayerNorm after each, and the head."""
    convolutions = 32 * (4 * 8 * 8 + 1) + 64 * (32 * 4 * 4 + 1) + 64 * (64 * 3 * 3 + 1)
    norms = 2 * (32 * 20 * 20 + 64 * 9 * 9 + 64 * 7 * 7 + 512)
    hidden, head = 512 * (64 * 7 * 7 + 1), 3 * (512 + 1)
    assert sum(p.numel() for p in network.parameters()) == convolutions + norms + hidden + head


def test_network_is_three_plain_convolutions_and_two_layers_of_pixels_from_0_to_1(network, frames):
    """All in float64."""
    network = copy.deepcopy(network)
    nn.init.normal_(network.conv1.bias)  # with biases of 0, LayerNorm would hide the scale of the pixels
    w = {name: weight.double() for name, weight in network.state_dict().items()}

    def norm_relu(x, name):
        return F.layer_norm(x, x.shape[1:], w[f"{name}.weight"], w[f"{name}.bias"]).relu()

    x = frames[:8].double() / 255
    for i, stride in enumerate((4, 2, 1), 1):
        x = F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], stride)
        x = norm_relu(x.movedim(1, -1), f"norm{i}").movedim(-1, 1)
    x = norm_relu(F.linear(x.movedim(1, -1).flatten(1), w["hidden.weight"], w["hidden.bias"]), "norm4")
    expected = F.linear(x, w["head.weight"], w["head.bias"])
    torch.testing.assert_close(network(frames[:8]).double(), expected, rtol=1e-3, atol=1e-4)


def test_network_values_each_frame_by_itself(network, frames):
    one_by_one = torch.cat([network(frame[None]) for frame in frames[:8]])
    assert one_by_one.shape == (8, 3)
    torch.testing.assert_close(network(frames[:8]), one_by_one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one_by_one[0], one_by_one[1])


def test_network_keeps_its_head_in_float32_under_autocast(network, frames):
    """Rounded to bfloat16, nearby Q-values would tie, and argmax would take the lower action."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q = network(frames[:8])
    assert q.dtype == torch.float32
    assert not torch.equal(q, q.bfloat16().float())


def test_gradients_of_chunks_add_up_to_the_gradient_of_the_minibatch(network, frames):
    actions, returns = torch.arange(len(frames)) % 3, torch.linspace(-1, 1, len(frames))

    def gradient(chunk_size):
        network.zero_grad()
        for chunk in torch.arange(len(frames)).split(chunk_size):
            q = network(frames[chunk]).gather(1, actions[chunk, None]).squeeze(1)
            ((q - returns[chunk]).square().sum() / len(frames)).backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()])

    torch.testing.assert_close(gradient(64), gradient(len(frames)), rtol=1e-3, atol=1e-5)
