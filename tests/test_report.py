"""tools/report.py: its numbers against ones worked out by hand, what it refuses, and a report of real runs."""

import csv
import itertools
import json

import numpy as np
import pytest
from helpers import Bandit
from scipy.stats import spearmanr

from tools import report, scores

COLUMNS = (
    "global_step charts/seconds charts/episodic_return abs/batch_size abs/behavioral_divergence abs/value_variance"
)
ARGS = {"total_timesteps": 1000, "num_steps": 32, "rollout_max": 64, "precision": "auto", "seed": 1}
ARGS |= {"env_id": "BreakoutNoFrameskip-v4", "adapt_rollout": True, "learning_rate": 1e-3}


def make_run(folder, score, script="pqn_abs.py", rows=20, shift=0.0, **args):
    """A finished run whose last tenth, two rows, scores as given; BD falls, and with it the values' variance rises."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "args": ARGS | args}))
    with open(folder / "metrics.csv", "w") as file:
        file.write(COLUMNS.replace(" ", ",") + "\n")
        for i in range(rows):
            now = "" if i == 0 else score + (0.5 if i == rows - 1 else -0.5 if i == rows - 2 else -i)
            divergence = "" if i % 2 else 0.9 - i / 50 + shift
            file.write(f"{(i + 1) * 1000 // rows},1.0,{now},{64 + i},{divergence},{i * i}\n")
    return folder


def compare(folder, games, seeds=(1, 2, 3), **args):
    """Runs of ABS and of the fixed batch; games holds for each the two mean scores."""
    for game, means in games.items():
        for adapt, mean in zip((True, False), means, strict=True):
            for seed in seeds:
                name = f"{args.get('script', '')}{args.get('rollout_max', '')}{game}{adapt}{seed}".replace("/", "")
                arguments = {"env_id": game, "adapt_rollout": adapt, "seed": seed} | args
                make_run(folder / name, mean + 10 * (seed - 2), **arguments)


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def refused(capsys, tmp_path, *folders, **options):
    with pytest.raises(SystemExit) as error:
        report.main(report.Args(folders, tmp_path / "report", **options))
    assert error.value.code == 2 and not (tmp_path / "report").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


GAMES = {"BreakoutNoFrameskip-v4": (100.0, 70.0), "ALE/Pong-v5": (5.0, 10.0)}
SPANS = {"Breakout": 30.5 - 1.7, "Pong": 14.6 + 20.7}  # human less random, Wang et al. 2016


def test_improvements_by_hand(tmp_path, capsys):
    compare(tmp_path / "runs", GAMES)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "improvement.csv")
    expected = {"Breakout": 100 * 30 / SPANS["Breakout"], "Pong": -100 * 5 / SPANS["Pong"]}
    expected["mean"] = sum(expected.values()) / 2
    assert {row["game"]: float(row["improvement_percent"]) for row in rows} == pytest.approx(expected, rel=1e-5)
    assert all(float(row["low"]) < float(row["improvement_percent"]) < float(row["high"]) for row in rows)
    assert [row["runs"] for row in rows] == ["6", "6", "12"]
    assert "| pqn_abs, ABS to L = 64 | Breakout | 104.17 |" in capsys.readouterr().out


def test_improvement_relative_to_the_fixed_batch(tmp_path):
    compare(tmp_path / "runs", {"MinAtar/Breakout-v1": (12.0, 8.0), "Pong": (-10.0, -20.0)})
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report", "fixed"))
    rows = table(tmp_path / "report" / "improvement.csv")
    assert [float(row["improvement_percent"]) for row in rows] == pytest.approx([50, 50, 50], rel=1e-5)


def test_interquartile_mean_and_profile_by_hand(tmp_path):
    pooled = [np.array([1.0, 2.0, 3.0, 100.0]), np.array([0.0, 4.0, 5.0, 1000.0])]
    assert report.interquartile_mean(pooled) == 3.5  # of 2, 3, 4 and 5
    compare(tmp_path / "runs", {"Breakout": (100.0, 70.0)}, seeds=(1, 2, 3, 4))
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "aggregate.csv")
    middle = [(mean + 5 - 1.7) / SPANS["Breakout"] for mean in (100, 70)]  # of seeds 2 and 3: 0 and 10 above the mean
    assert [float(row["value"]) for row in rows if row["statistic"] == "IQM"] == pytest.approx(middle, rel=1e-5)
    profile = [row for row in rows if row["statistic"] != "IQM" and row["condition"].endswith("pqn_abs, L = 32")]
    normal = (np.array([60, 70, 80, 90]) - 1.7) / SPANS["Breakout"]
    assert len(profile) == 100
    for row in profile:
        assert float(row["value"]) == pytest.approx((normal > float(row["at"])).mean())


def test_baseline_is_resampled(tmp_path):
    """A fixed batch's mean is as uncertain as the other: equal scores of ABS still leave an interval."""
    fixed = [8.0, 10.0, 12.0]
    for seed, score in enumerate(fixed):
        make_run(tmp_path / "runs" / f"fixed{seed}", score, adapt_rollout=False, seed=seed)
        make_run(tmp_path / "runs" / f"abs{seed}", 20.0, seed=seed)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report", "fixed"))
    means = sorted(np.mean(draw) for draw in itertools.product(fixed, repeat=3))
    low, high = (100 * (20 / mean - 1) for mean in (means[-1], means[0]))  # each comes once in 27: beyond 2.5%
    row = table(tmp_path / "report" / "improvement.csv")[0]
    assert [float(row[name]) for name in ("improvement_percent", "low", "high")] == pytest.approx([100, low, high])
    rows = [row for row in table(tmp_path / "report" / "aggregate.csv") if row["statistic"] == "IQM"]
    adaptive = next(row for row in rows if "ABS" in row["condition"])
    assert [float(adaptive[name]) for name in ("value", "low", "high")] == pytest.approx([2, 20 / 12, 20 / 8], rel=1e-5)


def test_interval_resamples_within_groups():
    """Groups of equal scores have no spread of their own, however far apart they are."""
    groups = [np.full(5, 1.0), np.full(5, 100.0)]
    assert report.interval(groups, report.interquartile_mean) == (50.5, 50.5)
    draws = np.random.default_rng(1).normal(size=400)
    low, high = report.interval([draws], lambda groups: groups[0].mean())
    spread = 1.96 * draws.std() / 20
    assert (low, high) == pytest.approx((draws.mean() - spread, draws.mean() + spread), abs=0.02)
    assert np.isnan(report.interval([np.ones(1)], report.interquartile_mean)).all()


def test_curves_are_means_over_seeds(tmp_path):
    for seed, shift in ((1, 0.0), (2, 0.1)):
        make_run(tmp_path / "runs" / str(seed), 20.0, seed=seed, shift=shift)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "divergence.csv")
    by_step = {float(row["step"]): row for row in rows}
    assert float(by_step[550.0]["mean"]) == pytest.approx(0.9 - 10 / 50 + 0.05)
    assert float(by_step[550.0]["low"]) == pytest.approx(0.7) and float(by_step[550.0]["high"]) == pytest.approx(0.8)
    assert np.isnan(float(by_step[5.0]["mean"]))  # before the first measurement
    assert {row["column"] for row in table(tmp_path / "report" / "batch_size.csv")} == {report.DIVERGENCE, report.BATCH}


def test_rank_correlation_of_divergence_with_a_signal(tmp_path):
    compare(tmp_path / "runs", GAMES)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "signals.csv")
    assert {row["signal"] for row in rows} == {"abs/value_variance"}
    assert {float(row["rank_correlation_with_BD"]) for row in rows} == {-1.0}
    assert spearmanr([3, 2, 1], [0, 4, 16]).statistic == -1


def test_improvement_over_rollout_max_by_script(tmp_path):
    for script, longest in (("pqn_abs.py", 64), ("pqn_abs_xl.py", 64), ("pqn_abs_xl.py", 128)):
        for seed in (1, 2):
            args = {"script": script, "rollout_max": longest, "seed": seed}
            make_run(tmp_path / "runs" / f"{script}{longest}{seed}", longest + seed, **args)
            if longest == 64:
                make_run(tmp_path / "runs" / f"{script}fixed{seed}", 10.0 + seed, adapt_rollout=False, **args)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "rollout_max.csv")
    expected = [100 * (longest - 10) / SPANS["Breakout"] for longest in (64, 64, 128)]
    assert [float(row["improvement_percent"]) for row in rows] == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "report" / "rollout_max.png").stat().st_size > 10_000


def test_noise_scale_is_compared_with_the_fixed_batch_of_pqn(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"gns{seed}", 30.0, "gns_baseline.py", seed=seed, micro_batches=8)
        make_run(tmp_path / "runs" / f"fixed{seed}", 10.0, seed=seed, adapt_rollout=False, log_noise_scale=False)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    rows = table(tmp_path / "report" / "improvement.csv")
    assert rows[0]["condition"] == "gns_baseline, noise scale to L = 64"
    assert float(rows[0]["improvement_percent"]) == pytest.approx(100 * 20 / SPANS["Breakout"], rel=1e-5)


def test_fixed_batches_of_several_lengths(tmp_path):
    """The one that the adaptive runs start from is the baseline; the others are compared with it as they are."""
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"abs{seed}", 15.0, seed=seed)
        for length, score in ((16, 8.0), (32, 10.0), (64, 13.0)):
            args = {"seed": seed, "num_steps": length, "adapt_rollout": False}
            make_run(tmp_path / "runs" / f"{length}{seed}", score, **args)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report", "fixed"))
    rows = table(tmp_path / "report" / "improvement.csv")
    expected = {"pqn_abs, L = 16": -20, "pqn_abs, L = 64": 30, "pqn_abs, ABS to L = 64": 50}
    found = {row["condition"]: float(row["improvement_percent"]) for row in rows if row["game"] == "mean"}
    assert found == pytest.approx(expected)
    values = [float(row["value"]) for row in table(tmp_path / "report" / "aggregate.csv") if row["statistic"] == "IQM"]
    assert values == pytest.approx([1.5, 0.8, 1, 1.3])


def test_curves_end_with_the_run_and_negative_scores_count(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / "runs" / str(seed), -20.5, env_id="ALE/Pong-v5", seed=seed)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    assert float(table(tmp_path / "report" / "learning_curves.csv")[-1]["step"]) == 1000
    make_run(tmp_path / "runs" / "3", -31.0, env_id="ALE/Pong-v5", seed=3)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    shares = [float(row["value"]) for row in table(tmp_path / "report" / "aggregate.csv")[1:]]
    assert shares[0] == pytest.approx(2 / 3) and shares[-1] == 0 and shares == sorted(shares, reverse=True)


def test_missing_seeds_are_named(tmp_path, capsys):
    compare(tmp_path / "runs", GAMES)
    for file in (tmp_path / "runs" / "ALEPong-v5False2").iterdir():
        file.unlink()
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report"))
    missing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert missing == ["missing: pqn_abs, L = 32, Pong: no seed 2"]


@pytest.mark.parametrize(
    "other, says",
    [
        ({"learning_rate": 0.5}, ("--learning-rate is 0.001", "0.5")),
        ({"env_id": "ALE/Breakout-v5"}, ("--env-id is BreakoutNoFrameskip-v4", "ALE/Breakout-v5")),
        ({"total_timesteps": 900, "script": "ppo_abs.py"}, ("--total-timesteps is 1000", "900")),
        ({"learning_rate": 0.5, "script": "gns_baseline.py"}, ("--learning-rate is 0.001", "0.5")),
    ],
)
def test_mixed_settings_are_refused(tmp_path, capsys, other, says):
    compare(tmp_path / "runs", GAMES)
    make_run(tmp_path / "runs" / "other", 1.0, **{"seed": 9} | other)
    line = refused(capsys, tmp_path, tmp_path / "runs")
    assert "other" in line and all(part in line for part in says)


def test_micro_batches_matter_where_they_set_the_batch(tmp_path, capsys):
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"pqn{seed}", 10.0, seed=seed, micro_batches=8 * seed, log_noise_scale=True)
    report.main(report.Args((tmp_path / "runs",), tmp_path / "first"))
    capsys.readouterr()
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"gns{seed}", 10.0, "gns_baseline.py", seed=seed, micro_batches=8 * seed)
    assert "--micro-batches" in refused(capsys, tmp_path, tmp_path / "runs")


@pytest.mark.parametrize(
    "run, says",
    [
        ({"rows": 10, "total_timesteps": 2000}, "at step 1,000 of 2,000"),
        ({"seed": 1}, "same game, settings and seed"),
        ({"env_id": "CartPole-v1"}, "CartPole"),
        ({"rows": 1}, "no score"),
    ],
)
def test_runs_that_cannot_be_compared(tmp_path, capsys, run, says):
    make_run(tmp_path / "runs" / "a", 10.0)
    if "total_timesteps" in run:
        (tmp_path / "runs" / "a" / "config.json").unlink()
    make_run(tmp_path / "runs" / "b", 10.0, **{"seed": 2} | run)
    assert says in refused(capsys, tmp_path, tmp_path / "runs")


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert "holds no run" in refused(capsys, tmp_path, tmp_path / "nowhere")
    assert "name at least one" in refused(capsys, tmp_path)
    other = make_run(tmp_path / "other" / "a", 10.0)
    assert "nowhere holds no run" in refused(capsys, tmp_path, other, tmp_path / "nowhere")
    (other / "config.json").write_text((other / "config.json").read_text().replace("rollout_max", "longest"))
    assert "rollout_max" in refused(capsys, tmp_path, other)
    run = make_run(tmp_path / "runs" / "a", 10.0)
    (run / "metrics.csv").write_text("")
    assert "no data" in refused(capsys, tmp_path, run)
    assert "no score other than 0 of pqn_abs, L = 32" in refused(
        capsys, tmp_path, make_run(tmp_path / "b", 10.0), normalise="fixed"
    )


def test_report_that_cannot_be_written(tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "a", 10.0)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as error:
        report.main(report.Args((run,), tmp_path / "file"))
    assert error.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_scores_are_those_of_57_games():
    known = scores.reference_scores()
    assert len(known) == 57 and known["Breakout"] == (1.7, 30.5) and known["Pong"] == (-20.7, 14.6)
    assert scores.game_name("BreakoutNoFrameskip-v4") == scores.game_name("ALE/Breakout-v5") == "Breakout"


def test_report_of_real_runs(tmp_path, train, capsys):
    for adapt in (True, False):
        for seed in (1, 2):
            options = {"total_timesteps": 2000, "adapt_frequency": 2, "learning_rate": 0.01, "log_noise_scale": True}
            train(Bandit(4), adapt_rollout=adapt, seed=seed, **options)
    report.main(report.Args((tmp_path,), tmp_path / "report"))
    names = "learning_curves divergence batch_size improvement aggregate"
    for name in names.split():
        assert (tmp_path / "report" / f"{name}.png").stat().st_size > 10_000
        assert len(table(tmp_path / "report" / f"{name}.csv")) >= 2
    signals = {row["signal"] for row in table(tmp_path / "report" / "signals.csv")}
    assert signals >= {"abs/policy_entropy", "abs/value_variance", "gns/noise_scale_raw"}
    assert "4 runs" in capsys.readouterr().out
