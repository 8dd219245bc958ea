"""Levels of many jobs of which no two are alike and which may share devices, to a known gap.

Duals of a part of the jobs on a part of the devices are nearly right for all: every other job
answers to them with duals of its own (`response_kernel`). Pairs that gain at such duals, or nearly,
make a small program, which an interior-point method solves; its duals ask for more pairs, but not
too far from those that proved most so far (Wentges, "Weighted Dantzig-Wolfe decomposition for
linear mixed-integer programming", 1997). The gap is proven over all pairs: rents are raised until
none gains, and the level at which demands would be worth all time and devices is out of reach.
O(classes^2 x columns) per look at all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.interior import Inside, climb_inside
from hocket.fleet.solve.levels import DemandAt
from hocket.fleet.solve.pair_tables import (
    Anchors,
    ClassPairTable,
    Partners,
    ShareColumns,
    new_partners,
)
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.prices import Duals, LevelAnswer, PairTime, proven_level, top_level
from hocket.fleet.solve.setup import SolveSetup
from hocket.kernels.containers import table as read_only

# The program of jobs that may share devices, with few of its pairs: its rows, duals and answers.
#
# Rows are the progress that every class is due, its time, and the devices of every pool. Demands
# near a level are taken for straight lines; what an answer is worth is measured with the demands
# themselves.

WIDE = 0.1
"""Distance above the level within which demands count as straight lines at first."""
_NOTHING = 1e-12
_SLACK = 2e-6
"""Part of a demand that no longer rises which may stay unserved, so that the feasible set has an
interior."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Classes, what they are due near a level, and how they share."""

    job_classes: JobClassTable
    table: ClassPairTable
    demand_at: DemandAt
    near: float
    unit: FloatArray
    """``[class]``: the size of a demand."""

    def chord(self, width: float) -> tuple[FloatArray, FloatArray]:
        """Slope of rows in the level, in parts of ``near``, and their limits at level 0."""
        base, slope = chord(self.demand_at, self.near, width)
        base = np.where(slope > 0.0, base, base * (1.0 - _SLACK))
        jobs = self.job_classes.num_jobs / self.unit
        others = np.zeros(len(jobs) + len(self.job_classes.capacity))
        rise = np.concatenate([jobs * slope * self.near, others])
        limit = np.concatenate([-jobs * base, self.job_classes.num_jobs, self.job_classes.capacity])
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
        job_classes, size = self.job_classes, len(self.unit)
        worth, price = rows[:size] / self.unit, rows[2 * size :]
        margin = worth[:, None] * job_classes.rates - job_classes.gang[:, None] * price
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
    """The least part that a job makes of what it is due at the level before this was cut off."""
    ceiling: float
    duals: Duals


def _rates(table: ClassPairTable, a: LongArray, b: LongArray) -> FloatArray:
    """``[pair, column]``: progress of a beside b."""
    rates = table.steps_per_s[table.profile_of[a], table.profile_of[b]] * table.unit[a][:, None]
    return np.where((table.alone[a] > 0.0) & (table.alone[b] > 0.0), rates, 0.0)


def columns_of(task: Task, pairs: ClassPairs) -> ShareColumns:
    """Every job alone on every column, then the pairs."""
    job_classes, unit = task.job_classes, task.unit
    one, at = np.nonzero(np.asarray(job_classes.rates) > 0.0)
    nobody = 2 * len(unit) + len(job_classes.capacity)
    a, b, j = pairs.a, pairs.b, pairs.column
    everywhere = np.arange(len(a))
    rate_a = _rates(task.table, a, b)[everywhere, j] / unit[a]
    rate_b = _rates(task.table, b, a)[everywhere, j] / unit[b]
    return ShareColumns(
        job_a=np.concatenate([one, a]).astype(np.uint32),
        job_b=np.concatenate([np.full(len(one), nobody), b]).astype(np.uint32),
        pool=np.concatenate([at, j]).astype(np.uint32),
        rate_a=np.concatenate([job_classes.rates[one, at] / unit[one], rate_a]),
        rate_b=np.concatenate([np.zeros(len(one)), rate_b]),
        devices=np.concatenate([job_classes.gang[one], job_classes.gang[a]]),
    )


def answer_of(
    task: Task,
    columns: ShareColumns,
    pairs: ClassPairs,
    inside: Inside,
    duals: Duals,
    ceiling: float,
) -> PairAnswer:
    """Turn an interior point into a feasible answer, cut to time and devices."""
    job_classes = task.job_classes
    fitting = _fitted(columns, inside.amount, job_classes)
    num_jobs = len(task.unit)
    made = np.bincount(columns.job_a, fitting * columns.rate_a, num_jobs)
    made += np.bincount(columns.job_b, fitting * columns.rate_b, num_jobs)[:num_jobs]
    progress = made * task.unit / job_classes.num_jobs
    level = min(inside.level * task.near, ceiling)
    demand = task.demand_at(level)
    served = float(np.min(progress[demand > 0.0] / demand[demand > 0.0], initial=1.0))
    num_single = len(fitting) - len(pairs.a)
    alone = np.zeros(job_classes.rates.shape)
    alone[np.nonzero(np.asarray(job_classes.rates) > 0.0)] = fitting[:num_single]
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


def _fitted(columns: ShareColumns, amount: FloatArray, job_classes: JobClassTable) -> FloatArray:
    """Amounts cut to what jobs have of time, then to what pools have of devices."""
    num_jobs = len(job_classes.gang)
    nobody = 2 * num_jobs + len(job_classes.capacity)
    time = np.bincount(columns.job_a, amount, nobody + 1)
    time += np.bincount(columns.job_b, amount, nobody + 1)
    left = np.ones(nobody + 1)
    left[:num_jobs] = job_classes.num_jobs / np.maximum(time[:num_jobs], job_classes.num_jobs)
    amount = amount * np.minimum(left[columns.job_a], left[columns.job_b])
    load = np.bincount(columns.pool, amount * columns.devices, len(job_classes.capacity))
    return np.asarray(
        amount * (job_classes.capacity / np.maximum(load, job_classes.capacity))[columns.pool]
    )


def chord(demand_at: DemandAt, level: float, width: float) -> tuple[FloatArray, FloatArray]:
    """Demands from a level to one that is ``width`` higher as base + slope x level."""
    demand, higher = demand_at(level), level * (1.0 + width)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # Nobody rises any more; whoever is not at its top is there for want of partners.
        return np.zeros(len(demand)), demand / level
    return demand - slope * level, slope


# A few classes that stand for all: one of each cell of a k-d tree over what classes do.
#
# Bentley, "Multidimensional binary search trees used for associative searching" (1975). Cells are
# halved where they are widest until there are as many as wanted, so all hold equally many classes,
# and prices among representatives are nearly those of all; the class nearest to the middle of its
# cell stands for it. O(classes x features x log cells).

_BESIDE = 16
"""Classes beside which all are looked at."""
_PAIRS_COUNT = 0.5
"""Weight of differences beside others against those alone."""
_APART = 100.0
"""Weight of gangs: jobs of different gangs never meet."""


def representatives(
    table: ClassPairTable, unit: FloatArray, count: int
) -> tuple[LongArray, LongArray]:
    """Some classes, and the cell of every class: the representative of cell i is number i.

    ``unit[class]`` is the size of what a class is due.
    """
    features = _features(table, unit)
    cells = _halved(features, np.arange(len(unit)), count)
    cell_of = np.empty(len(unit), dtype=np.int64)
    for number, cell in enumerate(cells):
        cell_of[cell] = number
    return np.array([_middle(features, cell) for cell in cells], dtype=np.int64), cell_of


def _features(table: ClassPairTable, unit: FloatArray) -> FloatArray:
    """``[class, feature]``: its progress alone, its and the others' beside some others."""
    num_classes = len(unit)
    others = np.arange(0, num_classes, max(num_classes // _BESIDE, 1))
    profile, scale = table.profile_of, table.unit / unit
    ours = table.steps_per_s[np.ix_(profile, profile[others])] * scale[:, None, None]
    theirs = table.steps_per_s[np.ix_(profile[others], profile)] * scale[others][:, None, None]
    beside = [ours, theirs.transpose(1, 0, 2)]
    return np.hstack(
        [
            _APART * np.log(table.gang)[:, None],
            table.alone / unit[:, None],
            *(_PAIRS_COUNT * rates.reshape(num_classes, -1) for rates in beside),
        ]
    )


def _halved(features: FloatArray, cell: LongArray, count: int) -> list[LongArray]:
    if count <= 1:
        return [cell]
    widest = features[cell].std(axis=0).argmax()
    ascending = cell[np.argsort(features[cell, widest], kind="stable")]
    half = count // 2
    cut = len(cell) * half // count
    return _halved(features, ascending[:cut], half) + _halved(
        features, ascending[cut:], count - half
    )


def _middle(features: FloatArray, cell: LongArray) -> int:
    away = features[cell] - features[cell].mean(axis=0)
    return int(cell[np.square(away).sum(axis=1).argmin()])


_PARTNERS = 8
"""Partners that are taken in at a time for each class."""
_ENOUGH = 3e-4
"""Relative gap at which no more partners are looked for."""
_MAX_STAGES = 16
"""Programs that are solved at most."""
_MAX_WORK, _WORK_PER_CLASS = 180_000_000, 160_000
"""Columns times iterations of the gradients, and pairs looked at: in all, and by class."""
_FIRST, _FIRST_EXTENDED, _PART = 2e-2, 1e-2, 0.3
"""Accuracy of the first program, also from duals of a part of the jobs, and of the others
as part of the gap so far."""
_MARGIN, _LEAST_MARGIN, _GAPS = 0.2, 0.005, 10.0
"""Pairs that lose no more than this part of what a job's progress is worth are taken in as well; at
last fewer, those that lose some times the gap."""
_IN_USE = 0.02
_STEP, _LEAST_STEP = 0.2, 0.05
"""Step from the best duals so far towards those of a program at which pairs are searched, at first
and at least."""
_ALONE_STEP, _LEAST_ALONE_STEP = 1.0, 0.5
"""The same where the best duals are far off, as those without sharing are at first."""
_FAR = 0.1
"""Relative gap from which on the best duals are far off."""
_LEAST_SAMPLE, _MAX_SAMPLE, _ONE_OF = 64, 256, 4
"""Number of classes that stand for all: one of so many, where that is not too few or too many."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Look:
    """Gains of all pairs at some duals, and the level that these prove."""

    rows: FloatArray
    partners: Partners
    duals: Duals
    ceiling: float


def pair_table(snapshot: ClusterSnapshot, setup: SolveSetup, rates: FloatArray) -> ClassPairTable:
    """Progress of the classes of a snapshot beside each other."""
    assert snapshot.pairs is not None
    first = setup.classes.first
    fastest = snapshot.usable_steps_per_s[first].max(axis=1, initial=0.0)
    unit = rates[first].max(axis=1, initial=0.0) / np.where(fastest > 0.0, fastest, np.inf)
    return ClassPairTable(
        steps_per_s=read_only(snapshot.pairs.steps_per_s, np.float64),
        profile_of=read_only(snapshot.pairs.profile_of[first], np.int64),
        unit=read_only(unit, np.float64),
        alone=setup.job_classes.rates,
        gang=setup.job_classes.gang,
        num_jobs=setup.job_classes.num_jobs,
    )


def highest_level_of_many(
    job_classes: JobClassTable,
    table: ClassPairTable,
    demand_at: DemandAt,
    cap: FloatArray,
    alone: LevelAnswer,
) -> LevelAnswer:
    """Climb as high as devices that may be shared allow, from the answer without sharing."""
    demand = demand_at(alone.level)
    unit = np.where(demand > 0.0, demand, np.where(cap > 0.0, cap, 1.0))
    task = Task(
        job_classes=job_classes, table=table, demand_at=demand_at, near=alone.level, unit=unit
    )
    answer = _solve(task, alone.duals, top_level(demand_at, cap))
    if answer.level < alone.level:
        # Nothing was gained: the answer alone stays, with the bound that holds for pairs too.
        alone_made = np.minimum(alone.demand, (job_classes.rates * alone.shares).sum(axis=1))
        answer = replace(
            answer,
            alone=alone.shares * job_classes.num_jobs[:, None],
            pairs=NOBODY,
            amount=np.zeros(0),
            progress=alone_made,
            level=alone.level,
            served=1.0,
        )
    return _level_answer(job_classes, demand_at, answer, alone)


def _level_answer(
    job_classes: JobClassTable, demand_at: DemandAt, answer: PairAnswer, alone: LevelAnswer
) -> LevelAnswer:
    demand = demand_at(answer.level)
    in_pairs = (
        answer.progress - (job_classes.rates * answer.alone).sum(axis=1) / job_classes.num_jobs
    )
    return LevelAnswer(
        level=answer.level,
        demand=demand,
        shares=answer.alone / job_classes.num_jobs[:, None],
        cap=demand,
        ceiling=max(answer.ceiling, answer.level),
        warm=alone.warm,
        duals=answer.duals,
        served=answer.served,
        pairs=PairTime(
            class_a=answer.pairs.a,
            class_b=answer.pairs.b,
            column=answer.pairs.column,
            amount=answer.amount,
            progress=in_pairs if len(answer.amount) else np.zeros(len(job_classes.gang)),
        ),
    )


def _solve(task: Task, duals: Duals, top: float) -> PairAnswer:
    """Solve with few pairs, look for others that would pay, and again with them."""
    step, least_step, accuracy = _ALONE_STEP, _LEAST_ALONE_STEP, _FIRST
    reached = guess = task.near
    if len(task.unit) > 2 * _LEAST_SAMPLE:
        part, found = _sampled(task, duals, top)
        duals, guess = _extended(task, part, found), found.level
        step, least_step, accuracy = _STEP, _LEAST_STEP, _FIRST_EXTENDED
    best = seen = _look(task, task.rows_of(duals), top, _MARGIN)
    # Where some are at their tops, programs near a level that is out of reach have no answer.
    task = replace(task, near=max(min(guess, best.ceiling), reached))
    answer, used, width, margin = None, NOBODY, WIDE, _MARGIN
    max_work = min(_WORK_PER_CLASS * len(task.unit), _MAX_WORK)
    work = looked = len(task.unit) ** 2 * len(task.job_classes.capacity) // 2
    for _ in range(_MAX_STAGES):
        pairs = _candidates(task, seen.partners, used)
        columns = columns_of(task, pairs)
        inside = climb_inside(
            columns, *task.chord(width), best.rows, len(task.unit), accuracy, max_work - work
        )
        seen = _look(task, _between(best.rows, inside.dual, step), top, margin)
        nearer = seen
        if seen.ceiling >= best.ceiling and step > least_step:
            step = max(0.5 * step, least_step)
            nearer = _look(task, _between(best.rows, inside.dual, step), top, margin)
            work += looked
        if nearer.ceiling < best.ceiling:
            best, step = nearer, min(2.0 * step, 1.0)
        else:
            step = max(0.5 * step, least_step)
        latest = answer_of(task, columns, pairs, inside, best.duals, best.ceiling)
        answer = latest if answer is None or latest.level > answer.level else answer
        gap = min(best.ceiling / max(answer.level, 1e-300) - 1.0, 1.0)
        took = inside.work + looked
        work += took
        if gap <= _ENOUGH or work + took > max_work:
            break
        if gap > _FAR:
            step, least_step = _ALONE_STEP, _LEAST_ALONE_STEP
        task = replace(task, near=max(answer.level, reached))
        used = pairs.where(latest.amount > _IN_USE)
        width = min(max(gap, 1e-5), WIDE)
        margin = min(max(_GAPS * gap, _LEAST_MARGIN), _MARGIN)
        accuracy = min(max(_PART * gap, 0.3 * _ENOUGH), accuracy)
    assert answer is not None
    return replace(answer, ceiling=best.ceiling, duals=best.duals)


def _between(best: FloatArray, other: FloatArray, step: float) -> FloatArray:
    return np.asarray((1.0 - step) * best + step * other)


def _sampled(task: Task, duals: Duals, top: float) -> tuple[LongArray, PairAnswer]:
    """Some of the classes, and how they would share their part of the devices."""
    job_classes, table = task.job_classes, task.table
    count = min(max(len(task.unit) // _ONE_OF, _LEAST_SAMPLE), _MAX_SAMPLE)
    part, cell_of = representatives(table, task.unit, count)
    ratio = count / len(task.unit)
    smaller = job_classes._replace(
        rates=read_only(job_classes.rates[part], np.float64),
        num_jobs=read_only(np.bincount(cell_of, job_classes.num_jobs) * ratio, np.float64),
        gang=read_only(job_classes.gang[part], np.float64),
        capacity=read_only(job_classes.capacity * ratio, np.float64),
    )
    few = Task(
        job_classes=smaller,
        table=table._replace(
            profile_of=read_only(table.profile_of[part], np.int64),
            unit=read_only(table.unit[part], np.float64),
            alone=smaller.rates,
            gang=smaller.gang,
            num_jobs=smaller.num_jobs,
        ),
        demand_at=lambda level: task.demand_at(level)[part],
        near=task.near,
        unit=task.unit[part],
    )
    start = Duals(worth=duals.worth[part], rent=duals.rent[part], price=duals.price)
    return part, _solve(few, start, top)


def _extended(task: Task, part: LongArray, found: PairAnswer) -> Duals:
    """Duals of all classes, each as it would answer to those of a part."""
    from hocket.fleet.solve.response_kernel import respond

    job_classes, duals = task.job_classes, found.duals
    spent = duals.rent[:, None] + job_classes.gang[part][:, None] * duals.price
    anchors = Anchors(
        one=read_only(part, np.int64),
        value=read_only(duals.worth * task.table.unit[part], np.float64),
        spent=read_only(np.where(job_classes.rates[part] > 0.0, spent, np.inf), np.float64),
    )
    worth, rent = np.zeros(len(task.unit)), np.zeros(len(task.unit))
    needed = np.asarray(task.demand_at(found.level))
    respond(task.table, anchors, duals.price, needed, worth, rent)
    return Duals(worth=worth, rent=rent, price=duals.price)


def _look(task: Task, rows: FloatArray, top: float, margin: float) -> _Look:
    """Look at all pairs; rents raised by half of what the best of each job gains leave no gain."""
    from hocket.fleet.solve.pricing_kernel import look_at_pairs

    duals = task.duals_of(rows)
    partners = new_partners(len(duals.worth), min(_PARTNERS, len(duals.worth)))
    half = 0.5 * task.job_classes.gang[:, None] * duals.price
    spent = np.where(task.table.alone > 0.0, duals.rent[:, None] + half, np.inf)
    look_at_pairs(task.table, duals.worth * task.table.unit, spent, margin, partners)
    raised = replace(duals, rent=duals.rent + 0.5 * np.maximum(partners.most, 0.0))
    ceiling = proven_level(task.job_classes, task.demand_at, raised, top)
    return _Look(rows=rows, partners=partners, duals=duals, ceiling=ceiling)


def _candidates(task: Task, partners: Partners, used: ClassPairs) -> ClassPairs:
    """The pairs that a look has listed, and those in use."""
    num_classes, num_columns = task.table.alone.shape
    a, place = np.nonzero(partners.gain > -np.inf)
    b, column = partners.other[a, place], partners.column[a, place]
    key = (np.minimum(a, b) * num_classes + np.maximum(a, b)) * num_columns + column
    in_use = (used.a * num_classes + used.b) * num_columns + used.column
    key = np.union1d(key, in_use)
    pair = key // num_columns
    return ClassPairs(a=pair // num_classes, b=pair % num_classes, column=key % num_columns)
