"""Levels where two jobs may share a device: the class program with pairs, columns by price.

Narayanan et al. (OSDI 2020, section 3.1) give every pair of jobs its own variable, n(n+1)/2 of
them. Summed over classes, a variable per pair of classes and column is exact, and a pair that does
no more than two jobs taking turns is never needed. Where many classes are left, the program starts
with the pairs that pay at the prices of the answer without sharing, and takes in what its own duals
ask for until none pays. One program of 2 x classes + pools rows per round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.fleet.allocation import PairedTime, SharedTime, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.levels import DemandAt, reached_level
from hocket.fleet.solve.linear import LinearProgram, Solved, solve
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.prices import (
    Duals,
    LevelAnswer,
    PairTime,
    highest_level,
    proven_level,
    top_level,
)
from hocket.fleet.solve.setup import SolveSetup

_MAX_STEPS = 20
_MAX_GENERATIONS = 30
_FEW = 6000
"""Pairs of classes that are all taken in at once."""
_PER_CLASS = 8
"""Partners that are taken in at a time for each class and column."""
_NEARLY = 0.05
"""Part of its cost that a pair may lose to stay in the next program."""
_ENOUGH = 1e-9
"""Relative gap at which no more pairs are looked for."""
_SAME = 1e-8
_PAYS = 1e-9
"""Dual value below which a row has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairRates:
    """Progress of classes beside each other."""

    rates: FloatArray
    """``[column, class a, class b]``: progress of a job of a beside one of b, in the unit of a."""
    profile_of: LongArray
    """The profile of each class."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairColumns:
    """Pairs of classes, a no later than b, on a column."""

    class_a: LongArray
    class_b: LongArray
    column: LongArray

    def __len__(self) -> int:
        return len(self.class_a)

    def where(self, is_kept: BoolArray) -> PairColumns:
        """Some of them."""
        return PairColumns(
            class_a=self.class_a[is_kept],
            class_b=self.class_b[is_kept],
            column=self.column[is_kept],
        )

    def joined(self, other: PairColumns) -> PairColumns:
        """The columns of both, each once."""
        return _columns(
            np.concatenate([self.class_a, other.class_a]),
            np.concatenate([self.class_b, other.class_b]),
            np.concatenate([self.column, other.column]),
        )


def pair_rates(snapshot: ClusterSnapshot, setup: SolveSetup, rates: FloatArray) -> PairRates:
    """Rates of pairs of classes; 0 where they may not share a device, or had better take turns."""
    assert snapshot.pairs is not None
    first = setup.classes.first
    profile = snapshot.pairs.profile_of[first]
    unit = snapshot.usable_steps_per_s[first].max(axis=1) / np.maximum(
        rates[first].max(axis=1), 1e-300
    )
    can_meet = snapshot.gang[first][:, None] == snapshot.gang[first][None, :]
    single = np.flatnonzero(setup.classes.num_jobs < 2)
    can_meet[single, single] = False
    scale = 1.0 / np.where(unit > 0.0, unit, np.inf)
    result = np.empty((snapshot.num_kinds, len(first), len(first)))
    for kind in range(snapshot.num_kinds):
        beside = snapshot.pairs.steps_per_s[:, :, kind][np.ix_(profile, profile)]
        beside *= scale[:, None]
        alone = np.where(
            setup.job_classes.rates[:, kind] > 0.0, setup.job_classes.rates[:, kind], np.inf
        )
        relative = beside / alone[:, None]
        pays = can_meet & (relative + relative.T > 1.0 + _PAYS) & (beside > 0.0) & (beside.T > 0.0)
        np.multiply(beside, pays, out=result[kind])
    return PairRates(rates=result, profile_of=profile)


def highest_shared_level(
    job_classes: JobClassTable,
    pairs: PairRates,
    demand_at: DemandAt,
    cap: FloatArray,
    warm: Warm | None,
) -> LevelAnswer:
    """Climb as high as the devices allow where jobs may share them."""
    alone = highest_level(job_classes, demand_at, cap, warm)
    if np.all(alone.demand >= cap * (1.0 - _SAME)):
        return replace(alone, pairs=no_pairs(len(cap)))
    known = None if warm is None or warm.columns is None else _still_there(pairs, warm.columns)
    columns = known if known else first_columns(job_classes, pairs, alone.duals)
    near = alone.level if warm is None else max(alone.level, warm.level)
    top = top_level(demand_at, cap)
    found = _highest(job_classes, pairs, demand_at, columns, (near, alone.level, top))
    solved, columns, level = found.solved, found.columns, found.level
    demand, together = demand_at(level), pair_time(job_classes, pairs, columns, solved)
    shares = solved.alone / job_classes.num_jobs[:, None]
    # What a solver of seven digits reached, not what it should have, is what can be kept.
    kept = np.minimum(demand, (job_classes.rates * shares).sum(axis=1) + together.progress)
    is_stuck = solved.duals.worth * np.maximum(demand, 1e-300) > _PAYS * level
    return LevelAnswer(
        level=level,
        demand=demand,
        shares=shares,
        cap=np.where(is_stuck, kept, cap),
        ceiling=max(found.ceiling, level),
        warm=replace(alone.warm, level=level, columns=_used(pairs, columns, solved)),
        duals=solved.duals,
        pairs=together,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Found:
    """An answer, the level that it reaches, and one that none exceeds."""

    solved: Solved
    columns: PairColumns
    level: float
    ceiling: float


def _highest(
    job_classes: JobClassTable,
    pairs: PairRates,
    demand_at: DemandAt,
    columns: PairColumns,
    levels: tuple[float, float, float],
) -> _Found:
    """The highest level from a guess, one that is reached alone, and one that is too high.

    Programs take demands near a level for straight lines. Duals prove a ceiling for the demands as
    they are, so steps that overshoot fall to it and never swing between two sides of a bend.
    """
    near, reached, ceiling = levels
    best: _Found | None = None
    for _ in range(_MAX_STEPS):
        base, slope = _line(demand_at, near)
        try:
            solved, columns, duals = _generate(job_classes, pairs, columns, (base, slope), near)
        except NoFeasiblePlanError:
            if near <= reached:
                raise
            # Whoever is at its top already cannot be served; all get the same part of what is due.
            ray = (np.zeros(len(base)), demand_at(near) / near)
            solved, columns, duals = _generate(job_classes, pairs, columns, ray, near)
            base, slope = ray
        ceiling = min(ceiling, proven_level(job_classes, demand_at, duals, ceiling))
        level = reached_level(demand_at, base + slope * solved.level, ceiling)
        if best is None or level > best.level:
            best = _Found(solved=solved, columns=columns, level=level, ceiling=ceiling)
        if ceiling - best.level <= _SAME * ceiling:
            break
        near = solved.level if near < solved.level < ceiling else ceiling
        columns = _in_reach(job_classes, pairs, columns, duals)
    assert best is not None
    return replace(best, ceiling=ceiling)


def _generate(
    job_classes: JobClassTable,
    pairs: PairRates,
    columns: PairColumns,
    line: tuple[FloatArray, FloatArray],
    level: float,
) -> tuple[Solved, PairColumns, Duals]:
    """Solve, take in the pairs that would pay, and again; with the columns and duals over all."""
    for _ in range(_MAX_GENERATIONS):
        solved_columns = columns
        program = LinearProgram(job_classes=job_classes, pairs=pairs.rates, columns=columns)
        solved = solve(program, base=line[0], slope=line[1], near=level)
        duals = _with_rents(job_classes, solved.duals)
        gain = gains(job_classes, pairs, duals)
        # Half of what a pair would gain, added to the rent of both, makes the duals feasible.
        unpaid = 0.5 * np.maximum(gain.max(axis=(0, 2), initial=0.0), 0.0)
        if float(job_classes.num_jobs @ unpaid) <= _ENOUGH * abs(solved.level):
            break
        more = columns.joined(_most_gaining(gain, _PER_CLASS))
        if len(more) == len(columns):
            break
        columns = more
    return solved, solved_columns, replace(duals, rent=duals.rent + unpaid)


def _with_rents(job_classes: JobClassTable, duals: Duals) -> Duals:
    """Duals whose rents cover what jobs earn alone, whatever the solver rounded."""
    margin = duals.worth[:, None] * job_classes.rates - job_classes.gang[:, None] * duals.price
    return replace(duals, rent=np.maximum(duals.rent, margin.max(axis=1, initial=0.0)))


def _in_reach(
    job_classes: JobClassTable, pairs: PairRates, columns: PairColumns, duals: Duals
) -> PairColumns:
    """Columns that pay, or nearly: a program a little further on needs few others."""
    a, b, j = columns.class_a, columns.class_b, columns.column
    earned = duals.worth[a] * pairs.rates[j, a, b] + duals.worth[b] * pairs.rates[j, b, a]
    spent = duals.rent[a] + duals.rent[b] + job_classes.gang[a] * duals.price[j]
    return columns.where(earned >= (1.0 - _NEARLY) * spent)


def gains(job_classes: JobClassTable, pairs: PairRates, duals: Duals) -> FloatArray:
    """``[column, class a, class b]``: what the time of a pair is worth above what it costs."""
    gain = np.empty(pairs.rates.shape)
    for column, rates in enumerate(pairs.rates):
        earned = rates * duals.worth[:, None]
        spent = 0.5 * job_classes.gang * duals.price[column] + duals.rent
        np.add(earned, earned.T, out=gain[column])
        gain[column] -= spent[:, None]
        gain[column] -= spent[None, :]
        gain[column][rates <= 0.0] = -np.inf
    return gain


def first_columns(job_classes: JobClassTable, pairs: PairRates, duals: Duals) -> PairColumns:
    """All pairs where they are few, else the best partners of each class at given prices."""
    if np.count_nonzero(pairs.rates) <= 2 * _FEW:
        return all_columns(pairs)
    return _most_gaining(gains(job_classes, pairs, duals), _PER_CLASS)


def _most_gaining(gain: FloatArray, per_class: int) -> PairColumns:
    """For every class and column, the partners that gain most, if any gain."""
    num_columns, num_classes, _ = gain.shape
    count = min(per_class, num_classes)
    best = np.empty((num_columns, num_classes, count), dtype=np.int64)
    for one in range(num_columns):
        best[one] = np.argpartition(gain[one], -count, axis=1)[:, -count:]
    column, a = np.indices(best.shape)[:2]
    keep = gain[column, a, best] > 0.0
    return _columns(a[keep], best[keep], column[keep])


def _columns(class_a: LongArray, class_b: LongArray, column: LongArray) -> PairColumns:
    low, high = np.minimum(class_a, class_b), np.maximum(class_a, class_b)
    size = int(high.max(initial=0)) + 1
    key = np.unique((column * size + low) * size + high)
    return PairColumns(class_a=key // size % size, class_b=key % size, column=key // size**2)


def shared_time(pairs: PairTime, profile_of: LongArray) -> SharedTime:
    """Time in pairs, summed over the classes of each profile."""
    low = np.minimum(profile_of[pairs.class_a], profile_of[pairs.class_b])
    high = np.maximum(profile_of[pairs.class_a], profile_of[pairs.class_b])
    keys, at = np.unique(np.stack([low, high, pairs.column], axis=1), axis=0, return_inverse=True)
    amount = np.asarray(np.bincount(at.reshape(-1), pairs.amount, len(keys)), dtype=float)
    return SharedTime(profile_a=keys[:, 0], profile_b=keys[:, 1], kind=keys[:, 2], amount=amount)


def paired_time(pairs: PairTime, setup: SolveSetup, profile_of: LongArray) -> PairedTime:
    """Time in pairs of each job, the same for all of a class."""
    of, num_jobs = setup.classes.of, setup.job_classes.num_jobs
    one = np.concatenate([pairs.class_a, pairs.class_b])
    other = np.concatenate([pairs.class_b, pairs.class_a])
    column, amount = np.tile(pairs.column, 2), np.tile(pairs.amount, 2) / num_jobs[one]
    by_class = np.argsort(of, kind="stable")
    size = np.bincount(of, minlength=len(num_jobs))
    start = np.cumsum(size) - size
    row = np.repeat(np.arange(len(one)), size[one])
    nth = np.arange(len(row)) - np.repeat(np.cumsum(size[one]) - size[one], size[one])
    return PairedTime(
        job=by_class[start[one[row]] + nth],
        profile=profile_of[other[row]],
        kind=column[row],
        amount=amount[row],
    )


def all_columns(pairs: PairRates) -> PairColumns:
    """Every pair of classes that gains by sharing."""
    column, class_a, class_b = np.nonzero(pairs.rates)
    keep = class_a <= class_b
    return PairColumns(class_a=class_a[keep], class_b=class_b[keep], column=column[keep])


def _used(pairs: PairRates, columns: PairColumns, solved: Solved) -> LongArray:
    """Columns in use by profile, which means the same when jobs have come and gone."""
    used = columns.where(solved.together > 0.0)
    return np.unique(_by_profile(pairs, used), axis=0)


def _by_profile(pairs: PairRates, columns: PairColumns) -> LongArray:
    both = pairs.profile_of[np.stack([columns.class_a, columns.class_b])]
    return np.stack([columns.column, both.min(axis=0), both.max(axis=0)], axis=1)


def _still_there(pairs: PairRates, rows: LongArray) -> PairColumns:
    """Pairs of classes whose profiles shared such devices in an earlier answer."""
    columns = all_columns(pairs)
    wanted = _by_profile(pairs, columns)
    size = int(max(wanted.max(initial=0), rows.max(initial=0))) + 1
    place = np.array([size * size, size, 1])
    return columns.where(np.isin(wanted @ place, rows @ place))


def _line(demand_at: DemandAt, level: float) -> tuple[FloatArray, FloatArray]:
    """Demands near a level as base + slope x level; exact where they are straight above it."""
    higher = level * (1.0 + 1e-7)
    demand = demand_at(level)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # Nobody rises any more; whoever is not at its top is there for want of partners.
        return np.zeros(len(demand)), demand / level
    return demand - slope * level, slope


def pair_time(
    job_classes: JobClassTable, pairs: PairRates, columns: PairColumns, solved: Solved
) -> PairTime:
    """Time in pairs of a solved program, and the progress made in it."""
    used = np.flatnonzero(solved.together > 1e-12)
    a, b, j = columns.class_a[used], columns.class_b[used], columns.column[used]
    amount = solved.together[used]
    progress = np.bincount(a, amount * pairs.rates[j, a, b], len(job_classes.gang))
    progress += np.bincount(b, amount * pairs.rates[j, b, a], len(job_classes.gang))
    return PairTime(
        class_a=a, class_b=b, column=j, amount=amount, progress=progress / job_classes.num_jobs
    )


def no_pairs(num_classes: int) -> PairTime:
    """Nobody shares."""
    none = np.zeros(0, dtype=np.int64)
    return PairTime(
        class_a=none, class_b=none, column=none, amount=np.zeros(0), progress=np.zeros(num_classes)
    )
