"""Levels of many distinct jobs that may share devices: split jobs and devices, solve each part.

POP (Narayanan et al., "Solving Large-Scale Granular Resource Allocation Problems Efficiently with
POP", SOSP 2021): where parts resemble the whole, each part alone reaches nearly the level of the
whole. Similar classes are dealt to different parts. A part first gets the devices that its classes
use where nobody shares, so it reaches at least that level. Then parts with a higher level hand
devices to the others. The duals of all parts prove a ceiling over all pairs.
O(parts x one linear program + classes^2 x columns).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.allocation import Warm
from hocket.fleet.solve.levels import DemandAt
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.prices import Duals, LevelAnswer, PairTime, proven_level, top_level
from hocket.fleet.solve.sharing import PairRates, RatesOf, highest_shared_level
from hocket.kernels.containers import table

PART_SIZE = 80
"""Maximum number of classes in a part. Larger parts come nearer to the optimum but take longer."""
_TURNS = 2
"""Number of times that all parts are solved; in between, devices are moved from part to part."""
_BLOCK = 32
"""Number of classes whose pairs are examined at once, which limits the memory."""


def highest_level_of_parts(
    job_classes: JobClassTable,
    pairs_of: Callable[[LongArray], PairRates],
    rates_of: RatesOf,
    demand_at: DemandAt,
    cap: FloatArray,
    alone: LevelAnswer,
    warm: Warm | None,
) -> LevelAnswer:
    """Find a high level for many classes that share devices; it is the level of the lowest part.

    ``alone`` is the answer without sharing.
    """
    parts = _deal(job_classes, np.maximum(alone.demand, 1e-300))
    pairs = [pairs_of(part) for part in parts]
    used = job_classes.num_jobs * job_classes.gang * alone.shares.T
    portions = np.array([used[:, part].sum(axis=1) for part in parts])
    # A column that no job uses alone may still be used by pairs.
    portions += 1e-9 * used.sum() * np.array([[len(part)] for part in parts])
    known = warm if warm is not None and warm.columns is not None else None
    starts = [known] * len(parts)
    best: list[LevelAnswer] = []
    for _ in range(_TURNS):
        portions /= portions.sum(axis=0)
        answers = [
            highest_shared_level(
                _few_classes(job_classes, part, portion),
                pair_rates,
                _demand_of(part, demand_at),
                cap[part],
                start,
            )
            for part, portion, pair_rates, start in zip(parts, portions, pairs, starts, strict=True)
        ]
        if not best or _lowest(answers) > _lowest(best):
            best = answers
        # Levels rise about in proportion to devices, so this nearly evens them out.
        portions /= np.array([[max(answer.level, 1e-300)] for answer in answers])
        starts = [answer.warm for answer in answers]
    return _joined(
        job_classes, rates_of, demand_at, cap, alone, list(zip(parts, best, strict=True))
    )


def _lowest(answers: list[LevelAnswer]) -> float:
    return min(answer.level for answer in answers)


def _few_classes(job_classes: JobClassTable, part: LongArray, portion: FloatArray) -> JobClassTable:
    return JobClassTable(
        rates=table(job_classes.rates[part], np.float64),
        num_jobs=table(job_classes.num_jobs[part], np.float64),
        gang=table(job_classes.gang[part], np.float64),
        capacity=table(np.maximum(job_classes.capacity * portion, 1e-9), np.float64),
    )


def _demand_of(part: LongArray, demand_at: DemandAt) -> DemandAt:
    return lambda level: demand_at(level)[part]


# ── similar classes go to different parts ────────────────────────────────────────────────────────


def _deal(job_classes: JobClassTable, unit: FloatArray) -> list[LongArray]:
    """Parts of equal size; classes with the same gang and favourite column are dealt in turn."""
    count = max(-(-len(unit) // PART_SIZE), 2)
    favourite = job_classes.rates.argmax(axis=1)
    order = np.lexsort((job_classes.rates.sum(axis=1) / unit, favourite, job_classes.gang))
    return [np.sort(order[part::count]) for part in range(count)]


# ── one answer from those of the parts ───────────────────────────────────────────────────────────


def _joined(
    job_classes: JobClassTable,
    rates_of: RatesOf,
    demand_at: DemandAt,
    cap: FloatArray,
    alone: LevelAnswer,
    found: list[tuple[LongArray, LevelAnswer]],
) -> LevelAnswer:
    level = min(answer.level for _, answer in found)
    shares, progress = np.zeros(job_classes.rates.shape), np.zeros(len(cap))
    worth, rent = np.zeros((2, len(cap)))
    for part, answer in found:
        assert answer.pairs is not None
        shares[part], progress[part] = answer.shares, answer.pairs.progress
        worth[part], rent[part] = answer.duals.worth, answer.duals.rent
    # One price for all parts: the bound needs duals of the whole program.
    price = np.mean([answer.duals.price for _, answer in found], axis=0)
    duals = _covered(job_classes, rates_of, Duals(worth=worth, rent=rent, price=price))
    times = [(part, answer.pairs) for part, answer in found if answer.pairs is not None]
    demand, top = demand_at(level), top_level(demand_at, cap)
    known = [answer.warm.columns for _, answer in found if answer.warm.columns is not None]
    columns = np.unique(np.concatenate(known), axis=0) if known else None
    return LevelAnswer(
        level=level,
        demand=demand,
        shares=shares,
        cap=demand,
        ceiling=max(proven_level(job_classes, demand_at, duals, top), level),
        warm=replace(alone.warm, columns=columns),
        duals=duals,
        pairs=PairTime(
            class_a=np.concatenate([part[time.class_a] for part, time in times]),
            class_b=np.concatenate([part[time.class_b] for part, time in times]),
            column=np.concatenate([time.column for _, time in times]),
            amount=np.concatenate([time.amount for _, time in times]),
            progress=progress,
        ),
    )


def _covered(job_classes: JobClassTable, rates_of: RatesOf, duals: Duals) -> Duals:
    """Duals with rents such that no job alone and no pair earns more than it costs.

    What a pair earns too much is first added to the rents of both; then each class, one after
    another, pays no more than its best pair needs at the rents of the moment.
    """
    worth, gang_cost = duals.worth, job_classes.gang[:, None] * duals.price
    margin = worth[:, None] * job_classes.rates - gang_cost
    alone = np.maximum(margin.max(axis=1, initial=0.0), 0.0)
    rent, every = np.maximum(duals.rent, alone), np.arange(len(worth))
    raised = rent.copy()
    blocks = np.array_split(every, -(-len(every) // _BLOCK))
    for block in blocks:
        short = _earned(rates_of, duals, gang_cost, block) - rent[block][:, None] - rent
        raised[block] += 0.5 * short.max(axis=1, initial=0.0)
    rent = raised
    for block in blocks:
        earned = _earned(rates_of, duals, gang_cost, block)
        for row, one in enumerate(block):
            least = earned[row] - rent
            # Two jobs of one class pay the same rent.
            least[one] = 0.5 * earned[row, one]
            rent[one] = max(alone[one], least.max(initial=0.0))
    return replace(duals, rent=rent)


def _earned(rates_of: RatesOf, duals: Duals, gang_cost: FloatArray, block: LongArray) -> FloatArray:
    """``[class of the block, class]``: what both must pay together where they share a device."""
    every = np.arange(len(duals.worth))
    ours, theirs = rates_of(block, every), rates_of(every, block).transpose(0, 2, 1)
    earned = ours * duals.worth[block][None, :, None] + theirs * duals.worth
    earned -= gang_cost[block].T[:, :, None]
    earned[(ours <= 0.0) | (theirs <= 0.0)] = 0.0
    return np.asarray(earned.max(axis=0, initial=0.0))
