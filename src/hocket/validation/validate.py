"""Predict the published tables again and say how far off the predictions are.

Twice: with nothing measured (zero-shot), and calibrated with at most ten runs per site. Runs that
took part in a calibration are not scored in the calibrated part. Which runs these are follows from
their configurations alone, never from their times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.calibrate import MIN_RUNS, calibrate
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.memory import (
    FORMULAS_ONLY,
    GIVEN_BACK,
    MemoryOverheads,
    fit_overheads,
    stage_memory,
)
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.step import predict
from hocket.hardware.cluster import Cluster
from hocket.transformer import Divisions, Transformer
from hocket.validation.choose import calibration_rows
from hocket.validation.clusters import site_cluster
from hocket.validation.rows import Measured
from hocket.validation.scores import (
    ErrorScore,
    OutOfMemoryScore,
    RankingScore,
    error_score,
    out_of_memory_score,
    ranking_score,
)
from hocket.validation.tolerances import Tolerance, tolerance_of

FORMULA_TABLES = frozenset({"korthikanti-memory"})
"""Tables whose memory was counted, not measured: nothing is added to the formulas."""
MIN_WEIGHED = 5
"""Runs with measured memory from which overheads are fitted."""


@dataclass(frozen=True, kw_only=True)
class TableScores:
    """The scores of one table, with nothing measured or calibrated."""

    step: ErrorScore | None
    ranking: RankingScore | None
    memory: ErrorScore | None
    out_of_memory: OutOfMemoryScore | None


@dataclass(frozen=True, kw_only=True)
class TableResult:
    """One table."""

    table: str
    num_rows: int
    num_calibration_rows: int
    """Runs of this table that took part in its site's calibration."""
    zero_shot: TableScores
    calibrated: TableScores
    tolerance: Tolerance
    violations: tuple[str, ...]
    """What is outside of tolerance, in sentences."""


@dataclass(frozen=True, kw_only=True)
class CalibratedSite:
    """What was fitted for one site, and from which runs."""

    coefficients: Coefficients
    overheads: MemoryOverheads | None
    """None where no memory was measured: those of the program hold."""
    timed: frozenset[tuple[str, str]]
    """Table and row of the runs that the coefficients were fitted to."""
    weighed: frozenset[tuple[str, str]]
    """The same for the overheads."""


def validate(
    tables: Mapping[str, Sequence[Measured]], names: Sequence[str] = ()
) -> list[TableResult]:
    """The results of the named tables, or of all; every table of a site serves to calibrate it."""
    wanted = {name: rows for name, rows in tables.items() if name in names or not names}
    sites = {name: calibrated_site(name, tables) for name in _site_names(wanted)}
    return [_table_result(name, rows, sites) for name, rows in wanted.items()]


def predict_steps(rows: Sequence[Measured], coefficients: Mapping[str, Coefficients]) -> FloatArray:
    """Predicted seconds of runs; coefficients by site."""
    groups: dict[tuple[str, Transformer, Software], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.cluster, row.model, row.software].append(index)
    predicted_s = np.empty(len(rows))
    for (site, model, software), group in groups.items():
        divisions = Divisions.of(rows[index].division for index in group)
        cluster = _cluster([row for row in rows if row.cluster == site])
        figures = predict(model, divisions, cluster, software, coefficients[site])
        predicted_s[group] = figures.step_s
    return predicted_s


def predict_memory(rows: Sequence[Measured], overheads: MemoryOverheads | None) -> FloatArray:
    """Predicted bytes on the fullest device of each run; overheads of its program unless given."""
    return np.array(
        [
            max(stage_memory(row.model, row.division, row.software, overheads).peak_bytes)
            for row in rows
        ],
        dtype=np.float64,
    )


# ── calibration ──────────────────────────────────────────────────────────────────────────────────


def _site_names(tables: Mapping[str, Sequence[Measured]]) -> list[str]:
    return list(dict.fromkeys(row.cluster for rows in tables.values() for row in rows))


def calibrated_site(site: str, tables: Mapping[str, Sequence[Measured]]) -> CalibratedSite:
    """What the chosen runs of a site tell about it."""
    rows = [row for table in tables.values() for row in table if row.cluster == site]
    timed = _chosen([row for row in rows if row.step_s is not None])
    timed = timed if len(timed) >= MIN_RUNS else []
    weighed = _chosen(
        [row for row in rows if row.memory_bytes is not None and row.table not in FORMULA_TABLES]
    )
    weighed = weighed if len(weighed) >= MIN_WEIGHED else []
    return CalibratedSite(
        coefficients=calibrate(timed, _cluster(timed)) if timed else Coefficients(),
        overheads=fitted_overheads(weighed) if weighed else None,
        timed=frozenset((row.table, row.row) for row in timed),
        weighed=frozenset((row.table, row.row) for row in weighed),
    )


def _chosen(rows: list[Measured]) -> list[Measured]:
    return [rows[index] for index in calibration_rows(rows)]


def fitted_overheads(rows: Sequence[Measured]) -> MemoryOverheads:
    """The overheads that runs with measured memory ask for."""
    only_state = MemoryOverheads(constant_bytes=0.0, state_factor=1.0, activation_factor=0.0)
    state_bytes, activation_bytes = [], []
    for row in rows:
        whole = stage_memory(row.model, row.division, row.software, FORMULAS_ONLY)
        state = stage_memory(row.model, row.division, row.software, only_state)
        fullest = int(np.argmax(whole.peak_bytes))
        state_bytes.append(state.peak_bytes[fullest])
        activation_bytes.append(whole.peak_bytes[fullest] - state.peak_bytes[fullest])
    measured = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    return fit_overheads(state_bytes, activation_bytes, measured, rows[0].software.overheads)


def _cluster(rows: Sequence[Measured]) -> Cluster:
    """The part of a site that holds the largest of the runs."""
    return site_cluster(rows[0].cluster, max(row.division.num_devices for row in rows))


# ── scores ───────────────────────────────────────────────────────────────────────────────────────


def _table_result(
    name: str, rows: Sequence[Measured], sites: Mapping[str, CalibratedSite]
) -> TableResult:
    untouched = {site: Coefficients() for site in sites}
    plain = FORMULAS_ONLY if name in FORMULA_TABLES else None
    zero_shot = _part(rows, rows, untouched, plain)
    timed = [row for row in rows if not _took_part(row, sites[row.cluster].timed)]
    weighed = [row for row in rows if not _took_part(row, sites[row.cluster].weighed)]
    # A site that gave no runs has nothing to be judged by but what is known without any.
    fitted = {site: found.coefficients for site, found in sites.items() if found.timed}
    # All runs of a table are from one site.
    overheads = plain if name in FORMULA_TABLES else sites[rows[0].cluster].overheads
    calibrated = _part(timed, weighed, fitted, overheads)
    tolerance = tolerance_of(name)
    return TableResult(
        table=name,
        num_rows=len(rows),
        num_calibration_rows=len(rows) - len(timed),
        zero_shot=zero_shot,
        calibrated=calibrated,
        tolerance=tolerance,
        violations=tuple(
            [f"{name}, zero-shot: {text}" for text in tolerance.violations(zero_shot, False)]
            + [f"{name}, calibrated: {text}" for text in tolerance.violations(calibrated, True)]
        ),
    )


def _took_part(row: Measured, chosen: frozenset[tuple[str, str]]) -> bool:
    return (row.table, row.row) in chosen


def _part(
    timed: Sequence[Measured],
    weighed: Sequence[Measured],
    coefficients: Mapping[str, Coefficients],
    overheads: MemoryOverheads | None,
) -> TableScores:
    ran = [row for row in timed if row.step_s is not None and row.cluster in coefficients]
    step, ranking = None, None
    if ran:
        predicted_s = predict_steps(ran, coefficients)
        measured_s = np.array([row.step_s for row in ran], dtype=np.float64)
        step = error_score(predicted_s / measured_s - 1.0)
        ranking = ranking_score(ran, predicted_s)
    memory, out_of_memory = _memory_scores(weighed, overheads)
    return TableScores(step=step, ranking=ranking, memory=memory, out_of_memory=out_of_memory)


def _memory_scores(
    rows: Sequence[Measured], overheads: MemoryOverheads | None
) -> tuple[ErrorScore | None, OutOfMemoryScore | None]:
    if not rows:
        return None, None
    known = [row for row in rows if row.memory_bytes is not None]
    measured = np.array([row.memory_bytes for row in known], dtype=np.float64)
    errors = predict_memory(known, overheads) / measured - 1.0
    capacity = np.array(
        [site_cluster(row.cluster, 8).devices[0].memory_bytes for row in rows], dtype=np.float64
    )
    needed = predict_memory(rows, overheads) / GIVEN_BACK
    # What was counted never ran: it cannot be a false alarm.
    ran = None if overheads is FORMULAS_ONLY else out_of_memory_score(rows, needed, capacity)
    return error_score(errors), ran
