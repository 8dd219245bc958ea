"""The program of jobs that may share devices, with few of its pairs: its rows, duals and answers.

Rows are the progress that every class is owed, its time, and the devices of every pool. Demands
near a level are taken for straight lines; what an answer is worth is measured with the demands
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.solve.interior import Inside
from hocket.fleet.solve.ladder import DemandAt
from hocket.fleet.solve.pair_tables import ClassPairTable, ShareColumns
from hocket.fleet.solve.price_tables import Crowd
from hocket.fleet.solve.prices import Duals

WIDE = 0.1
"""How far above the level demands count as straight lines at first."""
_NOTHING = 1e-12
_ROOM = 2e-6
"""Part of a demand that no longer rises which may stay unserved: a point inside needs room."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Classes, what they are owed near a level, and how they share."""

    crowd: Crowd
    table: ClassPairTable
    demand_at: DemandAt
    near: float
    unit: FloatArray
    """``[class]``: the size of a demand."""

    def chord(self, width: float) -> tuple[FloatArray, FloatArray]:
        """How rows rise with the level, in parts of ``near``, and their limits at level 0."""
        base, slope = chord(self.demand_at, self.near, width)
        base = np.where(slope > 0.0, base, base * (1.0 - _ROOM))
        jobs = self.crowd.num_jobs / self.unit
        others = np.zeros(len(jobs) + len(self.crowd.capacity))
        rise = np.concatenate([jobs * slope * self.near, others])
        limit = np.concatenate([-jobs * base, self.crowd.num_jobs, self.crowd.capacity])
        return rise, limit

    def rows_of(self, duals: Duals) -> FloatArray:
        """Duals as the program has them: such that a level is worth what all demands are."""
        rows = np.concatenate([duals.worth * self.unit, duals.rent, duals.price])
        rise = self.chord(WIDE)[0]
        worth = float(rise @ rows)
        if worth <= _NOTHING * float(rows.max(initial=0.0)):
            # Duals that see no worth in any rise say nothing.
            return np.where(rise > 0.0, 1.0, 0.0)
        return np.asarray(rows * (rise.sum() / worth))

    def duals_of(self, rows: FloatArray) -> Duals:
        """Duals of the program, with rents that cover what jobs earn alone."""
        crowd, size = self.crowd, len(self.unit)
        worth, price = rows[:size] / self.unit, rows[2 * size :]
        margin = worth[:, None] * crowd.rates - crowd.gang[:, None] * price
        rent = np.maximum(rows[size : 2 * size], margin.max(axis=1, initial=0.0))
        return Duals(worth=worth, rent=rent, price=price)


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassPairs:
    """Classes a and b, a no later than b, and the column that they share."""

    a: LongArray
    b: LongArray
    column: LongArray

    def where(self, is_kept: BoolArray) -> ClassPairs:
        """Some of them."""
        return ClassPairs(a=self.a[is_kept], b=self.b[is_kept], column=self.column[is_kept])


NOBODY = ClassPairs(
    a=np.zeros(0, dtype=np.int64),
    b=np.zeros(0, dtype=np.int64),
    column=np.zeros(0, dtype=np.int64),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PairAnswer:
    """Times that keep all limits, and duals over all pairs."""

    alone: FloatArray
    pairs: ClassPairs
    amount: FloatArray
    progress: FloatArray
    """``[class]``: of one job."""
    level: float
    served: float
    """The least part that a job makes of what it is owed at the level before this was cut off."""
    ceiling: float
    duals: Duals


def _rates(table: ClassPairTable, a: LongArray, b: LongArray) -> FloatArray:
    """``[pair, column]``: progress of a beside b."""
    rates = table.steps_per_s[table.profile_of[a], table.profile_of[b]] * table.unit[a][:, None]
    return np.where((table.alone[a] > 0.0) & (table.alone[b] > 0.0), rates, 0.0)


def columns_of(task: Task, pairs: ClassPairs) -> ShareColumns:
    """Every job alone on every column, then the pairs."""
    crowd, unit = task.crowd, task.unit
    one, at = np.nonzero(np.asarray(crowd.rates) > 0.0)
    nobody = 2 * len(unit) + len(crowd.capacity)
    a, b, j = pairs.a, pairs.b, pairs.column
    everywhere = np.arange(len(a))
    rate_a = _rates(task.table, a, b)[everywhere, j] / unit[a]
    rate_b = _rates(task.table, b, a)[everywhere, j] / unit[b]
    return ShareColumns(
        job_a=np.concatenate([one, a]).astype(np.uint32),
        job_b=np.concatenate([np.full(len(one), nobody), b]).astype(np.uint32),
        pool=np.concatenate([at, j]).astype(np.uint32),
        rate_a=np.concatenate([crowd.rates[one, at] / unit[one], rate_a]),
        rate_b=np.concatenate([np.zeros(len(one)), rate_b]),
        devices=np.concatenate([crowd.gang[one], crowd.gang[a]]),
    )


def answer_of(
    task: Task,
    columns: ShareColumns,
    pairs: ClassPairs,
    inside: Inside,
    duals: Duals,
    ceiling: float,
) -> PairAnswer:
    """What a point inside comes to once it is cut to time and devices, and all demands count."""
    crowd = task.crowd
    fitting = _fitted(columns, inside.amount, crowd)
    num_jobs = len(task.unit)
    made = np.bincount(columns.job_a, fitting * columns.rate_a, num_jobs)
    made += np.bincount(columns.job_b, fitting * columns.rate_b, num_jobs)[:num_jobs]
    progress = made * task.unit / crowd.num_jobs
    level = min(inside.level * task.near, ceiling)
    demand = task.demand_at(level)
    served = float(np.min(progress[demand > 0.0] / demand[demand > 0.0], initial=1.0))
    num_single = len(fitting) - len(pairs.a)
    alone = np.zeros(crowd.rates.shape)
    alone[np.nonzero(np.asarray(crowd.rates) > 0.0)] = fitting[:num_single]
    return PairAnswer(
        alone=alone,
        pairs=pairs,
        amount=fitting[num_single:],
        progress=progress,
        level=level * served,
        served=served,
        ceiling=ceiling,
        duals=duals,
    )


def _fitted(columns: ShareColumns, amount: FloatArray, crowd: Crowd) -> FloatArray:
    """Amounts cut to what jobs have of time, then to what pools have of devices."""
    num_jobs = len(crowd.gang)
    nobody = 2 * num_jobs + len(crowd.capacity)
    time = np.bincount(columns.job_a, amount, nobody + 1)
    time += np.bincount(columns.job_b, amount, nobody + 1)
    left = np.ones(nobody + 1)
    left[:num_jobs] = crowd.num_jobs / np.maximum(time[:num_jobs], crowd.num_jobs)
    amount = amount * np.minimum(left[columns.job_a], left[columns.job_b])
    load = np.bincount(columns.pool, amount * columns.devices, len(crowd.capacity))
    return np.asarray(amount * (crowd.capacity / np.maximum(load, crowd.capacity))[columns.pool])


def chord(demand_at: DemandAt, level: float, width: float) -> tuple[FloatArray, FloatArray]:
    """Demands from a level to one that is ``width`` higher as base + slope x level."""
    demand, higher = demand_at(level), level * (1.0 + width)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # Nobody rises any more; whoever is not at its top is there for want of partners.
        return np.zeros(len(demand)), demand / level
    return demand - slope * level, slope
