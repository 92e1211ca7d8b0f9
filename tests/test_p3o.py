"""p3o_abs.py's own: effective sample size, loss, replayed rollouts. The rest is in test_ppo.py."""

import pytest
import torch
from helpers import column
from test_ppo import KINDS, computed_twice, gradient, train  # noqa: F401
from torch.distributions import Categorical, kl_divergence

import p3o_abs
from p3o_abs import effective_sample_size, p3o_loss


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


def p3o_by_samples(log_pi, log_behavior, actions, advantages):
    """Loss, e_B, mean KL and capped share, sample by sample, with weights that are numbers."""
    ratios = []
    for i, action in enumerate(actions):
        ratios.append((log_pi[i, action] - log_behavior[i, action]).exp().item())
    e = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
    terms, pulls = [], []
    for i, action in enumerate(actions):
        pull = kl_divergence(Categorical(logits=log_pi[i]), Categorical(logits=log_behavior[i]))
        pulls.append(pull)
        terms.append((1 - e) * pull - min(ratios[i], e) * log_pi[i, action] * advantages[i])
    capped = sum(ratio > e for ratio in ratios) / len(ratios)
    return torch.stack(terms).mean(), e, torch.stack(pulls).mean().item(), capped


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_loss_and_gradient(spread):
    """Guards values, and that neither the capped ratios nor 1 - e_B are differentiated."""
    logits, log_behavior, actions, advantages = batch(0, spread=spread)

    def ours(x):
        return p3o_loss(x.log_softmax(-1), log_behavior, actions, advantages)[0]

    def slow(x):
        return p3o_by_samples(x.log_softmax(-1), log_behavior, actions, advantages)[0]

    given = logits.log_softmax(-1), log_behavior, actions, advantages
    values = [float(value) for value in p3o_loss(*given)]
    assert values == pytest.approx([float(value) for value in p3o_by_samples(*given)])
    torch.testing.assert_close(gradient(ours, logits), gradient(slow, logits))


# --- Whole iterations ---


def policy_loss_of_p3o(args, *batch):
    return p3o_by_samples(*batch)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", [0, 2])
def test_iterations_computed_twice(computed_twice, kind, replay):  # noqa: F811
    """Guards everything between the environment and the weights, replayed rollouts too."""
    arguments = {"replay_rollouts": replay, "ent_coef": 0.03, "keep": 1 + replay}
    folder = computed_twice(p3o_abs, KINDS[kind](), policy_loss_of_p3o, False, **arguments)
    ess = column(folder / "metrics.csv", "p3o/ess")
    assert 1 / 21 < min(ess) and max(ess) < 1
    assert min(column(folder / "metrics.csv", "p3o/kl")) > 0
