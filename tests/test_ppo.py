"""ppo_abs.py: its functions, a run computed twice; and what p3o_abs.py does in the same way."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import FakeEnvs, column, load, rows, same_weights, stacked
from torch.distributions import Categorical, kl_divergence

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


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(script, envs, network, **arguments) runs a script on envs and returns the folder."""
    count = iter(range(1000))

    def run(script, envs, network=SmallActorCritic, **arguments):
        monkeypatch.setattr(script, "make_envs", lambda args: envs)
        monkeypatch.setattr(script, "ActorCritic", network)
        names = {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults = {"num_envs": envs.num_envs, "device": "cpu", "precision": "float32"}
        defaults |= {"episodic_life": envs.full_lives > 0, "total_timesteps": 4 * 7 * 3}
        defaults |= {"num_steps": 7, "rollout_min": 4, "rollout_max": 14}
        defaults |= {"learning_rate": 0.01, "adapt_rollout": False, "adapt_frequency": 2}
        return script.main(script.Args(**(names | defaults | arguments)))

    return run


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
    """Guards conv1's division by 255, and the float32 heads over a body in bfloat16."""
    torch.manual_seed(0)
    network = ppo_abs.ActorCritic(SimpleNamespace(single_action_space=SimpleNamespace(n=4)))
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    x = frames.double() / 255
    w = {name: weight.double() for name, weight in network.state_dict().items()}
    for name, stride in (("conv1", 4), ("body.1", 2), ("body.3", 1)):
        x = F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride).relu()
    x = F.linear(x.flatten(1), w["body.6.weight"], w["body.6.bias"]).relu()
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
    """What the iterations should make of network (float64), with one mini-batch an epoch.

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
def computed_twice(train, monkeypatch):
    """computed_twice(script, envs, ...) runs four iterations and compares the weights."""

    def run(script, envs, policy_loss, clip_values, keep=1, **arguments):
        started = []
        drawn = []
        draw = torch.multinomial

        def network(envs):
            torch.manual_seed(3)
            started.append(SmallActorCritic(envs))
            return copy.deepcopy(started[0])

        def recorded(probabilities, count):
            drawn.append(draw(probabilities, count))
            return drawn[-1]

        monkeypatch.setattr(torch, "multinomial", recorded)
        folder = train(script, envs, network, num_minibatches=1, update_epochs=3, **arguments)
        args = script.Args(**load(folder)["args"])
        expected = started[0].double()
        actions = [action.squeeze(1) for action in drawn]
        second_computation(args, expected, envs.steps, actions, policy_loss, clip_values, keep)
        for name, weight in load(folder)["network"].items():
            reference = expected.state_dict()[name]
            torch.testing.assert_close(weight.double(), reference, rtol=1e-4, atol=1e-5)
        return SimpleNamespace(
            folder=folder, drawn=np.array([action.numpy() for action in actions])
        )

    return run


@pytest.mark.parametrize("lives", [0, 3])
@pytest.mark.parametrize("clip_coef", [0.1, 0.01])
def test_iterations_computed_twice(computed_twice, lives, clip_coef):
    """Guards everything between the environment and the weights: ends, losses, Adam, schedule."""
    arguments = {"clip_coef": clip_coef, "ent_coef": 0.03}
    envs = FakeEnvs(3, lives=lives)
    seen = computed_twice(ppo_abs, envs, policy_loss_of_ppo, True, **arguments)
    table = rows(seen.folder / "metrics.csv")
    rates = [float(row["charts/learning_rate"]) for row in table]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert table[-1]["charts/updates"] == "12"
    assert float(table[0]["losses/clipfrac"]) > 0.5  # clipping was put to the test


@pytest.mark.parametrize("script", SCRIPTS)
def test_fire_follows_a_lost_life_whatever_was_drawn(train, monkeypatch, script):
    """Guards the games that wait for FIRE; that learning is of the draw, the test above sees."""
    drawn = []
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    envs = FakeEnvs(8, terminate=0.3, lives=4)
    train(script, envs, total_timesteps=8 * 70, num_steps=70, rollout_max=70)
    drawn = torch.stack(drawn).squeeze(2).numpy()
    pressed = stacked(envs.steps, "action")
    after = np.zeros(pressed.shape, bool)
    after[1:] = stacked(envs.steps, "lost_life")[:-1]
    assert after.sum() > 20 and (pressed[after] == envs.fire_action).all()
    assert (drawn[after] != envs.fire_action).any()
    assert (pressed == drawn)[~after].all()


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
    log_pi, values = script.evaluate(lambda states: (logits, logits[:, 0]), None)
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
def test_divergences_are_of_one_iterations_updates(train, monkeypatch, script):
    """Guards θ_old, B_ref and the order of arguments: K = 2 measures in the second iteration."""
    networks = []
    before = []
    gae = script.gae

    def network(envs):
        networks.append(SmallActorCritic(envs))
        return networks[0]

    def snapshot(*args):  # between collecting and updating
        before.append(copy.deepcopy(networks[0]))
        return gae(*args)

    monkeypatch.setattr(script, "gae", snapshot)
    envs = FakeEnvs(3)
    arguments = {"replay_rollouts": 1} if script is p3o_abs else {}  # B_ref is of the new one
    arguments |= {"total_timesteps": 42, "learning_rate": 0.05}
    folder = train(script, envs, network, **arguments)
    states = torch.from_numpy(stacked(envs.steps[7:], "obs")).flatten(0, 1)
    old, new = before[1](states)[0], networks[0](states)[0]
    first, second = rows(folder / "metrics.csv")
    assert first["abs/kl_divergence"] == first["abs/behavioral_divergence"] == ""
    kl = kl_divergence(Categorical(logits=old), Categorical(logits=new)).mean().item()
    assert float(second["abs/kl_divergence"]) == pytest.approx(kl, rel=1e-4)
    changed = (old.argmax(1) != new.argmax(1)).float().mean().item()
    assert float(second["abs/behavioral_divergence"]) == pytest.approx(changed)


@pytest.mark.parametrize("script", SCRIPTS)
def test_rollouts_and_epochs_follow_the_kl(train, monkeypatch, script):
    """Guards Eq. 4's place in the loop, the window, the burn-in and the scaled epochs."""
    kls = [1e-4, 1.0, 3e-4, 1e-3, 2e-3, 1e-5, 1e-5, 1e-5, 5e-4, 1e-4]
    measured = iter(kls)
    monkeypatch.setattr(script, "mean_kl_divergence", lambda *args: next(measured))
    lengths, epochs = [], []
    length = 20.0
    for count in range(1, len(kls) + 1):
        lengths.append(round(length))
        epochs.append(max(2, math.floor(2 * round(length) / 8)))
        if count >= 3:
            window = kls[max(count - 4, 0) : count]
            kl = min(max(np.mean(window), 1e-4), 3.5e-3)
            alpha = (math.log(kl) - math.log(1e-4)) / (math.log(3.5e-3) - math.log(1e-4))
            length += 0.3 * (40 - alpha * (40 - 6) - length)
    arguments = {"num_steps": 20, "rollout_min": 6, "rollout_max": 40, "beta": 0.3}
    arguments |= {"divergence_window": 4, "burn_in": 3, "adapt_frequency": 1}
    arguments |= {"scale_epochs": True, "base_steps": 8, "update_epochs": 2, "num_minibatches": 1}
    total = 3 * sum(lengths)
    arguments |= {"adapt_rollout": True, "total_timesteps": total}
    folder = train(script, FakeEnvs(3), **arguments)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    assert len(set(lengths)) > 4
    updates = column(folder / "metrics.csv", "charts/updates", int)
    assert updates == np.cumsum(epochs).tolist()


@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_leaves_no_torn_or_double_row(train, script):
    """Guards both tables: what was written after the checkpoint is cut off and written anew."""
    envs = FakeEnvs(3, terminate=0.3)
    arguments = {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 150}
    folder = train(script, envs, **arguments)
    at_checkpoint = {name: (folder / name).read_text() for name in ("metrics.csv", "episodes.csv")}
    saved = load(folder)
    for name, text in at_checkpoint.items():
        with (folder / name).open("a") as file:
            file.write(text.splitlines()[-1] + "\n" + text.splitlines()[-1][:5])
    again = {**saved["args"], "resume": str(folder), "total_timesteps": 300}
    assert train(script, FakeEnvs(3, terminate=0.3), **again) == folder
    for name, text in at_checkpoint.items():
        after = (folder / name).read_text()
        assert after.startswith(text) and after != text
        header, *lines = after.splitlines()
        assert {line.count(",") for line in lines} == {header.count(",")}
    table = rows(folder / "metrics.csv")
    steps = [int(row["global_step"]) for row in table]
    sizes = [int(row["abs/batch_size"]) for row in table]
    assert steps == np.cumsum(sizes).tolist()
    updates = [int(row["charts/updates"]) for row in table]
    assert updates == list(range(16, 16 * len(table) + 1, 16))
    assert load(folder)["iteration"] == len(table)


# --- Bad input ---

BAD = [
    ("gae_lambda", 1.5),
    ("ent_coef", -1.0),
    ("vf_coef", math.nan),
    ("delta_min", 0.0),
    ("delta_min", 0.1),
    ("delta_max", math.inf),
    ("num_minibatches", 22),
    ("base_steps", 0),
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
    assert error.value.code == 2 and "logits (num_envs, actions) and values (num_envs,)" in line
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
