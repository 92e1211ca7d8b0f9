"""tools/branch.py: branches go on from their checkpoint with another batch and nothing else changed."""

import itertools
import json

import numpy as np
import pytest
from helpers import ROOT, column, load, rows, start

from tools import branch

EXAMPLE = """
import dataclasses, sys
sys.path[:0] = [{root!r}, {tests!r}]
import pqn_abs
from helpers import Noise, SmallNetwork as QNetwork


@dataclasses.dataclass
class Args(pqn_abs.Args):
    num_envs: int = 4


def make_envs(args):
    return Noise(args.num_envs)


{end}
"""
GUARDED = 'if __name__ == "__main__":\n    raise SystemExit("this is for those who run it")'
RUNS_WHEN_IMPORTED = "pqn_abs.make_envs, pqn_abs.QNetwork, pqn_abs.Args = make_envs, QNetwork, Args\n"
RUNS_WHEN_IMPORTED += "pqn_abs.main(pqn_abs.parse_args())"  # as the README's example does
OPTIONS = "--total-timesteps 6000 --adapt-frequency 1 --exploration-fraction 0.3 --precision float32".split()


def test_spread_by_hand():
    assert branch.spread([1.0, 2.0, 3.0]) == 1.0
    assert branch.spread([-5.0, -5.0]) == 0


def test_table_by_hand():
    scores = {(0.5, 1): (1.0, 3.0), (0.5, 2): (3.0, 5.0), (0.2, 1): (4.0, 4.0)}
    results = [
        {"level": level, "seed": seed, "rollout_length": length, "score": score}
        for (level, seed), pair in scores.items()
        for length, score in zip((16, 64), pair, strict=True)
    ]
    high, low = branch.table(results, (16, 64))
    assert (high["BD"], high["seeds"], high["L = 16"], high["L = 64"]) == (0.5, 2, 2.0, 4.0)
    assert high["spread"] == high["by chance"] == pytest.approx(2 / 3)  # both seeds as they are, or both reversed
    assert high["p"] == pytest.approx(0.5, abs=0.05)  # two of the four ways
    assert (low["BD"], low["seeds"], low["spread"]) == (0.2, 1, 0.0) and np.isnan(low["p"])


def test_chance_reaches_the_spread_of_noise_but_not_of_an_effect():
    """Where L does nothing, p is uniform; where it does, p is small."""
    rng, ps = np.random.default_rng(1), {0: [], 30: []}
    for effect, _ in itertools.product(ps, range(40)):
        scores = 100 + rng.normal(size=(4, 3)) * 10 + effect * np.arange(3)
        results = [
            {"level": 0.5, "seed": seed, "rollout_length": length, "score": scores[seed, i]}
            for seed in range(4)
            for i, length in enumerate((16, 32, 64))
        ]
        ps[effect].append(branch.table(results, (16, 32, 64))[0]["p"])
    assert 0.35 < np.mean(ps[0]) < 0.65 and min(ps[0]) < 0.2 < 0.8 < max(ps[0])
    assert np.mean(ps[30]) < 0.01


@pytest.mark.parametrize("end", [GUARDED, RUNS_WHEN_IMPORTED])
def test_branches_of_a_run(tmp_path, end):
    """Two levels, the second reached after five more measurements; two lengths, the same samples."""
    example = tmp_path / "example.py"
    example.write_text(EXAMPLE.format(root=str(ROOT), tests=str(ROOT / "tests"), end=end))
    words = ["--script", example, "--levels", 1.0, 0.99, "--lengths", 8, 32, "--seeds", 3, "--samples", 1000]
    process = start(ROOT / "tools" / "branch.py", *words, "--out", tmp_path / "out", "--", *OPTIONS)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    results = rows(tmp_path / "out" / "branches.csv")
    assert [(row["level"], row["rollout_length"]) for row in results] == [
        ("1.0", "8"),
        ("1.0", "32"),
        ("0.99", "8"),
        ("0.99", "32"),
    ]
    assert "| 0.99 | 1 |" in output and (tmp_path / "out" / "branches.png").stat().st_size > 10_000
    for row in results:
        begin, length = int(row["step"]), int(row["rollout_length"])
        folder = tmp_path / "out" / f"BD_{row['level']}_seed_3_L_{length}"
        steps = column(folder / "metrics.csv", "global_step", int)
        assert steps == list(range(begin + 4 * length, steps[-1] + 1, 4 * length))
        assert begin + 1000 <= steps[-1] < begin + 1000 + 4 * length
        epsilon = [1 - 0.999 * min(1, (step - 4 * length) / 1800) for step in steps]
        assert column(folder / "metrics.csv", "charts/epsilon") == pytest.approx(epsilon)
        late = [
            float(e["episodic_return"]) for e in rows(folder / "episodes.csv") if int(e["global_step"]) > begin + 500
        ]
        assert float(row["score"]) == pytest.approx(np.mean(late))
    (base,) = (tmp_path / "out" / "bases").iterdir()
    divergences = column(base / "metrics.csv", "abs/behavioral_divergence")
    first, second = (int(results[i]["step"]) for i in (0, 2))
    assert np.mean(divergences[1:6]) == pytest.approx(float(results[0]["BD"]))  # the untrained network's is left out
    assert column(base / "metrics.csv", "global_step", int)[5] == first < second == load(base)["global_step"]
    assert json.loads((base / "config.json").read_text())["args"]["seed"] == 3


@pytest.mark.parametrize(
    "words, says",
    [
        (["--levels", "0.2", "0.5"], "--levels"),
        (["--levels", "0"], "--levels"),
        (["--levels", "0.5", "0.5"], "--levels"),
        (["--lengths", "16", "16"], "--lengths"),
        (["--lengths", "1", "--", "--num-envs", "2"], "--num-minibatches"),
        (["--seeds", "-2", "1"], "--seed"),
        (["--script", str(ROOT / "gns_baseline.py")], "gns_baseline.py"),
        (["--", "--seed", "5"], "--seed"),
        (["--lengths", "0"], "--lengths"),
        (["--seeds", "1", "1"], "--seeds"),
        (["--script", "nowhere.py"], "nowhere.py"),
        (["--script", str(ROOT / "tools" / "plot.py")], "plot.py"),
        (["--out", str(ROOT / "tests")], "already"),
        (["--", "--env-id", "Pung"], "Pung"),
        (["--", "--beta", "2"], "--beta"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, words, says):
    out = [] if "--out" in words else ["--out", tmp_path / "out"]
    process = start(ROOT / "tools" / "branch.py", *out, *words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1 and says in errors
    assert not (tmp_path / "out").exists()
