"""tools/report.py: its numbers against ones worked out another way, and what it refuses."""

import csv
import itertools
import json
import math
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from tools import report, scores

ROOT = Path(__file__).resolve().parents[1]
ARGS = {"env_id": "breakout", "seed": 1, "total_timesteps": 1000, "num_steps": 32}
ARGS |= {"adapt_rollout": True, "rollout_min": 16, "rollout_max": 64, "delta_min": 0.05}
ARGS |= {"delta_max": 0.95, "update_epochs": 2, "num_minibatches": 4, "learning_rate": 1e-3}
HEADER = "global_step,charts/episodic_return,abs/rollout_length,abs/behavioral_divergence"
FIXED = {"adapt_rollout": False}


def make_run(folder, score, script="pqn_abs.py", extra=None, **args):
    """A finished run that has its score from 800 steps on, and half of it until then."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "args": ARGS | args}))
    extra = extra or {}
    lines = [",".join([HEADER, *extra])]
    for i in range(1, 11):
        cells = [100 * i, score if i > 8 else score / 2, 32, 0.9 / i, *extra.values()]
        lines.append(",".join(map(str, cells)))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def make_arm(folder, name, games, **args):
    """Runs of one arm; games holds the scores of the seeds from 1 on."""
    for game, values in games.items():
        for seed, value in enumerate(values, start=1):
            run = folder / f"{name}__{game}__{seed}".replace("/", "")
            make_run(run, value, env_id=game, seed=seed, **args)


def table(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def make_report(tmp_path, **options):
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report", **options))
    return tmp_path / "report"


def refusal(capsys, tmp_path, *folders, **options):
    """The line on stderr with which report.py ends with status 2, having written nothing."""
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args(folders, tmp_path / "report", **options))
    assert ended.value.code == 2 and not (tmp_path / "report").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


OURS = {"asterix": [12.0, 15.0, 14.0], "breakout": [7.0, 9.0]}
THEIRS = {"asterix": [11.0, 10.0, 13.0], "breakout": [8.0, 6.0]}


def two_arms(tmp_path):
    make_arm(tmp_path / "runs", "abs", OURS)
    make_arm(tmp_path / "runs", "fixed", THEIRS, **FIXED)


def log_ratio(ours, theirs):
    return np.mean([np.log(a).mean() - np.log(b).mean() for a, b in zip(ours, theirs, strict=True)])


def resampled(values):
    return [list(draw) for draw in itertools.product(values, repeat=len(values))]


def relabelled(first, second):
    """All ways to give a game's runs the labels of two arms."""
    both = first + second
    for chosen in itertools.combinations(range(len(both)), len(first)):
        rest = [both[i] for i in range(len(both)) if i not in chosen]
        yield [both[i] for i in chosen], rest


def test_contrasts_by_hand(tmp_path):
    """Against every bootstrap sample and every relabelling there is."""
    two_arms(tmp_path)
    rows = table(make_report(tmp_path) / "contrasts.csv")
    assert [row["game"] for row in rows] == ["Asterix", "Breakout", "All games"]
    for game, row in zip(["asterix", "breakout"], rows, strict=False):
        expected = 100 * np.expm1(log_ratio([OURS[game]], [THEIRS[game]]))
        assert float(row["change"]) == pytest.approx(expected, rel=1e-4)
    pooled, games = rows[2], list(OURS)
    found = log_ratio(OURS.values(), THEIRS.values())
    assert float(pooled["change"]) == pytest.approx(100 * np.expm1(found), rel=1e-4)
    draws = [[], []]
    for arm, values in enumerate((OURS, THEIRS)):
        for by_game in itertools.product(*(resampled(values[game]) for game in games)):
            draws[arm].append(np.mean([np.log(draw).mean() for draw in by_game]))
    spread = np.subtract.outer(*draws).ravel()
    expected = 100 * np.expm1(np.quantile(spread, [0.025, 0.975]))
    ends = [float(pooled["change_low"]), float(pooled["change_high"])]
    assert ends == pytest.approx(expected, abs=1.5)
    labels = itertools.product(*(relabelled(OURS[game], THEIRS[game]) for game in games))
    drawn = np.array([log_ratio(*zip(*choice, strict=True)) for choice in labels])
    p = (np.abs(drawn) >= abs(found) - 1e-9).mean()
    assert float(pooled["p"]) == pytest.approx(p, abs=0.015)
    assert float(rows[0]["p_improvement"]) == pytest.approx(8 / 9, rel=1e-4)  # 12 is less than 13
    assert float(pooled["p_improvement"]) == pytest.approx((8 / 9 + 3 / 4) / 2, rel=1e-4)
    assert {row["p_holm"] for row in rows} == {""}


def test_small_statistics_by_hand():
    assert report.improvement([np.array([1.0, 2.0]), np.array([2.0, 0.0])]) == 0.625  # with a tie
    assert report.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert report.holm([0.9, 0.5]) == [1, 1]
    pooled = [np.array([1.0, 2.0, 3.0, 100.0]), np.array([0.0, 4.0, 5.0, 1000.0])]
    assert report.interquartile_mean(pooled) == 3.5  # of 2, 3, 4 and 5


def test_several_primary_contrasts_are_corrected(tmp_path, capsys):
    two_arms(tmp_path)
    make_arm(tmp_path / "runs", "long", OURS, **FIXED | {"num_steps": 64})
    pairs = (("PQN, L = 64", "PQN, L = 32"), ("PQN with ABS", "PQN, L = 64"))
    rows = table(make_report(tmp_path, contrast=pairs) / "contrasts.csv")
    assert [(row["arm"], row["against"]) for row in rows[::3]] == list(pairs)
    first, second = rows[2], rows[5]
    assert float(first["p_holm"]) == pytest.approx(min(1, 2 * float(first["p"])), rel=1e-3)
    assert (second["p"], second["p_holm"], rows[0]["p_holm"]) == ("1", "1", "")
    assert "| PQN, L = 64 | PQN, L = 32 | All games |" in capsys.readouterr().out


def test_scores_are_weighted_by_steps_over_the_window(tmp_path):
    steps = np.array([100.0, 500.0, 700.0, 850.0, 1000.0])
    folder = make_run(tmp_path / "a", 1.0)
    lines = [f"{int(step)},{value},32,0.5" for step, value in zip(steps, "12345", strict=True)]
    (folder / "metrics.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    run = report.plot.read_run(folder)
    assert report.score(run, 0.2) == pytest.approx((50 * 4 + 150 * 5) / 200)
    assert report.score(run, 1.0) == pytest.approx((100 + 2 * 400 + 3 * 200 + 9 * 150) / 1000)
    run.columns["charts/episodic_return"][3] = np.nan
    assert report.score(run, 0.2) == 5


def test_scores_and_updates_by_arm_and_game(tmp_path):
    two_arms(tmp_path)
    make_arm(tmp_path / "runs", "new", OURS, extra={"charts/updates": 777}, scale_epochs=True)
    rows = table(make_report(tmp_path) / "scores.csv")
    assert [row["arm"] for row in rows[::2]] == [
        "PQN with ABS",
        "PQN with ABS (scale epochs)",
        "PQN, L = 32",
    ]
    assert [float(rows[0][name]) for name in ("mean", "n", "updates")] == pytest.approx(
        [np.mean(OURS["asterix"]), 3, 2 * 4 * 10], rel=1e-4
    )
    assert float(rows[0]["sd"]) == pytest.approx(np.std(OURS["asterix"], ddof=1), rel=1e-4)
    assert rows[2]["updates"] == "777"


def test_the_reference_is_resampled_but_what_it_divides_is_not(tmp_path):
    """The interval of the arm with mean 1 is that of its scores over their mean."""
    fixed = [8.0, 10.0, 12.0]
    make_arm(tmp_path / "runs", "abs", {"breakout": [20.0, 20.0, 20.0]})
    make_arm(tmp_path / "runs", "fixed", {"breakout": fixed}, **FIXED)
    rows = table(make_report(tmp_path) / "interquartile_means.csv")
    means = sorted(np.mean(draw) / 10 for draw in itertools.product(fixed, repeat=3))
    expected = [[2, 2, 2], [1, means[0], means[-1]]]  # the extremes come once in 27
    found = [[float(row[name]) for name in ("IQM", "IQM_low", "IQM_high")] for row in rows]
    assert found == [pytest.approx(line, rel=1e-3) for line in expected]


def test_atari_is_normalised_by_the_human(tmp_path):
    known = scores.reference_scores()
    assert len(known) == 57 and known["Breakout"] == (1.7, 30.5)
    make_arm(tmp_path / "runs", "abs", {"ALE/Breakout-v5": [16.1, 16.1]})
    rows = table(make_report(tmp_path) / "interquartile_means.csv")
    assert float(rows[0]["IQM"]) == pytest.approx(0.5)
    assert not (tmp_path / "report" / "contrasts.csv").exists()  # there is nothing to compare with


def test_curves_over_steps(tmp_path):
    make_arm(tmp_path / "runs", "abs", {"breakout": [10.0, 30.0]})
    make_arm(tmp_path / "runs", "fixed", {"breakout": [5.0, 5.0]}, **FIXED)
    out = make_report(tmp_path)
    last = table(out / "learning_curves.csv")[49]
    assert [float(last[name]) for name in ("value", "low", "high")] == [20, 10, 30]
    first = table(out / "learning_curves.csv")[0]
    assert (first["step"], first["value"]) == ("10", "nan")  # nothing was known yet
    assert {row["value"] for row in table(out / "rollout_length.csv")} == {"32"}
    assert float(table(out / "divergence.csv")[12]["value"]) == pytest.approx(
        0.9 * (1 / 2 + 1 / 3) / 2, abs=0.01
    )
    assert [row["value"] for row in table(out / "improvement.csv")][-1] == "1"
    last = table(out / "headline.csv")[49]  # pooled returns are relative to the fixed arm's score
    assert (last["arm"], last["column"]) == ("PQN with ABS", report.RETURN)
    assert float(last["value"]) == pytest.approx(4)
    for name in "headline learning_curves divergence rollout_length contrasts aggregate".split():
        assert (out / f"{name}.png").stat().st_size > 10_000


def test_signals_plain_and_given_the_step(tmp_path):
    """The partial correlation is that of what is left of the ranks after a fit to the step's."""
    rng = np.random.default_rng(1)
    steps, noise = np.arange(40), rng.normal(size=(2, 40))
    divergence, variance = -steps + 9 * noise[0], steps + 9 * noise[1]
    run = report.plot.read_run(make_run(tmp_path / "runs" / "a", 1.0))
    run.columns = {"global_step": steps, report.DIVERGENCE: divergence, "v": variance}
    plain, partial = report.correlations(run, "v")
    assert plain == pytest.approx(spearmanr(divergence, variance).statistic)
    ranks = [np.argsort(np.argsort(values)) for values in (divergence, variance)]
    left = [rank - np.polyval(np.polyfit(steps, rank, 1), steps) for rank in ranks]
    assert partial == pytest.approx(np.corrcoef(left)[0, 1])
    assert abs(partial) < abs(plain) / 2
    run.columns["v"] = np.full(40, 3.0)
    assert np.isnan(report.correlations(run, "v")).all()


def arms_of(tmp_path, *labels):
    runs = report.read_runs((tmp_path,))
    report.name_arms(runs, labels)
    return [run.arm for run in runs]


def test_settings_that_change_the_numbers_make_arms(tmp_path):
    make_run(tmp_path / "a", 1.0)
    make_run(tmp_path / "b", 1.0, learning_rate=0.5, run_name="other", micro_batches=8, burn_in=0)
    make_run(tmp_path / "c", 1.0, rollout_max=128, **FIXED)  # with a fixed L it says nothing
    make_run(tmp_path / "d", 1.0, **FIXED)
    make_run(tmp_path / "e", 1.0, "gns_baseline.py", micro_batches=8, **FIXED)
    assert arms_of(tmp_path) == [
        "PQN with ABS (learning rate 0.001)",
        "PQN with ABS (learning rate 0.5)",
        *["PQN, L = 32"] * 3,
    ]


def test_labels_name_what_the_settings_do_not_tell(tmp_path):
    make_run(tmp_path / "abs_1", 1.0)
    make_run(tmp_path / "open_1", 1.0, learning_rate=0.5)
    make_run(tmp_path / "x" / "open_2", 1.0)
    labels = "*/open_*=Open loop, L = 9", "*=Rest"
    assert arms_of(tmp_path, *labels) == ["Rest", "Open loop, L = 9", "Open loop, L = 9"]
    assert arms_of(tmp_path, labels[0])[0] == "PQN with ABS"


def test_a_label_sets_the_order_of_arms(tmp_path):
    two_arms(tmp_path)
    out = make_report(tmp_path, label=("*fixed*=Zero",), contrast=(("Zero", "PQN with ABS"),))
    assert [row["arm"] for row in table(out / "scores.csv")][::2] == ["Zero", "PQN with ABS"]
    assert table(out / "contrasts.csv")[0]["p_holm"] == ""  # a single one needs no correction


def test_a_game_without_logarithms_is_in_points(tmp_path, capsys):
    games = {"breakout": [1.0, 2.0], "freeway": [0.0, 3.0]}
    make_arm(tmp_path / "runs", "abs", games)
    make_arm(tmp_path / "runs", "fixed", {"breakout": [1.0, 1.5], "freeway": [2.0, 5.0]}, **FIXED)
    first, second, pooled = table(make_report(tmp_path) / "contrasts.csv")
    assert (second["game"], second["unit"], second["change"]) == ("Freeway", "points", "-2")
    assert first["game"] == "Breakout" and first["change"] == pooled["change"] != second["change"]
    assert "Freeway: a score is not above 0" in capsys.readouterr().out
    for folder in (tmp_path / "runs").glob("*breakout*"):
        shutil.rmtree(folder)
    assert len(table(make_report(tmp_path) / "contrasts.csv")) == 1


@pytest.mark.parametrize(
    "other, options, says",
    [
        ({"total_timesteps": 2000}, {}, "at step 1,000 of 2,000"),
        ({"total_timesteps": 500}, {}, "differ in --total-timesteps"),
        ({"seed": 1}, {}, "one arm, game and seed"),
        ({"env_id": "MinAtar/Breakout-v1"}, {}, "two forms of Breakout"),
        ({"num_steps": None}, {}, "num_steps is null"),
        (
            {},
            {"contrast": (("PQN with ABS", "PQN"),)},
            "no arm is called 'PQN'; there are PQN with",
        ),
        ({}, {"reference": "PQN"}, "no arm is called 'PQN'"),
        ({}, {"label": ("nothing=PQN",)}, "fits no run"),
        ({}, {"label": ("*",)}, "fits no run"),
        ({}, {"window": 0.0}, "--window"),
        ({}, {"window": float("nan")}, "--window"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, other, options, says):
    make_run(tmp_path / "runs" / "a", 10.0)
    make_run(tmp_path / "runs" / "b", 10.0, **{"seed": 2} | other)
    assert says in refusal(capsys, tmp_path, tmp_path / "runs", **options)


def test_arms_without_a_game_in_common_are_refused(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", 10.0)
    make_run(tmp_path / "runs" / "b", 10.0, env_id="freeway", **FIXED)
    pairs = (("PQN with ABS", "PQN, L = 32"),)
    assert "no game in common" in refusal(capsys, tmp_path, tmp_path / "runs", contrast=pairs)
    make_report(tmp_path)  # where none was asked for there is none


def test_what_is_no_run_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "a", math.nan)
    assert "no score" in refusal(capsys, tmp_path, tmp_path / "runs")
    assert "holds no run" in refusal(capsys, tmp_path, tmp_path / "runs", tmp_path / "nowhere")
    assert "name at least one" in refusal(capsys, tmp_path)
    (run / "metrics.csv").write_text(HEADER + "\nnan,1,32,0.5\n")
    assert "does not rise" in refusal(capsys, tmp_path, tmp_path / "runs")


def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "a", 10.0)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args((run,), tmp_path / "file"))
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def small_files():
    """For a process that is about to start: no file may have more than 20,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_leaves_the_earlier_report(tmp_path):
    two_arms(tmp_path)
    out = tmp_path / "report"
    out.mkdir()
    (out / "scores.csv").write_text("earlier")
    command = [sys.executable, ROOT / "tools" / "report.py", tmp_path / "runs", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert list(out.iterdir()) == [out / "scores.csv"]
    assert (out / "scores.csv").read_text() == "earlier"


def test_the_pilot(tmp_path):
    """Old runs are read; one of its scores, added up row by row."""
    pilot, out = ROOT / "results" / "minatar_pilot", tmp_path / "report"
    command = [sys.executable, ROOT / "tools" / "report.py", pilot, "--out", out]
    for length in (40, 64, 40):  # one that is named twice is one
        command += ["--contrast", "PQN with ABS", f"PQN, L = {length}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    means = []
    for seed in range(1, 6):
        total, weights, before = 0.0, 0.0, 0.0
        rows = table(pilot / f"asterix_abs_{seed}" / "metrics.csv")
        start = 0.8 * float(rows[-1]["global_step"])
        for row in rows:
            steps = float(row["global_step"]) - max(before, start)
            before = float(row["global_step"])
            if steps > 0:
                total += steps * float(row["charts/episodic_return"])
                weights += steps
        means.append(total / weights)
    row = table(out / "scores.csv")[0]
    assert (row["arm"], row["game"]) == ("PQN with ABS", "Asterix")
    assert float(row["mean"]) == pytest.approx(np.mean(means), rel=1e-4)
    rows = table(out / "contrasts.csv")
    assert len(rows) == 8 and float(rows[3]["change"]) == pytest.approx(4.3, abs=0.1)
    assert float(rows[7]["p_holm"]) == pytest.approx(2 * float(rows[7]["p"]), rel=1e-4)
