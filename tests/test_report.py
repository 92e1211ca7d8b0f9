"""tools/report.py: its numbers against ones worked out another way, and what it refuses."""

import itertools
import json

import numpy as np
import pytest
from helpers import ROOT, end_of, start, unpacked
from helpers import rows as table

from tools import report

ARGS = {"env_id": "breakout", "seed": 1, "total_timesteps": 1000, "num_steps": 32}
ARGS |= {"adapt_rollout": True, "rollout_min": 16, "rollout_max": 64, "delta_min": 0.05}
ARGS |= {"delta_max": 0.95, "update_epochs": 2, "num_minibatches": 4, "learning_rate": 1e-3}
HEADER = "global_step,charts/episodic_return,abs/rollout_length,abs/behavioral_divergence"
FIXED = {"adapt_rollout": False}


def make_run(folder, score, script="pqn_abs.py", **args):
    """A finished run that has its score from 800 steps on, and half of it until then."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "args": ARGS | args}))
    lines = [HEADER]
    for i in range(1, 11):
        cells = [100 * i, score if i > 8 else score / 2, 32, 0.9 / i]
        lines.append(",".join(map(str, cells)))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def make_arm(folder, name, games, **args):
    """Runs of one arm; games holds the scores of the seeds from 1 on."""
    for game, values in games.items():
        for seed, value in enumerate(values, start=1):
            run = folder / f"{name}__{game}__{seed}".replace("/", "")
            make_run(run, value, env_id=game, seed=seed, **args)


def make_report(tmp_path, **options):
    report.main(report.Args((tmp_path / "runs",), tmp_path / "report", **options))
    return tmp_path / "report"


def refusal(tmp_path, *folders, **options):
    """The line with which report.py ends, having written nothing."""
    with pytest.raises(ValueError) as ended:
        report.main(report.Args(folders, tmp_path / "report", **options))
    assert not (tmp_path / "report").exists() and "\n" not in str(ended.value)
    return str(ended.value)


OURS = {"asterix": [12.0, 15.0], "breakout": [7.0, 9.0]}
THEIRS = {"asterix": [11.0, 13.0], "breakout": [8.0, 6.0]}


def two_arms(tmp_path):
    make_arm(tmp_path / "runs", "abs", OURS)
    make_arm(tmp_path / "runs", "fixed", THEIRS, **FIXED)


def log_ratio(ours, theirs):
    return np.mean([np.log(a).mean() - np.log(b).mean() for a, b in zip(ours, theirs, strict=True)])


def relabelled(first, second):
    """All ways to give a game's runs the labels of two arms."""
    both = first + second
    for chosen in itertools.combinations(range(len(both)), len(first)):
        rest = [both[i] for i in range(len(both)) if i not in chosen]
        yield [both[i] for i in chosen], rest


def test_contrasts_by_hand(tmp_path, monkeypatch):
    """Against every bootstrap sample and every relabelling there is, of few enough runs."""
    monkeypatch.setattr(report, "ENOUGH", 2)
    two_arms(tmp_path)
    rows = table(make_report(tmp_path) / "contrasts.csv")
    assert [row["game"] for row in rows] == ["Asterix", "Breakout", "All games"]
    expected = 100 * np.expm1(log_ratio([OURS["asterix"]], [THEIRS["asterix"]]))
    assert float(rows[0]["change"]) == pytest.approx(expected, rel=1e-4)
    pooled, games = rows[2], list(OURS)
    found = log_ratio(OURS.values(), THEIRS.values())
    assert float(pooled["change"]) == pytest.approx(100 * np.expm1(found), rel=1e-4)
    draws = [[], []]
    for arm, values in enumerate((OURS, THEIRS)):
        resampled = (itertools.product(values[game], repeat=2) for game in games)
        for by_game in itertools.product(*resampled):
            draws[arm].append(np.mean([np.log(draw).mean() for draw in by_game]))
    spread = np.subtract.outer(*draws).ravel()
    expected = 100 * np.expm1(np.quantile(spread, [0.025, 0.975]))
    assert float(pooled["change_low"]) == pytest.approx(expected[0], abs=1.5)
    assert float(pooled["change_high"]) == pytest.approx(expected[1], abs=1.5)
    labels = itertools.product(*(relabelled(OURS[game], THEIRS[game]) for game in games))
    drawn = np.array([log_ratio(*zip(*choice, strict=True)) for choice in labels])
    p = (np.abs(drawn) >= abs(found) - 1e-9).mean()
    assert float(pooled["p"]) == pytest.approx(p, abs=0.015)
    assert float(rows[0]["p_improvement"]) == 3 / 4  # 12 is less than 13
    assert float(pooled["p_improvement"]) == 3 / 4
    assert [row["p_holm"] for row in rows] == ["", "", pooled["p"]]


def test_small_statistics_by_hand():
    """Guards a tie, Holm's correction and the middle half."""
    assert report.improvement(np.array([[1.0, 2.0]]), np.array([[2.0, 0.0]])) == 0.625
    assert report.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert report.holm([0.9, 0.5]) == [1, 1]
    pooled = np.array([[1.0, 2.0, 3.0, 100.0], [0.0, 4.0, 5.0, 1000.0]])
    assert report.interquartile_mean(pooled) == 3.5  # of 2, 3, 4 and 5


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


def test_the_reference_is_resampled_but_what_it_divides_is_not(tmp_path, monkeypatch):
    """Guards the interval of the arm with mean 1: that of its scores over their mean."""
    monkeypatch.setattr(report, "ENOUGH", 2)
    fixed = [8.0, 10.0, 12.0]
    make_arm(tmp_path / "runs", "abs", {"asterix": [20.0] * 3, "breakout": [20.0] * 3})
    make_arm(tmp_path / "runs", "fixed", {"asterix": [10.0] * 3, "breakout": fixed}, **FIXED)
    out = make_report(tmp_path)
    # 8, 8, 8 comes once in 27 draws. Of that and 10, 10, 10 the interquartile mean is 9.
    expected = [[2, 2, 2], [1, 0.9, 1.1]]
    rows = table(out / "aggregate.csv")
    assert [[float(row[name]) for name in list(row)[1:]] for row in rows] == expected
    for name in "headline learning_curves divergence rollout_length".split():
        assert (out / f"{name}.png").stat().st_size > 10_000


def test_curves_over_steps(tmp_path):
    """Guards the curves that figures draw: means over each 2% of the samples, interpolated."""
    make_arm(tmp_path / "runs", "abs", {"breakout": [10.0, 30.0]})
    study = report.read_study(report.Args((tmp_path / "runs",)))
    returns = study.curves("PQN with ABS", report.RETURN)
    assert returns.shape == (50, 1, 2)
    assert report.estimate(report.mean, returns)[:, -1].tolist() == [20, 10, 30]
    divergence = study.curves("PQN with ABS", report.DIVERGENCE)[:, 0, 0]
    assert divergence[0] == pytest.approx(0.9)  # the first value stands for all before
    assert divergence[12] == pytest.approx(0.9 * (1 / 2 + 1 / 3) / 2, abs=0.01)


def test_a_label_names_an_arm_and_sets_its_place(tmp_path):
    """Also that of runs of two scripts."""
    two_arms(tmp_path)
    make_arm(tmp_path / "runs", "open", {"asterix": OURS["asterix"]}, script="open_loop")
    make_arm(tmp_path / "runs", "open", {"breakout": OURS["breakout"]})
    labels = ("*/open_*=Open loop, L = 9",), ("*/abs_*=Zero",)
    out = make_report(tmp_path, label=labels, contrast=(("Zero", "Open loop, L = 9"),))
    arms = [row["arm"] for row in table(out / "scores.csv")][::2]
    assert arms == ["PQN, L = 32", "Open loop, L = 9", "Zero"]
    row = table(out / "scores.csv")[0]
    assert list(row.values()) == [arms[0], "Asterix", "12", "11 13", "80"]
    assert table(out / "contrasts.csv")[2]["change"] == "0"


@pytest.mark.parametrize("seeds, is_small", [(1, True), (4, True), (5, False)])
def test_few_runs_are_shown_instead_of_an_interval(tmp_path, capsys, seeds, is_small):
    """Guards a first comparison of one's own from an interval that is too narrow."""
    for name, first, options in (("abs", 20, {}), ("fixed", 10, FIXED)):
        scores = range(first, first + seeds)
        make_arm(tmp_path / "runs", name, {"asterix": scores, "breakout": scores}, **options)
    out = make_report(tmp_path)
    columns = {*table(out / "contrasts.csv")[0], *table(out / "aggregate.csv")[0]}
    only_many = {"change_low", "p", "p_improvement", "IQM_low"}
    assert columns & only_many == (set() if is_small else only_many)
    assert ("runs" in table(out / "scores.csv")[0]) == is_small
    assert ("too few for intervals and p" in capsys.readouterr().out) == is_small


@pytest.mark.filterwarnings("error")
def test_a_game_without_logarithms_is_in_points(tmp_path):
    """Also alone: Pong's scores can't be divided by one another."""
    make_arm(tmp_path / "runs", "abs", {"pong": [-20.0, -17.0]})
    make_arm(tmp_path / "runs", "fixed", {"pong": [-21.0, -12.0]}, **FIXED)
    out = make_report(tmp_path)
    assert (out / "headline.png").exists() and not (out / "aggregate.csv").exists()
    make_arm(tmp_path / "runs", "abs", {"breakout": [1.0, 2.0]})
    make_arm(tmp_path / "runs", "fixed", {"breakout": [1.0, 1.5]}, **FIXED)
    first, second, pooled = table(make_report(tmp_path) / "contrasts.csv")
    assert not (out / "aggregate.csv").exists()  # of one game that has logarithms
    assert (second["game"], second["unit"], second["change"]) == ("Pong", "points", "-2")
    assert first["game"] == "Breakout" and first["change"] == pooled["change"] != second["change"]


@pytest.mark.parametrize(
    "other, options, says",
    [
        ({"total_timesteps": 2000}, {}, "is unfinished"),
        ({"script": "my_abs.py"}, {}, "differ in script: name their arms by --label"),
        ({"seed": 1}, {}, "has seeds [1, 1, 2] of breakout where others have [1, 2]"),
        (FIXED, {}, "'PQN with ABS' has seeds [1, 2] of breakout where others have [1, 2, 3]"),
        ({}, {"contrast": (("PQN with ABS", "PQN"),)}, "no arm is called 'PQN'; there are PQN"),
        ({}, {"label": (("nothing=PQN",),)}, "names no run"),
        ({}, {"window": 0.0}, "--window"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, other, options, says):
    make_run(tmp_path / "runs" / "a", 10.0)
    make_run(tmp_path / "runs" / "b", 10.0, seed=2)
    make_run(tmp_path / "runs" / "c", 10.0, **{"seed": 3} | other)
    assert says in refusal(tmp_path, tmp_path / "runs", **options)
    assert "holds no run" in refusal(tmp_path, tmp_path / "nowhere")


def plain_score(run, window=0.2):
    """The step-weighted mean return over the last share of the steps, added up row by row."""
    total, weights, before = 0.0, 0.0, 0.0
    rows = table(run / "metrics.csv")
    start = (1 - window) * float(rows[-1]["global_step"])
    for row in rows:
        steps = float(row["global_step"]) - max(before, start)
        before = float(row["global_step"])
        if steps > 0 and row["charts/episodic_return"]:
            total += steps * float(row["charts/episodic_return"])
            weights += steps
    return total / weights


def test_the_verdict(tmp_path):
    """The study's contrasts follow from its rows, and README's "7%" from the first of them."""
    study = ROOT / "results" / "minatar_study"
    confirmation = unpacked("minatar_study/confirmation", tmp_path)
    logs = {}
    for arm in "abcde":
        runs = sorted(confirmation.glob(f"{arm}__*"))
        assert len(runs) == 60
        logs[arm] = np.log([plain_score(run) for run in runs])
    page = (study / "README.md").read_text()
    contrasts = [row for row in table(study / "report" / "contrasts.csv") if row["p_holm"]]
    for (first, second), row in zip(["ab", "ac", "de", "da"], contrasts, strict=True):
        change = 100 * np.expm1(logs[first].mean() - logs[second].mean())
        assert float(row["change"]) == pytest.approx(change, rel=1e-4)
        change, low, high = [float(row[k]) for k in ("change", "change_low", "change_high")]
        assert f"| {change:+.1f}% ({low:.1f} to {high:.1f}) | " in page
    lead = 100 * np.expm1(logs["a"].mean() - logs["b"].mean())
    readme = (ROOT / "README.md").read_text()
    assert f"ABS scored {lead:.0f}% more than the best" in readme

    runs = unpacked("crossed_schedules/l36", tmp_path).iterdir()
    mean = np.mean([np.log(plain_score(run)) for run in runs])
    page = (ROOT / "results" / "crossed_schedules" / "README.md").read_text()
    ahead, behind = 100 * np.expm1([logs["a"].mean() - mean, mean - logs["b"].mean()])
    assert f"ABS against L = 36 | {ahead:+.1f}% (" in page
    assert f"L = 36 against L = 64 | {behind:+.1f}% (" in page


def test_the_greedy_scores_of_the_study():
    study = ROOT / "results" / "minatar_study"
    out, _ = end_of(start(study / "greedy.py"))
    page = " ".join((study / "README.md").read_text().split())
    cells, contrasts = out.splitlines()[:5], out.splitlines()[5:]
    assert all(line in page for line in cells)
    assert len(contrasts) == 4
    for line in contrasts:
        pair, _, found = line.replace(", p ", ", ").partition(": ")
        assert f"{pair} {found}" in page


def test_human_normalised_scores(tmp_path):
    """(score - random) / (human - random): Pong's are -20.7 and 14.6, Breakout's 1.7 and 30.5."""
    pong, breakout = "ALE/Pong-v5", "BreakoutNoFrameskip-v4"
    make_arm(tmp_path / "runs", "abs", {pong: [14.6, -20.7], breakout: [30.5, 59.3]})
    make_arm(tmp_path / "runs", "fixed", {pong: [-20.7, -20.7], breakout: [1.7, 30.5]}, **FIXED)
    out = make_report(tmp_path, human=True)
    means = [float(row["mean"]) for row in table(out / "scores.csv")]
    assert means == pytest.approx([0.5, 1.5, 0, 0.5], abs=1e-6)
    rows = table(out / "contrasts.csv")
    assert [float(row["change"]) for row in rows] == pytest.approx([0.5, 1, 0.75])
    assert {row["unit"] for row in rows} == {"human - random"}
    make_arm(tmp_path / "other", "abs", {"breakout": [1, 2]})  # MinAtar's
    assert "none of the 57" in refusal(tmp_path / "other", tmp_path / "other", human=True)


def test_the_verdict_on_length_or_steps(tmp_path):
    """The page's main effects, in all and by setting, follow from the runs; so does README's."""
    logs = {}
    for run in unpacked("length_or_steps/arms", tmp_path).iterdir():
        name, game, _ = run.name.split("__")
        arm, rate = name.split("_")
        logs.setdefault((rate, game), {}).setdefault(arm, []).append(np.log(plain_score(run, 1)))
    page = (ROOT / "results" / "length_or_steps" / "README.md").read_text()
    effects = []
    for (rate, game), arms in logs.items():
        assert [len(arms[arm]) for arm in ("OO", "OM", "MO", "MM")] == [16] * 4
        oo, om, mo, mm = (np.mean(arms[arm]) for arm in ("OO", "OM", "MO", "MM"))
        effects.append([(oo + om - mo - mm) / 2, (oo + mo - om - mm) / 2])
        length, steps = 100 * np.expm1(effects[-1])
        row = page.partition(f"| {rate} | {game.replace('_', ' ').title()} | ")[2].split(" |\n")[0]
        assert row.endswith(f" | {length:+.1f}% | {steps:+.1f}%")
    length, steps = 100 * np.expm1(np.mean(effects, axis=0))
    text = " ".join(page.split())
    assert f"of a game's own schedule score {steps:.1f}% more than those of its mirror" in text
    assert f"The own L scores {-length:.1f}% less" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"of the steps {steps:+.1f}%" in readme


def test_the_crossed_verdict(tmp_path):
    """The page's effects, in all and by setting, follow from the runs; so does README's."""
    scores = {}
    for run in unpacked("crossed_schedules/arms", tmp_path).iterdir():
        arm, game, _ = run.name.split("__")
        scores.setdefault((arm[2:], game), {}).setdefault(arm[0], []).append(plain_score(run, 1))
    page = (ROOT / "results" / "crossed_schedules" / "README.md").read_text()
    by_setting = page[page.index("## Which settings make the difference") :]
    effects, leads = [], {}
    for (rate, game), arms in sorted(scores.items()):
        assert [len(arms[arm]) for arm in "ARXC"] == [8] * 4
        whole = np.mean([*arms.values()])
        pairs = [np.mean(arms[a]) - np.mean(arms[b]) for a, b in ("RX", "AR", "AC")]
        effects.append(100 * np.array(pairs) / whole)
        leads.setdefault(rate, []).append(np.mean(np.log(arms["A"])) - np.mean(np.log(arms["C"])))
        row = by_setting.partition(f"| {rate}, {game.replace('_', ' ').title()} | ")[2]
        printed = [float(cell.split()[0]) for cell in row.partition(" |\n")[0].split(" | ")]
        assert printed == pytest.approx(effects[-1], abs=0.051)
    for pair, effect in zip(["R - X", "A - R", "A - C"], np.mean(effects, axis=0), strict=True):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {pair}: "))
        assert f" | {effect:+.1f}% (" in line
    high, low = (100 * np.expm1(np.mean(leads[rate])) for rate in ("high", "low"))
    text = " ".join(page.split())
    assert f"ABS is {low:+.1f}% (" in text and f"at the low rate, and {high:+.1f}% (" in text
    readme = (ROOT / "README.md").read_text()
    assert f"| 2.5e-4 | **{low:+.1f}%** (" in readme and f"| 4e-3 | {high:+.1f}% (" in readme
