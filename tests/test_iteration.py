"""One iteration of the script, against the same iteration computed a second time from what the environment saw."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import Noise, column, load, record, rows, same, second_computation

import pqn_abs

ONE = {"num_steps": 7, "rollout_min": 5, "rollout_max": 9, "num_minibatches": 4, "learning_rate": 0.01}


class Walk(gymnasium.Env):
    """A single environment, for Gymnasium's own vector environment: six random bytes, and an end by chance."""

    observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.frame(), {}

    def step(self, action):
        return self.frame(), float(self.np_random.integers(-3, 4)), self.np_random.random() < 0.1, False, {}

    def frame(self):
        return self.np_random.integers(256, size=6, dtype=np.uint8)


def walks(num_envs, autoreset_mode):
    limited = gymnasium.wrappers.TimeLimit
    return SyncVectorEnv([lambda: limited(Walk(), 4) for _ in range(num_envs)], autoreset_mode=autoreset_mode)


@pytest.mark.parametrize(
    "envs, arguments",
    [
        (Noise(4), ONE | {"num_minibatches": 1}),
        (Noise(3), ONE),  # 21 transitions in 4 mini-batches: 6, 5, 5, 5
        (Noise(3, truncate=0.5), ONE | {"gamma": 0.9, "q_lambda": 0.9}),
        (Noise(3, terminate=0.0, truncate=0.0), ONE | {"q_lambda": 0.0}),
        (Noise(3), ONE | {"max_grad_norm": 0.05, "update_epochs": 3}),  # each gradient is clipped
        (Noise(160), {"learning_rate": 0.01, "reference_states": 5120}),  # mini-batches of 1280: more than one chunk
        (Noise(8, truncate=0.2, full_lives=2, lose_life=0.3), ONE | {"episodic_life": True}),
        (walks(3, AutoresetMode.SAME_STEP), ONE),
        (walks(3, "SameStep"), ONE | {"start_e": 0.0, "end_e": 0.0}),
    ],
    ids=["even", "uneven", "truncated", "endless", "clipped", "chunks", "lives", "SyncVectorEnv", "greedy"],
)
def test_iteration_computed_twice(watch, envs, arguments):
    seen = watch(envs, total_timesteps=1, **arguments)
    network, args = seen.start, seen.args
    before = copy.deepcopy(network)
    assert len(seen.envs.steps) == args.num_steps
    batch = args.num_envs * args.num_steps
    orders = seen.orders[: args.update_epochs]
    assert all(sorted(order.tolist()) == list(range(batch)) for order in orders)
    td_loss, q_values, grad_norm = second_computation(network, [seen.envs.steps], [orders], args)

    for name, parameter in load(seen.folder)["network"].items():
        torch.testing.assert_close(parameter.double(), network.state_dict()[name], rtol=1e-4, atol=2e-6)
    (row,) = rows(seen.folder / "metrics.csv")
    assert int(row["global_step"]) == int(row["abs/batch_size"]) == batch
    assert float(row["losses/td_loss"]) == pytest.approx(td_loss, rel=1e-4)
    assert float(row["losses/q_values"]) == pytest.approx(q_values, rel=1e-4, abs=1e-5)
    assert float(row["losses/grad_norm"]) == pytest.approx(grad_norm, rel=1e-4)

    states = torch.from_numpy(np.concatenate([step["obs"] for step in seen.envs.steps]))
    changed = (before(states).argmax(1) != network(states).argmax(1)).double().mean().item()
    assert float(row["abs/behavioral_divergence"]) == pytest.approx(changed, abs=1e-6)
    assert float(row["abs/value_variance"]) == pytest.approx(before(states).amax(1).var(correction=0).item(), rel=1e-4)
    shares = np.bincount(network(states).argmax(1)) / batch
    assert float(row["abs/policy_entropy"]) == pytest.approx(-sum(p * np.log(p) for p in shares if p > 0), abs=1e-5)
    next_length = pqn_abs.rollout_length(
        changed, args.num_steps, (0.05, 0.95), (args.rollout_min, args.rollout_max), args.beta
    )
    assert load(seen.folder)["adaptive_length"] == pytest.approx(next_length, rel=1e-4)


def test_network_may_compute_in_bfloat16_throughout(watch):
    """The script's own has a float32 head, another one need not."""
    seen = watch(Noise(3, truncate=0.3), total_timesteps=1, precision="bfloat16", **ONE)
    td_loss, *_ = second_computation(seen.start, [seen.envs.steps], [seen.orders[:2]], seen.args)
    assert float(rows(seen.folder / "metrics.csv")[0]["losses/td_loss"]) == pytest.approx(td_loss, rel=0.1)


def test_actions_are_greedy_but_for_the_share_epsilon(watch):
    """Of the random actions, one in four happens to be the greedy one."""
    shares = {}
    for epsilon in (0.0, 0.4, 1.0):
        seen = watch(Noise(64), total_timesteps=1, start_e=epsilon, end_e=epsilon)
        obs = torch.from_numpy(np.stack([step["obs"] for step in seen.envs.steps]))
        greedy = seen.start(obs.flatten(0, 1)).argmax(1).numpy()
        shares[epsilon] = (greedy != np.concatenate([step["action"] for step in seen.envs.steps])).mean()
    assert shares[0.0] == 0
    assert shares[0.4] == pytest.approx(0.4 * 0.75, abs=0.05)
    assert shares[1.0] == pytest.approx(0.75, abs=0.05)


def test_epsilon_falls_over_the_first_part_of_the_run(train):
    folder = train(Noise(4), total_timesteps=1280, exploration_fraction=0.5, adapt_rollout=False)
    assert column(folder / "metrics.csv", "charts/epsilon") == pytest.approx(
        [1 - 0.999 * min(1, step / 640) for step in range(0, 1280, 128)]
    )


@pytest.mark.parametrize("frequency", [1, 3, 4])
def test_divergence_is_measured_every_kth_iteration(train, frequency):
    folder = train(Noise(4), total_timesteps=128 * 9, adapt_frequency=frequency, adapt_rollout=False)
    measured = [i for i, row in enumerate(rows(folder / "metrics.csv")) if row["abs/behavioral_divergence"]]
    assert measured == list(range(0, 9, frequency))


def test_divergence_compares_the_networks_before_and_after_one_iteration(train, monkeypatch):
    """With K = 1 each iteration begins with the network that the last one left, and K = 3 sees every third of them."""

    def divergence(network, old_network, *rest):
        seen.append([copy.deepcopy(old_network.state_dict()), copy.deepcopy(network.state_dict())])
        return measure(network, old_network, *rest)

    seen, measure = [], pqn_abs.behavioral_divergence
    monkeypatch.setattr(pqn_abs, "behavioral_divergence", divergence)
    options = {"total_timesteps": 128 * 9, "adapt_rollout": False}  # so that the runs are the same
    train(Noise(4), adapt_frequency=1, **options)
    each, seen = seen, []
    assert all(same(before, last[1]) for (before, _), last in zip(each[1:], each, strict=False))
    assert not any(same(before, after) for before, after in each)
    train(Noise(4), adapt_frequency=3, **options)
    assert same(seen, each[::3])


@pytest.mark.parametrize("available, expected", [(128, 50), (32, 32)])
def test_reference_states_are_drawn_from_the_whole_rollout_without_repetition(watch, monkeypatch, available, expected):
    references = []

    def divergence(network, old_network, states, *rest):
        references.append(states.clone())
        return measure(network, old_network, states, *rest)

    measure = pqn_abs.behavioral_divergence
    monkeypatch.setattr(pqn_abs, "behavioral_divergence", divergence)
    seen = watch(Noise(available // 16), num_steps=16, reference_states=50, total_timesteps=1)
    rollout = [tuple(frame) for step in seen.envs.steps for frame in step["obs"].tolist()]
    drawn = [rollout.index(tuple(frame)) for frame in references[0].tolist()]
    assert len(drawn) == len(set(drawn)) == expected
    assert max(drawn) > 0.8 * available and min(drawn) < 0.2 * available


@pytest.mark.parametrize("measured, expected", [(0.0, 64), (0.3, 35), (1.0, 16)])
def test_rollouts_go_where_the_divergence_leads(train, monkeypatch, measured, expected):
    """From 32 steps, a tenth of the way with each measurement."""
    monkeypatch.setattr(pqn_abs, "behavioral_divergence", lambda *args: measured)
    folder = train(Noise(2), total_timesteps=5000, adapt_frequency=1)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert lengths[0] == 32 and abs(lengths[-1] - expected) <= 1
    assert lengths == sorted(lengths, reverse=expected < 32)
    assert np.abs(np.diff(lengths)).max() <= 4


@pytest.mark.parametrize("arguments", [{}, {"adapt_rollout": False}, {"beta": 1.0, "rollout_min": 1, "num_steps": 3}])
def test_batch_is_environments_times_rollout_and_rollouts_stay_in_range(train, arguments):
    envs = record(Noise(4))
    folder = train(envs, total_timesteps=3000, adapt_frequency=1, num_minibatches=2, learning_rate=0.01, **arguments)
    args = pqn_abs.Args(**load(folder)["args"])
    names = ("global_step", "abs/rollout_length", "abs/batch_size")
    steps, lengths, batches = (column(folder / "metrics.csv", name, int) for name in names)
    assert batches == [4 * length for length in lengths]
    assert steps == np.cumsum(batches).tolist()
    assert sum(lengths) == len(envs.steps)
    assert steps[-2] < 3000 <= steps[-1]
    if args.adapt_rollout:
        assert len(set(lengths)) > 1 and args.rollout_min <= min(lengths) and max(lengths) <= args.rollout_max
    else:
        assert set(lengths) == {args.num_steps}


def test_rollout_is_the_integer_nearest_to_the_adaptive_length(train, monkeypatch):
    def rollout_length(*args):
        adaptive.append(original(*args))
        return adaptive[-1]

    adaptive, original = [32.0], pqn_abs.rollout_length
    monkeypatch.setattr(pqn_abs, "rollout_length", rollout_length)
    folder = train(Noise(4), total_timesteps=3000, adapt_frequency=1, learning_rate=0.01)
    lengths = column(folder / "metrics.csv", "abs/rollout_length", int)
    assert all(abs(a - b) <= 0.5 for a, b in zip(adaptive, lengths, strict=False))
    assert load(folder)["adaptive_length"] == adaptive[-1]


def test_each_iteration_explores_anew(train):
    envs = record(Noise(4))
    train(envs, total_timesteps=256, start_e=1.0, end_e=1.0, adapt_rollout=False)
    actions = np.stack([step["action"] for step in envs.steps])
    assert not np.array_equal(actions[:32], actions[32:])
    assert np.bincount(actions.flatten()) == pytest.approx(256 / 4, rel=0.4)


def test_scores_are_those_of_the_game(train):
    envs = record(Noise(3))
    folder = train(envs, total_timesteps=2000)
    expected, score, length = [], np.zeros(3), np.zeros(3, dtype=int)
    for t, step in enumerate(envs.steps):
        score, length = score + step["reward"], length + 1
        for i in np.flatnonzero(step["terminated"] | step["truncated"]):
            expected.append((3 * (t + 1), score[i], length[i]))
            score[i], length[i] = 0, 0
    scores = [tuple(float(value) for value in row.values()) for row in rows(folder / "episodes.csv")]
    assert scores == expected
    assert float(rows(folder / "metrics.csv")[-1]["charts/episodic_return"]) == pytest.approx(
        np.mean([score for _, score, _ in expected[-100:]])
    )


def test_fire_follows_a_lost_life_and_scores_count_the_whole_game(train):
    """Also from one rollout to the next; and with the option off, nothing presses FIRE."""
    after = {True: [], False: []}
    for on in after:
        envs = record(Noise(8, terminate=0.0, truncate=0.02, full_lives=5, lose_life=0.2))
        folder = train(envs, total_timesteps=2000, episodic_life=on, start_e=0.5, end_e=0.5)
        for last, step, following in zip(envs.steps, envs.steps[1:], envs.steps[2:], strict=False):
            alive = ~(step["terminated"] | step["truncated"])
            after[on] += following["action"][alive & (step["lives"] < last["lives"])].tolist()
        ended = [step["terminated"] | step["truncated"] for step in envs.steps]
        assert len(rows(folder / "episodes.csv")) == np.sum(ended)
        assert sum(column(folder / "episodes.csv", "episodic_length", int)) <= 8 * len(envs.steps)
    assert len(after[True]) > 100 and set(after[True]) == {envs.fire_action}
    assert set(after[False]) == {0, 1, 2, 3}


@pytest.mark.parametrize("envs", [walks(2, AutoresetMode.NEXT_STEP), walks(2, AutoresetMode.DISABLED), Noise(2)])
def test_other_autoreset_modes_are_refused(train, tmp_path, capsys, envs):
    """With Noise: an environment that doesn't say what it does."""
    if isinstance(envs, Noise):
        envs.metadata = {}
    with pytest.raises(SystemExit) as error:
        train(envs)
    assert error.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"num_envs": 3}, {"num_envs": 4, "env_groups": 2}])
def test_other_numbers_of_environments_are_refused(train, tmp_path, capsys, options):
    """make_envs, which may be the user's, is called for each group with the number that it has."""
    with pytest.raises(SystemExit) as error:
        train(lambda args: Noise(4), **options)
    assert error.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
