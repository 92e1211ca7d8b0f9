"""p3o_tokens.py: the task, the model, one update computed twice, stale data, and its files."""

import copy
import json
import math
import random
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    column,
    config,
    contents,
    end_of,
    load,
    rows,
    same_weights,
    start,
    wait_for,
)
from torch.distributions import Categorical, kl_divergence

import p3o_tokens
from p3o_tokens import ANSWER, END, PROMPT, VOCABULARY, CausalTransformer

TOKENS_RUN = ROOT / "tests" / "tokens_run.py"


def decode(tokens):
    return ["".join(VOCABULARY[i] for i in row) for row in tokens.tolist()]


def solutions(prompts, off_by_one=()):
    """The right answers (N, ANSWER) to prompts (N, PROMPT); but one too much in some rows."""
    answers = []
    for i, problem in enumerate(decode(prompts)):
        a, b = problem.rstrip("=").split("+")
        answer = str(int(a) + int(b) + (i in off_by_one))[::-1]
        answers.append([VOCABULARY.index(digit) for digit in answer.ljust(ANSWER, "\n")])
    return torch.tensor(answers)


class Tiny(CausalTransformer):
    def __init__(self):
        super().__init__(width=16, heads=2, layers=1)


@pytest.fixture
def train(tmp_path):
    """train(iterations, part, **arguments) runs p3o_tokens.py and returns the run's folder."""
    count = iter(range(100))

    def run(iterations=1, network=Tiny, **arguments):
        defaults = {"supervised_updates": 2, "group_size": 4, "num_problems": 8}
        defaults |= {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults |= {"total_timesteps": 32 * iterations, "eval_frequency": 1000}
        args = p3o_tokens.Args(**(defaults | arguments))
        return p3o_tokens.main(args, CausalTransformer=network)

    return run


@pytest.fixture
def launch(monkeypatch, capsys):
    """launch(*arguments, **parts) is the command line in this process: (status, stderr)."""

    def run(*arguments, **parts):
        monkeypatch.setattr(sys, "argv", [p3o_tokens.SCRIPT, *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            p3o_tokens.launch(**({"CausalTransformer": Tiny} | parts))
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().err

    return run


# --- The task ---


def test_problems_and_answers_are_written_as_said():
    """Guards the format: numbers right-aligned, answers units first, END as padding."""
    prompts, answers = p3o_tokens.encode([(347, 58), (1000, 9999)], [405, 10999])
    assert decode(prompts) == [" 347+  58=", "1000+9999="]
    assert decode(answers) == ["504\n\n\n", "99901\n"]


def test_the_teacher_adds_each_place_by_itself():
    """Guards the flaw: digit by digit, without carries; right where no place exceeds 9."""
    rng = random.Random(0)
    for a, b in p3o_tokens.draw_problems(rng, 300):
        places = zip(f"{a:04}", f"{b:04}", strict=True)
        expected = "".join(str((int(x) + int(y)) % 10) for x, y in places)
        assert p3o_tokens.sum_without_carries(a, b) == int(expected)


def test_held_out_problems_are_never_trained_on():
    """Guards the evaluation: no pair of one kind is of the other; all lengths are in both."""
    rng = random.Random(0)
    trained = p3o_tokens.draw_problems(rng, 3000)
    held_out = p3o_tokens.draw_problems(rng, 3000, held_out=True)
    assert not set(trained) & set(held_out)
    for problems in (trained, held_out):
        lengths = {(len(str(a)), len(str(b))) for a, b in problems}
        assert lengths == {(i, j) for i in (2, 3, 4) for j in (2, 3, 4)}


def test_tokens_count_up_to_the_first_end():
    """Guards the mask: END itself is learned, padding is not, an endless answer counts whole."""
    answers = torch.tensor([[1, END, END, END, END, END], [END, 3, END, 1, 1, 1], [1] * 6])
    sums = p3o_tokens.valid_tokens(answers).int().tolist()
    assert sums == [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1] * 6]


# --- The model ---


def test_no_token_sees_the_future():
    """Guards causality: a change at position t leaves the logits before t as they are."""
    torch.manual_seed(0)
    network = CausalTransformer()
    tokens = torch.randint(len(VOCABULARY), (5, PROMPT + ANSWER))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % len(VOCABULARY)
    before, after = network(tokens), network(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


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
    greedy, _ = p3o_tokens.write_answers(network, prompts[:1], 1e-6)
    assert greedy[0, 0] == log_behavior[0, 0].argmax()


# --- One update, computed twice ---


def loss_of(args, network, prompts, answers, log_behavior, rewards):
    """The mean loss of an iteration's tokens, one by one, from the header's equations."""
    tokens = []
    groups = rewards.view(-1, args.group_size)
    for i, answer in enumerate(answers.tolist()):
        group = groups[i // args.group_size]
        advantage = rewards[i] - group.mean()
        if args.loss == "grpo":
            advantage = advantage / (group.var(correction=0).sqrt() + 1e-6)
        length = answer.index(END) + 1 if END in answer else ANSWER
        for t in range(length):
            context = torch.cat([prompts[i], answers[i, :t]])[None]
            policy = Categorical(logits=network(context)[0, -1])
            tokens.append((policy, Categorical(logits=log_behavior[i, t]), answer[t], advantage))
    ratios = []
    for policy, behavior, token, _ in tokens:
        token = torch.tensor(token)
        ratios.append((policy.log_prob(token) - behavior.log_prob(token)).exp())
    plain = [ratio.item() for ratio in ratios]
    e = sum(plain) ** 2 / (len(plain) * sum(ratio**2 for ratio in plain))
    losses = []
    for ratio, (policy, behavior, token, advantage) in zip(ratios, tokens, strict=True):
        if args.loss == "p3o":
            gain = min(ratio.item(), e) * policy.log_prob(torch.tensor(token)) * advantage
            losses.append((1 - e) * kl_divergence(policy, behavior) - gain)
        else:
            bound = 1 + args.clip_coef if advantage > 0 else 1 - args.clip_coef
            is_clipped = (ratio - bound) * advantage > 0
            losses.append(-(bound if is_clipped else ratio) * advantage)
    return torch.stack([torch.as_tensor(x) for x in losses]).mean(), e


@pytest.fixture
def guessing(monkeypatch):
    """A part that guesses, so that some answers of a group earn 1; and what it does in a run.

    Its weights are random, and its logits lean to the right answers. The imitation must be over
    after one update: the learning rate of this one is 0.
    """
    seen = SimpleNamespace(calls=[], draws=[])

    class Guessing(Tiny):
        def __init__(self):
            super().__init__()
            for weight in self.tokens.weight, self.positions.weight, self.head.weight:
                torch.nn.init.normal_(weight, std=0.4)
            seen.network, seen.before = self, copy.deepcopy(self)

        def forward(self, tokens):
            call = SimpleNamespace(tokens=tokens.clone(), training=self.training)
            call.weights = copy.deepcopy(self.state_dict())
            call.learns = torch.is_grad_enabled()
            call.in_bfloat16 = torch.is_autocast_enabled("cpu")
            seen.calls.append(call)
            right = F.one_hot(solutions(tokens[:, :PROMPT]), len(VOCABULARY))
            leaning = F.pad(right, (0, 0, PROMPT - 1, 0))[:, : tokens.shape[1]]
            return super().forward(tokens) + 5.0 * leaning

    def recorded(probabilities, count, multinomial=torch.Tensor.multinomial):
        tokens = multinomial(probabilities, count)
        if len(tokens) < 256:  # the others are the exam
            seen.draws.append((seen.calls[-1], tokens))
        return tokens

    monkeypatch.setattr(torch.Tensor, "multinomial", recorded)
    seen.part = Guessing
    return seen


def batches(seen, temperature=1.0):
    """The batches as they should be: sampler's weights, prompts, answers, log π_b, and rewards."""
    found = []
    for first in range(0, len(seen.draws), ANSWER):
        calls, tokens = zip(*seen.draws[first : first + ANSWER], strict=True)
        prompts, drawn = calls[0].tokens[:, :PROMPT], torch.cat(tokens, 1)
        sampler = copy.deepcopy(seen.before)
        sampler.load_state_dict(calls[0].weights)
        with torch.no_grad():
            logits = sampler(torch.cat([prompts, drawn[:, :-1]], 1))[:, PROMPT - 1 :]
        answers = []
        for answer in drawn.tolist():
            length = answer.index(END) if END in answer else ANSWER
            answers.append(answer[:length] + [END] * (ANSWER - length))
        batch = SimpleNamespace(weights=calls[0].weights, prompts=prompts)
        batch.answers = torch.tensor(answers)
        batch.log_pi = (logits / temperature).log_softmax(-1)
        batch.rewards = (batch.answers == solutions(prompts)).all(1).float()
        found.append(batch)
    return found


def test_the_imitation_can_be_skipped(train, guessing):
    """Guards pretrained models: the first answers are those of the weights that they came with."""
    train(1, guessing.part, supervised_updates=0)
    assert not any(call.training for call in guessing.calls)
    assert same_weights(guessing.calls[0].weights, guessing.before.state_dict())


@pytest.mark.parametrize("noise", ["none", "temperature"])
@pytest.mark.parametrize("loss", ["p3o", "ppo", "grpo"])
def test_an_update_computed_twice(train, guessing, loss, noise):
    """Guards all between the answers and the gradient: rewards, groups, mask, loss, its mean."""
    arguments = {"loss": loss, "behavior_noise": noise, "max_grad_norm": 1e9}
    folder = train(1, guessing.part, supervised_updates=1, **arguments)
    args = p3o_tokens.Args(**config(folder)["args"])
    (batch,) = batches(guessing, 1.3 if noise == "temperature" else 1)
    assert 0.1 < batch.rewards.mean() < 0.9
    lengths = p3o_tokens.valid_tokens(batch.answers).sum(1)
    assert lengths.min() < lengths.max() == ANSWER
    answered = batch.prompts, batch.answers, batch.log_pi, batch.rewards
    expected, e = loss_of(args, guessing.before, *answered)
    guessing.before.zero_grad()
    expected.backward()
    (row,) = rows(folder / "metrics.csv")
    assert float(row["charts/reward"]) == batch.rewards.mean().item()
    assert float(row["charts/episodic_return"]) == pytest.approx(batch.rewards.mean().item())
    assert float(row["p3o/ess"]) == pytest.approx(e, abs=1e-5)
    assert (e > 0.999) == (noise == "none")
    assert float(row["losses/policy_loss"]) == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    for ours, slow in zip(guessing.network.parameters(), guessing.before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, slow.grad, rtol=1e-3, atol=1e-6)


class Calculator(Tiny):
    """Answers rightly, but for each fourth problem, where it is off by one."""

    def forward(self, tokens):
        prompts = tokens[:, :PROMPT]
        answers = F.one_hot(solutions(prompts, range(0, len(prompts), 4)), len(VOCABULARY))
        return super().forward(tokens) + 100.0 * F.pad(answers, (0, 0, PROMPT - 1, 0))


def test_an_answer_earns_1_if_it_is_the_sum(train):
    """Guards the reward and both accuracies."""
    (row,) = rows(train(1, Calculator) / "metrics.csv")
    for name in "reward", "greedy_accuracy", "sampled_accuracy", "episodic_return":
        assert float(row[f"charts/{name}"]) == 0.75


class Hesitant(Tiny):
    """The right answers are the likeliest, but far from certain."""

    def forward(self, tokens):
        answers = F.one_hot(solutions(tokens[:, :PROMPT]), len(VOCABULARY))
        return 0.01 * super().forward(tokens) + 3.0 * F.pad(answers, (0, 0, PROMPT - 1, 0))


def test_greedy_answers_are_the_likeliest_ones(train):
    """Guards the two accuracies from each other."""
    (row,) = rows(train(1, Hesitant) / "metrics.csv")
    assert float(row["charts/greedy_accuracy"]) == 1
    assert float(row["charts/sampled_accuracy"]) < 0.5


def test_fresh_data_is_on_policy_to_the_bit(train, guessing):
    """Guards ρ = 1 where sampler and learner are one: e_B = 1, no pull, nothing capped."""
    folder = train(4, guessing.part)
    for name, value in {"p3o/ess": 1, "p3o/kl_weight": 0, "p3o/kl": 0, "p3o/capped": 0}.items():
        assert column(folder / "metrics.csv", name) == [value] * 4
    assert column(folder / "metrics.csv", "ppo/clipped") == [0] * 4


def test_a_sampler_in_bfloat16_is_another_policy(train, guessing):
    """Guards --behavior-noise bfloat16: slightly off, and only the sampler is."""
    folder = train(2, guessing.part, behavior_noise="bfloat16", adapt_frequency=1)
    assert 0.99 < min(column(folder / "metrics.csv", "p3o/ess")) < 1
    samplers = [call for call, _ in guessing.draws]
    assert samplers and all(call.in_bfloat16 for call in samplers)
    others = [call for call in guessing.calls if not any(call is other for other in samplers)]
    assert others and not any(call.in_bfloat16 for call in others)
    weights = load(folder)["network"].values()
    assert all(weight.dtype == torch.float32 for weight in weights)
    with torch.autocast("cpu", torch.bfloat16):
        _, log_pi = p3o_tokens.write_answers(Tiny(), others[0].tokens[:, :PROMPT], 1.0)
    assert log_pi.dtype == torch.float32


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_answers_come_from_the_policy_of_lag_updates_ago(train, guessing, lag):
    """Guards --lag: the sampler's weights are those that learning had then, or the first ones."""
    arguments = {"lag": lag, "learning_rate": 1e-2, "supervised_updates": 1}
    train(7, guessing.part, **arguments)
    sampled_with = [batch.weights for batch in batches(guessing)]
    learned = [guessing.before.state_dict()]
    for iterations in range(1, 8):
        learned.append(load(train(iterations, guessing.part, **arguments))["network"])
    assert len(sampled_with) == 7
    for iteration, weights in enumerate(sampled_with):
        assert same_weights(weights, learned[max(iteration - lag, 0)])
    assert not same_weights(learned[0], learned[1])


class WithDropout(Tiny):
    def forward(self, tokens):
        return F.dropout(super().forward(tokens), 0.5, self.training)


def test_networks_are_in_train_mode_in_the_imitation_only(train, guessing):
    """Guards the answers, the exam and the update."""
    train(3, guessing.part, lag=1, adapt_frequency=1, eval_frequency=1, supervised_updates=2)
    learning = [call.training for call in guessing.calls if call.learns]
    assert learning == [True, True, False, False, False]
    assert not any(call.training for call in guessing.calls if not call.learns)


def test_dropout_changes_no_ratio(train):
    """Guards ρ = 1 on fresh data; and δ: an update that changes nothing has none."""
    folder = train(3, WithDropout, adapt_frequency=1, learning_rate=1e-9)
    kls = column(folder / "metrics.csv", "abs/kl_divergence")
    assert len(kls) == 3 and max(map(abs, kls)) < 1e-7
    assert column(folder / "metrics.csv", "p3o/ess") == [1, 1, 1]


# --- ABS ---


def test_the_number_of_problems_follows_the_kl(train, guessing):
    """Guards --adapt-batch: L of the next batch is Eq. 4's of the KL measured, smoothed."""
    arguments = {"adapt_batch": True, "adapt_frequency": 2, "problems_min": 4, "problems_max": 16}
    folder = train(20, guessing.part, **arguments)
    table = rows(folder / "metrics.csv")
    length = 8.0
    for row in table:
        assert int(row["abs/rollout_length"]) == round(length)
        assert int(row["abs/batch_size"]) == 4 * round(length)
        if row["abs/kl_divergence"]:
            kl = min(max(float(row["abs/kl_divergence"]), 5e-4), 2e-2)
            alpha = math.log(kl / 5e-4) / math.log(2e-2 / 5e-4)
            length = 0.9 * length + 0.1 * (16 - alpha * 12)
    measured = [i for i, row in enumerate(table, 1) if row["abs/kl_divergence"]]
    assert measured == list(range(2, len(table) + 1, 2))
    assert len({row["abs/rollout_length"] for row in table}) > 1
    assert not p3o_tokens.Args().adapt_batch


def test_a_schedule_of_ones_own(train, tmp_path):
    """Guards the part rollout_length, and batches that stay without --adapt-batch."""
    lengths = iter([3, 9, 5, 5])
    args = p3o_tokens.Args(
        supervised_updates=1,
        group_size=4,
        num_problems=8,
        total_timesteps=4 * (8 + 3 + 9),
        adapt_frequency=1,
        adapt_batch=True,
        problems_min=1,
        runs_dir=str(tmp_path),
        run_name="mine",
    )
    rule = lambda divergence, length, **limits: next(lengths)  # noqa: E731
    folder = p3o_tokens.main(args, CausalTransformer=Tiny, rollout_length=rule)
    assert column(folder / "metrics.csv", "abs/rollout_length", int) == [8, 3, 9]
    fixed = train(3, adapt_frequency=1)
    assert len(column(fixed / "metrics.csv", "abs/kl_divergence")) == 3
    assert column(fixed / "metrics.csv", "abs/rollout_length", int) == [8, 8, 8]


def test_the_kl_is_that_of_one_update(train, guessing):
    """Guards what drives L: KL( π_θold ‖ π_θ ), averaged over the valid tokens of the batch."""
    arguments = {"adapt_frequency": 1, "supervised_updates": 1, "learning_rate": 1e-2}
    folder = train(1, guessing.part, **arguments)
    (batch,) = batches(guessing)
    sequences = torch.cat([batch.prompts, batch.answers], 1)
    total, reverse = [], []
    for i, t in p3o_tokens.valid_tokens(batch.answers).nonzero().tolist():
        old, new = (
            Categorical(logits=network(sequences[i : i + 1, : PROMPT + t])[0, -1])
            for network in (guessing.before, guessing.network)
        )
        total.append(kl_divergence(old, new).item())
        reverse.append(kl_divergence(new, old).item())
    (measured,) = column(folder / "metrics.csv", "abs/kl_divergence")
    assert measured == pytest.approx(sum(total) / len(total), rel=1e-3)
    assert abs(sum(reverse) / sum(total) - 1) > 0.01


# --- Files, resuming, bad input ---


def without_clock(folder):
    table = rows(folder / "metrics.csv")
    for row in table:
        del row["charts/seconds"], row["charts/SPS"]
    return table


def test_same_seed_same_numbers(train):
    """Guards reproducibility, the supervised start included."""
    arguments = {"behavior_noise": "temperature"}  # e_B < 1: so weights move without a reward
    one, again, other = (train(3, seed=seed, **arguments) for seed in (7, 7, 8))
    assert without_clock(one) == without_clock(again) != without_clock(other)
    assert same_weights(load(one)["network"], load(again)["network"])


def test_a_run_goes_on_as_if_it_had_not_stopped(train, launch, guessing):
    """Guards --resume: weights, Adam's state, the earlier policies, L_adapt, and the tables."""
    arguments = {"lag": 2, "adapt_batch": True, "adapt_frequency": 1, "eval_frequency": 1}
    arguments |= {"problems_min": 4, "problems_max": 16, "learning_rate": 1e-2}
    whole = train(12, guessing.part, **arguments)
    stopped = train(5, guessing.part, **arguments)
    further = ["--total-timesteps", 32 * 12]
    status, errors = launch("--resume", stopped, *further, CausalTransformer=guessing.part)
    assert status == 0, errors
    assert without_clock(stopped) == without_clock(whole)
    one, other = load(whole), load(stopped)
    assert same_weights(one["network"], other["network"])
    assert same_weights(one["policies"], other["policies"])
    assert one["adaptive_length"] == other["adaptive_length"] != 8
    assert one["scores"] == other["scores"] and 0 < sum(one["scores"]) < 100
    assert config(stopped)["args"]["total_timesteps"] == 32 * 12


def test_a_resumed_run_takes_the_batch_that_it_is_given(train, launch):
    """Guards --num-problems and no --adapt-batch beside --resume: the old L does not count."""
    folder = train(2)
    steps = ["--total-timesteps", 96, "--num-problems", 5]
    status, errors = launch("--resume", folder, *steps)
    assert status == 0, errors
    lengths = [row["abs/rollout_length"] for row in rows(folder / "metrics.csv")]
    assert lengths == ["8", "8", "5", "5"]


SMALL = ["--supervised-updates", 2, "--group-size", 2, "--num-problems", 4, "--lag", 1]
SMALL += ["--eval-frequency", 10**6, "--total-timesteps", 200, "--checkpoint-every", 1e-6]
SMALL += ["--behavior-noise", "temperature"]  # e_B < 1: so weights move without a reward


@pytest.fixture
def held(tmp_path):
    """A process that waits in its eleventh iteration, and the file that it waits for to go."""
    hold = tmp_path / "hold"
    hold.touch()
    command = [TOKENS_RUN, *SMALL, "--runs-dir", tmp_path, "--run-name", "held"]
    process = start(*command, env={"HOLD": str(hold)})
    wait_for((tmp_path / "hold.reached").exists, process)
    assert load(tmp_path / "held")["iteration"] == 10
    return process, hold


def test_killed_and_resumed_it_gives_the_same_numbers(tmp_path, held):
    """Guards runs against kill -9, as processes."""
    process, _ = held
    process.kill()
    process.communicate()
    end_of(start(TOKENS_RUN, "--resume", tmp_path / "held"))
    end_of(start(TOKENS_RUN, *SMALL, "--runs-dir", tmp_path, "--run-name", "whole"))
    assert without_clock(tmp_path / "held") == without_clock(tmp_path / "whole")
    ends = [load(tmp_path / name)["network"] for name in ("whole", "held")]
    assert same_weights(*ends)
    assert min(column(tmp_path / "whole" / "metrics.csv", "losses/grad_norm")) > 0


def test_ctrl_c_saves_and_ends(tmp_path, held):
    """Guards SIGINT during training, and what follows it."""
    process, hold = held
    process.send_signal(signal.SIGINT)
    hold.unlink()
    _, errors = end_of(process)
    assert "finishing the iteration" in errors and "stopped after 88 steps" in errors
    assert "--resume" in errors and "tools/" not in errors
    assert load(tmp_path / "held")["iteration"] == 11
    assert column(tmp_path / "held" / "metrics.csv", "global_step", int) == list(range(8, 96, 8))
    end_of(start(TOKENS_RUN, "--resume", tmp_path / "held"))
    assert column(tmp_path / "held" / "metrics.csv", "global_step", int) == list(range(8, 208, 8))


class Broken(Tiny):
    """Its gradient is not finite."""

    def forward(self, tokens):
        return super().forward(tokens) * (math.nan if torch.is_grad_enabled() else 1)


def test_nan_stops_it(train, launch):
    """Guards the last good checkpoint: a broken update is not saved over it."""
    folder = train(2)
    good = (folder / "checkpoint.pt").read_bytes()
    further = ["--total-timesteps", 320]
    status, errors = launch("--resume", folder, *further, CausalTransformer=Broken)
    assert status == 1 and "no longer finite" in errors
    assert (folder / "checkpoint.pt").read_bytes() == good


@pytest.mark.parametrize(
    "arguments",
    [
        ["--total-timesteps", 0],
        ["--group-size", 1],
        ["--lag", -1],
        ["--forget-share", 1.5],
        ["--learning-rate", "nan"],
        ["--temperature", 0],
        ["--delta-min", 1, "--delta-max", 0.5],
        ["--adapt-batch", "--num-problems", 3],
        ["--problems-max", 15],  # below --problems-min, which counts without --adapt-batch, too
        ["--resume", "nothing"],
    ],
    ids=lambda arguments: arguments[-2],
)
def test_bad_input_is_refused(launch, tmp_path, monkeypatch, arguments):
    """Guards users: status 2 and one line that names the option, before any work."""
    monkeypatch.chdir(tmp_path)
    status, errors = launch(*arguments, CausalTransformer=None)
    (line,) = errors.splitlines()
    assert status == 2
    assert any(str(word) in line for word in arguments if str(word).startswith("--"))
    assert contents(tmp_path) == {}


def test_a_name_that_is_taken_is_refused(train, launch, tmp_path):
    """Guards an earlier run from a second one with its name."""
    train(run_name="mine")
    before = contents(tmp_path)
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "mine")
    assert status == 2 and "mine" in errors
    assert contents(tmp_path) == before


def test_a_run_of_another_script_is_refused(train, launch):
    """Guards --resume: config.json says whose run it is."""
    folder = train()
    text = (folder / "config.json").read_text()
    assert json.loads(text)["script"] == p3o_tokens.SCRIPT
    (folder / "config.json").write_text(text.replace(p3o_tokens.SCRIPT, "p3o_abs.py"))
    status, errors = launch("--resume", folder)
    (line,) = errors.splitlines()
    assert status == 2 and "made by p3o_abs.py" in line


@pytest.mark.parametrize("name", ["network", "policies", "optimizer"])
def test_a_checkpoint_with_wrong_contents_is_refused(train, launch, name):
    """Guards a damaged run: one line."""
    folder = train()
    checkpoint = load(folder)
    checkpoint[name] = "text"
    torch.save(checkpoint, folder / "checkpoint.pt")
    status, errors = launch("--resume", folder)
    (line,) = errors.splitlines()
    assert status == 2 and "no checkpoint" in line


def test_another_lag_than_the_checkpoints_is_refused(train, launch):
    """Guards --lag beside --resume: the policies in between were not saved."""
    folder = train(lag=2)
    status, errors = launch("--resume", folder, "--lag", 3)
    (line,) = errors.splitlines()
    assert status == 2 and "no checkpoint" in line


def test_wandb_gets_the_rows(train, monkeypatch):
    """Guards --track: the numbers of metrics.csv, without empty cells."""
    sent = []
    run = SimpleNamespace(id="one", define_metric=lambda *names, **options: None, log=sent.append)
    run.finish = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))
    folder = train(3, track=True)
    expected = []
    for row in rows(folder / "metrics.csv"):
        expected.append({name: float(cell) for name, cell in row.items() if cell})
    assert sent == expected and len(sent) == 3


@pytest.mark.slow
def test_p3o_repairs_what_the_teacher_spoilt(tmp_path):
    """Guards the whole: greedy answers to held-out problems, from under 0.7 to over 0.95."""
    options = {"runs_dir": str(tmp_path), "seed": 11}
    still = {"run_name": "start", "learning_rate": 1e-9, "total_timesteps": 256}
    folders = [p3o_tokens.main(p3o_tokens.Args(**options | still))]
    folders.append(p3o_tokens.main(p3o_tokens.Args(**options)))
    name = "charts/greedy_accuracy"
    start, greedy = [column(folder / "metrics.csv", name) for folder in folders]
    assert start[0] < 0.7 and sum(greedy[-3:]) / 3 > 0.95
