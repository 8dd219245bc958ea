"""Convert a snapshot to the tables of the solvers, and shares of classes back to jobs.

Device types that are equal for all jobs are pooled. A job gets of each type in proportion to its
devices, so that a policy that treats all types as equal uses them equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, positions
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.levels import LevelProblem
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.kernels.containers import table

# Jobs with equal input to the objective are solved as one class. Averaging a solution over equal
# jobs keeps it feasible and as good, so a class needs one row, however many jobs it has. (Narayanan
# et al., OSDI 2020, use one row per job.) Throughputs that differ by less than the noise of any
# measurement count as equal; otherwise noise would decide which of two equal jobs runs where. O(n
# k) to hash the rows, O(n log n) to sort them.

EQUAL = 1e-8
"""Relative difference below which two throughputs count as the same."""
# Bits of the mantissa to which the values of a class are rounded.
_CLASS_GRID_BITS = 30


@dataclass(frozen=True, eq=False, kw_only=True)
class JobClasses:
    """Classes of interchangeable jobs."""

    of: LongArray
    """The class of each job."""
    num_jobs: LongArray
    first: LongArray
    """One job of each class."""
    rows: FloatArray
    """``[class, column]``: the values of the class, snapped where they were nearly equal."""


def find_classes(values: FloatArray, exact: FloatArray) -> JobClasses:
    """Classes of jobs with nearly equal rows of ``values`` and equal rows of ``exact``."""
    first, of = _distinct(np.hstack([values, exact]))
    rows, has_merged = snap(values[first])
    if has_merged:
        again, merged = _distinct(np.hstack([rows, exact[first]]))
        first, rows, of = first[again], rows[again], merged[of]
    return JobClasses(
        of=of,
        num_jobs=np.bincount(of, minlength=len(first)),
        first=first,
        rows=np.ascontiguousarray(rows),
    )


def snap(values: FloatArray) -> tuple[FloatArray, bool]:
    """Make nearly equal values of each column equal; also returns whether there were any."""
    columns = np.ascontiguousarray(values.T)
    snapped, has_merged = _shortened(columns), False
    for column, ascending in enumerate(np.sort(columns)):
        gap = np.diff(ascending)
        is_near = gap <= EQUAL * ascending[1:]
        if np.any(is_near & (gap > 0.0)):
            _merge(columns[column], ascending, is_near, snapped[column])
            has_merged = True
    return snapped.T, has_merged


def _merge(
    values: FloatArray, ascending: FloatArray, is_near: BoolArray, snapped: FloatArray
) -> None:
    """Replace runs of close values by the lowest of the run."""
    place = np.arange(1, len(ascending))
    start = np.maximum.accumulate(np.where(is_near, 0, place))
    moved = ascending[1:][is_near]
    at = np.minimum(np.searchsorted(moved, values), len(moved) - 1)
    is_moved = moved[at] == values
    snapped[is_moved] = _shortened(ascending[start[is_near]])[at[is_moved]]


def _shortened(values: FloatArray) -> FloatArray:
    """Round to a shorter mantissa, so that a class gets the same number whichever jobs are in
    it."""
    fraction, exponent = np.frexp(values)
    return np.asarray(
        np.ldexp(np.round(np.ldexp(fraction, _CLASS_GRID_BITS)), exponent - _CLASS_GRID_BITS)
    )


def _distinct(rows: FloatArray) -> tuple[LongArray, LongArray]:
    """Indices of the first of all equal rows, in order of appearance, and the group of each row."""
    # Rows are compared as bytes, which sorts faster than by columns. Adding 0.0 turns -0.0 into
    # 0.0.
    keys = np.ascontiguousarray(rows + 0.0).view(f"V{8 * rows.shape[1]}").reshape(-1)
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], positions(order)[of.reshape(-1)]


# Bits of the mantissa that are kept of a share.
_GRID_BITS = 38


@dataclass(frozen=True, eq=False, kw_only=True)
class SolveSetup:
    """Classes of jobs, pools of devices, and how to expand their shares to jobs and device
    types."""

    classes: JobClasses
    job_classes: JobClassTable
    spread: FloatArray
    """``[column of the classes, column of the snapshot]``: how shares divide over pooled device
    types."""
    can_run: BoolArray
    """``[job]``: whether any device may run it."""
    snapping: float
    """Largest relative change of a rate by making nearly equal ones equal."""

    def expand(self, shares: FloatArray) -> FloatArray:
        """Shares of jobs on the device types of the snapshot, from shares of classes on pools."""
        return np.asarray((shares @ self.spread)[self.classes.of])


def set_up(
    snapshot: ClusterSnapshot, level_problem: LevelProblem, *, pools_types: bool = True
) -> SolveSetup:
    """Group the jobs of a snapshot into classes and device types into pools."""
    exact = [snapshot.gang[:, None].astype(float), level_problem.marks]
    if snapshot.pairs is not None:
        exact.append(snapshot.pairs.profile_of[:, None].astype(float))
    classes = find_classes(level_problem.rates, np.hstack(exact))
    group_of = np.arange(snapshot.num_types)
    # Pair tables are by device type, so types stay apart where jobs share.
    if pools_types and snapshot.pairs is None:
        group_of = _alike_columns(classes.rows)
    spread, first = _spread(snapshot, group_of)
    capacity = np.bincount(np.searchsorted(first, group_of), snapshot.num_devices, len(first))
    rates = classes.rows[:, first]
    # The change is measured over all jobs of a class, since one snapped row stands for all of them.
    change = np.abs(classes.rows[classes.of] - level_problem.rates)
    relative = change / np.maximum(level_problem.rates, 1e-300)
    return SolveSetup(
        classes=classes,
        job_classes=JobClassTable(
            rates=table(rates, np.float64),
            num_jobs=table(classes.num_jobs, np.float64),
            gang=table(snapshot.gang[classes.first], np.float64),
            # A pool without devices would divide by zero.
            capacity=table(np.maximum(capacity, 1e-9), np.float64),
        ),
        spread=spread,
        can_run=np.asarray((level_problem.rates > 0.0).any(axis=1)),
        snapping=float(relative.max(initial=0.0)),
    )


def trim(shares: FloatArray) -> FloatArray:
    """Round shares down to a shorter mantissa: limits stay kept, and solver noise disappears."""
    fraction, exponent = np.frexp(shares)
    return np.asarray(np.ldexp(np.floor(np.ldexp(fraction, _GRID_BITS)), exponent - _GRID_BITS))


def _alike_columns(rates: FloatArray) -> LongArray:
    """For each column, the first column that is equal to it for every class."""
    group_of = np.arange(rates.shape[1])
    for column in range(1, rates.shape[1]):
        for other in range(column):
            if group_of[other] == other and np.array_equal(rates[:, column], rates[:, other]):
                group_of[column] = other
                break
    return group_of


def _spread(snapshot: ClusterSnapshot, group_of: LongArray) -> tuple[FloatArray, LongArray]:
    if np.array_equal(group_of, np.arange(snapshot.num_types)):
        return np.eye(snapshot.num_types), group_of
    first = np.unique(group_of)
    spread = np.zeros((len(first), snapshot.num_types))
    for row, column in enumerate(first):
        members = np.flatnonzero(group_of == column)
        devices = snapshot.num_devices[members].astype(float)
        spread[row, members] = devices / max(devices.sum(), 1.0) if len(members) > 1 else 1.0
    return spread, first
