"""ppo_abs.py: its functions, a run computed twice; and what p3o_abs.py does in the same way."""

import copy
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
    ReusedArrays,
    column,
    config,
    expected_episodes,
    load,
    rows,
    stacked,
)
from torch.distributions import Categorical, kl_divergence

import p3o_abs
import ppo_abs
from ppo_abs import EpisodicLife

SCRIPTS = [ppo_abs, p3o_abs]


class SmallActorCritic(nn.Module):
    """Smooth, so that float32 and float64 agree; its heads are no float32 ones under autocast."""

    def __init__(self, envs):
        super().__init__()
        self.actions = int(envs.single_action_space.n)
        self.hidden = nn.Linear(int(np.prod(envs.single_observation_space.shape)), 16)
        self.heads = nn.Linear(16, self.actions + 1)

    def forward(self, frames):
        assert torch.is_grad_enabled() or not self.training  # acts and is measured in eval mode
        x = frames.flatten(1).to(self.hidden.weight.dtype) / 255
        outputs = self.heads(torch.tanh(self.hidden(x)))
        return outputs[:, : self.actions], outputs[:, self.actions]


@pytest.fixture
def train(tmp_path):
    """train(script, envs, network, **arguments) runs a script on envs and returns the folder."""
    count = iter(range(1000))

    def run(script, envs, network=SmallActorCritic, rollout_length=None, **arguments):
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        defaults |= {"total_timesteps": 4 * 7 * 3, "num_steps": 7}
        defaults |= {"rollout_min": 4, "rollout_max": 14}
        defaults |= {"learning_rate": 0.01, "adapt_rollout": False, "adapt_frequency": 2}
        args = script.Args(**(names | defaults | arguments))
        rule = rollout_length or script.rollout_length
        parts = {"make_envs": lambda args: envs, "ActorCritic": network, "rollout_length": rule}
        return script.main(args, **parts)

    return run


class Watching(FakeEnvs):
    """Keeps the network's weights at each step, beside what FakeEnvs keeps."""

    def __init__(self, num_envs, kind=SmallActorCritic):
        super().__init__(num_envs)
        self.kind = kind
        self.weights = []

    def make_network(self, envs):
        self.network = self.kind(envs)
        return self.network

    def network_at(self, t):
        """The network that acted in step t."""
        network = self.kind(self)
        network.load_state_dict(self.weights[t])
        return network

    def step(self, actions):
        self.weights.append(copy.deepcopy(self.network.state_dict()))
        return super().step(actions)


def gradient(function, x):
    """Of the sum of what function makes of x."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


# --- Pure functions ---


def mixed_returns(rewards, next_values, terminated, truncated, gamma, gae_lambda):
    """λ-returns by definition: a return over n + 1 steps weighs (1-λ) λ^n, the last one λ^n."""
    returns = np.zeros(rewards.shape)
    for start, env in np.ndindex(rewards.shape):
        collected = 0.0
        for t in range(start, len(rewards)):
            n = t - start
            collected += gamma**n * rewards[t, env]
            ahead = 0.0 if terminated[t, env] else gamma ** (n + 1) * next_values[t, env]
            last = terminated[t, env] or truncated[t, env] or t == len(rewards) - 1
            weight = gae_lambda**n if last else (1 - gae_lambda) * gae_lambda**n
            returns[start, env] += weight * (collected + ahead)
            if last:
                break
    return returns


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_probability_of_0_counts_0(script):
    """Guards action masks, logits of -inf: entropy, KL(old ‖ new) and gradients stay right."""
    mask = torch.tensor([0.0, -math.inf, 0.0])
    logits, old_logits = torch.randn((2, 5, 3), generator=torch.Generator().manual_seed(0))

    def entropy_and_kl(x):
        log_pi, old_log_pi = script.log_policy(x + mask), script.log_policy(old_logits + mask)
        entropy = -(log_pi.exp() * log_pi).sum(1)
        return entropy - script.kl_divergence(old_log_pi, log_pi)

    kept = torch.tensor([0, 2])
    new, old = Categorical(logits=logits[:, kept]), Categorical(logits=old_logits[:, kept])
    expected = new.entropy() - kl_divergence(old, new)
    torch.testing.assert_close(entropy_and_kl(logits), expected)
    slope = gradient(entropy_and_kl, logits)
    assert slope.isfinite().all() and (slope[:, 1] == 0).all() and (slope[:, kept] != 0).any()


def test_network_is_three_convolutions_and_a_layer_over_pixels_from_0_to_1():
    """Guards the division by 255 and the strides."""
    torch.manual_seed(0)
    network = ppo_abs.ActorCritic(SimpleNamespace(single_action_space=SimpleNamespace(n=4)))
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    x = frames / 255
    for layer, stride in ((0, 4), (2, 2), (4, 1)):
        x = F.conv2d(x, network.body[layer].weight, network.body[layer].bias, stride).relu()
    x = network.body[7](x.flatten(1)).relu()
    logits, values = network(frames)
    torch.testing.assert_close(logits, network.actor(x), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(values, network.critic(x).squeeze(1), rtol=1e-3, atol=1e-5)


# --- Whole iterations ---


def policy_loss_of_ppo(args, log_pi, log_behavior, actions, advantages):
    ratios = (log_pi - log_behavior)[range(len(actions)), actions].exp()
    clipped = ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    return -torch.stack([ratios * advantages, clipped * advantages]).amin(0).mean()


def second_computation(args, network, steps, policy_loss, clip_values, keep=1):
    """What the iterations should make of network (float64), with one mini-batch per epoch.

    Learning is of the executed actions, and of this many (keep) rollouts.
    """
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    kept = []
    for start in range(0, len(steps), args.num_steps):
        rollout = steps[start : start + args.num_steps]
        obs = torch.from_numpy(stacked(rollout, "obs")).flatten(0, 1)
        true_next = torch.from_numpy(stacked(rollout, "true_next")).flatten(0, 1)
        reward = np.sign(stacked(rollout, "reward"))
        with torch.no_grad():
            logits, values = network(obs)
            next_values = network(true_next)[1].reshape(reward.shape)
        terminated = stacked(rollout, "terminated") | stacked(rollout, "lost_life")
        ends = terminated, stacked(rollout, "truncated")
        discount = args.gamma, args.gae_lambda
        returns = mixed_returns(reward, next_values.numpy(), *ends, *discount).flatten()
        returns = torch.from_numpy(returns)
        actions = torch.from_numpy(stacked(rollout, "action")).flatten()
        kept.append([obs, logits.log_softmax(-1), actions, returns, values])
        obs, log_behavior, actions, returns, values = map(
            torch.cat, zip(*kept[-keep:], strict=True)
        )
        advantages = returns - values
        advantages = (advantages - advantages.mean()) / (advantages.numpy().std() + 1e-8)
        done = start * args.num_envs / args.total_timesteps
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done)
        for _ in range(args.update_epochs):
            logits, value = network(obs)
            log_pi = logits.log_softmax(-1)
            errors = [(value - returns) ** 2]
            if clip_values:
                near = values + (value - values).clamp(-args.clip_coef, args.clip_coef)
                errors.append((near - returns) ** 2)
            loss = policy_loss(args, log_pi, log_behavior, actions, advantages)
            loss += args.vf_coef * torch.stack(errors).amax(0).mean() / 2
            loss -= args.ent_coef * Categorical(logits=logits).entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            optimizer.step()


@pytest.fixture
def computed_twice(train):
    """computed_twice(script, envs, ...) runs four iterations and compares the weights."""

    def run(script, envs, policy_loss, clip_values, keep=1, **arguments):
        started = []

        def network(envs):
            torch.manual_seed(3)
            started.append(SmallActorCritic(envs))
            return copy.deepcopy(started[0])

        folder = train(script, envs, network, num_minibatches=1, update_epochs=3, **arguments)
        args = script.Args(**config(folder)["args"])
        expected = started[0].double().eval()
        second_computation(args, expected, envs.unwrapped.steps, policy_loss, clip_values, keep)
        for name, weight in load(folder)["network"].items():
            reference = expected.state_dict()[name]
            torch.testing.assert_close(weight.double(), reference, rtol=1e-4, atol=1e-5)
        return folder

    return run


KINDS = {
    "plain": lambda: FakeEnvs(3, truncate=0.4),
    "lives": lambda: EpisodicLife(FakeEnvs(3, terminate=0.4, lives=3), fire_action=2),
    "reused-arrays": lambda: EpisodicLife(ReusedArrays(3, terminate=0.4, lives=3), fire_action=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_coef", [0.1, 0.01])
def test_iterations_computed_twice(computed_twice, kind, clip_coef):
    """Guards everything between the environment and the weights: ends, losses, Adam, schedule."""
    arguments = {"clip_coef": clip_coef, "ent_coef": 0.03}
    folder = computed_twice(ppo_abs, KINDS[kind](), policy_loss_of_ppo, True, **arguments)
    clipped = column(folder / "metrics.csv", "losses/clipfrac")
    assert clipped[0] > 0.5  # clipping was put to the test


@pytest.mark.parametrize("script", SCRIPTS)
def test_divergences_are_of_one_iterations_updates(train, script):
    """Guards θ_old, B_ref and KL's direction: K = 2 measures in the second iteration.

    Without ABS L stays, and without annealing the learning rate.
    """
    envs = Watching(3)
    arguments = {"replay_rollouts": 1} if script is p3o_abs else {}  # B_ref is of the new one
    arguments |= {"total_timesteps": 63, "learning_rate": 0.05, "anneal_lr": False}
    folder = train(script, envs, envs.make_network, **arguments)
    states = torch.from_numpy(stacked(envs.steps[7:14], "obs")).flatten(0, 1)
    old, new = envs.network_at(7)(states)[0], envs.network_at(14)(states)[0]
    first, second, third = rows(folder / "metrics.csv")
    assert first["abs/kl_divergence"] == first["abs/behavioral_divergence"] == ""
    kl = kl_divergence(Categorical(logits=old), Categorical(logits=new)).mean().item()
    assert float(second["abs/kl_divergence"]) == pytest.approx(kl, rel=1e-4)
    changed = (old.argmax(1) != new.argmax(1)).float().mean().item()
    assert float(second["abs/behavioral_divergence"]) == pytest.approx(changed)
    assert (third["abs/rollout_length"], third["charts/learning_rate"]) == ("7", "0.05")


@pytest.mark.parametrize("script", SCRIPTS)
def test_rollouts_and_epochs_follow_the_kl(train, script):
    """Guards the rule's place in the loop, what it is given and gives, and the scaled epochs."""
    lengths = [150, 90, 280, 200, 131]
    epochs = [2, 2, 4, 3, 2]  # 2 L / 128, and at least 2
    limits = {"rollout_min": 90, "rollout_max": 280}
    limits |= {"delta_min": 1e-4, "delta_max": 3.5e-3, "beta": 0.3}
    later = iter([90.4, 279.6, 200.0, 131.0, 150.0])
    given = []

    def rule(divergence, adaptive_length, **options):
        assert options == limits
        given.append((divergence, adaptive_length))
        return next(later)

    arguments = {"num_steps": 150, "scale_epochs": True, "update_epochs": 2, "num_minibatches": 1}
    arguments |= {"adapt_rollout": True, "adapt_frequency": 1, "rollout_length": rule} | limits
    arguments |= {"replay_rollouts": 2} if script is p3o_abs else {}
    folder = train(script, FakeEnvs(3), total_timesteps=3 * sum(lengths), **arguments)
    table = rows(folder / "metrics.csv")
    assert [int(row["abs/rollout_length"]) for row in table] == lengths
    assert [int(row["charts/updates"]) for row in table] == np.cumsum(epochs).tolist()
    kls = [float(row["abs/kl_divergence"]) for row in table]
    assert given == list(zip(kls, [150.0, 90.4, 279.6, 200.0, 131.0], strict=True))
    begins = np.cumsum([0, *lengths[:-1]]) / sum(lengths)
    rates = [float(row["charts/learning_rate"]) for row in table]
    assert rates == pytest.approx(0.01 * (1 - begins))


# --- Scores, resuming, NaN ---


@pytest.mark.parametrize("script", SCRIPTS)
def test_scores_weights_and_length_come_back(train, script):
    """Guards a run across a stop, and scores of whole games, unclipped, where lives are lost.

    The resumed run's rate is almost 0, so that it saves the weights that it loaded.
    """
    fakes = FakeEnvs(3, terminate=0.3, lives=3), FakeEnvs(3, terminate=0.3, lives=3)
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    first, second = (EpisodicLife(envs, fire_action=2) for envs in fakes)
    folder = train(script, first, rollout_length=lambda kl, length, **_: length + 0.7, **arguments)
    before = load(folder)
    again = {**config(folder)["args"], "resume": str(folder)}
    train(script, second, **again | {"total_timesteps": 300, "learning_rate": 1e-9})
    after = load(folder)
    for name, weights in before["network"].items():
        torch.testing.assert_close(after["network"][name], weights, rtol=0, atol=1e-6)
    old, new = before["optimizer"]["state"], after["optimizer"]["state"]
    assert old[0]["exp_avg_sq"].max() > 0
    table = rows(folder / "metrics.csv")
    assert new[0]["step"] == old[0]["step"] + 16 * (after["iteration"] - before["iteration"])
    assert after["iteration"] == len(table) > before["iteration"]
    assert int(table[before["iteration"]]["abs/rollout_length"]) == round(before["adaptive_length"])
    episodes = expected_episodes(fakes[0].steps)
    for step, score in expected_episodes(fakes[1].steps):
        episodes.append((before["global_step"] + step, score))
    assert len(episodes) > 10
    for row in table:
        scores = [score for step, score in episodes if step <= int(row["global_step"])]
        if scores:
            mean = np.mean(scores[-100:])
            assert float(row["charts/episodic_return"]) == pytest.approx(mean)


class NotFinite(FakeEnvs):
    """Float observations; after nine steps, one of them is NaN."""

    def frames(self):
        frames = super().frames().astype(np.float32)
        if len(self.steps) == 9:
            frames[1, 2] = np.nan
        return frames


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_not_finite_ends_the_run(train, tmp_path, script):
    """Guards the last checkpoint, and the message from a draw with NaN probabilities."""
    with pytest.raises(FloatingPointError, match="not finite at step 42"):
        train(script, NotFinite(3), checkpoint_every=1e-9)
    saved = load(tmp_path / "run0")
    assert saved["global_step"] == 21
    assert all(weights.isfinite().all() for weights in saved["network"].values())


# --- Bad input ---


@pytest.mark.parametrize(
    "script, name, value", [(ppo_abs, "ent_coef", math.nan), (p3o_abs, "replay_rollouts", -1)]
)
def test_values_that_make_no_run(train, tmp_path, script, name, value):
    """Guards the user: one line that names the option, and no run's folder."""
    with pytest.raises(script.UsageError, match=f"^--{name.replace('_', '-')} must be from "):
        train(script, FakeEnvs(3), **{name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_parts_that_break_the_promise(train, tmp_path, script):
    """Guards users' parts: an error at the start, not a silent wrong loss or a hang."""
    with pytest.raises(script.UsageError, match=r"\[\(2, 4\), \(2,\)\], not \[\(3, 4\), \(3,\)\]"):
        train(script, FakeEnvs(3), num_envs=2)
    envs = FakeEnvs(3)
    envs.single_action_space = Discrete(4, start=-1)
    with pytest.raises(script.UsageError, match="actions from 0 up and autoreset_mode SAME_STEP"):
        train(script, envs)
    assert list(tmp_path.iterdir()) == []
