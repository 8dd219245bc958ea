"""Levels of many jobs of which no two are alike and which may share devices, to a known gap.

The program of a few partners for each job is solved by an interior-point method, loosely at first,
because duals from well inside ask for better partners than those of an exact answer (Gondzio,
Gonzalez-Brevis and Munari, "New developments in the primal-dual column generation technique",
2013). The gap is proven over all pairs: rents are raised until none gains, and the level at which
demands would be worth all time and devices is out of reach. O(classes^2 x columns) per look at all
pairs.
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
from hocket.fleet.solve.pair_tables import Columns, PairTable, Partners, new_partners
from hocket.fleet.solve.prices import Duals, PairTime, Rung, level_of_zero, top_level
from hocket.fleet.solve.setup import Setup

Counts = NDArray[np.int64]

_PARTNERS = 8
"""Partners that are taken in at a time for each class."""
_AMONG = (128, 512)
"""Partners that every class looks at first, and then."""
_MANY_SUITORS = 3
_ENOUGH = 3e-4
"""Relative gap at which no more partners are looked for."""
_MAX_STAGES, _FEW_STAGES, _MOST = 8, 2, 1024
"""Programs that are solved at most; where there are more classes than the last number, fewer."""
_FIRST, _PART = 2e-2, 0.15
"""How exactly the first program is solved, and the others as part of the gap so far."""
_MARGIN = 0.3
"""Pairs that lose no more than this part of what a job's progress is worth are taken in as well."""
_WIDE = 0.1
"""How far above the level demands count as straight lines at first."""
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
        return np.asarray(rows * (rise.sum() / max(float(rise @ rows), 1e-300)))

    def duals_of(self, rows: FloatArray) -> Duals:
        """Duals of the program, with rents that cover what jobs earn alone."""
        crowd, size = self.crowd, len(self.unit)
        worth, price = rows[:size] / self.unit, rows[2 * size :]
        margin = worth[:, None] * crowd.rates - crowd.gang[:, None] * price[crowd.pool_of]
        rent = np.maximum(rows[size : 2 * size], margin.max(axis=1, initial=0.0))
        return Duals(worth=worth, rent=rent, price=price)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pairs:
    """Classes a and b, a no later than b, and the column that they share."""

    a: Counts
    b: Counts
    column: Counts

    def where(self, is_kept: NDArray[np.bool_]) -> _Pairs:
        """Some of them."""
        return _Pairs(a=self.a[is_kept], b=self.b[is_kept], column=self.column[is_kept])


_NOBODY = _Pairs(
    a=np.zeros(0, dtype=np.int64),
    b=np.zeros(0, dtype=np.int64),
    column=np.zeros(0, dtype=np.int64),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Answer:
    """Times that keep all limits, and duals over all pairs."""

    alone: FloatArray
    pairs: _Pairs
    amount: FloatArray
    progress: FloatArray
    """``[class]``: of one job."""
    level: float
    served: float
    """The least part that a job makes of what it is owed at the level before this was cut off."""
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
    """Climb as high as devices that may be shared allow, from the answer without sharing."""
    demand = demand_at(alone.level)
    unit = np.where(demand > 0.0, demand, np.where(cap > 0.0, cap, 1.0))
    task = _Task(crowd=crowd, table=table, demand_at=demand_at, near=alone.level, unit=unit)
    answer = _solve(task, alone.duals, top_level(demand_at, cap))
    if answer.level < alone.level:
        # Nothing was gained: the answer alone stays, with the bound that holds for pairs too.
        alone_made = np.minimum(alone.demand, (crowd.rates * alone.shares).sum(axis=1))
        answer = replace(
            answer,
            alone=alone.shares * crowd.num_jobs[:, None],
            pairs=_NOBODY,
            amount=np.zeros(0),
            progress=alone_made,
            level=alone.level,
            served=1.0,
        )
    return _rung(crowd, demand_at, answer, alone)


def _rung(crowd: Crowd, demand_at: DemandAt, answer: _Answer, alone: Rung) -> Rung:
    demand = demand_at(answer.level)
    in_pairs = answer.progress - (crowd.rates * answer.alone).sum(axis=1) / crowd.num_jobs
    return Rung(
        level=answer.level,
        demand=demand,
        shares=answer.alone / crowd.num_jobs[:, None],
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
            progress=in_pairs if len(answer.amount) else np.zeros(len(crowd.gang)),
        ),
    )


def _solve(task: _Task, duals: Duals, top: float) -> _Answer:
    """Solve, look for partners that would pay, and again with them."""
    rows, width, accuracy = task.rows_of(duals), _WIDE, _FIRST
    duals, used, best = task.duals_of(rows), _NOBODY, None
    strides = [len(rows) // (2 * among) for among in _AMONG if len(rows) >= 4 * among]
    lists = _lists(task, duals, strides, 0)
    for stage in range(_MAX_STAGES):
        pairs = _candidates(task, duals, lists, used)
        columns = _columns(task, pairs)
        inside = climb_inside(columns, *task.chord(width), rows, len(task.unit), accuracy)
        rows = inside.dual
        duals = _without_hubs(task, task.duals_of(rows))
        lists = _lists(task, duals, strides, stage + 1)
        # Before all pairs are looked at nothing is proven.
        ceiling = np.inf
        if stage + 1 >= len(strides):
            ceiling = _ceiling(task, _raised(duals, lists[0]), top)
        answer = _answer(task, columns, pairs, inside, duals, ceiling)
        best = answer if best is None else _better(best, answer)
        gap = min(best.ceiling / max(best.level, 1e-300) - 1.0, 1.0)
        if gap <= _ENOUGH or stage + 1 >= _num_stages(len(task.unit)):
            break
        task, used = (
            replace(task, near=max(best.level, task.near)),
            pairs.where(answer.amount > 0.02),
        )
        width = min(max(gap, 1e-5), _WIDE)
        accuracy = min(max(_PART * gap, 0.3 * _ENOUGH), 0.5 * accuracy)
    assert best is not None
    return best


def _num_stages(num_classes: int) -> int:
    return _MAX_STAGES if num_classes <= _MOST else _FEW_STAGES


def _lists(task: _Task, duals: Duals, strides: list[int], stage: int) -> list[Partners]:
    """Partners among a few at first; later among all, and some others, because the best partners
    of all are the same for many jobs."""
    if stage < len(strides):
        return [_look(task, duals, strides[stage], stage)]
    lists = [_look(task, duals, 1, 0)]
    return [*lists, _look(task, duals, strides[0], stage)] if strides else lists


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


def _candidates(task: _Task, duals: Duals, lists: list[Partners], used: _Pairs) -> _Pairs:
    """The pairs that gain, or nearly, on the columns where they do, and those in use."""
    num_classes, num_columns = task.table.alone.shape
    listed = []
    for partners in lists:
        a, place = np.nonzero(partners.gain > -_MARGIN)
        b = partners.other[a, place]
        listed.append(np.minimum(a, b) * num_classes + np.maximum(a, b))
    pair = np.unique(np.concatenate(listed))
    gain = _gains(task, duals, pair // num_classes, pair % num_classes)
    best = gain.max(axis=1, initial=0.0, keepdims=True)
    at, column = np.nonzero(gain > best - _MARGIN)
    in_use = (used.a * num_classes + used.b) * num_columns + used.column
    key = np.union1d(pair[at] * num_columns + column, in_use)
    pair = key // num_columns
    return _Pairs(a=pair // num_classes, b=pair % num_classes, column=key % num_columns)


def _gains(task: _Task, duals: Duals, a: Counts, b: Counts) -> FloatArray:
    """``[pair, column]``: what the time of a pair is worth above what it costs."""
    rate_a, rate_b = _rates(task.table, a, b), _rates(task.table, b, a)
    earned = duals.worth[a][:, None] * rate_a + duals.worth[b][:, None] * rate_b
    spent = task.crowd.gang[a][:, None] * duals.price[task.crowd.pool_of]
    gain = earned - spent - (duals.rent[a] + duals.rent[b])[:, None]
    return np.where((rate_a > 0.0) & (rate_b > 0.0), gain, -np.inf)


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
    ceiling: float,
) -> _Answer:
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
    return _Answer(
        alone=alone,
        pairs=pairs,
        amount=fitting[num_single:],
        progress=progress,
        level=level * served,
        served=served,
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
    return level_of_zero(lambda level: float(worth @ task.demand_at(level)) - all_there_is, top)


def chord(demand_at: DemandAt, level: float, width: float) -> tuple[FloatArray, FloatArray]:
    """Demands from a level to one that is ``width`` higher as base + slope x level."""
    demand, higher = demand_at(level), level * (1.0 + width)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # Nobody rises any more; whoever is not at its top is there for want of partners.
        return np.zeros(len(demand)), demand / level
    return demand - slope * level, slope
