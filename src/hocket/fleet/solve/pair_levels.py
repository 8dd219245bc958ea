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

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.market import Market
from hocket.fleet.solve.interior import climb_inside
from hocket.fleet.solve.ladder import DemandAt
from hocket.fleet.solve.pair_program import (
    NOBODY,
    WIDE,
    ClassPairs,
    PairAnswer,
    Task,
    answer_of,
    columns_of,
)
from hocket.fleet.solve.pair_tables import Anchors, ClassPairTable, Partners, new_partners
from hocket.fleet.solve.price_tables import Crowd
from hocket.fleet.solve.prices import Duals, PairTime, Rung, proven_level, top_level
from hocket.fleet.solve.representatives import representatives
from hocket.fleet.solve.setup import SolveSetup
from hocket.kernels.containers import table as read_only

_PARTNERS = 8
"""Partners that are taken in at a time for each class."""
_ENOUGH = 3e-4
"""Relative gap at which no more partners are looked for."""
_MAX_STAGES = 16
"""Programs that are solved at most."""
_MAX_WORK, _WORK_PER_CLASS = 90_000_000, 80_000
"""Columns times iterations of the gradients, and pairs looked at: in all, and by class."""
_FIRST, _FIRST_EXTENDED, _PART = 2e-2, 1e-2, 0.3
"""How exactly the first program is solved, also from duals of a part of the jobs, and the others
as part of the gap so far."""
_MARGIN, _LEAST_MARGIN, _GAPS = 0.2, 0.005, 10.0
"""Pairs that lose no more than this part of what a job's progress is worth are taken in as well; at
last fewer, those that lose some times the gap."""
_IN_USE = 0.02
_STEP, _LEAST_STEP = 0.2, 0.05
"""How far from the best duals so far, towards those of a program, pairs are looked for at first,
and at least."""
_ALONE_STEP, _LEAST_ALONE_STEP = 1.0, 0.5
"""The same where the best duals are far off, as those without sharing are at first."""
_FAR = 0.1
"""Relative gap from which on the best duals are far off."""
_LEAST_SAMPLE, _MAX_SAMPLE, _ONE_OF = 64, 256, 4
"""How many classes stand for all: one of so many, where that is not too few or too many."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Look:
    """What all pairs gain at some duals, and the level that these prove."""

    rows: FloatArray
    partners: Partners
    duals: Duals
    ceiling: float


def pair_table(market: Market, setup: SolveSetup, rates: FloatArray) -> ClassPairTable:
    """What the classes of a market do beside each other."""
    assert market.pairs is not None
    first = setup.classes.first
    fastest = market.usable_steps_per_s[first].max(axis=1, initial=0.0)
    unit = rates[first].max(axis=1, initial=0.0) / np.where(fastest > 0.0, fastest, np.inf)
    return ClassPairTable(
        steps_per_s=read_only(market.pairs.steps_per_s, np.float64),
        profile_of=read_only(market.pairs.profile_of[first], np.int64),
        unit=read_only(unit, np.float64),
        alone=setup.crowd.rates,
        gang=setup.crowd.gang,
        num_jobs=setup.crowd.num_jobs,
    )


def highest_rung_of_many(
    crowd: Crowd, table: ClassPairTable, demand_at: DemandAt, cap: FloatArray, alone: Rung
) -> Rung:
    """Climb as high as devices that may be shared allow, from the answer without sharing."""
    demand = demand_at(alone.level)
    unit = np.where(demand > 0.0, demand, np.where(cap > 0.0, cap, 1.0))
    task = Task(crowd=crowd, table=table, demand_at=demand_at, near=alone.level, unit=unit)
    answer = _solve(task, alone.duals, top_level(demand_at, cap))
    if answer.level < alone.level:
        # Nothing was gained: the answer alone stays, with the bound that holds for pairs too.
        alone_made = np.minimum(alone.demand, (crowd.rates * alone.shares).sum(axis=1))
        answer = replace(
            answer,
            alone=alone.shares * crowd.num_jobs[:, None],
            pairs=NOBODY,
            amount=np.zeros(0),
            progress=alone_made,
            level=alone.level,
            served=1.0,
        )
    return _rung(crowd, demand_at, answer, alone)


def _rung(crowd: Crowd, demand_at: DemandAt, answer: PairAnswer, alone: Rung) -> Rung:
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
    work = looked = len(task.unit) ** 2 * len(task.crowd.capacity) // 2
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
    crowd, table = task.crowd, task.table
    count = min(max(len(task.unit) // _ONE_OF, _LEAST_SAMPLE), _MAX_SAMPLE)
    part, cell_of = representatives(table, task.unit, count)
    ratio = count / len(task.unit)
    smaller = crowd._replace(
        rates=read_only(crowd.rates[part], np.float64),
        num_jobs=read_only(np.bincount(cell_of, crowd.num_jobs) * ratio, np.float64),
        gang=read_only(crowd.gang[part], np.float64),
        capacity=read_only(crowd.capacity * ratio, np.float64),
    )
    few = Task(
        crowd=smaller,
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

    crowd, duals = task.crowd, found.duals
    spent = duals.rent[:, None] + crowd.gang[part][:, None] * duals.price
    anchors = Anchors(
        one=read_only(part, np.int64),
        value=read_only(duals.worth * task.table.unit[part], np.float64),
        spent=read_only(np.where(crowd.rates[part] > 0.0, spent, np.inf), np.float64),
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
    half = 0.5 * task.crowd.gang[:, None] * duals.price
    spent = np.where(task.table.alone > 0.0, duals.rent[:, None] + half, np.inf)
    look_at_pairs(task.table, duals.worth * task.table.unit, spent, margin, partners)
    raised = replace(duals, rent=duals.rent + 0.5 * np.maximum(partners.most, 0.0))
    ceiling = proven_level(task.crowd, task.demand_at, raised, top)
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
