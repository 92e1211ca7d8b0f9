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
from helpers import column, config, contents, load, rows, same_weights
from torch.distributions import Categorical, kl_divergence

import p3o_tokens
from p3o_tokens import ANSWER, END, PROMPT, VOCABULARY, CausalTransformer


def solutions(prompts, off_by_one=()):
    """The right answers (N, ANSWER) to prompts (N, PROMPT); but one too much in some rows."""
    answers = []
    for i, prompt in enumerate(prompts.tolist()):
        a, b = "".join(VOCABULARY[token] for token in prompt).rstrip("=").split("+")
        answer = str(int(a) + int(b) + (i in off_by_one))[::-1]
        answers.append([VOCABULARY.index(digit) for digit in answer.ljust(ANSWER, "\n")])
    return torch.tensor(answers)


class Tiny(CausalTransformer):
    def __init__(self):
        super().__init__(width=16, heads=2, layers=1)

    def forward(self, tokens):
        assert torch.is_grad_enabled() or not self.training  # writes and is examined in eval mode
        return super().forward(tokens)


class Guessing(Tiny):
    """Has random weights, but leans to the right answers, so that some of a group's earn 1."""

    def __init__(self):
        super().__init__()
        for weight in self.tokens.weight, self.positions.weight, self.head.weight:
            torch.nn.init.normal_(weight, std=0.4)

    def forward(self, tokens):
        right = F.one_hot(solutions(tokens[:, :PROMPT]), len(VOCABULARY))
        leaning = F.pad(right, (0, 0, PROMPT - 1, 0))[:, : tokens.shape[1]]
        return super().forward(tokens) + 5.0 * leaning


@pytest.fixture
def seen(monkeypatch):
    """What happens in a run of seen.part, which guesses: its calls, batches and exams.

    The imitation must be over after one update: the learning rate of this one is 0.
    """
    seen = SimpleNamespace(calls=[], batches=[], exams={})

    class Seen(Guessing):
        def __init__(self):
            super().__init__()
            seen.network, seen.before = self, copy.deepcopy(self)

        def forward(self, tokens):
            call = SimpleNamespace(learns=torch.is_grad_enabled())
            call.in_bfloat16 = torch.is_autocast_enabled("cpu")
            call.weights = copy.deepcopy(self.state_dict())
            seen.calls.append(call)
            return super().forward(tokens)

    def recorded(network, prompts, temperature, write_answers=p3o_tokens.write_answers):
        answers, log_pi = write_answers(network, prompts, temperature)
        batch = SimpleNamespace(prompts=prompts, answers=answers, log_pi=log_pi)
        batch.calls = seen.calls[-ANSWER:]
        if len(prompts) < 256:
            seen.batches.append(batch)
        else:
            seen.exams[temperature] = batch
        return answers, log_pi

    monkeypatch.setattr(p3o_tokens, "write_answers", recorded)
    seen.part = Seen
    return seen


@pytest.fixture
def train(tmp_path):
    """train(iterations, part, **arguments) runs p3o_tokens.py and returns the run's folder."""
    count = iter(range(100))

    def run(iterations=1, network=Tiny, **arguments):
        defaults = {"supervised_updates": 1, "group_size": 4, "num_problems": 8}
        defaults |= {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults |= {"total_timesteps": 32 * iterations, "eval_frequency": 1000}
        defaults |= {"problems_min": 4, "problems_max": 16}
        args = p3o_tokens.Args(**(defaults | arguments))
        return p3o_tokens.main(args, CausalTransformer=network)

    return run


# --- The task and the model ---


def test_held_out_problems_are_never_trained_on():
    """Guards the evaluation: no pair of one kind is of the other; all lengths are in both."""
    rng = random.Random(0)
    trained = p3o_tokens.draw_problems(rng, 3000)
    held_out = p3o_tokens.draw_problems(rng, 3000, held_out=True)
    assert not set(trained) & set(held_out)
    for problems in (trained, held_out):
        lengths = {(len(str(a)), len(str(b))) for a, b in problems}
        assert lengths == {(i, j) for i in (2, 3, 4) for j in (2, 3, 4)}


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_answers_are_drawn_from_the_probabilities_given(temperature):
    """Guards π_b: its log-probabilities are the network's at this temperature, its draws follow."""
    torch.manual_seed(0)
    network = CausalTransformer(width=16, heads=2)
    torch.nn.init.normal_(network.head.weight, std=0.5)
    prompts, _ = p3o_tokens.encode([(12, 345)] * 5000, [0] * 5000)
    answers, log_behavior = p3o_tokens.write_answers(network, prompts, temperature)
    ended = p3o_tokens.valid_tokens(answers)
    assert (answers[~ended] == END).all() and 0 < ended.float().mean() < 1
    prefix = torch.cat([prompts, answers], 1)
    for t in range(ANSWER):
        logits = network(prefix[:200, : PROMPT + t])[:, -1]
        expected = Categorical(logits=logits / temperature).logits
        alive = ended[:200, t]
        torch.testing.assert_close(log_behavior[:200, t][alive], expected[alive])
    shares = torch.bincount(answers[:, 0], minlength=len(VOCABULARY)) / len(answers)
    torch.testing.assert_close(shares, log_behavior[0, 0].exp(), atol=0.02, rtol=0)


# --- An update, computed twice ---


def test_the_imitation_learns_the_teachers_answers():
    """Guards the start: cross-entropy on sums of which some were added without carries."""
    torch.manual_seed(0)
    network = Tiny()
    slow = copy.deepcopy(network)
    args = p3o_tokens.Args(supervised_updates=1)
    p3o_tokens.imitate_teacher(network, args, random.Random(3))
    rng = random.Random(3)
    losses = []
    for a, b in p3o_tokens.draw_problems(rng, 64):
        total = a + b
        if rng.random() < 0.5:  # digit by digit
            places = zip(f"{a:04}", f"{b:04}", strict=True)
            total = int("".join(str((int(x) + int(y)) % 10) for x, y in places))
        text = f"{a:4}+{b:4}={str(total)[::-1]}\n"[: PROMPT + ANSWER]
        tokens = torch.tensor([VOCABULARY.index(character) for character in text])
        for t in range(PROMPT, len(text)):
            losses.append(-Categorical(logits=slow(tokens[None, :t])[0, -1]).log_prob(tokens[t]))
    torch.stack(losses).mean().backward()
    for ours, expected in zip(network.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-3, atol=1e-6)


def policies_of(network, batch):
    """(answer's number, token, the network's policy before it) of each valid token, one by one."""
    found = []
    for i, answer in enumerate(batch.answers):
        length = answer.tolist().index(END) + 1 if END in answer else ANSWER
        for t in range(length):
            context = torch.cat([batch.prompts[i], answer[:t]])[None]
            found.append((i, answer[t], Categorical(logits=network(context)[0, -1])))
    return found


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


@pytest.mark.parametrize("noise", ["none", "temperature"])
@pytest.mark.parametrize("loss", ["p3o", "ppo", "grpo"])
def test_an_update_computed_twice(train, seen, loss, noise):
    """Guards all from the answers to the gradient, rewards and groups, too; and what drives L."""
    arguments = {"loss": loss, "behavior_noise": noise, "max_grad_norm": 1e9}
    folder = train(1, seen.part, adapt_frequency=1, learning_rate=1e-2, **arguments)
    args = p3o_tokens.Args(**config(folder)["args"])
    (batch,) = seen.batches
    rewards = (batch.answers == solutions(batch.prompts)).all(1).float()
    assert 0.1 < rewards.mean() < 0.9
    policies = policies_of(seen.before, batch)
    assert len(rewards) < len(policies) < batch.answers.numel()  # some answers are padded
    log_pi_b = batch.log_pi[p3o_tokens.valid_tokens(batch.answers)]
    behaviors = [Categorical(logits=log_pi) for log_pi in log_pi_b]
    expected, e = loss_of(args, policies, behaviors, rewards)
    expected.backward()
    (row,) = rows(folder / "metrics.csv")
    assert float(row["charts/reward"]) == rewards.mean().item()
    assert float(row["charts/episodic_return"]) == pytest.approx(rewards.mean().item())
    assert float(row["p3o/ess"]) == pytest.approx(e, abs=1e-5)
    if noise == "none":  # sampler and learner are one: on-policy to the bit
        assert float(row["p3o/ess"]) == 1
        for name in ("p3o/kl_weight", "p3o/kl", "p3o/capped", "ppo/clipped"):
            assert float(row[name]) == 0
    else:
        assert e < 0.999
    assert float(row["losses/policy_loss"]) == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    for ours, slow in zip(seen.network.parameters(), seen.before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, slow.grad, rtol=1e-3, atol=1e-6)
    kls, reverse = [], []
    for (_, _, old), (_, _, new) in zip(policies, policies_of(seen.network, batch), strict=True):
        kls.append(kl_divergence(old, new).item())
        reverse.append(kl_divergence(new, old).item())
    assert float(row["abs/kl_divergence"]) == pytest.approx(np.mean(kls), rel=1e-3)
    assert abs(sum(reverse) / sum(kls) - 1) > 0.01
    greedy, sampled = seen.exams[1e-6], seen.exams[1.0]
    for name, exam in (("greedy", greedy), ("sampled", sampled)):
        share = (exam.answers == solutions(exam.prompts)).all(1).float().mean().item()
        assert float(row[f"charts/{name}_accuracy"]) == share and 0.1 < share < 1


@pytest.mark.parametrize("loss", ["p3o", "ppo"])
def test_a_token_that_is_never_written_counts_0(train, loss):
    """Guards masks: logits of -inf do what very low ones do, gradients included."""

    class Masked(Guessing):
        low = -200.0

        def forward(self, tokens):
            never = torch.tensor([character in "+= " for character in VOCABULARY])
            return super().forward(tokens).masked_fill(never, self.low)

    class NeverWritten(Masked):
        low = -math.inf

    tables = []
    for part in (Masked, NeverWritten):
        arguments = {"loss": loss, "lag": 1, "adapt_frequency": 1, "learning_rate": 1e-2}
        folder = train(4, part, behavior_noise="temperature", **arguments)
        tables.append(without_clock(folder))
    for expected, row in zip(*tables, strict=True):
        for name, cell in row.items():
            assert float(cell or 0) == pytest.approx(float(expected[name] or 0), rel=1e-4), name
    assert float(row["p3o/kl"]) > 0 and float(row["losses/grad_norm"]) > 0


# --- Stale data, and a sampler that differs ---


def test_a_sampler_in_bfloat16_is_another_policy(train, seen):
    """Guards --behavior-noise bfloat16: slightly off, and only the sampler is."""
    folder = train(2, seen.part, behavior_noise="bfloat16", adapt_frequency=1)
    assert 0.99 < min(column(folder / "metrics.csv", "p3o/ess")) < 1
    sampling = [call for batch in seen.batches for call in batch.calls]
    assert len(sampling) == 2 * ANSWER and all(call.in_bfloat16 for call in sampling)
    assert sum(call.in_bfloat16 for call in seen.calls) == len(sampling)


@pytest.mark.parametrize("lag", [0, 3])
def test_answers_come_from_the_policy_of_lag_updates_ago(train, seen, lag):
    """Guards --lag: the sampler's weights are those that learning had then, or the first ones."""
    folder = train(7, seen.part, lag=lag, learning_rate=1e-2, adapt_frequency=1)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [8] * 7  # no --adapt-batch
    learned = [call.weights for call in seen.calls if call.learns][1:]  # the first is the imitation
    for iteration, batch in enumerate(seen.batches):
        for call in batch.calls:
            assert same_weights(call.weights, learned[max(iteration - lag, 0)])
    assert len(seen.batches) == 7 and not same_weights(learned[0], learned[1])


# --- ABS ---


def test_the_number_of_problems_follows_the_kl(train):
    """Guards --adapt-batch: L of the next batch is Eq. 4's of the KL measured, smoothed."""
    table = rows(train(20, Guessing, adapt_batch=True, adapt_frequency=2) / "metrics.csv")
    length = 8.0
    for i, row in enumerate(table, 1):
        assert int(row["abs/rollout_length"]) == round(length)
        assert int(row["abs/batch_size"]) == 4 * round(length)
        assert bool(row["abs/kl_divergence"]) == (i % 2 == 0)
        if row["abs/kl_divergence"]:
            kl = min(max(float(row["abs/kl_divergence"]), 5e-4), 2e-2)
            alpha = math.log(kl / 5e-4) / math.log(2e-2 / 5e-4)
            length = 0.9 * length + 0.1 * (16 - alpha * 12)
    assert len({row["abs/rollout_length"] for row in table}) > 1


# --- Resuming, bad input ---


def without_clock(folder):
    table = rows(folder / "metrics.csv")
    for row in table:
        del row["charts/seconds"], row["charts/SPS"]
    return table


def test_a_run_goes_on_as_if_it_had_not_stopped(train, monkeypatch):
    """Guards the seed and --resume: weights, Adam's state, earlier policies, L_adapt, tables."""
    arguments = {"lag": 2, "adapt_batch": True, "adapt_frequency": 1, "eval_frequency": 1}
    whole = train(12, Guessing, learning_rate=1e-2, **arguments)
    stopped = train(5, Guessing, learning_rate=1e-2, **arguments)
    command = f"{p3o_tokens.SCRIPT} --total-timesteps {32 * 12} --resume"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(stopped)])
    p3o_tokens.launch(CausalTransformer=Guessing)
    assert without_clock(stopped) == without_clock(whole)
    one, other = load(whole), load(stopped)
    assert same_weights(one["network"], other["network"])
    for policy, its_twin in zip(one["policies"], other["policies"], strict=True):
        assert same_weights(policy, its_twin)
    assert len(one["policies"]) == 3
    assert one["adaptive_length"] == other["adaptive_length"]
    assert one["adaptive_length"] % 1 > 0  # L_adapt is saved, not L
    assert one["scores"] == other["scores"] and 0 < sum(one["scores"]) < 100


class Broken(Tiny):
    """Its gradient is not finite."""

    def forward(self, tokens):
        return super().forward(tokens) * (math.nan if torch.is_grad_enabled() else 1)


def test_nan_stops_it(train):
    """Guards the last good checkpoint: a broken update is not saved over it."""
    folder = train(2, supervised_updates=0)
    good = (folder / "checkpoint.pt").read_bytes()
    with pytest.raises(FloatingPointError, match="not finite at step 96"):
        train(10, Broken, resume=str(folder))
    assert (folder / "checkpoint.pt").read_bytes() == good


@pytest.mark.parametrize(
    "arguments",
    [
        {"group_size": 1},
        {"lag": -1},
        {"delta_max": 1e-4},  # below delta_min
        {"num_problems": 3, "adapt_batch": np.bool_(True)},  # below problems_min
        {"problems_max": 15},  # below problems_min
        {"loss": "PPO"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(tmp_path, arguments):
    """Guards users: an error that names the flag, before any work."""
    flag = "--" + next(iter(arguments)).replace("_", "-")
    args = p3o_tokens.Args(runs_dir=str(tmp_path), **arguments)
    with pytest.raises(p3o_tokens.UsageError, match=flag):
        p3o_tokens.main(args, CausalTransformer=None)
    assert contents(tmp_path) == {}
