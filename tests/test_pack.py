"""tools/pack.py keeps what figures are made of, and the same runs give the same archive."""

import json
import tarfile

from helpers import ROOT, end_of, start

TOOL = ROOT / "tools" / "pack.py"
HEADER = "global_step,charts/epsilon,abs/rollout_length,abs/batch_size,abs/behavioral_divergence,"
HEADER += "losses/td_loss,charts/SPS,charts/episodic_return\n"
ROWS = "64,1.0,32,64,,0.5,64.0,\n128,0.9,32,64,0.123456789,0.4,32.0,0.333333333333\n"
ROWS += "192,0.8,31,64,,0.3,256.0,1234567.5\n"


def make_suite(folder):
    for name, rows in (("a__pong__1", ROWS), ("a__pong__2", ROWS.splitlines(keepends=True)[0])):
        run = folder / name
        run.mkdir(parents=True)
        args = {"total_timesteps": 192, "runs_dir": "/home/someone/runs", "seed": 1}
        args["resume"] = f"/home/someone/runs/{name}"
        (run / "config.json").write_text(json.dumps({"script": "pqn_abs.py", "args": args}))
        (run / "metrics.csv").write_text(HEADER + rows)
        (run / "checkpoint.pt").write_bytes(b"x" * 1000)
    return folder


def unpacked(archive):
    with tarfile.open(archive) as packed:
        return {member.name: packed.extractfile(member).read().decode() for member in packed}


def test_what_is_kept(tmp_path):
    suite = make_suite(tmp_path / "suite")
    out = end_of(start(TOOL, suite, tmp_path / "study.tar.gz"))
    assert out == (f"{tmp_path}/study.tar.gz: 2 runs, 1 of them unfinished\n", "")
    files = unpacked(tmp_path / "study.tar.gz")
    assert list(files) == [
        "study/a__pong__1/config.json",
        "study/a__pong__1/metrics.csv",
        "study/a__pong__2/config.json",
        "study/a__pong__2/metrics.csv",
    ]
    assert files["study/a__pong__1/metrics.csv"] == (
        "global_step,abs/rollout_length,abs/behavioral_divergence,charts/episodic_return,"
        "charts/seconds\n"
        "64,32,,,\n128,32,0.123457,0.333333,\n192,31,,1.23457e+06,3.25\n"
    )
    assert files["study/a__pong__2/metrics.csv"].endswith("\n64,32,,,1\n")
    config = json.loads(files["study/a__pong__1/config.json"])
    args = {"total_timesteps": 192, "runs_dir": "runs", "seed": 1, "resume": None}
    assert config == {"script": "pqn_abs.py", "args": args}


def test_the_seconds_of_an_earlier_run_stay(tmp_path):
    suite = make_suite(tmp_path / "suite")
    rows = "global_step,charts/seconds\n64,1.5\n128,2.25\n"
    (suite / "a__pong__1" / "metrics.csv").write_text(rows)
    end_of(start(TOOL, suite, tmp_path / "a.tar.gz"))
    packed = unpacked(tmp_path / "a.tar.gz")["a/a__pong__1/metrics.csv"]
    assert packed == "global_step,charts/seconds\n64,\n128,2.25\n"


def test_thin_keeps_measured_rows_and_the_last(tmp_path):
    suite = make_suite(tmp_path / "suite")
    kl = suite / "a__pong__2" / "metrics.csv"
    kl.write_text(HEADER.replace("behavioral", "kl") + ROWS)
    end_of(start(TOOL, suite, tmp_path / "a.tar.gz", "--thin"))
    files = unpacked(tmp_path / "a.tar.gz")
    for name in ("a__pong__1", "a__pong__2"):
        kept = files[f"a/{name}/metrics.csv"].splitlines()[1:]
        assert [row.split(",")[0] for row in kept] == ["128", "192"]


def test_the_same_runs_give_the_same_archive(tmp_path):
    for name in ("one", "other"):
        suite = make_suite(tmp_path / name)
        (tmp_path / f"{name}_out").mkdir()
        end_of(start(TOOL, suite, tmp_path / f"{name}_out" / "runs.tar.gz"))
    first, second = sorted(tmp_path.glob("*/runs.tar.gz"))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[4:8] == bytes(4)  # gzip's time of writing


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    suite = make_suite(tmp_path / "new")
    (suite / "a__pong__2" / "metrics.csv").write_text(HEADER)
    for folder, line in (("empty", "holds no run"), ("new", "has no rows yet")):
        words = tmp_path / folder, tmp_path / "a.tar.gz"
        out, error = end_of(start(TOOL, *words), status=1)
        assert out == "" and error.count("\n") == 1 and line in error
    assert not (tmp_path / "a.tar.gz").exists()
