"""Levels of many jobs of which no two are alike and which may share devices, to a known gap.

A sample of the jobs finds prices of devices and what time and progress are worth; every other job
finds its own beside them. With these the best partners of each job are few, the program of such
columns is solved by an interior-point method, and its duals ask for further partners
(Gondzio, Gonzalez-Brevis and Munari, "New developments in the primal-dual column generation
technique", 2013). The gap is proven over all pairs: half of what the best pair of each job still
gains, added to its rent, makes the duals feasible. O(classes^2 x columns) per look at all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.compiled.containers import table as read_only
from hocket.fleet.market import Market
from hocket.fleet.solve.crowd import Crowd
from hocket.fleet.solve.interior import Inside, climb_inside
from hocket.fleet.solve.ladder import DemandAt
from hocket.fleet.solve.pair_tables import Columns, Partners, PairTable, new_partners
from hocket.fleet.solve.prices import Duals, PairTime, Rung, level_of_zero, top_level
from hocket.fleet.solve.setup import Setup

Counts = NDArray[np.int64]

_SAMPLE = 256
_PARTNERS = 8
_ENOUGH = 3e-4
"""Relative gap at which no more partners are looked for."""
_FIRST = 2e-2
_PART = 0.15
_MAX_STAGES = 8
_MANY_SUITORS = 3
"""How exactly the programs are solved one after the other."""
_MARGIN = 0.1
"""Pairs that lose no more than this part of what a job's progress is worth are taken in as well."""
_WIDE = 0.1
_ROOM = 2e-6
"""Part of a demand that no longer rises which may stay unserved: a point inside needs room."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Task:
    """Classes, what they are owed near a level, and how they share."""

    crowd: Crowd
    table: PairTable
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
        rise = self.chord(_WIDE)[0]
        return rows * (rise.sum() / max(float(rise @ rows), 1e-300))

    def duals_of(self, rows: FloatArray) -> Duals:
        """Duals of the program, with rents that cover what jobs earn alone."""
        crowd, size = self.crowd, len(self.unit)
        worth, price = rows[:size] / self.unit, rows[2 * size :]
        margin = worth[:, None] * crowd.rates - crowd.gang[:, None] * price[crowd.pool_of]
        rent = np.maximum(rows[size : 2 * size], margin.max(axis=1, initial=0.0))
        return Duals(worth=worth, rent=rent, price=price)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pairs:
    a: Counts
    b: Counts
    column: Counts


@dataclass(frozen=True, eq=False, kw_only=True)
class _Answer:
    """Times that keep all limits, and duals over all pairs."""

    alone: FloatArray
    pairs: _Pairs
    amount: FloatArray
    progress: FloatArray
    """``[class]``: of one job."""
    level: float
    ceiling: float
    duals: Duals


def pair_table(market: Market, setup: Setup, rates: FloatArray) -> PairTable:
    """What the classes of a market do beside each other."""
    assert market.pairs is not None
    first = setup.classes.first
    fastest = market.usable_steps_per_s[first].max(axis=1, initial=0.0)
    unit = rates[first].max(axis=1, initial=0.0) / np.where(fastest > 0.0, fastest, np.inf)
    return PairTable(
        steps_per_s=read_only(market.pairs.steps_per_s, np.float64),
        profile_of=read_only(market.pairs.profile_of[first], np.int64),
        unit=read_only(unit, np.float64),
        alone=setup.crowd.rates,
        gang=setup.crowd.gang,
        num_jobs=setup.crowd.num_jobs,
    )


def highest_rung_of_many(
    crowd: Crowd, table: PairTable, demand_at: DemandAt, cap: FloatArray, alone: Rung
) -> Rung:
    """Climb as high as devices that may be shared allow, to a gap of about 1e-3 or less."""
    demand = demand_at(alone.level)
    unit = np.where(demand > 0.0, demand, np.where(cap > 0.0, cap, 1.0))
    task = _Task(crowd=crowd, table=table, demand_at=demand_at, near=alone.level, unit=unit)
    duals, near = alone.duals, alone.level
    if len(cap) >= 2 * _SAMPLE:
        duals, near = _learn(task, alone.duals)
    answer = _solve(replace(task, near=near), duals, _ENOUGH, top_level(demand_at, cap))
    return _rung(crowd, demand_at, answer, alone)


def _rung(crowd: Crowd, demand_at: DemandAt, answer: _Answer, alone: Rung) -> Rung:
    if answer.level < alone.level:
        none = np.zeros(0, dtype=np.int64)
        nobody = PairTime(
            class_a=none,
            class_b=none,
            column=none,
            amount=np.zeros(0),
            progress=np.zeros(len(crowd.gang)),
        )
        return replace(alone, cap=alone.demand, ceiling=answer.ceiling, pairs=nobody)
    demand = demand_at(answer.level)
    alone_progress = (crowd.rates * answer.alone).sum(axis=1) / crowd.num_jobs
    return Rung(
        level=answer.level,
        demand=demand,
        shares=answer.alone / crowd.num_jobs[:, None],
        cap=demand,
        ceiling=answer.ceiling,
        warm=replace(alone.warm, level=answer.level),
        duals=answer.duals,
        pairs=PairTime(
            class_a=answer.pairs.a,
            class_b=answer.pairs.b,
            column=answer.pairs.column,
            amount=answer.amount,
            progress=answer.progress - alone_progress,
        ),
    )


def _learn(task: _Task, duals: Duals) -> tuple[Duals, float]:
    """Duals of all classes from those of a sample, and the level that it reaches."""
    from hocket.fleet.solve.pricing_kernel import settle_duals

    sample = np.arange(0, len(task.unit), -(-len(task.unit) // _SAMPLE))
    part = _part_of(task, sample)
    known = Duals(worth=duals.worth[sample], rent=duals.rent[sample], price=duals.price)
    answer = _solve(part, known, 1e-2, np.inf)
    target = task.demand_at(answer.level) * (1.0 - 1e-9)
    worth, rent = np.zeros(len(task.unit)), np.zeros(len(task.unit))
    price = answer.duals.price[task.crowd.pool_of]
    settle_duals(
        task.table, target, sample, answer.duals.worth, answer.duals.rent, price, worth, rent
    )
    return Duals(worth=worth, rent=rent, price=answer.duals.price), answer.level


def _part_of(task: _Task, sample: Counts) -> _Task:
    """The same for some of the classes, with as large a part of the devices."""
    crowd, demand_at = task.crowd, task.demand_at
    wanted = crowd.gang * crowd.num_jobs
    part = float(wanted[sample].sum() / wanted.sum())
    rates, gang, num_jobs = (
        read_only(values[sample], np.float64)
        for values in (crowd.rates, crowd.gang, crowd.num_jobs)
    )
    few = crowd._replace(
        rates=rates,
        gang=gang,
        num_jobs=num_jobs,
        capacity=read_only(crowd.capacity * part, np.float64),
    )
    table = task.table._replace(
        profile_of=read_only(task.table.profile_of[sample], np.int64),
        unit=read_only(task.table.unit[sample], np.float64),
        alone=rates,
        gang=gang,
        num_jobs=num_jobs,
    )
    return _Task(
        crowd=few,
        table=table,
        demand_at=lambda level: demand_at(level)[sample],
        near=task.near,
        unit=task.unit[sample],
    )


def _solve(task: _Task, duals: Duals, gap: float, top: float) -> _Answer:
    """Solve, look for partners that would pay, and again with them."""
    rows, width, accuracy = task.rows_of(duals), _WIDE, _FIRST
    used, best = None, None
    stride = max(len(task.unit) // 128, 1)
    lists = [_look(task, task.duals_of(rows), stride, 0)]
    duals = task.duals_of(rows)
    for stage in range(_MAX_STAGES):
        pairs = _candidates(task, duals, lists, _MARGIN, used)
        columns = _columns(task, pairs)
        rise, limit = task.chord(width)
        inside = climb_inside(columns, rise, limit, rows, len(task.unit), accuracy)
        rows = inside.dual
        duals = _without_hubs(task, task.duals_of(rows))
        lists = [_look(task, duals, 1, 0)]
        answer = _answer(task, columns, pairs, inside, _raised(duals, lists[0]), top)
        best = answer if best is None else _better(best, answer)
        if best.ceiling - best.level <= gap * best.ceiling:
            break
        if stride > 1:
            lists.append(_look(task, duals, stride, stage + 1))
        task = replace(task, near=best.level)
        width = min(max(best.ceiling / best.level - 1.0, 1e-5), _WIDE)
        accuracy = min(max(_PART * (answer.ceiling / answer.level - 1.0), 0.3 * gap), accuracy)
        many = inside.amount[-len(pairs.a) :] > 0.02 if len(pairs.a) else np.zeros(0, dtype=bool)
        used = _Pairs(a=pairs.a[many], b=pairs.b[many], column=pairs.column[many])
    assert best is not None
    return best


def _raised(duals: Duals, partners: Partners) -> Duals:
    """Rents raised by half of what the best pair of each job would gain: then none gains."""
    return replace(duals, rent=duals.rent + 0.5 * np.maximum(partners.gain[:, 0], 0.0))


def _better(one: _Answer, other: _Answer) -> _Answer:
    ceiling = min(one.ceiling, other.ceiling)
    return replace(one if one.level > other.level else other, ceiling=ceiling)


def _look(task: _Task, duals: Duals, stride: int, turn: int) -> Partners:
    from hocket.fleet.solve.pricing_kernel import best_partners

    partners = new_partners(len(duals.worth), min(_PARTNERS, len(duals.worth)))
    value = duals.worth * task.table.unit
    best_partners(task.table, value, _spent(task, duals), stride, turn, partners)
    return partners


def _spent(task: _Task, duals: Duals) -> FloatArray:
    half = 0.5 * task.crowd.gang[:, None] * duals.price[task.crowd.pool_of]
    return np.where(task.table.alone > 0.0, duals.rent[:, None] + half, np.inf)


def _without_hubs(task: _Task, duals: Duals) -> Duals:
    """Rents raised of jobs that many others would gain with: cheaper than raising the others'."""
    from hocket.fleet.solve.pricing_kernel import settle_rents

    partners = _look(task, duals, max(len(task.unit) // 512, 1), 0)
    wooed = np.bincount(partners.other[partners.gain > 0.0], minlength=len(task.unit))
    order = np.argsort(-wooed, kind="stable")[: np.count_nonzero(wooed >= _MANY_SUITORS)]
    crowd, rent = task.crowd, duals.rent.copy()
    margin = duals.worth[:, None] * crowd.rates - crowd.gang[:, None] * duals.price[crowd.pool_of]
    least = np.maximum(margin.max(axis=1, initial=0.0), 0.0)
    value = duals.worth * task.table.unit
    settle_rents(task.table, value, _spent(task, duals), order, least, rent)
    return replace(duals, rent=rent)


def _candidates(
    task: _Task, duals: Duals, lists: list[Partners], margin: float, used: _Pairs | None
) -> _Pairs:
    """The pairs that gain, or nearly, on the columns where they do, and those in use."""
    num_classes, num_columns = task.table.alone.shape
    keys = []
    for partners in lists:
        a, place = np.nonzero(partners.gain > -margin)
        b = partners.other[a, place]
        keys.append(np.minimum(a, b) * num_classes + np.maximum(a, b))
    key = np.unique(np.concatenate(keys))
    a, b = key // num_classes, key % num_classes
    rate_a, rate_b = _rates(task.table, a, b), _rates(task.table, b, a)
    earned = duals.worth[a][:, None] * rate_a + duals.worth[b][:, None] * rate_b
    spent = task.crowd.gang[a][:, None] * duals.price[task.crowd.pool_of]
    gain = earned - spent - (duals.rent[a] + duals.rent[b])[:, None]
    pair, column = np.nonzero((gain > -margin) & (rate_a > 0.0) & (rate_b > 0.0))
    key = key[pair] * num_columns + column
    if used is not None:
        key = np.union1d(key, (used.a * num_classes + used.b) * num_columns + used.column)
    one = key // num_columns
    return _Pairs(a=one // num_classes, b=one % num_classes, column=key % num_columns)


def _rates(table: PairTable, a: Counts, b: Counts) -> FloatArray:
    """``[pair, column]``: progress of a beside b."""
    rates = table.steps_per_s[table.profile_of[a], table.profile_of[b]] * table.unit[a][:, None]
    return np.where((table.alone[a] > 0.0) & (table.alone[b] > 0.0), rates, 0.0)


def _columns(task: _Task, pairs: _Pairs) -> Columns:
    """Every job alone on every column, then the pairs."""
    crowd, unit = task.crowd, task.unit
    one, at = np.nonzero(np.asarray(crowd.rates) > 0.0)
    nobody = 2 * len(unit) + len(crowd.capacity)
    a, b, j = pairs.a, pairs.b, pairs.column
    everywhere = np.arange(len(a))
    rate_a = _rates(task.table, a, b)[everywhere, j] / unit[a]
    rate_b = _rates(task.table, b, a)[everywhere, j] / unit[b]
    return Columns(
        job_a=np.concatenate([one, a]).astype(np.uint32),
        job_b=np.concatenate([np.full(len(one), nobody), b]).astype(np.uint32),
        pool=crowd.pool_of[np.concatenate([at, j])].astype(np.uint32),
        rate_a=np.concatenate([crowd.rates[one, at] / unit[one], rate_a]),
        rate_b=np.concatenate([np.zeros(len(one)), rate_b]),
        devices=np.concatenate([crowd.gang[one], crowd.gang[a]]),
    )


def _answer(
    task: _Task,
    columns: Columns,
    pairs: _Pairs,
    inside: Inside,
    duals: Duals,
    top: float,
) -> _Answer:
    crowd = task.crowd
    ceiling = _ceiling(task, duals, top)
    fitting = _fitted(columns, inside.amount, crowd)
    num_jobs = len(task.unit)
    made = np.bincount(columns.job_a, fitting * columns.rate_a, num_jobs)
    made += np.bincount(columns.job_b, fitting * columns.rate_b, num_jobs)[:num_jobs]
    progress = made * task.unit / crowd.num_jobs
    level = min(inside.level * task.near, ceiling)
    demand = task.demand_at(level)
    level *= float(np.min(progress[demand > 0.0] / demand[demand > 0.0], initial=1.0))
    num_single = len(fitting) - len(pairs.a)
    alone = np.zeros(crowd.rates.shape)
    alone[np.nonzero(np.asarray(crowd.rates) > 0.0)] = fitting[:num_single]
    return _Answer(
        alone=alone,
        pairs=pairs,
        amount=fitting[num_single:],
        progress=progress,
        level=level,
        ceiling=ceiling,
        duals=duals,
    )


def _fitted(columns: Columns, amount: FloatArray, crowd: Crowd) -> FloatArray:
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


def _ceiling(task: _Task, duals: Duals, top: float) -> float:
    """The level at which demands are worth all that time and devices are: none higher is served."""
    crowd = task.crowd
    worth = crowd.num_jobs * duals.worth
    all_there_is = float(crowd.num_jobs @ duals.rent + crowd.capacity @ duals.price)
    high = top if np.isfinite(top) else 1e3 * task.near
    return level_of_zero(lambda level: float(worth @ task.demand_at(level)) - all_there_is, high)


def chord(demand_at: DemandAt, level: float, width: float) -> tuple[FloatArray, FloatArray]:
    """Demands from a level to one that is ``width`` higher as base + slope x level."""
    demand, higher = demand_at(level), level * (1.0 + width)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # Nobody rises any more; whoever is not at its top is there for want of partners.
        return np.zeros(len(demand)), demand / level
    return demand - slope * level, slope
