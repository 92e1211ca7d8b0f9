"""ppo_abs.py and p3o_abs.py: their functions, and whole iterations computed a second time. They share the rest with
pqn_abs.py, and it is tested there."""

import copy
import math
import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from catch import Catch
from helpers import Bandit, Noise, column, forward_view, load, record, rows, same, without_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast import lives

import p3o_abs
import ppo_abs
from p3o_abs import effective_sample_size, p3o_loss
from ppo_abs import clipped_surrogate, clipped_value_loss, gae, kl_divergence, mean_kl_divergence

SCRIPTS = [ppo_abs, p3o_abs]
shares = st.floats(0, 1)
logits = st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=6)


def log_probabilities(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def gradient(function, x):
    """Of the sum of what function makes of x."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


# --- Advantages ---


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), st.integers(1, 4), shares, shares, shares, st.integers(0, 2**32 - 1))
def test_advantages_are_those_of_the_forward_view(length, num_envs, gamma, gae_lambda, ends, seed):
    """An advantage is the λ-return, the weighted mean of all n-step returns, less the value."""
    rng = np.random.default_rng(seed)
    rewards, values, last_values = rng.normal(size=(3, length + 1, num_envs))
    rewards, values, following = rewards[:-1], values[:-1], values[1:]
    terminated, truncated = rng.random((2, length, num_envs)) < ends
    next_values = np.where(truncated, last_values[:-1], following)  # a cut episode ends in a state of its own
    rollout = map(torch.from_numpy, (rewards, values, next_values, terminated, truncated))
    expected = forward_view(rewards, next_values, terminated, truncated, gamma, gae_lambda) - values
    np.testing.assert_allclose(gae(*rollout, gamma, gae_lambda).numpy(), expected, rtol=1e-5, atol=1e-6)


# --- PPO's losses ---


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        (1.05, 2.0, -2.1, -2.1),  # inside: ρ A, and its gradient with respect to log π is ρ A too
        (0.95, -2.0, 1.9, 1.9),
        (1.3, 2.0, -2.2, 0.0),  # outside, where the advantage would push further: clipped
        (0.7, -2.0, 1.8, 0.0),
        (0.7, 2.0, -1.4, -1.4),  # outside, where the advantage pulls back: not clipped
        (1.3, -2.0, 2.6, 2.6),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_at_hand_worked_points(ratio, advantage, loss, slope):
    old, advantage = torch.tensor([-1.2], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    new = old + math.log(ratio)
    assert clipped_surrogate(new, old, advantage, 0.1).item() == pytest.approx(loss)
    assert gradient(lambda x: clipped_surrogate(x, old, advantage, 0.1), new).item() == pytest.approx(slope)


@pytest.mark.parametrize("sign", [1, -1])
def test_surrogate_at_the_clip(sign):
    """Continuous there, with a gradient between those of its two sides."""
    old, advantage = torch.zeros(1, dtype=torch.float64), torch.tensor([2.0 * sign], dtype=torch.float64)
    at = torch.tensor([math.log(1 + 0.1 * sign)], dtype=torch.float64)
    losses = [clipped_surrogate(at + shift, old, advantage, 0.1).item() for shift in (-1e-9, 0, 1e-9)]
    assert losses == pytest.approx([-2 * sign * (1 + 0.1 * sign)] * 3, abs=1e-7)
    slope = gradient(lambda x: clipped_surrogate(x, old, advantage, 0.1), at).item()
    assert 0 <= -sign * slope <= 2.2 + 1e-9


@pytest.mark.parametrize(
    "value, loss, slope",
    [
        (1.05, 0.5 * 0.95**2, -0.95),  # V_old is 1 and the return 2
        (1.3, 0.5 * 0.9**2, 0.0),  # past V_old + ε, nearer to the return: the clipped one is the larger
        (0.7, 0.5 * 1.3**2, -1.3),  # past V_old - ε, farther from it: the other is
    ],
)
def test_value_loss_at_hand_worked_points(value, loss, slope):
    value, old, target = (torch.tensor([x], dtype=torch.float64) for x in (value, 1.0, 2.0))
    assert clipped_value_loss(value, old, target, 0.1).item() == pytest.approx(loss)
    assert gradient(lambda x: clipped_value_loss(x, old, target, 0.1), value).item() == pytest.approx(slope)


# --- KL divergence ---


def test_kl_divergence_by_hand_and_in_its_direction():
    p, q = log_probabilities([[0.5, 0.5]]), log_probabilities([[0.25, 0.75]])
    assert kl_divergence(p, q).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(q, p).item() == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))
    old, new = (lambda states, x=x: x.expand(len(states), 2) for x in (p, q))
    assert mean_kl_divergence(new, old, torch.zeros(5, 3)) == pytest.approx(kl_divergence(p, q).item())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_kl_divergence_is_the_mean_log_ratio_of_samples(seed):
    generator = torch.Generator().manual_seed(seed)
    log_p, log_q = torch.randn((2, 6), generator=generator, dtype=torch.float64).log_softmax(-1)
    actions = torch.multinomial(log_p.exp(), 50_000, replacement=True, generator=generator)
    ratios = (log_p - log_q)[actions]
    assert abs(ratios.mean() - kl_divergence(log_p, log_q)) < 5 * ratios.std() / len(ratios) ** 0.5 + 1e-12


@settings(deadline=None)
@given(logits, logits)
def test_kl_divergence_is_positive_but_for_equal_policies(a, b):
    a, b = (torch.tensor(rows[:1], dtype=torch.float32).log_softmax(-1) for rows in (a, b))
    assert kl_divergence(a, a).item() == 0
    assert kl_divergence(a, b).item() >= -1e-6


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_policies_of_equal_networks_do_not_diverge(precision):
    torch.manual_seed(0)
    network = ppo_abs.ActorCritic(Catch(1))
    frames = torch.randint(256, (40, 4, 84, 84), dtype=torch.uint8)
    policies = [lambda states, net=net: net(states)[0] for net in (network, copy.deepcopy(network))]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        assert mean_kl_divergence(*policies, frames, chunk_size=16) == 0
        assert ppo_abs.behavioral_divergence(*policies, frames, chunk_size=16) == 0
        outputs = network(frames)
    assert [output.dtype for output in outputs] == [torch.float32] * 2
    assert [tuple(output.shape) for output in outputs] == [(40, 3), (40,)]


def test_network_is_three_plain_convolutions_and_a_layer_of_pixels_from_0_to_1():
    """The first one is computed over blocks of pixels; here it is not, and all is in float64."""
    torch.manual_seed(0)
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    network = ppo_abs.ActorCritic(Catch(1))
    w = {name: weight.double() for name, weight in network.state_dict().items()}
    x = frames.double() / 255
    for i, stride in enumerate((4, 2, 1), 1):
        x = F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], stride).relu()
    x = F.linear(x.flatten(1), w["hidden.weight"], w["hidden.bias"]).relu()
    logits, values = network(frames)
    expected = F.linear(x, w["actor.weight"], w["actor.bias"])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-6)
    expected = F.linear(x, w["critic.weight"], w["critic.bias"])[:, 0]
    torch.testing.assert_close(values.double(), expected, rtol=1e-3, atol=1e-5)


def test_first_policy_is_nearly_uniform():
    torch.manual_seed(0)
    frames = torch.randint(256, (40, 4, 84, 84), dtype=torch.uint8)
    policy = ppo_abs.ActorCritic(Catch(1))(frames)[0].softmax(-1)
    assert (policy - 1 / 3).abs().max() < 0.02


# --- P3O's loss ---


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=30), st.floats(-300, 300), st.randoms())
def test_effective_sample_size_is_bounded_and_ignores_scale_and_order(log_ratios, shift, random):
    x = torch.tensor(log_ratios, dtype=torch.float64)
    ess = effective_sample_size(x).item()
    assert 1 / len(x) - 1e-9 <= ess <= 1 + 1e-9
    assert effective_sample_size(x + shift).item() == pytest.approx(ess)
    shuffled = torch.tensor(random.sample(log_ratios, len(x)), dtype=x.dtype)
    assert effective_sample_size(shuffled).item() == pytest.approx(ess)
    ratios = np.exp(log_ratios)
    assert ess == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-6)


def test_effective_sample_size_at_its_ends():
    assert effective_sample_size(torch.zeros(7)).item() == 1
    assert effective_sample_size(torch.tensor([3.0, 3.0])).item() == 1
    assert effective_sample_size(torch.tensor([50.0, 0.0, 0.0, 0.0])).item() == pytest.approx(1 / 4)
    half = torch.tensor([0.0, 0.0, -1000.0, -1000.0])  # two count, two do not
    assert effective_sample_size(half).item() == pytest.approx(1 / 2)


def test_fresh_data_gives_the_score_function_gradient():
    """ρ = 1: L = mean(-log π A), and nothing pulls back."""
    x = torch.randn((6, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actions, advantages = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0]).double()
    behavior = x.log_softmax(-1)

    def loss(x):
        return p3o_loss(x.log_softmax(-1), behavior, actions, advantages)[0]

    _, ess, kl, capped = p3o_loss(behavior, behavior, actions, advantages)
    assert (ess, kl, capped) == (1, 0, 0)
    chosen = torch.nn.functional.one_hot(actions, 3).double()
    expected = -(advantages[:, None] * (chosen - x.softmax(-1))) / 6  # ∇ log π(a) = 1[a] - π
    torch.testing.assert_close(gradient(loss, x), expected)
    assert loss(x).item() == pytest.approx(-(behavior[range(6), actions] * advantages).mean().item())


def stale_batch():
    """Four samples whose first ratio is 90 times the others: π_b(a) = 0.01 and π(a) = 0.9, and twice 0.5."""
    behavior = log_probabilities([[0.01, 0.99], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    policy = log_probabilities([[0.9, 0.1], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    return policy, behavior, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64)


def test_one_dominating_ratio_by_hand():
    """ρ = (90, 1, 1, 1): e_B = 93² / (4 · 8103), just above 1/4, which caps all four."""
    policy, behavior, actions, advantages = stale_batch()
    loss, ess, kl, capped = p3o_loss(policy, behavior, actions, advantages)
    e = 93**2 / (4 * 8103)
    pull = (0.9 * math.log(0.9 / 0.01) + 0.1 * math.log(0.1 / 0.99)) / 4
    assert ess.item() == pytest.approx(e) and 0.25 < e < 0.27
    assert kl.item() == pytest.approx(pull) and capped.item() == 1
    score = -e * (math.log(0.9) + 3 * math.log(0.5)) / 4
    assert loss.item() == pytest.approx(score + (1 - e) * pull)


def test_capped_sample_has_a_gradient_where_ppo_has_none():
    policy, behavior, actions, advantages = stale_batch()
    e = 93**2 / (4 * 8103)
    p3o = gradient(lambda x: p3o_loss(x.log_softmax(-1), behavior, actions, advantages)[0], policy)
    pi = policy.exp()
    score = -e * torch.tensor([[0.1, -0.1]], dtype=torch.float64)  # of the first sample: ∇ log π(a) = 1[a] - π
    kl = pi[:1] * (policy[:1] - behavior[:1] - kl_divergence(policy[:1], behavior[:1]))
    torch.testing.assert_close(p3o[:1], (score + (1 - e) * kl) / 4)
    ppo = gradient(lambda x: clipped_surrogate(x.log_softmax(-1)[:, 0], behavior[:, 0], advantages, 0.1).mean(), policy)
    assert ppo[0].abs().max() == 0 < p3o[0].abs().max()


@settings(deadline=None)
@given(logits, st.integers(0, 2**32 - 1))
def test_gradient_of_the_kl_divergence(rows, seed):
    """∇ KL(π ‖ π_b) with respect to the logits is π_j (log π_j / π_b,j - KL)."""
    x = torch.tensor(rows, dtype=torch.float64)
    behavior = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    log_pi = x.log_softmax(-1)
    expected = log_pi.exp() * (log_pi - behavior - kl_divergence(log_pi, behavior)[:, None])
    torch.testing.assert_close(gradient(lambda x: kl_divergence(x.log_softmax(-1), behavior), x), expected)


@settings(deadline=None)
@given(logits, st.integers(0, 2**32 - 1))
def test_gradient_takes_weights_as_constants(rows, seed):
    """Neither the capped ratios nor 1 - e_B are differentiated."""
    x, generator = torch.tensor(rows, dtype=torch.float64), torch.Generator().manual_seed(seed)
    behavior = torch.randn(x.shape, dtype=x.dtype, generator=generator).log_softmax(-1)
    actions = torch.randint(4, (len(x),), generator=generator)
    advantages = torch.randn(len(x), dtype=x.dtype, generator=generator)
    ratios = (x.log_softmax(-1) - behavior)[range(len(x)), actions].exp().numpy()
    e = ratios.sum() ** 2 / (len(x) * (ratios**2).sum())
    weights = torch.from_numpy(np.minimum(ratios, e))

    def plain(x):
        log_pi = x.log_softmax(-1)
        return -(weights * log_pi[range(len(x)), actions] * advantages).mean() + (1 - e) * (
            log_pi.exp() * (log_pi - behavior)
        ).sum() / len(x)

    def ours(x):
        return p3o_loss(x.log_softmax(-1), behavior, actions, advantages)[0]

    torch.testing.assert_close(gradient(ours, x), gradient(plain, x), rtol=1e-6, atol=1e-9)


# --- Iterations, once more: from the definitions, in float64 ---


class PlainAdam:
    """Adam (Kingma and Ba, 2015, Algorithm 1) with its usual constants, but ε = 1e-5."""

    def __init__(self, parameters):
        self.parameters, self.t = parameters, 0
        self.m, self.v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    def step(self, gradients, lr):
        self.t += 1
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * m / (1 - 0.9**self.t) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-5)


def policy_loss(script, new, old, actions, advantages, args):
    """Sample by sample; new and old are log-probabilities of all actions."""
    n = range(len(actions))
    ratios = (new - old)[n, actions].exp()
    if script is ppo_abs:
        low, high = 1 - args.clip_coef, 1 + args.clip_coef
        clips = [min(r * a, min(max(r, low), high) * a) for r, a in zip(ratios, advantages, strict=True)]
        return -sum(clips) / len(clips)
    fixed = ratios.detach()
    e = fixed.sum() ** 2 / (len(n) * (fixed**2).sum())
    terms = [-min(r, e) * new[i, actions[i]] * advantages[i] for i, r in enumerate(fixed)]
    return sum(terms) / len(terms) + (1 - e) * (new.exp() * (new - old)).sum() / len(n)


def second_computation(script, network, steps, orders, args):
    """Updates network (float64) through all iterations; returns for each the mean losses of policy and value."""
    parameters, logged, kept = list(network.parameters()), [], []
    optimizer = PlainAdam(parameters)
    batch = args.num_steps * args.num_envs
    for iteration in range(len(steps) // args.num_steps):
        rollout = steps[iteration * args.num_steps : (iteration + 1) * args.num_steps]
        names = "reward true_next terminated truncated".split()
        reward, true_next, terminated, truncated = (np.stack([step[name] for step in rollout]) for name in names)
        obs = torch.from_numpy(np.concatenate([step["obs"] for step in rollout]))
        actions = torch.from_numpy(np.concatenate([step["action"] for step in rollout]))
        with torch.no_grad():
            scores, values = network(obs)
            next_values = network(torch.from_numpy(true_next).flatten(0, 1))[1].numpy().reshape(reward.shape)
        flags = terminated, truncated, args.gamma, args.gae_lambda
        returns = torch.from_numpy(forward_view(np.sign(reward), next_values, *flags).flatten())
        kept.append([obs, actions, scores - scores.logsumexp(1, keepdim=True), returns - values, returns, values])
        kept = kept[-1 - getattr(args, "replay_rollouts", 0) :]
        data = [torch.cat(tensors) for tensors in zip(*kept, strict=True)]
        lr, losses = args.learning_rate * (1 - iteration * batch / args.total_timesteps), []
        for _ in range(args.update_epochs):
            for part in np.array_split(orders.pop(0), args.num_minibatches):
                obs, actions, old, advantages, returns, values = (tensor[part] for tensor in data)
                scores, value = network(obs)
                new = scores - scores.logsumexp(1, keepdim=True)
                advantages = (advantages - advantages.mean()) / (advantages.numpy().std() + 1e-8)
                policy = policy_loss(script, new, old, actions, advantages, args)
                errors = [(value - returns) ** 2]
                if script is ppo_abs:
                    near = values + (value - values).clip(-args.clip_coef, args.clip_coef)
                    errors.append((near - returns) ** 2)
                value_loss = torch.stack(errors).amax(0).mean() / 2
                entropy = -(new.exp() * new).sum(1).mean()
                loss = policy + args.vf_coef * value_loss - args.ent_coef * entropy
                gradients = torch.autograd.grad(loss, parameters)
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                optimizer.step([g * min(1.0, args.max_grad_norm / norm) for g in gradients], lr)
                losses.append([policy.item(), value_loss.item(), entropy.item(), norm.item()])
        orders[: int(iteration % args.adapt_frequency == 0)] = []  # B_ref's
        logged.append(np.mean(losses, axis=0))
    return logged


ONE = {"num_steps": 7, "num_envs": 3, "num_minibatches": 4, "learning_rate": 0.01, "episodic_life": False}
ONE |= {"adapt_rollout": False, "adapt_frequency": 2, "update_epochs": 2}


@pytest.mark.parametrize(
    "script, envs, arguments",
    [
        *((script, Noise(3), ONE) for script in SCRIPTS),
        *((script, Noise(3, truncate=0.5), ONE | {"gamma": 0.9, "gae_lambda": 0.5}) for script in SCRIPTS),
        *((script, Noise(3), ONE | {"max_grad_norm": 100.0, "ent_coef": 0.3, "vf_coef": 2.0}) for script in SCRIPTS),
        (ppo_abs, Noise(3), ONE | {"update_epochs": 10, "clip_coef": 0.03}),  # much is clipped
        (p3o_abs, Noise(3), ONE | {"replay_rollouts": 1}),
        (p3o_abs, Noise(3), ONE | {"replay_rollouts": 2, "update_epochs": 6, "learning_rate": 0.03}),
    ],
)
def test_iterations_computed_twice(watch, script, envs, arguments):
    seen = watch(envs, script=script, total_timesteps=4 * 21, **arguments)
    orders = [order.numpy() for order in seen.orders]
    logged = second_computation(script, seen.start, seen.envs.steps, orders, seen.args)
    assert orders == []
    for name, parameter in load(seen.folder)["network"].items():
        torch.testing.assert_close(parameter.double(), seen.start.state_dict()[name], rtol=1e-3, atol=1e-5)
    table = rows(seen.folder / "metrics.csv")
    for row, expected in zip(table, logged, strict=True):
        names = "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm"
        assert [float(row[name]) for name in names] == pytest.approx(expected, rel=2e-3, abs=1e-5)
    if script is p3o_abs:
        names = "ess kl_weight capped kl".split()
        ess, weight, capped, kl = (column(seen.folder / "metrics.csv", f"p3o/{name}") for name in names)
        assert [1 - e for e in ess] == pytest.approx(weight) and 1 / 21 < min(ess) and max(ess) < 1
        assert 0 < min(capped) and max(capped) < 1 and min(kl) > 0
    elif arguments["update_epochs"] == 10:
        assert max(column(seen.folder / "metrics.csv", "losses/clipfrac")) > 0.3


@pytest.mark.parametrize("script", SCRIPTS)
def test_divergences_are_those_of_one_iteration(watch, script):
    seen = watch(Noise(3), script=script, total_timesteps=1, **ONE)
    after = copy.deepcopy(seen.first).double()
    states = torch.from_numpy(np.concatenate([step["obs"] for step in seen.envs.steps]))
    old, new = (network(states)[0].log_softmax(-1) for network in (seen.start, after))
    (row,) = rows(seen.folder / "metrics.csv")
    expected = (old.exp() * (old - new)).sum(1).mean().item()
    assert float(row["abs/kl_divergence"]) == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    variance = seen.start(states)[1].var(correction=0).item()
    assert float(row["abs/value_variance"]) == pytest.approx(variance, rel=1e-3)
    assert float(row["abs/behavioral_divergence"]) == pytest.approx((old.argmax(1) != new.argmax(1)).double().mean())


@pytest.mark.parametrize("script", SCRIPTS)
def test_actions_are_drawn_from_the_policy(watch, script):
    seen = watch(Noise(64), script=script, total_timesteps=1, **ONE | {"num_envs": 64, "num_steps": 64})
    obs = torch.from_numpy(np.concatenate([step["obs"] for step in seen.envs.steps]))
    policy = seen.start(obs)[0].softmax(-1)
    counts = np.bincount(np.concatenate([step["action"] for step in seen.envs.steps]), minlength=4)
    expected, spread = policy.sum(0), (policy * (1 - policy)).sum(0).sqrt()
    assert (abs(counts - expected.detach().numpy()) < 4 * spread.detach().numpy()).all()
    assert expected.std() > 2 * spread.mean()  # or uniform draws would pass, too


@pytest.mark.parametrize("script", SCRIPTS)
def test_fire_follows_a_lost_life_and_the_policy_learns_from_its_own_choice(train, monkeypatch, script):
    """What the environment gets is FIRE; what the gradient is of is the action that the policy drew."""
    envs = record(Noise(8, terminate=0.0, truncate=0.0, full_lives=4, lose_life=0.2))
    gathered = []

    def watched(tensor, dim, index, original=torch.Tensor.gather):
        gathered.append(index.flatten().tolist())
        return original(tensor, dim, index)

    monkeypatch.setattr(torch.Tensor, "gather", watched)
    options = ONE | {"num_envs": 8, "num_steps": 64, "update_epochs": 1, "num_minibatches": 1}
    train(envs, script=script, total_timesteps=1, **options | {"episodic_life": True})
    lost, fired = [], []
    for step, following in zip(envs.steps, envs.steps[1:], strict=False):
        life = (step["lives"] < step["lives_before"]) & ~step["terminated"]
        fired += following["action"][life].tolist()
        lost.append(life)
    assert len(fired) > 20 and set(fired) == {envs.fire_action}
    sent = np.concatenate([step["action"] for step in envs.steps])
    assert np.bincount(gathered[0], minlength=4)[2] < np.bincount(sent, minlength=4)[2] - len(fired) / 2


@pytest.mark.parametrize("episodic_life", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_lost_life_ends_the_learners_episode(train, monkeypatch, script, episodic_life):
    envs = record(Noise(8, terminate=0.05, truncate=0.05, full_lives=4, lose_life=0.2))
    seen, gae = [], script.gae
    monkeypatch.setattr(script, "gae", lambda *a: seen.append([x.numpy().copy() for x in a[3:5]]) or gae(*a))
    options = ONE | {"num_envs": 8, "num_steps": 64, "episodic_life": episodic_life}
    train(envs, script=script, total_timesteps=1, **options)
    ((terminated, truncated),) = seen
    names = "terminated truncated lives lives_before".split()
    ended, cut, lives, before = (np.stack([step[name] for step in envs.steps]) for name in names)
    lost = (lives < before) & ~ended & ~cut
    assert lost.sum() > 20 and np.array_equal(truncated, cut)
    assert np.array_equal(terminated, ended | lost if episodic_life else ended)


@pytest.mark.parametrize("script", SCRIPTS)
def test_learning_rate_falls_to_zero(train, script):
    folder = train(Noise(3), script=script, total_timesteps=210, **ONE)
    rates = column(folder / "metrics.csv", "charts/learning_rate")
    assert rates == pytest.approx([0.01 * (1 - i / 10) for i in range(10)])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("measured, expected", [(0.0, 256), (1e9, 64)])
def test_rollouts_go_where_the_kl_divergence_leads(train, monkeypatch, script, measured, expected):
    monkeypatch.setattr(script, "mean_kl_divergence", lambda *args: measured)
    options = {"total_timesteps": 3000, "adapt_frequency": 1, "beta": 0.5, "episodic_life": False}
    folder = train(Noise(2), script=script, adapt_rollout=True, **options)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[0] == 128 and abs(lengths[-1] - expected) <= 2
    assert column(folder / "metrics.csv", "abs/batch_size", int) == [2 * length for length in lengths]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("episodic_life", [False, True])
def test_groups_of_environments_change_no_number(train, script, episodic_life):
    options = {"total_timesteps": 2500, "num_envs": 7, "adapt_frequency": 2, "episodic_life": episodic_life}
    one, three = (train(lives, script=script, env_groups=n, **options) for n in (1, 3))
    for name, parameter in load(one)["network"].items():
        torch.testing.assert_close(parameter, load(three)["network"][name], rtol=1e-3, atol=1e-4)
    for name in ("episodic_return", "episodic_length"):
        assert sorted(column(one / "episodes.csv", name)) == sorted(column(three / "episodes.csv", name))


@pytest.mark.parametrize("script", SCRIPTS)
def test_resumed_run_equals_a_straight_one(train, script):
    class Interrupted(Bandit):
        steps = 0

        def step(self, actions):
            self.steps += 1
            if self.steps == 300:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step(actions)

    options = {"adapt_frequency": 2, "episodic_life": False, "adapt_rollout": True, "total_timesteps": 3000}
    straight = train(Bandit(4), script=script, **options)
    folder = train(Interrupted(4), script=script, **options)
    assert 1200 <= load(folder)["global_step"] < 2000
    args = script.parse_args(["--resume", str(folder / "checkpoint.pt")])
    arguments = {name: value for name, value in vars(args).items() if name != "device"}
    assert train(Bandit(4), script=script, **arguments) == folder
    assert without_clock(folder / "metrics.csv") == without_clock(straight / "metrics.csv")
    assert same(load(folder)["network"], load(straight)["network"])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "option, value", [("gae_lambda", 1.5), ("ent_coef", -1.0), ("vf_coef", math.nan), ("delta_min", 0.0)]
)
def test_values_that_make_no_run(train, tmp_path, capsys, script, option, value):
    with pytest.raises(SystemExit) as error:
        train(Noise(4), script=script, **{option: value})
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and f"--{option.replace('_', '-')} {value}: " in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script, option, value", [(ppo_abs, "clip_coef", 0.0), (p3o_abs, "replay_rollouts", -1)])
def test_value_that_makes_no_run_of_one_script(train, capsys, script, option, value):
    with pytest.raises(SystemExit) as error:
        train(Noise(4), script=script, **{option: value})
    assert error.value.code == 2 and f"--{option.replace('_', '-')} {value}: " in capsys.readouterr().err


# --- Learning ---

BUDGET = {"total_timesteps": 20_000, "num_envs": 8, "num_steps": 32, "rollout_min": 16, "rollout_max": 64}
BUDGET |= {"adapt_frequency": 10, "precision": "auto", "episodic_life": False, "ent_coef": 0.03}


REPLAY = {"replay_rollouts": 4, "update_epochs": 1, "num_steps": 16}


@pytest.mark.parametrize("script, options", [(ppo_abs, {}), (p3o_abs, {}), (p3o_abs, REPLAY)])
def test_catch_is_solved(train, script, options):
    folder = train(Catch(8), script.ActorCritic, script, **BUDGET | options)
    assert max(column(folder / "metrics.csv", "charts/episodic_return")) >= 0.8
