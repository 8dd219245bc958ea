"""Predicted steps against published ones: as shipped, and after ten runs of the same cluster."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.calibrate import calibrate, prediction_errors
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.validation import load_tables, site_cluster
from hocket.hardware.cluster import Cluster
from tests.cost.public_tables import public_tables

SHIPPED = load_tables()
PUBLIC = public_tables()
needs_data = pytest.mark.skipif(not PUBLIC, reason="no ../shared/data beside the repository")


def errors(rows: list[MeasuredRun], coefficients: Coefficients = Coefficients()) -> FloatArray:  # noqa: B008
    return prediction_errors(rows, cluster_of(rows), coefficients)


def cluster_of(rows: list[MeasuredRun]) -> Cluster:
    return site_cluster(rows[0].cluster, max(row.config.num_devices for row in rows))


def timed(rows: list[MeasuredRun]) -> list[MeasuredRun]:
    return [row for row in rows if row.step_s is not None]


@pytest.mark.parametrize(
    ("table", "mean", "largest"),
    [
        ("sc21-table1", 0.05, 0.08), ("sc21-table2", 0.05, 0.08),
        ("korthikanti-table5", 0.06, 0.10), ("mt-nlg", 0.15, 0.20), ("bloom", 0.12, 0.30),
        ("sc21-zero3", 0.15, 0.30), ("h100-weak-scaling", 0.20, 0.40),
    ],
)  # fmt: skip
def test_published_steps_are_met_without_calibration(
    table: str, mean: float, largest: float
) -> None:
    sizes = np.abs(errors(timed(SHIPPED[table])))
    assert sizes.mean() <= mean
    assert sizes.max() <= largest


def selene() -> list[MeasuredRun]:
    names = ("sc21-table1", "sc21-table2", "korthikanti-table5")
    return [row for name in names for row in timed(SHIPPED[name])]


def left_out(rows: list[MeasuredRun], seed: int, count: int = 10) -> FloatArray:
    """Errors of the rows that were not among ten random ones that the fit saw."""
    order = np.random.default_rng(seed).permutation(len(rows))
    seen, unseen = ([rows[i] for i in part] for part in (order[:count], order[count:]))
    fitted = calibrate(seen, cluster_of(rows))
    return np.abs(errors(unseen, fitted))


def test_ten_runs_of_selene_predict_the_others() -> None:
    for seed in range(2):
        sizes = left_out(selene(), seed)
        assert sizes.mean() <= 0.05
        assert np.quantile(sizes, 0.95) <= 0.10


@needs_data
@pytest.mark.parametrize(
    ("table", "mean", "high"),
    [("bloom", 0.07, 0.18), ("vtrain-single", 0.10, 0.27), ("vtrain-multi", 0.09, 0.25)],
)
def test_ten_runs_of_a_public_cluster_predict_the_others(
    table: str, mean: float, high: float
) -> None:
    found = [left_out(timed(PUBLIC[table]), seed) for seed in range(2)]
    assert np.mean([sizes.mean() for sizes in found]) <= mean
    assert np.mean([np.quantile(sizes, 0.95) for sizes in found]) <= high


@needs_data
@pytest.mark.parametrize(
    ("table", "mean"), [("bloom", 0.08), ("vtrain-single", 0.10), ("vtrain-multi", 0.10)]
)
def test_public_steps_are_met_without_calibration(table: str, mean: float) -> None:
    assert np.abs(errors(timed(PUBLIC[table]))).mean() <= mean


@needs_data
def test_head_widths_order_bloom_as_measured() -> None:
    rows = {row.row.split()[-1]: row for row in timed(PUBLIC["bloom"])}
    narrow, wide, unaligned = (rows[line] for line in ("948", "947", "833"))
    assert wide.step_s is not None
    assert narrow.step_s is not None
    assert wide.step_s < narrow.step_s
    predicted = {
        row.row: row.step_s * (1 + float(errors([row] * 3)[0]))
        for row in (narrow, wide, unaligned)
        if row.step_s is not None
    }
    assert predicted[wide.row] < predicted[narrow.row] < predicted[unaligned.row]
