"""p3o_tokens.py: the task, the model, one update computed twice, stale data, and its files."""

import copy
import functools
import json
import math
import random
import signal
import sys

import pytest
import torch
from helpers import ROOT, column, load, rows, same_weights, start, wait_for
from torch.distributions import Categorical, kl_divergence

import p3o_tokens
from p3o_tokens import ANSWER, END, PROMPT, VOCABULARY, CausalTransformer


def decode(tokens):
    return ["".join(VOCABULARY[i] for i in row) for row in tokens.tolist()]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(**arguments) runs p3o_tokens.py with a tiny transformer and returns its folder."""
    count = iter(range(100))
    tiny = functools.partial(CausalTransformer, width=16, heads=2, layers=1)
    monkeypatch.setattr(p3o_tokens, "CausalTransformer", tiny)

    def run(iterations=1, **arguments):
        defaults = {"supervised_updates": 2, "group_size": 4, "num_problems": 8}
        defaults |= {"runs_dir": str(tmp_path), "run_name": f"run{next(count)}"}
        defaults |= {"total_timesteps": 32 * iterations, "eval_frequency": 1000}
        return p3o_tokens.main(p3o_tokens.Args(**(defaults | arguments)))

    return run


@pytest.fixture
def launch(monkeypatch, capsys):
    """launch(*arguments) is the command line in this process; returns the status and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["p3o_tokens.py", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            p3o_tokens.launch()
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
    """A random start, and END at once as right answer: some of a group's answers earn 1."""
    seen = {"batches": []}

    def begin(network, args):
        for weight in network.tokens.weight, network.positions.weight, network.head.weight:
            torch.nn.init.normal_(weight, std=0.4)
        torch.nn.init.constant_(network.head.bias[END], 2)
        seen["network"] = network
        seen["before"] = copy.deepcopy(network)

    def watched(network, prompts, temperature, write=p3o_tokens.write_answers):
        answers, log_pi = write(network, prompts, temperature)
        if len(prompts) < 256:  # the others are the exam
            weights = copy.deepcopy(network.state_dict())
            seen["batches"].append((weights, prompts, answers, log_pi))
        return answers, log_pi

    def end_at_once(problems, totals, encode=p3o_tokens.encode):
        prompts, answers = encode(problems, totals)
        return prompts, torch.full_like(answers, END)

    monkeypatch.setattr(p3o_tokens, "imitate_teacher", begin)
    monkeypatch.setattr(p3o_tokens, "write_answers", watched)
    monkeypatch.setattr(p3o_tokens, "encode", end_at_once)
    return seen


@pytest.mark.parametrize("noise", ["none", "temperature"])
@pytest.mark.parametrize("loss", ["p3o", "ppo", "grpo"])
def test_an_update_computed_twice(train, guessing, loss, noise):
    """Guards all between the answers and the gradient: rewards, groups, mask, loss, its mean."""
    folder = train(loss=loss, behavior_noise=noise, max_grad_norm=1e9)
    args = p3o_tokens.Args(**load(folder)["args"])
    ((_, *batch),) = guessing["batches"]
    rewards = (batch[1][:, 0] == END).float()
    assert 0.1 < rewards.mean() < 0.9
    expected, e = loss_of(args, guessing["before"], *batch, rewards)
    expected.backward()
    (row,) = rows(folder / "metrics.csv")
    assert float(row["charts/reward"]) == rewards.mean().item()
    assert float(row["p3o/ess"]) == pytest.approx(e, abs=1e-5)
    assert (e > 0.999) == (noise == "none")
    assert float(row["losses/policy_loss"]) == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    for ours, slow in zip(
        guessing["network"].parameters(), guessing["before"].parameters(), strict=True
    ):
        torch.testing.assert_close(ours.grad, slow.grad, rtol=1e-3, atol=1e-6)


def test_an_answer_earns_1_if_it_is_the_sum(train, monkeypatch):
    """Guards the reward and both accuracies: right but for each fourth answer, off by one there."""

    def calculate(network, prompts, temperature):
        answers = []
        for i, problem in enumerate(decode(prompts)):
            a, b = problem.rstrip("=").split("+")
            total = int(a) + int(b) + (i % 4 == 0)
            answers.append([VOCABULARY.index(digit) for digit in f"{str(total)[::-1]:\n<{ANSWER}}"])
        log_pi = torch.zeros(len(answers), ANSWER, len(VOCABULARY)).log_softmax(-1)
        return torch.tensor(answers), log_pi

    monkeypatch.setattr(p3o_tokens, "write_answers", calculate)
    (row,) = rows(train() / "metrics.csv")
    for name in "reward", "greedy_accuracy", "sampled_accuracy":
        assert float(row[f"charts/{name}"]) == 0.75


def test_fresh_data_is_on_policy_to_the_bit(train, guessing):
    """Guards ρ = 1 where sampler and learner are one: e_B = 1, no pull, nothing capped."""
    folder = train(4)
    for name, value in {"p3o/ess": 1, "p3o/kl_weight": 0, "p3o/kl": 0, "p3o/capped": 0}.items():
        assert column(folder / "metrics.csv", name) == [value] * 4
    assert column(folder / "metrics.csv", "ppo/clipped") == [0] * 4


def test_a_sampler_in_bfloat16_is_another_policy(train, guessing):
    """Guards --behavior-noise bfloat16: slightly off, and only the sampler is."""
    folder = train(2, behavior_noise="bfloat16")
    assert 0.99 < min(column(folder / "metrics.csv", "p3o/ess")) < 1
    _, _, _, log_pi = guessing["batches"][0]
    assert log_pi.dtype == torch.float32
    weights = load(folder)["network"].values()
    assert all(weight.dtype == torch.float32 for weight in weights)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_answers_come_from_the_policy_of_lag_updates_ago(train, guessing, lag):
    """Guards --lag: the sampler's weights are those that learning had then, or the first ones."""
    train(7, lag=lag, learning_rate=1e-2)
    sampled_with = [weights for weights, *_ in guessing["batches"]]
    learned = []
    for iteration in range(7):
        guessing["batches"].clear()
        train(iteration + 1, learning_rate=1e-2, lag=lag)
        learned.append(copy.deepcopy(guessing["network"].state_dict()))
    before = [guessing["before"].state_dict(), *learned]
    for iteration, weights in enumerate(sampled_with):
        assert same_weights(weights, before[max(iteration - lag, 0)])
    assert not same_weights(before[0], before[1])


# --- ABS ---


def test_the_number_of_problems_follows_the_kl(train, guessing):
    """Guards --adapt-batch: L of the next batch is Eq. 4's of the KL measured, smoothed."""
    folder = train(20, adapt_batch=True, adapt_frequency=2, problems_min=4, problems_max=16)
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


def test_the_kl_is_that_of_one_update(train, guessing):
    """Guards what drives L: KL( π_θold ‖ π_θ ), averaged over the valid tokens of the batch."""
    folder = train(1, adapt_frequency=1)
    ((_, prompts, answers, _),) = guessing["batches"]
    sequences = torch.cat([prompts, answers], 1)
    total = []
    for i, t in p3o_tokens.valid_tokens(answers).nonzero().tolist():
        old, new = (
            Categorical(logits=network(sequences[i : i + 1, : PROMPT + t])[0, -1])
            for network in (guessing["before"], guessing["network"])
        )
        total.append(kl_divergence(old, new).item())
    (measured,) = column(folder / "metrics.csv", "abs/kl_divergence")
    assert measured == pytest.approx(sum(total) / len(total), rel=1e-3)


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
    whole = train(12, **arguments)
    stopped = train(5, **arguments)
    status, errors = launch("--resume", stopped, "--total-timesteps", 32 * 12)
    assert status == 0, errors
    assert without_clock(stopped) == without_clock(whole)
    one, other = load(whole), load(stopped)
    assert same_weights(one["network"], other["network"])
    assert same_weights(one["policies"], other["policies"])
    assert one["adaptive_length"] == other["adaptive_length"] != 8
    config = json.loads((stopped / "config.json").read_text())
    assert config["args_before"]["total_timesteps"] == 160


def test_a_resumed_run_takes_the_batch_that_it_is_given(train, launch):
    """Guards --num-problems and no --adapt-batch beside --resume: the old L does not count."""
    folder = train(2)
    steps = ["--total-timesteps", 96, "--num-problems", 5]
    status, errors = launch("--resume", folder, *steps)
    assert status == 0, errors
    lengths = [row["abs/rollout_length"] for row in rows(folder / "metrics.csv")]
    assert lengths == ["8", "8", "5", "5"]


def test_killed_and_resumed_it_gives_the_same_numbers(tmp_path):
    """Guards runs against kill -9, as processes."""
    script = ROOT / "p3o_tokens.py"
    small = ["--supervised-updates", 2, "--group-size", 2, "--num-problems", 4, "--lag", 1]
    small += ["--eval-frequency", 10**6, "--total-timesteps", 800, "--runs-dir", tmp_path]
    small += ["--behavior-noise", "temperature"]  # e_B < 1: so weights move without a reward
    whole = start(script, *small, "--run-name", "whole")
    killed = start(script, *small, "--run-name", "killed", "--checkpoint-every", 1e-6)
    checkpoint = tmp_path / "killed" / "checkpoint.pt"
    wait_for(lambda: checkpoint.exists() and load(tmp_path / "killed")["iteration"] > 9, killed)
    killed.kill()
    killed.communicate()
    reached = load(tmp_path / "killed")["iteration"]
    resumed = start(script, "--resume", tmp_path / "killed")
    for process in (whole, resumed):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert 9 < reached < 100
    assert without_clock(tmp_path / "killed") == without_clock(tmp_path / "whole")
    ends = [load(tmp_path / name)["network"] for name in ("whole", "killed")]
    assert same_weights(*ends)
    assert min(column(tmp_path / "whole" / "metrics.csv", "losses/grad_norm")) > 0


def test_ctrl_c_saves_and_ends(tmp_path):
    """Guards SIGINT during training."""
    small = ["--supervised-updates", 2, "--group-size", 2, "--num-problems", 4]
    small += ["--runs-dir", tmp_path, "--run-name", "run", "--checkpoint-every", 1e-6]
    process = start(ROOT / "p3o_tokens.py", *small)
    wait_for((tmp_path / "run" / "checkpoint.pt").exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert load(tmp_path / "run")["global_step"] == 8 * len(rows(tmp_path / "run" / "metrics.csv"))


def test_nan_stops_it(train, launch, guessing, monkeypatch):
    """Guards the last good checkpoint: a broken update is not saved over it."""
    folder = train(2)
    good = (folder / "checkpoint.pt").read_bytes()

    def broken(*args, p3o_loss=p3o_tokens.p3o_loss):
        loss, *rest = p3o_loss(*args)
        return loss * math.nan, *rest

    monkeypatch.setattr(p3o_tokens, "p3o_loss", broken)
    status, errors = launch("--resume", folder, "--total-timesteps", 320)
    assert status == 1 and "not finite" in errors
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
        ["--resume", "nothing"],
    ],
    ids=lambda arguments: arguments[-2],
)
def test_bad_input_is_refused(launch, tmp_path, monkeypatch, arguments):
    """Guards users: status 2 and one line that names the option, before any work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(p3o_tokens, "imitate_teacher", None)
    status, errors = launch(*arguments)
    (line,) = errors.splitlines()
    assert status == 2
    assert any(str(word) in line for word in arguments if str(word).startswith("--"))


def test_a_name_that_is_taken_is_refused(train, launch, tmp_path):
    """Guards an earlier run from a second one with its name."""
    train(run_name="mine")
    status, errors = launch("--runs-dir", tmp_path, "--run-name", "mine")
    assert status == 2 and "mine" in errors


@pytest.mark.parametrize(
    "name", "network policies optimizer global_step adaptive_length seconds metrics_size".split()
)
def test_a_checkpoint_with_wrong_contents_is_refused(train, launch, name):
    """Guards a damaged run: one line."""
    folder = train()
    checkpoint = load(folder)
    checkpoint[name] = "text"
    torch.save(checkpoint, folder / "checkpoint.pt")
    status, errors = launch("--resume", folder)
    assert status == 2 and "no checkpoint" in errors


def test_wandb_gets_the_rows(train, monkeypatch):
    """Guards --track: the numbers of metrics.csv, at their steps, without empty cells."""
    sent = []
    monkeypatch.setattr(p3o_tokens.wandb, "init", lambda **options: None)
    monkeypatch.setattr(p3o_tokens.wandb, "log", lambda row, step: sent.append((step, row)))
    folder = train(3, track=True)
    expected = []
    for row in rows(folder / "metrics.csv"):
        numbers = {name: float(cell) for name, cell in row.items() if cell}
        expected.append((int(row["global_step"]), numbers))
    assert sent == expected


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
