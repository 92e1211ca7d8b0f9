"""p3o_tokens.py: the task, the model, each update computed twice, stale data, and resuming."""

import copy
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import column, config, load, rows, same_weights
from torch.distributions import Categorical, kl_divergence

import p3o_tokens
from p3o_tokens import ANSWER, END, PROMPT, VOCABULARY, CausalTransformer, effective_sample_size


def solutions(prompts):
    """The right answers (N, ANSWER) to prompts (N, PROMPT)."""
    answers = []
    for prompt in prompts.tolist():
        a, b = "".join(VOCABULARY[token] for token in prompt).rstrip("=").split("+")
        answer = str(int(a) + int(b))[::-1].ljust(ANSWER, "\n")
        answers.append([VOCABULARY.index(digit) for digit in answer])
    return torch.tensor(answers)


class Guessing(CausalTransformer):
    """Has random weights, but leans to the right answers, so that some of a group's earn 1."""

    def __init__(self):
        super().__init__(width=16, heads=2, layers=1)
        for weight in self.tokens.weight, self.positions.weight, self.head.weight:
            torch.nn.init.normal_(weight, std=0.4)

    def forward(self, tokens):
        right = F.one_hot(solutions(tokens[:, :PROMPT]), len(VOCABULARY))
        leaning = F.pad(right, (0, 0, PROMPT - 1, 0))[:, : tokens.shape[1]]
        return super().forward(tokens) + 5.0 * leaning


@pytest.fixture
def seen(monkeypatch):
    """What happens in a run of seen.part, which guesses: its calls, batches and exams."""
    seen = SimpleNamespace(networks=[], calls=[], batches=[], exams={})

    class Seen(Guessing):
        def __init__(self):
            super().__init__()
            seen.networks.append(self)  # the learner, then the sampler

        def forward(self, tokens):
            call = SimpleNamespace(learns=torch.is_grad_enabled())
            call.in_bfloat16 = torch.is_autocast_enabled("cpu")
            call.weights = copy.deepcopy(self.state_dict())
            seen.calls.append(call)
            return super().forward(tokens)

    write_answers = p3o_tokens.write_answers

    def recorded(network, prompts, temperature, *options):
        answers, logits = write_answers(network, prompts, temperature, *options)
        batch = SimpleNamespace(prompts=prompts, answers=answers, logits=logits)
        batch.calls = seen.calls[-ANSWER:]
        if len(prompts) < 256:
            seen.batches.append(batch)
        else:
            seen.exams[temperature] = batch
        return answers, logits

    monkeypatch.setattr(p3o_tokens, "write_answers", recorded)
    seen.part = Seen
    return seen


@pytest.fixture
def train(tmp_path):
    """train(iterations, part, **arguments) runs p3o_tokens.py and returns the run's folder."""
    count = iter(range(100))

    def run(iterations, network, **arguments):
        # The learning rate of the only supervised update is 0.
        defaults = {"supervised_updates": 1, "group_size": 4, "num_problems": 8}
        defaults |= {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults |= {"total_timesteps": 32 * iterations, "eval_frequency": 1000}
        defaults |= {"problems_min": 4, "problems_max": 16, "device": "cpu"}
        args = p3o_tokens.Args(**(defaults | arguments))
        return p3o_tokens.main(args, CausalTransformer=network)

    return run


# --- The task and the model ---


def test_held_out_problems_are_never_trained_on():
    """Guards the evaluation: no pair of one kind is of the other."""
    rng = random.Random(0)
    trained = p3o_tokens.draw_problems(rng, 3000)
    held_out = p3o_tokens.draw_problems(rng, 3000, held_out=True)
    assert not set(trained) & set(held_out)


def test_answers_are_drawn_from_the_policy_given():
    """Guards π_b: it is the network's at this temperature, and its draws follow it."""
    torch.manual_seed(0)
    network = CausalTransformer(width=16, heads=2)
    torch.nn.init.normal_(network.head.weight, std=0.5)
    prompts, _ = p3o_tokens.encode([(12, 345)] * 2000, [0] * 2000, "cpu")
    answers, logits = p3o_tokens.write_answers(network, prompts, 3.0)
    behavior = Categorical(logits=logits)
    valid = p3o_tokens.valid_tokens(answers)
    assert (answers[~valid] == END).all() and 0 < valid.float().mean() < 1
    for t in range(ANSWER):
        prefix = torch.cat([prompts, answers[:, :t]], 1)[:200]
        expected = Categorical(logits=network(prefix)[:, -1] / 3)
        alive = valid[:200, t]
        torch.testing.assert_close(behavior.probs[:200, t][alive], expected.probs[alive])
    shares = torch.bincount(answers[:, 0], minlength=len(VOCABULARY)) / len(answers)
    torch.testing.assert_close(shares, behavior.probs[0, 0], atol=0.03, rtol=0)


# --- An update, computed twice ---


def test_effective_sample_size_at_its_ends():
    """Guards the formula where its value is known."""
    assert effective_sample_size(torch.zeros(7)).item() == 1
    assert effective_sample_size(torch.full((7,), 500.0)).item() == 1  # exp(500) overflows
    assert effective_sample_size(torch.tensor([90.0, 0, 0, 0])).item() == pytest.approx(1 / 4)


def policies_of(network, batch):
    """(answer's number, token, the network's policy before it) of each valid token, one by one."""
    found = []
    for i, answer in enumerate(batch.answers):
        length = answer.tolist().index(END) + 1 if END in answer else ANSWER
        for t in range(length):
            context = torch.cat([batch.prompts[i], answer[:t]])[None]
            found.append((i, answer[t], Categorical(logits=network(context)[0, -1])))
    return found


def test_the_imitation_learns_the_teachers_answers():
    """Guards the start: cross-entropy on sums of which some were added without carries."""
    torch.manual_seed(0)
    network = CausalTransformer(width=16, heads=2)
    slow = copy.deepcopy(network)
    args = p3o_tokens.Args(supervised_updates=1, seed=3, device="cpu")
    p3o_tokens.imitate_teacher(network, args)
    rng = random.Random(3)
    problems = p3o_tokens.draw_problems(rng, 64)
    totals = []
    for a, b in problems:
        total = a + b
        if rng.random() < 0.5:  # digit by digit
            places = zip(f"{a:04}", f"{b:04}", strict=True)
            total = int("".join(str((int(x) + int(y)) % 10) for x, y in places))
        totals.append(total)
    prompts, answers = p3o_tokens.encode(problems, totals, "cpu")
    batch = SimpleNamespace(prompts=prompts, answers=answers)
    losses = [-policy.log_prob(token) for _, token, policy in policies_of(slow, batch)]
    torch.stack(losses).mean().backward()
    for ours, expected in zip(network.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-6)


def loss_of(args, policies, behaviors, rewards):
    """The mean loss of a batch's tokens, from the header's equations; and e_B."""
    ratios = []
    for (_, token, policy), behavior in zip(policies, behaviors, strict=True):
        ratios.append((policy.log_prob(token) - behavior.log_prob(token)).exp())
    plain = [ratio.item() for ratio in ratios]
    e = sum(plain) ** 2 / (len(plain) * sum(ratio**2 for ratio in plain))
    losses = []
    for (i, token, policy), behavior, ratio in zip(policies, behaviors, ratios, strict=True):
        group = rewards.view(-1, args.group_size)[i // args.group_size]
        advantage = rewards[i] - group.mean()
        if args.loss == "grpo":
            advantage = advantage / (group.var(correction=0).sqrt() + 1e-6)
        if args.loss == "p3o":
            gain = min(ratio.item(), e) * policy.log_prob(token) * advantage
            losses.append((1 - e) * kl_divergence(policy, behavior) - gain)
        else:
            bound = 1 + args.clip_coef if advantage > 0 else 1 - args.clip_coef
            is_clipped = (ratio - bound) * advantage > 0
            losses.append(-(bound if is_clipped else ratio) * advantage)
    return torch.stack([torch.as_tensor(x) for x in losses]).mean(), e


@pytest.mark.parametrize("noise", ["none", "bfloat16", "temperature"])
@pytest.mark.parametrize("loss", ["p3o", "ppo", "grpo"])
def test_an_update_computed_twice(train, seen, loss, noise):
    """Guards all from the answers to the gradient, rewards and groups, too; and what drives L."""
    arguments = {"loss": loss, "behavior_noise": noise, "max_grad_norm": 1e9}
    folder = train(1, seen.part, adapt_frequency=1, learning_rate=1e-2, **arguments)
    args = p3o_tokens.Args(**config(folder)["args"])
    (batch,) = seen.batches
    rewards = (batch.answers == solutions(batch.prompts)).all(1).float()
    assert (batch.prompts.view(8, 4, PROMPT) == batch.prompts[::4, None]).all()  # a group's is one
    network = seen.networks[0]
    before = Guessing()
    before.load_state_dict(batch.calls[0].weights)  # on fresh data, the sampler has the learner's
    policies = policies_of(before, batch)
    assert len(rewards) < len(policies) < batch.answers.numel()  # some answers are padded
    valid = p3o_tokens.valid_tokens(batch.answers)
    behaviors = [Categorical(logits=logits) for logits in batch.logits[valid]]
    expected, e = loss_of(args, policies, behaviors, rewards)
    expected.backward()
    for ours, slow in zip(network.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, slow.grad, rtol=1e-3, atol=1e-6)
    (row,) = rows(folder / "metrics.csv")
    row = {name: float(cell) for name, cell in row.items()}
    assert row["charts/reward"] == row["charts/episodic_return"] == rewards.mean().item() > 0
    assert row["p3o/ess"] == pytest.approx(e, abs=1e-5)
    if noise == "none":  # sampler and learner are one: on-policy to the bit
        assert row["p3o/ess"] == 1 and row["p3o/kl"] == row["p3o/capped"] == row["ppo/clipped"] == 0
    else:
        assert e < 1 and row["p3o/kl"] > 0
    in_bfloat16 = [call for call in seen.calls if call.in_bfloat16]  # only the sampler is
    assert in_bfloat16 == (batch.calls if noise == "bfloat16" else [])
    assert row["losses/policy_loss"] == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    kls = []
    for (_, _, old), (_, _, new) in zip(policies, policies_of(network, batch), strict=True):
        kls.append([kl_divergence(old, new).item(), kl_divergence(new, old).item()])
    forward, backward = np.mean(kls, 0)
    assert row["abs/kl_divergence"] == pytest.approx(forward, rel=2e-4)
    assert abs(backward / forward - 1) > 1e-3
    for name, temperature in (("greedy", 1e-6), ("sampled", 1.0)):
        exam = seen.exams[temperature]
        share = (exam.answers == solutions(exam.prompts)).all(1).float().mean().item()
        assert row[f"charts/{name}_accuracy"] == share and 0.1 < share < 1


@pytest.mark.parametrize("lag", [0, 2])
def test_answers_come_from_the_policy_of_lag_updates_ago(train, seen, lag):
    """Guards --lag: the sampler's weights are those that learning had then, or the first ones."""
    folder = train(5, seen.part, lag=lag, learning_rate=1e-2, adapt_frequency=1)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [8] * 5  # no --adapt-batch
    learned = [call.weights for call in seen.calls if call.learns][1:]  # the first is the imitation
    for iteration, batch in enumerate(seen.batches):
        for call in batch.calls:
            assert same_weights(call.weights, learned[max(iteration - lag, 0)])
    assert len(seen.batches) == 5 and not same_weights(learned[0], learned[1])


def test_the_number_of_problems_follows_the_kl(train):
    """Guards --adapt-batch: L of the next batch is Eq. 4's of the KL measured, smoothed."""
    arguments = {"adapt_frequency": 2, "delta_min": 1e-6, "delta_max": 0.5}
    table = rows(train(20, Guessing, adapt_batch=True, **arguments) / "metrics.csv")
    length = 8.0
    for i, row in enumerate(table, 1):
        assert int(row["abs/rollout_length"]) == round(length)
        assert int(row["abs/batch_size"]) == 4 * round(length)
        assert bool(row["abs/kl_divergence"]) == (i % 2 == 0)
        if row["abs/kl_divergence"]:
            kl = float(row["abs/kl_divergence"])
            assert 1e-6 < kl < 0.5
            alpha = math.log(kl / 1e-6) / math.log(0.5 / 1e-6)
            length = 0.9 * length + 0.1 * (16 - alpha * 12)
    assert len({row["abs/rollout_length"] for row in table}) > 1


def test_a_run_goes_on_as_if_it_had_not_stopped(train, monkeypatch):
    """Guards the seed and --resume: weights, Adam's state, earlier policies, L_adapt, tables."""
    arguments = {"lag": 2, "adapt_batch": True, "adapt_frequency": 1, "learning_rate": 1e-2}
    whole = train(8, Guessing, **arguments)
    stopped = train(4, Guessing, **arguments)
    command = f"p3o_tokens.py --total-timesteps {32 * 8} --resume {stopped}"
    monkeypatch.setattr(sys, "argv", command.split())
    p3o_tokens.launch(CausalTransformer=Guessing)
    for name in ("losses/policy_loss", "losses/grad_norm", "abs/kl_divergence", "p3o/ess"):
        assert column(stopped / "metrics.csv", name) == column(whole / "metrics.csv", name)
    one, other = load(whole), load(stopped)
    assert same_weights(one["network"], other["network"])
    for policy, its_twin in zip(one["policies"], other["policies"], strict=True):
        assert same_weights(policy, its_twin)
    assert len(one["policies"]) == 3
    assert one["adaptive_length"] == other["adaptive_length"]
    assert one["adaptive_length"] % 1 > 0  # L_adapt is saved, not L
    assert one["scores"] == other["scores"] and 0 < sum(one["scores"]) < 100


REFUSED = [
    {"group_size": 1},
    {"lag": -1},
    {"delta_max": 1e-4},  # below delta_min
    {"num_problems": np.int64(3), "adapt_batch": np.bool_(True)},  # below problems_min
]


@pytest.mark.parametrize("arguments", REFUSED, ids=str)
def test_bad_arguments_are_refused(arguments):
    """Guards users: an error that names the flag, before any work."""
    flag = "--" + next(iter(arguments)).replace("_", "-")
    with pytest.raises(ValueError, match=flag):
        p3o_tokens.Args(**arguments)
