"""ppo_abs.py: its functions, a run computed twice; and what p3o_abs.py does in the same way."""

import copy
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import Discrete
from helpers import FakeEnvs, ReusedArrays, column, config, load, rows, same_weights, stacked
from torch.distributions import Categorical, kl_divergence
from torch.optim.optimizer import register_optimizer_step_pre_hook

import p3o_abs
import ppo_abs

SCRIPTS = [ppo_abs, p3o_abs]


class SmallActorCritic(nn.Module):
    """Smooth, so that float32 and float64 agree; its heads are no float32 ones under autocast."""

    def __init__(self, envs):
        super().__init__()
        self.actions = int(envs.single_action_space.n)
        self.hidden = nn.Linear(int(np.prod(envs.single_observation_space.shape)), 16)
        self.heads = nn.Linear(16, self.actions + 1)

    def forward(self, frames):
        x = frames.flatten(1).to(self.hidden.weight.dtype) / 255
        outputs = self.heads(torch.tanh(self.hidden(x)))
        return outputs[:, : self.actions], outputs[:, self.actions]


def on(envs, network=SmallActorCritic):
    """The parts of a script's main and launch that make it train a network on envs."""
    return {"make_envs": lambda args: envs, "ActorCritic": network}


@pytest.fixture
def train(tmp_path):
    """train(script, envs, network, **arguments) runs a script on envs and returns the folder."""
    count = iter(range(1000))

    def run(script, envs, network=SmallActorCritic, rollout_length=None, **arguments):
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        defaults |= {"episodic_life": envs.full_lives > 0, "total_timesteps": 4 * 7 * 3}
        defaults |= {"num_steps": 7, "rollout_min": 4, "rollout_max": 14}
        defaults |= {"learning_rate": 0.01, "adapt_rollout": False, "adapt_frequency": 2}
        args = script.Args(**(names | defaults | arguments))
        rule = rollout_length or script.rollout_length
        return script.main(args, **on(envs, network), rollout_length=rule)

    return run


@pytest.fixture
def draws(monkeypatch):
    """A list that gets the actions (E,) that the policy draws in each step, counted from 0."""
    drawn = []
    multinomial = torch.multinomial

    def recorded(probabilities, count):
        actions = multinomial(probabilities, count)
        drawn.append(actions.squeeze(1))
        return actions

    monkeypatch.setattr(torch, "multinomial", recorded)
    return drawn


class Watching(FakeEnvs):
    """Keeps the network's weights at each step, beside what FakeEnvs keeps."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weights = []

    def make_network(self, envs):
        self.network = SmallActorCritic(envs)
        return self.network

    def network_at(self, t):
        """The network that acted in step t."""
        network = SmallActorCritic(self)
        network.load_state_dict(self.weights[t])
        return network

    def step(self, actions):
        self.weights.append(copy.deepcopy(self.network.state_dict()))
        return super().step(actions)


def constant(logits):
    """A policy that takes all states for the same."""
    return lambda states: logits


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


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 0.0), (0.9, 1.0), (1.0, 0.5)])
def test_advantages_are_lambda_returns_less_values(gamma, gae_lambda):
    """Guards gae() at ends of both kinds, also where both come at once."""
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(12, 50))
    all_values, last_values = rng.normal(size=(2, 13, 50))
    values = all_values[:-1]
    terminated, truncated = rng.random((2, 12, 50)) < 0.2
    assert (terminated & truncated).any()
    next_values = np.where(truncated, last_values[:-1], all_values[1:])
    ends = rewards, next_values, terminated, truncated, gamma, gae_lambda
    expected = mixed_returns(*ends) - values
    rollout = map(torch.from_numpy, (rewards, values, next_values, terminated, truncated))
    advantages = ppo_abs.gae(*rollout, gamma, gae_lambda)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_normalized_advantages():
    """Guards mean and standard deviation, and a mini-batch of one."""
    advantages = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    spread = math.sqrt((2**2 + 1**2 + 3**2) / 3)
    expected = torch.tensor([-2, -1, 3]) / spread
    torch.testing.assert_close(ppo_abs.normalize(advantages), expected.double())
    assert ppo_abs.normalize(torch.tensor([5.0])).tolist() == [0]


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        (1.05, 2.0, -2.1, -2.1),  # inside: ρ A, and its gradient with respect to log π is ρ A too
        (0.95, -2.0, 1.9, 1.9),
        (1.3, 2.0, -2.2, 0.0),  # outside, where the advantage would push further: clipped
        (0.7, -2.0, 1.8, 0.0),
        (0.7, 2.0, -1.4, -1.4),  # outside, where the advantage pulls back: not clipped
        (1.3, -2.0, 2.6, 2.6),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope):
    """Guards PPO's clip: on which side it stops the gradient, and on which it must not."""
    old = torch.tensor([-1.2], dtype=torch.float64)
    advantage = torch.tensor([advantage], dtype=torch.float64)

    def surrogate(new):
        return ppo_abs.clipped_surrogate(new, old, advantage, 0.1)

    new = old + math.log(ratio)
    assert surrogate(new).item() == pytest.approx(loss)
    assert gradient(surrogate, new).item() == pytest.approx(slope)


@pytest.mark.parametrize(
    "value, loss, slope",
    [
        (1.05, 0.5 * 0.95**2, -0.95),  # V_old is 1 and the return 2
        (1.3, 0.5 * 0.9**2, 0.0),  # past V_old + ε, nearer to the return: the clipped one counts
        (0.7, 0.5 * 1.3**2, -1.3),  # past V_old - ε, farther from it: the other does
    ],
)
def test_clipped_value_loss_by_hand(value, loss, slope):
    """Guards the larger of the two errors, and its gradient."""
    old = torch.tensor([1.0], dtype=torch.float64)

    def value_loss(value):
        return ppo_abs.clipped_value_loss(value, old, 2 * old, 0.1)

    assert value_loss(value * old).item() == pytest.approx(loss)
    assert gradient(value_loss, value * old).item() == pytest.approx(slope)


def test_kl_is_exact_and_weighs_actions_as_the_old_policy():
    """Guards formula and direction: KL(old ‖ new) is not KL(new ‖ old)."""
    new, old = torch.randn((2, 9, 5), generator=torch.Generator().manual_seed(0))
    expected = kl_divergence(Categorical(logits=old), Categorical(logits=new))
    log_old, log_new = old.log_softmax(-1), new.log_softmax(-1)
    torch.testing.assert_close(ppo_abs.kl_divergence(log_old, log_new), expected)
    mean = ppo_abs.mean_kl_divergence(constant(new), constant(old), None)
    assert mean == pytest.approx(expected.mean().item(), rel=1e-5)
    assert ppo_abs.mean_kl_divergence(constant(old), constant(old), None) == 0


def test_network_is_three_convolutions_and_a_layer_over_pixels_from_0_to_1():
    """Guards the division by 255, and the float32 heads over a body in bfloat16."""
    torch.manual_seed(0)
    network = ppo_abs.ActorCritic(SimpleNamespace(single_action_space=SimpleNamespace(n=4)))
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    x = frames.double() / 255
    w = {name: weight.double() for name, weight in network.state_dict().items()}
    for name, stride in (("body.0", 4), ("body.2", 2), ("body.4", 1)):
        x = F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride).relu()
    x = F.linear(x.flatten(1), w["body.7.weight"], w["body.7.bias"]).relu()
    logits, values = network(frames)
    expected = F.linear(x, w["actor.weight"], w["actor.bias"])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-6)
    expected = F.linear(x, w["critic.weight"], w["critic.bias"]).squeeze(1)
    torch.testing.assert_close(values.double(), expected, rtol=1e-3, atol=1e-5)
    assert (logits.softmax(-1) - 1 / 4).abs().max() < 0.02  # the first policy
    with torch.autocast("cpu", torch.bfloat16):
        logits, values = network(frames)
    assert logits.dtype == values.dtype == torch.float32


# --- Whole iterations ---


def policy_loss_of_ppo(args, log_pi, log_behavior, actions, advantages):
    ratios = (log_pi - log_behavior)[range(len(actions)), actions].exp()
    clipped = ratios.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    return -torch.stack([ratios * advantages, clipped * advantages]).amin(0).mean()


def second_computation(args, network, steps, drawn, policy_loss, clip_values, keep=1):
    """What the iterations should make of network (float64), with one mini-batch per epoch.

    drawn are the actions (E,) that the policy drew in each step; keep rollouts are learned from.
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
        ends = [stacked(rollout, name) for name in ("terminated", "truncated")]
        discount = args.gamma, args.gae_lambda
        returns = mixed_returns(reward, next_values.numpy(), *ends, *discount).flatten()
        returns = torch.from_numpy(returns)
        actions = torch.cat(drawn[start : start + args.num_steps])
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
def computed_twice(train, draws):
    """computed_twice(script, envs, ...) runs four iterations and compares the weights."""

    def run(script, envs, policy_loss, clip_values, keep=1, **arguments):
        started = []

        def network(envs):
            torch.manual_seed(3)
            started.append(SmallActorCritic(envs))
            return copy.deepcopy(started[0])

        folder = train(script, envs, network, num_minibatches=1, update_epochs=3, **arguments)
        args = script.Args(**config(folder)["args"])
        expected = started[0].double()
        second_computation(args, expected, envs.steps, draws, policy_loss, clip_values, keep)
        for name, weight in load(folder)["network"].items():
            reference = expected.state_dict()[name]
            torch.testing.assert_close(weight.double(), reference, rtol=1e-4, atol=1e-5)
        return folder

    return run


class NumberFlags(FakeEnvs):
    """Its flags are bytes, which would index where they should mask."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, terminated.astype(np.uint8), truncated.astype(np.uint8), info


class OtherLastTypes(FakeEnvs):
    """Float observations; the last ones of another type, or as an array of objects."""

    def __init__(self, kind, *args, **options):
        super().__init__(*args, **options)
        self.kind = kind

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float32), info

    def step(self, actions):
        obs, *rest, info = super().step(actions)
        last = info["final_obs"].astype(self.kind)
        if self.kind is object:  # as in Gymnasium's own vectors: None where nothing ended
            last = np.full(self.num_envs, None)
            for i in np.flatnonzero(self.steps[-1].over):
                last[i] = info["final_obs"][i].astype(np.float64)
        return obs.astype(np.float32), *rest, info | {"final_obs": last}


def from_minus_one():
    envs = FakeEnvs(3, lives=3)
    envs.single_action_space = Discrete(3, start=-1)
    return envs


KINDS = {
    "plain": lambda: FakeEnvs(3),
    "lives": lambda: FakeEnvs(3, lives=3),
    "reused-arrays": lambda: ReusedArrays(3, lives=3, terminate=0.4),
    "uint8-flags": lambda: NumberFlags(3, lives=3, terminate=0.4, truncate=0.4),
    "last-in-int64": lambda: OtherLastTypes(np.int64, 3, truncate=0.4),
    "last-in-objects": lambda: OtherLastTypes(object, 3, truncate=0.4),
    "actions-from-minus-one": from_minus_one,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_coef", [0.1, 0.01])
def test_iterations_computed_twice(computed_twice, kind, clip_coef):
    """Guards everything between the environment and the weights: ends, losses, Adam, schedule."""
    arguments = {"clip_coef": clip_coef, "ent_coef": 0.03}
    folder = computed_twice(ppo_abs, KINDS[kind](), policy_loss_of_ppo, True, **arguments)
    table = rows(folder / "metrics.csv")
    rates = [float(row["charts/learning_rate"]) for row in table]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert table[-1]["charts/updates"] == "12"
    assert float(table[0]["losses/clipfrac"]) > 0.5  # clipping was put to the test


@pytest.fixture
def rates():
    """A list that gets the learning rate of each gradient step."""
    seen = []

    def note(optimizer, *given):
        seen.append(optimizer.param_groups[0]["lr"])

    handle = register_optimizer_step_pre_hook(note)
    yield seen
    handle.remove()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("anneal_lr", [True, False])
def test_the_learning_rate_falls_with_the_steps_or_stays(train, rates, script, anneal_lr):
    """Guards --anneal-lr where L changes, so that a share of steps is no share of iterations."""
    lengths = iter([4, 12, 5, 9, 14, 4, 7, 7, 7])
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    folder = train(
        script,
        FakeEnvs(3),
        rollout_length=lambda *given, **options: next(lengths),
        anneal_lr=anneal_lr,
        **arguments,
    )
    steps = column(folder / "metrics.csv", "global_step", int)
    assert steps[-1] > 150 and len(set(np.diff(steps))) > 2
    begins = np.array([0, *steps[:-1]])
    expected = 0.01 * (1 - begins / 150) if anneal_lr else np.full(len(steps), 0.01)
    assert rates == pytest.approx(np.repeat(expected, 16))  # four epochs of four mini-batches
    assert column(folder / "metrics.csv", "charts/learning_rate") == pytest.approx(expected)
    assert min(rates) > 0


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", [FakeEnvs, ReusedArrays])
def test_fire_follows_a_lost_life_whatever_was_drawn(train, draws, script, kind):
    """Guards the games that wait for FIRE; that learning is of the draw, the test above sees."""
    envs = kind(8, terminate=0.3, lives=4)
    train(script, envs, total_timesteps=8 * 70, num_steps=70, rollout_max=70)
    drawn = torch.stack(draws).numpy()
    pressed = stacked(envs.steps, "action")
    after = np.zeros(pressed.shape, bool)
    after[1:] = stacked(envs.steps, "lost_life")[:-1]
    assert after.sum() > 20 and (pressed[after] == envs.fire_action).all()
    assert (drawn[after] != envs.fire_action).any()
    assert (pressed == drawn)[~after].all()


@pytest.mark.parametrize("script", SCRIPTS)
def test_actions_count_from_where_their_space_starts(train, draws, script):
    """Guards Discrete(3, start=-1): the environment gets -1, 0 and 1."""
    envs = FakeEnvs(3)
    envs.single_action_space = Discrete(3, start=-1)
    train(script, envs)
    pressed = stacked(envs.steps, "action")
    assert set(pressed.flatten().tolist()) == {-1, 0, 1}
    assert (pressed == torch.stack(draws).numpy() - 1).all()


@pytest.mark.parametrize("script", SCRIPTS)
def test_bfloat16_without_a_float32_head(train, script):
    """Guards users' networks: a cut episode's value is stored, and KL is a KL, not a rounding."""
    envs = FakeEnvs(16, truncate=0.3)
    arguments = {"learning_rate": 1e-4, "adapt_frequency": 1, "total_timesteps": 16 * 7 * 12}
    folder = train(script, envs, precision="bfloat16", **arguments)
    kls = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(kls) == 12 and min(kls) >= 0 and 0 < max(kls) < 0.1


@pytest.mark.parametrize("script", SCRIPTS)
def test_outputs_are_float32_before_anything_is_done_with_them(script):
    """Guards ratios and entropy: probabilities sum to 1 in float32, not in bfloat16."""
    logits = torch.randn((50, 6), generator=torch.Generator().manual_seed(0)).bfloat16()
    log_pi, values = script.policy_and_value(lambda states: (logits, logits[:, 0]), None)
    assert log_pi.dtype == values.dtype == torch.float32
    torch.testing.assert_close(log_pi.exp().sum(1), torch.ones(50), rtol=1e-5, atol=0)


def test_kl_of_bfloat16_logits_is_not_negative():
    """Guards the same where it failed: the difference of two rounded distributions."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        old, noise = torch.randn((2, 200, 4), generator=generator)
        new = (old + 1e-3 * noise).bfloat16()
        kl = ppo_abs.mean_kl_divergence(constant(new), constant(old.bfloat16()), None)
        assert kl >= -1e-9


@pytest.mark.parametrize("script", SCRIPTS)
def test_measuring_changes_nothing_that_is_learned(train, script):
    """Guards comparisons: K = 1 and K = 1000 give the same weights, bit for bit."""
    often = train(script, FakeEnvs(3), adapt_frequency=1)
    never = train(script, FakeEnvs(3), adapt_frequency=1000)
    assert len(column(often / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(never / "metrics.csv", "abs/kl_divergence") == []
    assert same_weights(load(often)["network"], load(never)["network"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_divergences_are_of_one_iterations_updates(train, script):
    """Guards θ_old, B_ref and the order of arguments: K = 2 measures in the second iteration."""
    envs = Watching(3)
    arguments = {"replay_rollouts": 1} if script is p3o_abs else {}  # B_ref is of the new one
    arguments |= {"total_timesteps": 42, "learning_rate": 0.05}
    folder = train(script, envs, envs.make_network, **arguments)
    states = torch.from_numpy(stacked(envs.steps[7:], "obs")).flatten(0, 1)
    old, new = envs.network_at(7)(states)[0], envs.network(states)[0]
    first, second = rows(folder / "metrics.csv")
    assert first["abs/kl_divergence"] == first["abs/behavioral_divergence"] == ""
    kl = kl_divergence(Categorical(logits=old), Categorical(logits=new)).mean().item()
    assert float(second["abs/kl_divergence"]) == pytest.approx(kl, rel=1e-4)
    changed = (old.argmax(1) != new.argmax(1)).float().mean().item()
    assert float(second["abs/behavioral_divergence"]) == pytest.approx(changed)


class WithDropout(SmallActorCritic):
    """Notes for each call whether it is for learning, and its mode."""

    def __init__(self, envs):
        super().__init__(envs)
        self.dropout = nn.Dropout(0.5)
        self.calls = []

    def forward(self, frames):
        self.calls.append((torch.is_grad_enabled(), self.training))
        x = frames.flatten(1) / 255
        outputs = self.heads(self.dropout(torch.tanh(self.hidden(x))))
        return outputs[:, : self.actions], outputs[:, self.actions]


@pytest.mark.parametrize("script", SCRIPTS)
def test_networks_act_and_are_measured_in_eval_mode(train, script):
    """Guards KL, BD and acting from dropout, which takes part in learning."""
    made = []

    def network(envs):
        made.append(WithDropout(envs))
        return made[0]

    folder = train(script, FakeEnvs(8), network, learning_rate=1e-9, adapt_frequency=1)
    kls = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(kls) == 2 and np.abs(kls).max() < 1e-7
    assert column(folder / "metrics.csv", "abs/behavioral_divergence") == [0, 0]
    calls = made[0].calls[1:]  # the first is for the shapes
    assert all(is_learning == training for is_learning, training in calls)
    updates = column(folder / "metrics.csv", "charts/updates", int)[-1]
    assert sum(training for _, training in calls) == updates > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_rollouts_and_epochs_follow_the_kl(train, script):
    """Guards Eq. 4's place in the loop, what it is given, and the scaled epochs."""
    kls = [1e-4, 1.0, 3e-4, 1e-3, 2e-3, 1e-5, 1e-5, 1e-5, 5e-4, 1e-4]
    measured = iter(kls)
    given = []

    def rule(divergence, adaptive_length, **limits):
        given.append(divergence)
        return script.rollout_length(next(measured), adaptive_length, **limits)

    lengths, epochs = [], []
    length = 150.0
    for kl in kls:
        lengths.append(round(length))
        epochs.append(max(2, math.floor(2 * round(length) / 128)))
        kl = min(max(kl, 1e-4), 3.5e-3)
        alpha = (math.log(kl) - math.log(1e-4)) / (math.log(3.5e-3) - math.log(1e-4))
        length += 0.3 * (280 - alpha * (280 - 90) - length)
    assert len(set(lengths)) > 4 and len(set(epochs)) > 1
    arguments = {"num_steps": 150, "rollout_min": 90, "rollout_max": 280, "beta": 0.3}
    arguments |= {"scale_epochs": True, "update_epochs": 2, "num_minibatches": 1}
    arguments |= {"adapt_rollout": True, "adapt_frequency": 1}
    total = 3 * sum(lengths)
    folder = train(script, FakeEnvs(3), rollout_length=rule, total_timesteps=total, **arguments)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    updates = column(folder / "metrics.csv", "charts/updates", int)
    assert updates == np.cumsum(epochs).tolist()
    assert column(folder / "metrics.csv", "abs/kl_divergence") == given


@pytest.mark.parametrize("script", SCRIPTS)
def test_fixed_rollouts_stay(train, script):
    """Guards the baseline: with --no-adapt-rollout, what is measured changes no rollout."""
    folder = train(script, FakeEnvs(3), adapt_frequency=1, beta=1.0)
    assert len(column(folder / "metrics.csv", "abs/kl_divergence")) == 4
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [7] * 4


# --- Files ---


def expected_episodes(steps):
    """(step, score) of each whole game in what FakeEnvs recorded; the first step is 1."""
    score = np.zeros(len(steps[0].reward))
    episodes = []
    for t, step in enumerate(steps, 1):
        score += step.reward
        for i in np.flatnonzero(step.over):
            episodes.append((t, score[i]))
            score[i] = 0
    return episodes


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("lives", [0, 3])
def test_resuming_leaves_no_torn_or_double_row(train, script, lives):
    """Guards the table: what follows the checkpoint is cut off and written anew.

    Its scores are of whole games, unclipped, also where lost lives end the learner's episodes.
    """
    first, second = FakeEnvs(3, terminate=0.3, lives=lives), FakeEnvs(3, terminate=0.3, lives=lives)
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    if script is p3o_abs:
        arguments["replay_rollouts"] = 1
    folder = train(script, first, **arguments)
    metrics = folder / "metrics.csv"
    at_checkpoint = metrics.read_text()
    with metrics.open("a") as file:
        file.write(at_checkpoint.splitlines()[-1] + "\n" + at_checkpoint.splitlines()[-1][:5])
    again = {**config(folder)["args"], "resume": str(folder), "total_timesteps": 300}
    assert train(script, second, **again) == folder
    after = metrics.read_text()
    assert after.startswith(at_checkpoint) and after != at_checkpoint
    header, *lines = after.splitlines()
    assert {line.count(",") for line in lines} == {header.count(",")}
    table = rows(metrics)
    steps = [int(row["global_step"]) for row in table]
    sizes = [int(row["abs/batch_size"]) for row in table]
    assert steps == np.cumsum(sizes).tolist()
    updates = [int(row["charts/updates"]) for row in table]
    assert updates == list(range(16, 16 * len(table) + 1, 16))
    assert load(folder)["iteration"] == len(table)
    episodes = expected_episodes(first.steps)
    for t, score in expected_episodes(second.steps):
        episodes.append((len(first.steps) + t, score))
    assert len(episodes) > 20 and len({score for _, score in episodes}) > 5
    for row in table:
        until_now = [score for t, score in episodes if 3 * t <= int(row["global_step"])]
        if until_now:
            mean = np.mean(until_now[-100:])
            assert float(row["charts/episodic_return"]) == pytest.approx(mean)
        else:
            assert row["charts/episodic_return"] == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_optimizer_and_length_come_back(train, script):
    """Guards learning across a stop: an iteration without learning saves what it loaded."""

    def longer(divergence, adaptive_length, **limits):
        return adaptive_length + 0.7

    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    folder = train(script, FakeEnvs(3), rollout_length=longer, **arguments)
    before = load(folder)
    again = {**config(folder)["args"], "resume": str(folder)}
    again |= {"total_timesteps": before["global_step"] + 1, "learning_rate": 1e-9}
    train(script, FakeEnvs(3), **again)
    after = load(folder)
    for name, weights in before["network"].items():
        torch.testing.assert_close(after["network"][name], weights, rtol=0, atol=1e-6)
    old, new = before["optimizer"]["state"], after["optimizer"]["state"]
    assert new[0]["step"] == old[0]["step"] + 16
    assert old[0]["exp_avg_sq"].max() > 0
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[-1] == round(before["adaptive_length"]) > 7


class NotFinite(FakeEnvs):
    """Float observations; in the tenth step, one of them is NaN."""

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs.astype(np.float32), info

    def step(self, actions):
        obs, *rest = super().step(actions)
        obs = obs.astype(np.float32)
        if len(self.steps) == 10:
            obs[1, 2] = np.nan
        return obs, *rest


class Spoiled(SmallActorCritic):
    """The gradient of the second iteration's last update is infinite."""

    updates = 0

    def forward(self, frames):
        logits, values = super().forward(frames)
        self.updates += self.training
        factor = math.inf if self.updates == 32 and self.training else 1
        return logits, values * factor


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("envs, network", [(NotFinite, SmallActorCritic), (FakeEnvs, Spoiled)])
def test_what_is_not_finite_ends_the_run(train, tmp_path, capsys, script, envs, network):
    """Guards the user and the last checkpoint: one line, status 1, before a draw from NaN."""
    with pytest.raises(SystemExit) as error:
        train(script, envs(3), network, checkpoint_every=1e-9)
    assert error.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith(f"{script.SCRIPT}: "))
    assert "finite" in line
    saved = load(tmp_path / "run0")
    assert saved["global_step"] == 21
    assert all(weights.isfinite().all() for weights in saved["network"].values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_line(monkeypatch, tmp_path, script):
    """Guards launch with parts of one's own, and --resume without them in config.json."""
    words = ["--no-episodic-life", "--no-anneal-lr", "--num-envs", "3", "--num-steps", "64"]
    words += ["--device", "cpu", "--runs-dir", str(tmp_path), "--run-name", "mine"]
    for total, more in (("192", words), ("384", ["--resume", str(tmp_path / "mine")])):
        monkeypatch.setattr(sys, "argv", [script.SCRIPT, *more, "--total-timesteps", total])
        script.launch(**on(FakeEnvs(3)))
    assert column(tmp_path / "mine" / "metrics.csv", "global_step", int) == [192, 384]
    assert column(tmp_path / "mine" / "metrics.csv", "charts/learning_rate") == [2.5e-4] * 2


# --- Bad input ---

BAD = [
    ("gae_lambda", 1.5),
    ("ent_coef", -1.0),
    ("vf_coef", math.nan),
    ("delta_min", 0.0),
    ("delta_min", 0.1),
    ("delta_max", math.inf),
    ("num_minibatches", 22),
    ("rollout_min", 0),
    ("rollout_max", 3),  # below rollout_min, which counts with --no-adapt-rollout, too
]
BAD_OF_ONE = [(ppo_abs, "clip_coef", 0.0), (p3o_abs, "replay_rollouts", -1)]


@pytest.mark.parametrize(
    "script, name, value", [*((script, *bad) for script in SCRIPTS for bad in BAD), *BAD_OF_ONE]
)
def test_values_that_make_no_run(train, tmp_path, capsys, script, name, value):
    """Guards the user: one line that names the option, status 2, no run's folder."""
    with pytest.raises(SystemExit) as error:
        train(script, FakeEnvs(3), **{name: value})
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2
    assert line.startswith(f"{script.SCRIPT}: --{name.replace('_', '-')} {value}: ")
    assert not (tmp_path / "run0").exists()


class OneOutput(SmallActorCritic):
    def forward(self, frames):
        return super().forward(frames)[0]


class ColumnOfValues(SmallActorCritic):
    def forward(self, frames):
        logits, values = super().forward(frames)
        return logits, values[:, None]  # would be broadcast to (N, N)


class ExtraAction(SmallActorCritic):
    def forward(self, frames):
        logits, values = super().forward(frames)
        return torch.cat([logits, logits], 1), values


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("network", [OneOutput, ColumnOfValues, ExtraAction])
def test_networks_that_break_the_promise(train, tmp_path, capsys, script, network):
    """Guards users' networks: an error at the start, not a silent wrong loss or a hang."""
    with pytest.raises(SystemExit) as error:
        train(script, FakeEnvs(3), network)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and "logits and values of shapes [(3, 4), (3,)]" in line
    assert list(tmp_path.iterdir()) == []


# --- Learning ---


class Bandit(FakeEnvs):
    """Each environment shows one picture for ever, and one action wins; a step is an episode."""

    def frames(self):
        return np.random.default_rng(0).integers(256, size=(self.num_envs, 6), dtype=np.uint8)

    def step(self, actions):
        obs, _, terminated, truncated, info = super().step(actions)
        self.steps.clear()
        return obs, 1.0 * (actions == np.arange(self.num_envs) % 4), terminated, truncated, info


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_bandit_is_solved(train, script):
    """Guards the sign of it all."""
    arguments = {"num_steps": 16, "total_timesteps": 8 * 16 * 60}
    folder = train(script, Bandit(8, terminate=1, truncate=0), rollout_max=16, **arguments)
    assert column(folder / "metrics.csv", "charts/episodic_return")[-1] > 0.8
