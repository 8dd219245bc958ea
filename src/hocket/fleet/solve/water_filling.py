"""Lexicographic max-min: raise all jobs together, leave those behind that cannot rise, go on.

A job stays behind where it runs all the time on the fastest column that it can still have, or where
a little more of it costs something at the prices that stopped the others (Bertsekas and Gallager,
Data Networks, section 6.5.2, for the principle). A pool that has a price is full for good, so jobs
that rise further do it on pools without one, and there are no more rounds than pools: no integer
program is needed to find who is stuck. At most ``pools`` searches for prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.fleet.allocation import Allocation, PairedTime, SharedTime, Warm
from hocket.fleet.market import Market
from hocket.fleet.solve.ladder import DemandAt, Ladder, reached_level
from hocket.fleet.solve.pair_levels import highest_rung_of_many, pair_table
from hocket.fleet.solve.prices import Rung, highest_rung
from hocket.fleet.solve.setup import SolveSetup, set_up, trim
from hocket.fleet.solve.sharing import (
    highest_shared_rung,
    no_pairs,
    pair_rates,
    paired_time,
    shared_time,
)

NOT_HIGHER = 1e-11
"""Part by which a job must be able to rise for another rung to be worth it."""
ROOM = 1e-10
"""Part that those give up who cannot: else rounding would make full pools look overfull."""
_ROUNDING, _ROUNDING_SHARED = 1e-8, 1e-6
"""How exactly demands are met: by prices, and by a solver of seven digits."""
MANY, MANY_KNOWN = 150, 300
"""Classes from which on programs of pairs are solved to a known gap only, at the first level; also
where the pairs of an earlier answer are known, which leave few others to look for."""
MAX_RUNGS = 8
"""Without sharing no more than kinds of devices are needed, and nearly always one or two."""


def climb(name: str, market: Market, ladder: Ladder, warm: Warm | None = None) -> Allocation:
    """The allocation whose lowest job is as high as can be, then the next lowest, and so on."""
    setup = set_up(market, ladder)
    rungs = fill(setup, ladder, search_in(market, setup, ladder, warm), warm)
    shares = trim(setup.expand(rungs[-1].shares))
    progress = (ladder.rates * shares).sum(axis=1)
    if rungs[-1].pairs is not None:
        progress = progress + rungs[-1].pairs.progress[setup.classes.of]
    rounding = _ROUNDING if market.pairs is None else _ROUNDING_SHARED
    objective, bound = _measure(setup, ladder, progress, rungs[0], rounding)
    shared, paired = _together(market, setup, rungs[-1])
    return Allocation(
        policy=name,
        shares=shares,
        shared=shared,
        paired=paired,
        objective=objective,
        bound=bound,
        notes=_notes(market, setup, rungs),
        warm=rungs[0].warm,
    )


def _measure(
    setup: SolveSetup, ladder: Ladder, progress: FloatArray, rung: Rung, rounding: float
) -> tuple[float, float]:
    """The objective of what the jobs get, and its bound, widened by what snapping changed."""
    classes, slack, ceiling = setup.classes, 2.0 * setup.snapping + 1e-11, rung.ceiling
    demand_at = _demands(setup, ladder, _caps(setup))
    if ladder.score is None:
        met = np.full(len(classes.first), np.inf)
        # A job that is as high as it can be, but for rounding, must not decide the level.
        np.minimum.at(met, classes.of, progress * (1.0 + slack + rounding) / rung.served)
        return rung.served * reached_level(demand_at, met, ceiling), ceiling * (1.0 + slack)
    best = np.where(setup.can_run, demand_at(ceiling)[classes.of], np.inf)
    bound = ladder.score(best) * (1.0 - slack if ladder.is_cost else 1.0 + slack)
    return ladder.score(np.where(setup.can_run, progress, np.inf)), bound


def _demands(setup: SolveSetup, ladder: Ladder, cap: FloatArray) -> DemandAt:
    return ladder.demands(ladder.marks[setup.classes.first], setup.crowd.num_jobs, cap)


def _caps(setup: SolveSetup) -> FloatArray:
    return np.asarray(setup.crowd.rates.max(axis=1, initial=0.0))


def fill(
    setup: SolveSetup,
    ladder: Ladder,
    search: Callable[[DemandAt, FloatArray, Warm | None], Rung],
    warm: Warm | None,
) -> list[Rung]:
    """All rungs up to the one from which nobody can rise."""
    cap = _caps(setup)
    rungs: list[Rung] = []
    while True:
        try:
            rung = search(_demands(setup, ladder, cap), cap, warm)
        except NoFeasiblePlanError:
            if not rungs:
                raise
            # Rounding left no room to go on from what is held already, which stays legal.
            return rungs
        rungs.append(rung)
        can_rise = rung.cap > rung.demand * (1.0 + NOT_HIGHER)
        if not can_rise.any() or len(rungs) >= MAX_RUNGS:
            return rungs
        # A hair of room, or rounding would make pools that are full look overfull.
        cap, warm = np.where(can_rise, rung.cap, _held(rung)), rung.warm


def search_in(
    market: Market, setup: SolveSetup, ladder: Ladder, warm: Warm | None = None
) -> Callable[[DemandAt, FloatArray, Warm | None], Rung]:
    """The search for the highest level that suits a market: alone, with pairs, with many pairs."""
    crowd = setup.crowd
    if market.pairs is None:
        return lambda demand_at, cap, warm: highest_rung(crowd, demand_at, cap, warm)
    knows_pairs = warm is not None and warm.columns is not None
    if len(crowd.gang) >= (MANY_KNOWN if knows_pairs else MANY):
        return _search_many(market, setup, ladder)
    pairs = pair_rates(market, setup, ladder.rates)
    return lambda demand_at, cap, warm: highest_shared_rung(crowd, pairs, demand_at, cap, warm)


def _search_many(
    market: Market, setup: SolveSetup, ladder: Ladder
) -> Callable[[DemandAt, FloatArray, Warm | None], Rung]:
    crowd, table = setup.crowd, pair_table(market, setup, ladder.rates)

    def search(demand_at: DemandAt, cap: FloatArray, warm: Warm | None) -> Rung:
        alone = highest_rung(crowd, demand_at, cap, warm)
        if np.all(alone.demand >= cap * (1.0 - _ROUNDING)):
            return replace(alone, pairs=no_pairs(len(cap)))
        return highest_rung_of_many(crowd, table, demand_at, cap, alone)

    return search


def _held(rung: Rung) -> FloatArray:
    return np.minimum(rung.demand, rung.cap) * (1.0 - ROOM)


def _together(
    market: Market, setup: SolveSetup, rung: Rung
) -> tuple[SharedTime | None, PairedTime | None]:
    if market.pairs is None or rung.pairs is None:
        return None, None
    profile_of = market.pairs.profile_of[setup.classes.first]
    return shared_time(rung.pairs, profile_of), paired_time(rung.pairs, setup, profile_of)


def _notes(market: Market, setup: SolveSetup, rungs: list[Rung]) -> dict[str, str]:
    notes = {"classes": str(len(setup.classes.first)), "levels": str(len(rungs))}
    left_out = np.flatnonzero(~setup.can_run)
    if len(left_out):
        names = ", ".join(market.ids[job] for job in left_out[:20])
        notes["cannot run"] = names + (", …" if len(left_out) > 20 else "")
    return notes
