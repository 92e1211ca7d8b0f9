"""BD's rank correlations with other signals, plain and given the step: report/signals.csv.

python results/minatar_pilot/signals.py
"""

import math
import sys
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tools import plot, report

HERE = Path(__file__).parent
SIGNALS = ["abs/policy_entropy", "abs/value_variance", "gns/noise_scale_raw"]


def correlations(run: plot.Run, signal: str) -> tuple[float, float]:
    """BD's rank correlation with a signal s, and the partial one given the step t; or NaN.

    r(BD, s | t) = [r(BD, s) - r(BD, t) r(s, t)] / sqrt([1 - r(BD, t)²] [1 - r(s, t)²])
    """
    table = np.array([run.columns[name] for name in (plot.DIVERGENCE, signal, plot.STEP)])
    table = table[:, np.isfinite(table).all(axis=0)]
    if table.shape[1] < 4 or (np.ptp(table, axis=1) == 0).any():
        return math.nan, math.nan
    ranks = np.corrcoef(rankdata(table, axis=1))
    plain, bd_step, signal_step = ranks[0, 1], ranks[0, 2], ranks[1, 2]
    rest = (1 - bd_step**2) * (1 - signal_step**2)
    if rest < 1e-9:  # the step tells one of the two
        return math.nan, math.nan
    return plain, (plain - bd_step * signal_step) / math.sqrt(rest)


def rows(study: report.Study) -> list[dict]:
    """By arm and signal: means over runs and games."""
    found = []
    for arm, cells in study.arms.items():
        for signal in SIGNALS:
            values = np.array([[correlations(run, signal) for run in cell] for cell in cells])
            plain, partial = report.estimate(report.mean, np.moveaxis(values, -1, 0)).T
            row = {"arm": arm, "signal": signal} | report.interval("correlation", plain)
            found.append(row | report.interval("given_step", partial))
    return found


if __name__ == "__main__":
    study = report.read_study(report.Args((HERE / "runs",)))
    print(report.write(HERE / "report" / "signals.csv", rows(study)))
