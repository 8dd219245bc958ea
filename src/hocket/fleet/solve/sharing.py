"""Highest level if two jobs may share a device: linear programs with pairs of classes.

Narayanan et al. (OSDI 2020, section 3.1) give every pair of jobs its own variable, n(n+1)/2 of
them. One variable per pair of classes and column is exact too, and a pair that makes no more
progress than two jobs taking turns is never needed. With many pairs, the program starts with those
that pay at the prices of the answer without sharing and adds pairs by reduced cost (column
generation). Programs have 2 x classes + pools rows.
"""

from __future__ import annotations

from collections.abc import Callable
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

# Programs per level, and rounds of column generation per program.
_MAX_STEPS = 20
_MAX_GENERATIONS = 30
_FEW = 6000
"""Number of pairs of classes up to which all are used at once."""
_PER_CLASS = 8
"""Number of partners that are added at a time for each class and column."""
_NEARLY = 0.05
"""Fraction of its cost by which a pair may fail to pay and still stay in the next program."""
_ENOUGH = 1e-9
"""Relative gap below which no more pairs are added."""
# Relative difference below which two levels count as equal.
_SAME = 1e-8
_PAYS = 1e-9
"""Dual value below which a row has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairRates:
    """Progress of classes beside each other on shared devices."""

    rates: FloatArray
    """``[column, class a, class b]``: progress of a job of a beside one of b, in the unit of a."""
    profile_of: LongArray
    """The profile of each class."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairColumns:
    """Pairs of classes (a no later than b) on a column."""

    class_a: LongArray
    class_b: LongArray
    column: LongArray

    def __len__(self) -> int:
        return len(self.class_a)

    def where(self, is_kept: BoolArray) -> PairColumns:
        """Keep some of the columns."""
        return PairColumns(
            class_a=self.class_a[is_kept],
            class_b=self.class_b[is_kept],
            column=self.column[is_kept],
        )

    def joined(self, other: PairColumns) -> PairColumns:
        """Union with other columns."""
        return _columns(
            np.concatenate([self.class_a, other.class_a]),
            np.concatenate([self.class_b, other.class_b]),
            np.concatenate([self.column, other.column]),
        )


RatesOf = Callable[[LongArray, LongArray], FloatArray]
"""``[column, a, b]``: progress of some classes beside others; 0 where they may not share."""


def rates_beside(snapshot: ClusterSnapshot, setup: SolveSetup, rates: FloatArray) -> RatesOf:
    """Look up the progress of classes beside each other in the pair table of a snapshot."""
    assert snapshot.pairs is not None
    first, job_classes = setup.classes.first, setup.job_classes
    profile, steps_per_s = snapshot.pairs.profile_of[first], snapshot.pairs.steps_per_s
    fastest = snapshot.usable_steps_per_s[first].max(axis=1, initial=0.0)
    # Rates are throughputs in a unit per job, and pairs must be in the same one.
    scale = rates[first].max(axis=1, initial=0.0) / np.where(fastest > 0.0, fastest, np.inf)
    can_run = job_classes.rates > 0.0

    def rates_of(a: LongArray, b: LongArray) -> FloatArray:
        found = steps_per_s[np.ix_(profile[a], profile[b])] * scale[a][:, None, None]
        can_meet = job_classes.gang[a][:, None] == job_classes.gang[b]
        # A class of one job cannot be paired with itself.
        can_meet &= (a[:, None] != b) | (job_classes.num_jobs[a][:, None] >= 2)
        found *= can_meet[:, :, None] & can_run[a][:, None] & can_run[b]
        return np.ascontiguousarray(found.transpose(2, 0, 1))

    return rates_of


def pair_rates(
    snapshot: ClusterSnapshot, setup: SolveSetup, rates_of: RatesOf, some: LongArray | None = None
) -> PairRates:
    """Rates of pairs of classes (all, or some); 0 where taking turns is better than sharing."""
    assert snapshot.pairs is not None
    which = np.arange(len(setup.classes.first)) if some is None else some
    beside, alone = rates_of(which, which), setup.job_classes.rates[which].T[:, :, None]
    relative = beside / np.where(alone > 0.0, alone, np.inf)
    theirs = beside.transpose(0, 2, 1)
    pays = (relative + relative.transpose(0, 2, 1) > 1.0 + _PAYS) & (beside > 0.0) & (theirs > 0.0)
    profile_of = snapshot.pairs.profile_of[setup.classes.first[which]]
    return PairRates(rates=beside * pays, profile_of=profile_of)


def highest_shared_level(
    job_classes: JobClassTable,
    pairs: PairRates,
    demand_at: DemandAt,
    cap: FloatArray,
    warm: Warm | None,
) -> LevelAnswer:
    """Find the highest level that the devices allow if jobs may share them."""
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
    # Caps are what the solver reached with its seven digits, not what was demanded; only that can
    # be kept.
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
    """A solution, the level that it reaches, and a proven ceiling."""

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
    """Find the highest level; ``levels`` are a guess, one that is reached without sharing, and one
    that is too high.

    Programs linearise demands near a level. Duals prove a ceiling for the exact demands, so a step
    that overshoots falls back to it and does not oscillate.
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
            # Jobs at their highest demand already cannot be served; all jobs then get the same
            # fraction of their demands.
            ray = (np.zeros(len(base)), demand_at(near) / near)
            solved, columns, duals = _generate(job_classes, pairs, columns, ray, near)
            base, slope = ray
        ceiling = min(ceiling, proven_level(job_classes, demand_at, duals, ceiling))
        level = reached_level(demand_at, base + slope * solved.level, ceiling)
        if best is None or level > best.level:
            best = _Found(solved=solved, columns=columns, level=level, ceiling=ceiling)
        if ceiling - best.level <= _SAME * ceiling:
            break
        # A program without further gain is solved again at the ceiling.
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
    """Column generation: solve, add the pairs with a positive gain, repeat; returns the columns and
    duals too."""
    for _ in range(_MAX_GENERATIONS):
        solved_columns = columns
        program = LinearProgram(job_classes=job_classes, pairs=pairs.rates, columns=columns)
        solved = solve(program, base=line[0], slope=line[1], near=level)
        duals = _with_rents(job_classes, solved.duals)
        gain = gains(job_classes, pairs, duals)
        # Half of what a pair would gain, added to the rents of both, makes the duals feasible.
        unpaid = 0.5 * np.maximum(gain.max(axis=(0, 2), initial=0.0), 0.0)
        if float(job_classes.num_jobs @ unpaid) <= _ENOUGH * abs(solved.level):
            break
        more = columns.joined(_most_gaining(gain, _PER_CLASS))
        if len(more) == len(columns):
            break
        columns = more
    return solved, solved_columns, replace(duals, rent=duals.rent + unpaid)


def _with_rents(job_classes: JobClassTable, duals: Duals) -> Duals:
    """Raise rents until they cover what jobs earn alone, because the solver rounds."""
    margin = duals.worth[:, None] * job_classes.rates - job_classes.gang[:, None] * duals.price
    return replace(duals, rent=np.maximum(duals.rent, margin.max(axis=1, initial=0.0)))


def _in_reach(
    job_classes: JobClassTable, pairs: PairRates, columns: PairColumns, duals: Duals
) -> PairColumns:
    """Keep the columns that pay, or nearly do: a program at a near level needs few others."""
    a, b, j = columns.class_a, columns.class_b, columns.column
    earned = duals.worth[a] * pairs.rates[j, a, b] + duals.worth[b] * pairs.rates[j, b, a]
    spent = duals.rent[a] + duals.rent[b] + job_classes.gang[a] * duals.price[j]
    return columns.where(earned >= (1.0 - _NEARLY) * spent)


def gains(job_classes: JobClassTable, pairs: PairRates, duals: Duals) -> FloatArray:
    """``[column, class a, class b]``: value of the progress of a pair minus its cost at the
    duals."""
    gain = np.empty(pairs.rates.shape)
    for column, rates in enumerate(pairs.rates):
        earned = rates * duals.worth[:, None]
        spent = 0.5 * job_classes.gang * duals.price[column] + duals.rent
        np.add(earned, earned.T, out=gain[column])
        gain[column] -= spent[:, None]
        gain[column] -= spent[None, :]
        # Pairs that may not share must never be picked.
        gain[column][rates <= 0.0] = -np.inf
    return gain


def first_columns(job_classes: JobClassTable, pairs: PairRates, duals: Duals) -> PairColumns:
    """All pairs if there are few, else the best partners of each class at given prices."""
    # Each pair counts twice, once from each side.
    if np.count_nonzero(pairs.rates) <= 2 * _FEW:
        return all_columns(pairs)
    return _most_gaining(gains(job_classes, pairs, duals), _PER_CLASS)


def _most_gaining(gain: FloatArray, per_class: int) -> PairColumns:
    """The partners with the largest positive gain, for every class and column."""
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
    # One integer per pair removes duplicates faster than rows would.
    key = np.unique((column * size + low) * size + high)
    return PairColumns(class_a=key // size % size, class_b=key % size, column=key // size**2)


def shared_time(pairs: PairTime, profile_of: LongArray) -> SharedTime:
    """Time in pairs, summed over the classes of each profile."""
    low = np.minimum(profile_of[pairs.class_a], profile_of[pairs.class_b])
    high = np.maximum(profile_of[pairs.class_a], profile_of[pairs.class_b])
    keys, at = np.unique(np.stack([low, high, pairs.column], axis=1), axis=0, return_inverse=True)
    amount = np.asarray(np.bincount(at.reshape(-1), pairs.amount, len(keys)), dtype=float)
    return SharedTime(
        profile_a=keys[:, 0], profile_b=keys[:, 1], device_type=keys[:, 2], amount=amount
    )


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
        device_type=column[row],
        amount=amount[row],
    )


def all_columns(pairs: PairRates) -> PairColumns:
    """Every pair of classes that gains by sharing."""
    column, class_a, class_b = np.nonzero(pairs.rates)
    keep = class_a <= class_b
    return PairColumns(class_a=class_a[keep], class_b=class_b[keep], column=column[keep])


def _used(pairs: PairRates, columns: PairColumns, solved: Solved) -> LongArray:
    """Profiles of the pairs in use: unlike classes, these stay the same when jobs come and go."""
    used = columns.where(solved.together > 0.0)
    return np.unique(_by_profile(pairs, used), axis=0)


def _by_profile(pairs: PairRates, columns: PairColumns) -> LongArray:
    both = pairs.profile_of[np.stack([columns.class_a, columns.class_b])]
    return np.stack([columns.column, both.min(axis=0), both.max(axis=0)], axis=1)


def _still_there(pairs: PairRates, rows: LongArray) -> PairColumns:
    """Pairs of classes whose profiles shared devices in an earlier answer."""
    columns = all_columns(pairs)
    wanted = _by_profile(pairs, columns)
    size = int(max(wanted.max(initial=0), rows.max(initial=0))) + 1
    place = np.array([size * size, size, 1])
    return columns.where(np.isin(wanted @ place, rows @ place))


def _line(demand_at: DemandAt, level: float) -> tuple[FloatArray, FloatArray]:
    """Linearise demands at a level as base + slope x level; exact where they are linear above
    it."""
    higher = level * (1.0 + 1e-7)
    demand = demand_at(level)
    slope = (demand_at(higher) - demand) / (higher - level)
    if not slope.any():
        # No demand rises any more, so jobs below their highest demand lack partners; scale all
        # demands.
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
    """Pair time of an answer without sharing."""
    none = np.zeros(0, dtype=np.int64)
    return PairTime(
        class_a=none, class_b=none, column=none, amount=np.zeros(0), progress=np.zeros(num_classes)
    )
