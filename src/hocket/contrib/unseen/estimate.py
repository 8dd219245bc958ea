"""A job that the table does not have: its row from a few measurements, alone and beside others.

Speeds alone on other kinds follow from those of jobs of like names and gangs (`belief_from`); the
part of them that is left beside each other job on each kind is one more row of a wide table with
holes (`complete`). Narayanan et al. (OSDI 2020, section 3.3) give a new job the row of its nearest
neighbour instead; here what was measured stays as it was measured. Cost of two completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import UsageError
from hocket.contrib.unseen.belief import belief_from, check_kind, check_speed
from hocket.contrib.unseen.completion import Completed, complete
from hocket.fleet.throughputs.table import JobProfile, Throughputs

PairRates = Mapping[tuple[str, JobProfile], tuple[float, float]]
"""Kind and other job to steps per second (mine, other's) on one device; (0, 0): may not share."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimated:
    """A table with one more job, the last, and how sure its numbers are."""

    throughputs: Throughputs
    alone_log_deviation: FloatArray
    """``[kind]``: standard deviation of the logarithm; 0 where it was measured."""
    pair_log_deviation: FloatArray
    """``[other profile, kind]``: the same for the part that the new job keeps beside another."""


def with_unseen_job(
    table: Throughputs,
    job: JobProfile,
    alone: Mapping[str, float],
    beside: PairRates | None = None,
    *,
    boldness: float = 0.0,
) -> Estimated:
    """The table with a job of which steps per second on some kinds are known, and perhaps pairs.

    Other kinds are taken to be as fast as they may be by ``boldness`` deviations, so that the job
    is tried there; 0: what is most likely. A kind with 0 stays 0: the job cannot run there. Raises
    `UsageError` for names that the table does not have, for what is no speed, and where not even
    one kind is known.
    """
    _check(table, job, beside or {})
    same = np.array([profile.gang == job.gang for profile in table.profiles], dtype=bool)
    belief = belief_from(table, job, alone)
    hoped = zip(table.kinds, belief.steps_per_s(boldness), strict=True)
    row = np.array([alone.get(*both) for both in hoped])
    mine, others, pair_deviation = _pairs(table, same, row, beside or {})
    beside_all = np.zeros((len(same) + 1, len(same) + 1, len(table.kinds)))
    beside_all[:-1, :-1] = table.beside
    beside_all[-1, :-1], beside_all[:-1, -1] = mine, others
    return Estimated(
        throughputs=Throughputs(
            kinds=table.kinds,
            profiles=(*table.profiles, job),
            alone=np.vstack([table.alone, row]),
            beside=beside_all,
        ),
        alone_log_deviation=np.where(belief.can_run, belief.logs.deviation, 0.0),
        pair_log_deviation=pair_deviation,
    )


def _pairs(
    table: Throughputs, same: BoolArray, row: FloatArray, measured: PairRates
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What the new job and each other do on one device, ``[other, kind]``."""
    shape = (len(same), len(table.kinds))
    mine, others, deviation = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    at = np.flatnonzero(same)
    if not len(at) or not table.beside[np.ix_(at, at)].any():
        return mine, others, deviation
    kept, lost = _measured_parts(table, row, measured)
    alone = np.where(table.alone > 0.0, table.alone, np.inf)
    # [other, kind, partner]: what a job keeps of its speed beside a partner.
    parts = table.beside[np.ix_(at, at)].transpose(0, 2, 1) / alone[at][:, :, None]
    mine_parts = _last_row(parts, kept[at])
    other_parts = _last_row(parts.transpose(2, 1, 0), lost[at])
    mine[at] = np.minimum(mine_parts.values, 1.0) * row
    others[at] = np.minimum(other_parts.values, 1.0) * table.alone[at]
    deviation[at] = mine_parts.log_deviation
    # Who shares a kind with nobody does not fit beside anything, whatever its speed would be.
    shares = parts.any(axis=2)
    allowed = np.zeros(shape, dtype=bool)
    allowed[at] = np.where(np.isnan(kept[at]), shares, kept[at] > 0.0)
    allowed &= (mine > 0.0) & (others > 0.0)
    return np.where(allowed, mine, 0.0), np.where(allowed, others, 0.0), deviation


def _measured_parts(
    table: Throughputs, row: FloatArray, measured: PairRates
) -> tuple[FloatArray, FloatArray]:
    """What was measured of the new job and of the others, as parts; NaN where nothing was."""
    kept = np.full((len(table.profiles), len(table.kinds)), np.nan)
    lost = kept.copy()
    for (kind, other), (mine, others) in measured.items():
        at, column = table.profiles.index(other), table.kinds.index(kind)
        both = mine > 0.0 and others > 0.0 and row[column] > 0.0 and table.alone[at, column] > 0.0
        kept[at, column] = mine / row[column] if both else 0.0
        lost[at, column] = others / table.alone[at, column] if both else 0.0
    return kept, lost


def _last_row(parts: FloatArray, measured: FloatArray) -> Completed:
    """``[partner, kind]`` of a new job, from ``[job, kind, partner]`` of those in the table."""
    flat = parts.transpose(0, 2, 1).reshape(len(parts), -1)
    filled = complete(np.vstack([np.where(flat > 0.0, flat, np.nan), _known(measured.ravel())]))
    return Completed(
        values=filled.values[-1].reshape(measured.shape),
        log_deviation=filled.log_deviation[-1].reshape(measured.shape),
    )


def _known(values: FloatArray) -> FloatArray:
    return np.where(values > 0.0, values, np.nan)


def _check(table: Throughputs, job: JobProfile, beside: PairRates) -> None:
    for (kind, other), speeds in beside.items():
        check_kind(table, kind)
        for speed in speeds:
            check_speed(speed)
        if other not in table.profiles or other.gang != job.gang:
            hint = "pairs have jobs of one gang that are in the table"
            raise UsageError(f"{job.job_type!r} cannot be paired with {other}", hint=hint)
    if job in table.profiles:
        raise UsageError(f"the table has {job.job_type!r} already", hint="read its row")
