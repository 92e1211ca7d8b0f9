"""ppo_abs_continuous.py: normalisation, and whole runs computed a second time in another way."""

import copy
import math

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box
from helpers import FakeEnvs, column, config, expected_episodes, load, on, rows, stacked
from test_pqn import forward_view

import ppo_abs_continuous as script

# Other scripts' tests have what is the same text here: gae, rollout_length, Run and launch.


class ToyEnvs(FakeEnvs):
    """Three random numbers of unlike size as observation, two as action."""

    def __init__(self, num_envs, limit=0.5, **ends):
        super().__init__(num_envs, **ends)
        self.single_observation_space = Box(-np.inf, np.inf, (3,), float)
        self.single_action_space = Box(-limit, limit, (2,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (num_envs, 3), float)
        self.action_space = Box(-limit, limit, (num_envs, 2), np.float32)

    def frames(self):
        return self.rng.normal([5, 0, -300], [0.1, 1, 100], size=(self.num_envs, 3))


@pytest.fixture
def train(tmp_path):
    """train(envs, **arguments) runs the script on envs and returns the run's folder."""

    def run(envs, rollout_length=script.rollout_length, **arguments):
        defaults = {"runs_dir": str(tmp_path), "run_name": "run"}
        defaults |= {"num_envs": envs.num_envs, "num_minibatches": 1, "update_epochs": 3}
        defaults |= {"num_steps": 21, "rollout_min": 21, "rollout_max": 60, "adapt_rollout": False}
        defaults |= {"adapt_frequency": 2, "total_timesteps": 84, "learning_rate": 0.01}
        parts = {"make_envs": on(envs)["make_envs"], "rollout_length": rollout_length}
        return script.main(script.Args(**(defaults | arguments)), **parts)

    return run


# --- Normalisation ---


def mean_and_var(seen):
    """Of all rows so far, and of 1e-4 rows with mean 0 and variance 1, as in Gymnasium."""
    seen = np.array(seen)
    count = len(seen) + 1e-4
    mean = seen.sum(0) / count
    squares = ((seen - mean) ** 2).sum(0) + 1e-4 * (1 + mean**2)
    return mean, squares / count


def normalized(envs, counted, sums):
    """What learning should see of envs.steps: observations, those that followed, and rewards.

    Observations are added to the list counted, and discounted sums of rewards to the list sums.
    """

    def count_and_scale(obs):
        counted.extend(obs)
        mean, var = mean_and_var(counted)
        return np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)

    seen, following, rewards = [count_and_scale(envs.steps[0].obs)], [], []
    discounted = np.zeros(envs.num_envs)
    for step, after in zip(envs.steps, [*envs.steps[1:], envs], strict=True):
        following.append(count_and_scale(step.true_next))
        seen.append(following[-1].copy())
        if step.over.any():
            seen[-1][step.over] = count_and_scale(after.obs[step.over])
        discounted = 0.99 * discounted + step.reward
        sums.extend(discounted)
        rewards.append(np.clip(step.reward / np.sqrt(mean_and_var(sums)[1] + 1e-8), -10, 10))
        discounted = np.where(step.over, 0, discounted)
    return np.array(seen[:-1]), np.array(following), np.array(rewards)


def test_outliers_are_clipped():
    """Guards the limits of ±10 for observations. Rewards are clipped in the runs below."""
    normalizer = script.Normalizer(ToyEnvs(1), 0.99)
    normalizer.observations.update(np.random.default_rng(1).normal(size=(500, 3)))
    assert normalizer.scale(np.array([[1e4, 0.0, -1e4]]))[0, [0, 2]].tolist() == [10, -10]


# --- Whole runs, computed twice ---


def means_and_values(network, obs):
    """Two layers of tanh and a linear one, twice."""
    outputs = []
    for layers in (network.actor, network.critic):
        hidden = torch.tanh(obs @ layers[0].weight.T + layers[0].bias)
        hidden = torch.tanh(hidden @ layers[2].weight.T + layers[2].bias)
        outputs.append(hidden @ layers[4].weight.T + layers[4].bias)
    return outputs[0], outputs[1].squeeze(1)


def log_density(mean, log_std, actions):
    """log of the Gaussian density of actions (N, A)."""
    squares = ((actions - mean) / log_std.exp()) ** 2
    return (-squares / 2 - log_std - math.log(2 * math.pi) / 2).sum(1)


def gaussian_kl(new, old, states):
    """The mean over states of KL(new ‖ old), in closed form."""
    mean_gaps = means_and_values(new, states)[0] - means_and_values(old, states)[0]
    variance, old_variance = (2 * new.log_std).exp(), (2 * old.log_std).exp()
    parts = (variance + mean_gaps**2) / old_variance - 1 - (variance / old_variance).log()
    return parts.sum(1).mean() / 2


def losses_of(args, network, obs, actions, old_log_probs, advantages, old_values):
    """PPO's losses of a mini-batch: policy, value, entropy; and the share of clipped ratios."""
    mean, values = means_and_values(network, obs)
    ratios = (log_density(mean, network.log_std, actions) - old_log_probs).exp()
    returns = advantages + old_values
    advantages = (advantages - advantages.mean()) / advantages.var(correction=1).sqrt()
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    # Only the bound that the advantage pushes the ratio towards counts.
    bounded = torch.where(advantages > 0, ratios.clip(max=high), ratios.clip(min=low))
    policy_loss = -(bounded * advantages).mean()
    near = values.clip(old_values - args.clip_coef, old_values + args.clip_coef)
    errors, near_errors = (values - returns) ** 2, (near - returns) ** 2
    value_loss = torch.where(errors > near_errors, errors, near_errors).mean() / 2
    entropy = (network.log_std + (1 + math.log(2 * math.pi)) / 2).sum()
    clipped = ((ratios < low) | (ratios > high)).double().mean()
    return policy_loss, value_loss, entropy, clipped


def second_computation(args, network, envs, drawn, orders):
    """Update network (float64) as the iterations on the recorded steps should.

    drawn has the actions of each step; orders has the samples' order in each epoch, and then their
    order for δ. Returns, for each iteration, δ, the last mini-batch's losses and the gradient norm.
    """
    optimizer = torch.optim.Adam(network.parameters(), eps=1e-5)
    orders = iter(orders)
    logged = []
    length = args.num_steps // args.num_envs
    seen, following, rewards = normalized(envs, [], [])
    for start in range(0, len(envs.steps), length):
        part = slice(start, start + length)
        obs = torch.from_numpy(seen[part]).flatten(0, 1)
        actions = torch.stack(drawn[part]).double().flatten(0, 1)
        old_network = copy.deepcopy(network).requires_grad_(False)
        mean, values = means_and_values(old_network, obs)
        true_next = torch.from_numpy(following[part]).flatten(0, 1)
        next_values = means_and_values(old_network, true_next)[1].reshape(length, -1).numpy()
        ends = [stacked(envs.steps[part], name) for name in ("terminated", "truncated")]
        returns = forward_view(rewards[part], next_values, *ends, args.gamma, args.gae_lambda)
        old_log_probs = log_density(mean, old_network.log_std, actions)
        batch = obs, actions, old_log_probs, torch.from_numpy(returns).flatten() - values, values
        done = start * args.num_envs / args.total_timesteps
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - done)
        for _ in range(args.update_epochs):
            for minibatch in np.array_split(next(orders), args.num_minibatches):
                losses = losses_of(args, network, *[column[minibatch] for column in batch])
                policy_loss, value_loss, entropy, _ = losses
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
                optimizer.step()
        states = obs[next(orders)[: args.reference_states]]
        logged.append([gaussian_kl(network, old_network, states).item()])
        logged[-1] += [value.item() for value in (*losses, norm)]
    return logged


@pytest.mark.parametrize(
    "num_envs, limit, options",
    [(1, 0.5, {}), (3, 0.5, {"reference_states": 5}), (3, 100, {"clip_coef": 0.02})],
)
def test_a_run_computed_twice(train, monkeypatch, num_envs, limit, options):
    """Guards all from the environment to the weights: moments, ends, losses, Adam, schedule, δ.

    Actions are played within their limits, and learned from as they were drawn.
    """
    drawn, orders = [], []
    randperm = torch.randperm

    class Recorded(script.Independent):
        def sample(self):
            drawn.append(super().sample())
            return drawn[-1].clone()

    def recorded(count):
        orders.append(randperm(count))
        return orders[-1]

    monkeypatch.setattr(torch, "randperm", recorded)
    monkeypatch.setattr(script, "Independent", Recorded)
    envs = ToyEnvs(num_envs, limit, terminate=0.2, truncate=0.2)
    folder = train(envs, num_minibatches=2, ent_coef=0.03, adapt_frequency=1, **options)
    args = script.Args(**config(folder)["args"])
    torch.manual_seed(args.seed)
    network = script.ActorCritic(envs, args).double()
    expected = second_computation(args, network, envs, drawn, orders)
    names = ["policy_loss", "value_loss", "entropy", "clipfrac", "grad_norm"]
    names = ["abs/kl_divergence", *(f"losses/{name}" for name in names)]
    logged = [column(folder / "metrics.csv", name) for name in names]
    np.testing.assert_allclose(np.transpose(logged), expected, rtol=1e-3, atol=1e-5)
    options = {"rtol": 1e-3, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(load(folder)["network"], network.state_dict(), **options)
    drawn = torch.stack(drawn).numpy()
    assert (np.abs(drawn).max() > limit) == (limit == 0.5)
    np.testing.assert_array_equal(stacked(envs.steps, "action"), drawn.clip(-limit, limit))
    assert load(folder)["scores"] == [score for _, score in expected_episodes(envs.steps)]


def test_longer_rollouts_have_more_epochs(train):
    """Guards N_epochs: 2 L / 2048, and at least 2."""
    for length, epochs in ((1400, 2), (5000, 4)):
        arguments = {"run_name": str(length), "num_steps": length, "total_timesteps": length}
        folder = train(ToyEnvs(100), update_epochs=2, **arguments)
        assert column(folder / "metrics.csv", "charts/updates", int) == [epochs]


def test_moments_and_the_authors_rule_survive_a_resume(train):
    """Guards K, burn-in, the mean of the last 5 δ, L and moments across a stop after two δ."""
    limits = {"rollout_min": 21, "rollout_max": 60, "delta_min": 0.01, "delta_max": 0.1}
    given = []

    def rule(divergence, length, **options):
        assert options == limits | {"beta": 0.1}
        given.append((divergence, length))
        return length + 3.3

    first, second = ToyEnvs(3), ToyEnvs(3)
    arguments = {"adapt_rollout": True, "num_steps": 50, "burn_in": 3, "divergence_window": 5}
    folder = train(first, rollout_length=rule, **arguments, **limits)
    assert given == []
    arguments = {**config(folder)["args"], "resume": str(folder), "total_timesteps": 600}
    train(second, rollout_length=rule, **arguments)
    table = rows(folder / "metrics.csv")
    assert not any(row["abs/kl_divergence"] for row in table[::2])
    measured = [float(row["abs/kl_divergence"]) for row in table[1::2]]
    means = [np.mean(measured[max(i - 5, 0) : i]) for i in range(3, len(measured) + 1)]
    lengths = 21 + 3.3 * np.arange(len(means))
    np.testing.assert_allclose(given, np.transpose([means, lengths]))
    lengths = [21 + 3.3 * max(i // 2 - 2, 0) for i in range(len(table))]
    played = [int(row["abs/rollout_length"]) for row in table]
    assert played == [3 * round(length / 3) for length in lengths]  # steps of all three
    moments = {"observations": [], "returns": []}
    for envs in (first, second):
        normalized(envs, *moments.values())
    for name, counted in moments.items():
        state = load(folder)[name]
        assert state["count"] == pytest.approx(len(counted) + 1e-4)
        np.testing.assert_allclose((state["mean"], state["var"]), mean_and_var(counted), rtol=1e-7)


# --- Gymnasium's environments, and what is refused ---


def test_pendulum(tmp_path):
    """Guards Gymnasium's own vector: arrays of arrays in final_obs, scores, and autoreset."""
    args = script.Args("Pendulum-v1", num_envs=2, rollout_min=450, total_timesteps=900)
    args.num_minibatches, args.runs_dir = 4, str(tmp_path)
    scores = load(script.main(args))["scores"]
    assert len(scores) == 4  # 450 steps in each environment, 200 an episode
    assert all(-2000 < score < 0 for score in scores)
    with pytest.raises(ValueError, match="SAME_STEP"):  # Gymnasium's default is NEXT_STEP
        script.main(args, make_envs=lambda args: gymnasium.make_vec(args.env_id, args.num_envs))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"clip_coef": math.nan}, "^--clip-coef must be from 0 to 1"),
        ({"num_minibatches": 11}, "^--num-minibatches must be at most half"),  # of 21 samples
        ({"num_minibatches": 11, "num_envs": 21, "num_steps": 31}, "^--num-mini"),  # of 21, too
        ({"rollout_min": 61}, "^--rollout-min must be at most"),
        ({"divergence_window": 9}, "^--burn-in must be at most"),
        ({"num_envs": 2}, r"not \(\(3,\), \(2,\), \(3,\)\)"),
    ],
)
def test_what_makes_no_run(train, tmp_path, arguments, message):
    """Guards the user: an error at the start, not a loss that is NaN or silently wrong."""
    with pytest.raises(ValueError, match=message):
        train(ToyEnvs(3), **arguments)
    assert not any(tmp_path.iterdir())
