"""p3o_abs.py's own: effective sample size, loss, replayed rollouts. The rest is in test_ppo.py."""

import math

import pytest
import torch
from helpers import column, load
from test_ppo import KINDS, Watching, computed_twice, gradient, train  # noqa: F401
from torch.distributions import Categorical, kl_divergence

import p3o_abs
from p3o_abs import effective_sample_size, p3o_loss
from ppo_abs import clipped_surrogate


def batch(seed, size=30, spread=1.0):
    """Logits of the policy, log π_b, actions and advantages; both policies differ by spread."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn((2, size, 4), generator=generator, dtype=torch.float64)
    log_behavior = (logits + spread * noise).log_softmax(-1)
    actions = torch.randint(4, (size,), generator=generator)
    return logits, log_behavior, actions, torch.randn(size, generator=generator).double()


# --- The functions ---


def test_effective_sample_size_at_its_ends():
    """Guards the formula where its value is known."""
    assert effective_sample_size(torch.zeros(7)).item() == 1
    assert effective_sample_size(torch.full((7,), 500.0)).item() == 1  # exp(500) overflows
    assert effective_sample_size(torch.tensor([90.0, 0, 0, 0])).item() == pytest.approx(1 / 4)


def policy_loss_of_p3o(args, log_pi, log_behavior, actions, advantages):
    """Sample by sample, with weights that are plain numbers."""
    ratios = []
    for i, action in enumerate(actions):
        ratios.append((log_pi[i, action] - log_behavior[i, action]).exp().item())
    e = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
    terms = []
    for i, action in enumerate(actions):
        pull = kl_divergence(Categorical(logits=log_pi[i]), Categorical(logits=log_behavior[i]))
        terms.append((1 - e) * pull - min(ratios[i], e) * log_pi[i, action] * advantages[i])
    return torch.stack(terms).mean()


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_loss_and_gradient(spread):
    """Guards value, and that neither the capped ratios nor 1 - e_B are differentiated."""
    logits, log_behavior, actions, advantages = batch(0, spread=spread)

    def ours(x):
        return p3o_loss(x.log_softmax(-1), log_behavior, actions, advantages)[0]

    def slow(x):
        return policy_loss_of_p3o(None, x.log_softmax(-1), log_behavior, actions, advantages)

    assert ours(logits).item() == pytest.approx(slow(logits).item())
    torch.testing.assert_close(gradient(ours, logits), gradient(slow, logits))


def test_a_capped_sample_keeps_a_gradient_where_ppo_has_none():
    """Guards the point of P3O, at ρ = (90, 1, 1, 1): e_B = 93² / (4 · 8103) caps all four."""
    log_pi = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]).log()
    log_behavior = torch.tensor([[0.01, 0.99], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]).log()
    actions = torch.zeros(4, dtype=torch.int64)
    advantages = torch.ones(4)
    _, e_b, kl, capped = p3o_loss(log_pi, log_behavior, actions, advantages)
    pull = (0.9 * math.log(90) + 0.1 * math.log(0.1 / 0.99)) / 4
    expected = (93**2 / (4 * 8103), pull, 1)
    assert (e_b.item(), kl.item(), capped.item()) == pytest.approx(expected)

    def p3o(x):
        return p3o_loss(x.log_softmax(-1), log_behavior, actions, advantages)[0]

    def ppo(x):
        return clipped_surrogate(x.log_softmax(-1)[:, 0], log_behavior[:, 0], advantages, 0.1)

    assert gradient(ppo, log_pi)[0].abs().max() == 0
    assert gradient(p3o, log_pi)[0].abs().max() > 0.1


# --- Whole iterations ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", [0, 2])
def test_iterations_computed_twice(computed_twice, kind, replay):  # noqa: F811
    """Guards everything between the environment and the weights, replayed rollouts too."""
    arguments = {"replay_rollouts": replay, "ent_coef": 0.03, "keep": 1 + replay}
    folder = computed_twice(p3o_abs, KINDS[kind](), policy_loss_of_p3o, False, **arguments)
    ess = column(folder / "metrics.csv", "p3o/ess")
    assert 1 / 21 < min(ess) and max(ess) < 1
    assert min(column(folder / "metrics.csv", "p3o/kl")) > 0


def test_replayed_rollouts_hold_the_probabilities_of_the_policy_that_acted(train, monkeypatch):  # noqa: F811
    """Guards π_b: of the newest 3 rollouts, of varying lengths, each as its own network saw it."""
    losses = []

    def watched(log_pi, log_behavior, *args, loss=p3o_loss):
        losses.append(log_behavior)
        return loss(log_pi, log_behavior, *args)

    monkeypatch.setattr(p3o_abs, "p3o_loss", watched)
    envs = Watching(3)
    lengths = [7, 4, 14, 5, 9, 6]
    later = iter([*lengths[1:], 7])
    arguments = {"num_minibatches": 1, "update_epochs": 1, "replay_rollouts": 2}
    arguments |= {"adapt_rollout": True, "adapt_frequency": 1, "total_timesteps": 3 * sum(lengths)}
    folder = train(
        p3o_abs,
        envs,
        envs.make_network,
        rollout_length=lambda *given, **options: next(later),
        **arguments,
    )
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == lengths
    assert len(losses) == load(folder)["iteration"] == 6
    acted = []
    for t, step in enumerate(envs.steps):
        logits, _ = envs.network_at(t)(torch.from_numpy(step.obs))
        acted.append(logits.log_softmax(-1).detach())
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for i, behavior in enumerate(losses):
        expected = torch.cat(acted[starts[max(i - 2, 0)] : starts[i + 1]])
        order = behavior[:, 0].argsort()
        expected = expected[expected[:, 0].argsort()]
        torch.testing.assert_close(behavior[order], expected, rtol=1e-4, atol=1e-5)
