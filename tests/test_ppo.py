"""ppo_abs.py: its functions, and whole runs computed a second time in another way."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import FakeEnvs, column, config, expected_episodes, load, on, stacked
from test_pqn import forward_view

import ppo_abs


class SmallActorCritic(nn.Module):
    """Smooth, so that float32 and float64 agree."""

    def __init__(self, envs, args):
        super().__init__()
        self.actions = int(envs.single_action_space.n)
        self.hidden = nn.Linear(int(np.prod(envs.single_observation_space.shape)), 16)
        self.heads = nn.Linear(16, self.actions + 1)

    def forward(self, frames):
        x = frames.flatten(1).to(self.hidden.weight.dtype) / 255
        outputs = self.heads(torch.tanh(self.hidden(x)))
        return outputs[:, : self.actions], outputs[:, self.actions]


class Masked(SmallActorCritic):
    """Never takes the last action."""

    def forward(self, frames):
        logits, values = super().forward(frames)
        return logits + torch.tensor([0.0, 0.0, 0.0, -math.inf]), values


@pytest.fixture
def train(tmp_path):
    """train(envs, network, **arguments) runs ppo_abs.py on envs and returns the run's folder."""
    count = iter(range(1000))

    def run(envs, network=SmallActorCritic, rollout_length=ppo_abs.rollout_length, **arguments):
        defaults = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults |= {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        defaults |= {"total_timesteps": 84, "num_steps": 7, "rollout_min": 4, "rollout_max": 14}
        defaults |= {"learning_rate": 0.01, "adapt_rollout": False, "adapt_frequency": 2}
        parts = {"make_envs": on(envs)["make_envs"], "ActorCritic": network}
        args = ppo_abs.Args(**(defaults | arguments))
        return ppo_abs.main(args, **parts, rollout_length=rollout_length)

    return run


# --- Pure functions ---


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_advantages_are_lambda_returns_above_the_values(gae_lambda):
    """Guards the backward recursion, at both ends of λ, with endings of each kind."""
    rng = np.random.default_rng(1)
    rewards, values, after_the_end = rng.normal(size=(3, 12, 20))
    terminated, truncated = rng.random((2, 12, 20)) < 0.2
    next_values = np.where(terminated | truncated, after_the_end, np.roll(values, -1, axis=0))
    arrays = rewards, next_values, terminated, truncated
    expected = forward_view(*arrays, 0.9, gae_lambda) - values
    tensors = map(torch.from_numpy, (rewards, values, next_values, terminated, truncated))
    np.testing.assert_allclose(ppo_abs.gae(*tensors, 0.9, gae_lambda), expected, atol=1e-6)


def kl_by_definition(old_logits, logits):
    """The mean of KL(π_old ‖ π), without the actions whose logits are -inf."""
    kept = old_logits[0].isfinite()
    old_log_pi = old_logits[:, kept].double().log_softmax(1)
    log_pi = logits[:, kept].double().log_softmax(1)
    return (old_log_pi.exp() * (old_log_pi - log_pi)).sum(1).mean().item()


@pytest.mark.parametrize("masked", [0.0, -math.inf])
def test_divergence_is_the_kl_from_the_old_to_the_new_policy(masked):
    """Guards its direction, its mean over states, and masks: a probability of 0 counts 0."""
    mask = torch.tensor([0.0, masked, 0.0])
    logits, old_logits = torch.randn((2, 50, 3), generator=torch.Generator().manual_seed(0)) + mask
    networks = (lambda states: (logits, None)), (lambda states: (old_logits, None))
    divergence = ppo_abs.policy_divergence(*networks, None)
    assert divergence == pytest.approx(kl_by_definition(old_logits, logits), rel=1e-5)
    assert divergence != pytest.approx(kl_by_definition(logits, old_logits), rel=0.01)


def test_network_is_three_convolutions_and_a_layer_over_pixels_from_0_to_1():
    """Guards the division by 255, the strides, and the heads, which bfloat16 must not round."""
    torch.manual_seed(0)
    envs = SimpleNamespace(single_action_space=SimpleNamespace(n=4))
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    network = ppo_abs.ActorCritic(envs, ppo_abs.Args(device="cpu", precision="float32"))
    x = frames / 255
    for layer, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, network.body[layer].weight, network.body[layer].bias, stride).relu()
    x = network.body[7](x.flatten(1)).relu()
    expected = network.actor(x), network.critic(x).squeeze(1)
    torch.testing.assert_close(network(frames), expected, rtol=1e-3, atol=1e-5)
    rounding = ppo_abs.ActorCritic(envs, ppo_abs.Args(device="cpu", precision="bfloat16"))
    rounding.load_state_dict(network.state_dict())
    for output, exact in zip(rounding(frames), network(frames), strict=True):
        torch.testing.assert_close(output, exact, rtol=0.1, atol=0.01)
        assert output.dtype == torch.float32 and not torch.equal(output, exact)
        assert not torch.equal(output, output.bfloat16().float())


# --- Whole runs, computed twice ---


def losses_of(args, logits, values, old_log_pi, actions, returns, old_values):
    """PPO's losses of a mini-batch: policy, value, entropy; and the share of clipped ratios."""
    kept = logits[0].isfinite()  # without actions that are masked
    log_pi = logits[:, kept].log_softmax(1)
    entropy = -(log_pi.exp() * log_pi).sum(1).mean()
    samples = range(len(actions))
    ratios = (log_pi[samples, actions] - old_log_pi[samples, actions]).exp()
    advantages = returns - old_values
    advantages = (advantages - advantages.mean()) / advantages.var(correction=1).sqrt()
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    # Only the bound that the advantage pushes the ratio towards counts.
    bounded = torch.where(advantages > 0, ratios.clip(max=high), ratios.clip(min=low))
    policy_loss = -(bounded * advantages).mean()
    near = values.clip(old_values - args.clip_coef, old_values + args.clip_coef)
    errors, near_errors = (values - returns) ** 2, (near - returns) ** 2
    value_loss = torch.where(errors > near_errors, errors, near_errors).mean() / 2
    clipped = ((ratios < low) | (ratios > high)).double().mean()
    return policy_loss, value_loss, entropy, clipped


def second_computation(args, network, steps, orders):
    """Update network (float64) as the iterations on the recorded steps should, in these orders.

    Returns, for each iteration, the last mini-batch's losses and gradient norm.
    """
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    orders = iter(orders)
    logged = []
    for start in range(0, len(steps), args.num_steps):
        rollout = steps[start : start + args.num_steps]
        obs = torch.from_numpy(stacked(rollout, "obs")).flatten(0, 1)
        true_next = torch.from_numpy(stacked(rollout, "true_next")).flatten(0, 1)
        rewards = np.sign(stacked(rollout, "reward"))
        with torch.no_grad():
            logits, values = network(obs)
            next_values = network(true_next)[1].reshape(rewards.shape).numpy()
        terminated = stacked(rollout, "terminated") | stacked(rollout, "lost_life")
        given = rewards, next_values, terminated, stacked(rollout, "truncated")
        returns = torch.from_numpy(forward_view(*given, args.gamma, args.gae_lambda)).flatten()
        actions = torch.from_numpy(stacked(rollout, "action")).flatten()
        batch = logits.log_softmax(1), actions, returns, values
        done = start * args.num_envs / args.total_timesteps
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done)
        for _ in range(args.update_epochs):
            for minibatch in np.array_split(next(orders), args.num_minibatches):
                old = [part[minibatch] for part in batch]
                losses = losses_of(args, *network(obs[minibatch]), *old)
                policy_loss, value_loss, entropy, _ = losses
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                optimizer.step()
        logged.append([value.item() for value in (*losses, norm)])
    return logged


LOSSES = ["policy_loss", "value_loss", "entropy", "clipfrac", "grad_norm"]


@pytest.mark.parametrize(
    "network, options, clip_coef",
    [
        (SmallActorCritic, {"truncate": 0.4}, 0.01),
        (SmallActorCritic, {"terminate": 0.4, "lives": 3}, 0.1),
        (Masked, {}, 0.1),
    ],
)
def test_a_run_computed_twice(train, monkeypatch, network, options, clip_coef):
    """Guards all from the environment to the weights: ends, losses, Adam, schedule, own actions.

    After a lost life, FIRE is executed, but what the policy drew is learned from.
    """
    envs = FakeEnvs(3, **options)
    first, orders = [], []
    randperm = torch.randperm

    def make_network(envs, args):
        made = network(envs, args)
        first.append(copy.deepcopy(made).double())
        return made

    def recorded(*given, **options):
        orders.append(randperm(*given, **options))
        return orders[-1]

    monkeypatch.setattr(torch, "randperm", recorded)
    arguments = {"num_minibatches": 2, "update_epochs": 3, "adapt_frequency": 1000}
    folder = train(envs, make_network, clip_coef=clip_coef, ent_coef=0.03, **arguments)
    args = ppo_abs.Args(**config(folder)["args"])
    assert len(orders) == 4 * 3 and all(set(order.tolist()) == set(range(21)) for order in orders)
    expected = second_computation(args, first[0], envs.steps, orders)
    for name, weight in load(folder)["network"].items():
        reference = first[0].state_dict()[name]
        torch.testing.assert_close(weight.double(), reference, rtol=1e-4, atol=1e-5)
    logged = [column(folder / "metrics.csv", f"losses/{name}") for name in LOSSES]
    np.testing.assert_allclose(np.transpose(logged), expected, rtol=1e-3, atol=1e-5)
    drawn, executed = stacked(envs.steps, "action"), stacked(envs.steps, "executed")
    assert (drawn != executed).any() == ("lives" in options)
    assert set(drawn.flatten().tolist()) == set(range(3 if network is Masked else 4))


def test_divergence_is_of_one_iterations_updates(train):
    """Guards θ_old and B_ref: with K = 2, the second iteration starts where a run of one ends."""
    envs = FakeEnvs(3)
    options = {"learning_rate": 0.05, "anneal_lr": False}
    before = train(FakeEnvs(3), **options, total_timesteps=21)
    folder = train(envs, **options, total_timesteps=42)
    states = torch.from_numpy(stacked(envs.steps[7:], "obs")).flatten(0, 1)
    network = SmallActorCritic(envs, None)
    network.load_state_dict(load(before)["network"])
    old_logits, _ = network(states)
    network.load_state_dict(load(folder)["network"])
    logits, _ = network(states)
    table = folder / "metrics.csv"
    kl = kl_by_definition(old_logits, logits)
    assert column(table, "abs/kl_divergence") == pytest.approx([kl], rel=1e-3)
    assert column(table, "charts/learning_rate") == [0.05, 0.05]
    assert column(table, "abs/rollout_length") == [7, 7]


def test_rollouts_and_epochs_follow_the_kl(train):
    """Guards the rule's place in the loop, what it is given and gives, and the scaled epochs."""
    adaptive_lengths = [150.0, 90.4, 279.6, 200.0, 131.0]
    limits = {"rollout_min": 90, "rollout_max": 280, "delta_min": 1e-4, "delta_max": 3e-3}
    given = []

    def rule(divergence, length, **options):
        assert options == {**limits, "beta": 0.1}
        given.append((divergence, length))
        return [*adaptive_lengths, 150.0][len(given)]

    arguments = {"num_steps": 150, "scale_epochs": True, "update_epochs": 2, "num_minibatches": 1}
    arguments |= {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 3 * 851} | limits
    table = train(FakeEnvs(3), rollout_length=rule, **arguments) / "metrics.csv"
    assert column(table, "abs/rollout_length") == [150, 90, 280, 200, 131]
    assert column(table, "charts/updates") == [2, 4, 8, 11, 13]  # max(2, 2 L // 128) in each
    kls = column(table, "abs/kl_divergence")
    assert given == list(zip(kls, adaptive_lengths, strict=True))


# --- Resuming, and what is refused ---


def test_scores_weights_and_length_come_back(train):
    """Guards a run across a stop, and scores of whole games, unclipped, where lives are lost.

    The resumed run's rate is almost 0, so that it saves the weights that it loaded.
    """
    first, second = FakeEnvs(3, terminate=0.3, lives=3), FakeEnvs(3, terminate=0.3, lives=3)
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    folder = train(first, rollout_length=lambda kl, length, **_: length + 0.7, **arguments)
    before = load(folder)
    again = {**config(folder)["args"], "resume": str(folder)}
    train(second, **again | {"total_timesteps": 300, "learning_rate": 1e-9})
    after = load(folder)
    for name, weights in before["network"].items():
        torch.testing.assert_close(after["network"][name], weights, rtol=0, atol=1e-6)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[before["iteration"]] == round(7 + 0.7 * before["iteration"])
    assert after["optimizer"]["state"][0]["step"] == after["updates"] == 16 * len(lengths)
    episodes = expected_episodes(first.steps) + expected_episodes(second.steps)
    assert after["scores"] == [score for _, score in episodes[-100:]] != before["scores"] != []


def test_what_is_not_finite_ends_the_run(train, tmp_path):
    """Guards the checkpoint: no action is drawn from probabilities that are NaN."""
    with pytest.raises(ValueError, match="nan"):
        train(FakeEnvs(3), learning_rate=math.inf)
    assert not (tmp_path / "run0" / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"clip_coef": math.nan}, "^--clip-coef must be from 0 to 1"),
        ({"num_minibatches": 11}, "^--num-minibatches must be at most half"),  # of 21 samples
        ({"num_envs": 2}, r"\(\(2, 4\), \(2,\)\), not \(\(3, 4\), \(3,\)\)"),
    ],
)
def test_what_makes_no_run(train, tmp_path, arguments, message):
    """Guards the user: an error at the start, not a loss that is NaN or silently wrong."""
    with pytest.raises(ValueError, match=message):
        train(FakeEnvs(3), **arguments)
    assert not any(tmp_path.iterdir())
