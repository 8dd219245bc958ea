"""Shares of many jobs of few classes, at the cost of the classes only.

A policy that looks at nothing but throughputs, gang and weight gives jobs with the same three the
same answer, and which classes there are changes far less often than how many jobs each has. So the
tables of the solver are kept per set of classes, and only the numbers of jobs are new. The tables
are a pure function of the classes, put in order of their bytes: what was asked before does not show
in an answer. O(jobs) and one search for prices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.allocation import Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.las import las_ladder
from hocket.fleet.policies.las_central import las_program, spread_central
from hocket.fleet.rounds.state import FleetState, Jobs
from hocket.fleet.rounds.tables import Ascent, new_alike, new_ascent
from hocket.fleet.solve.centre import Even
from hocket.fleet.solve.ladder import owed
from hocket.fleet.solve.price_tables import Crowd, Owed
from hocket.fleet.solve.prices import MAX_QUESTIONS
from hocket.fleet.solve.setup import set_up, trim
from hocket.fleet.solve.water_filling import MAX_RUNGS
from hocket.kernels.containers import table

_MAX_CLASSES = 256
"""More classes than this are hardly met twice."""
_SEES_SPEEDS = {"las": True, "las-agnostic": False}
"""Max-min policies, and whether they look at throughputs or only at where a job can run."""


class Groups(NamedTuple):
    """Jobs that are exactly alike."""

    of: LongArray
    """``[row]``: the class of a job; -1 for one that wants no devices."""
    num_alike: LongArray
    key: bytes
    """Throughputs, gang and weight of all classes, in a fixed order."""


class ClassAnswer(NamedTuple):
    """What the policy says of classes."""

    shares: FloatArray
    """``[class, kind]``."""
    warm: Warm | None
    """What speeds up the next answer."""
    notes: dict[str, str]


class Known(NamedTuple):
    """What follows from a set of classes."""

    crowd: Crowd
    owed: Owed
    """On the first rung."""
    top: float
    """The level at which everybody is as high as it can be."""
    spread: FloatArray
    """``[column, kind]``: how a share divides over kinds that nobody can tell apart."""
    place: LongArray
    """``[class]``: its row in the crowd."""


def group_jobs(state: FleetState, jobs: Jobs) -> Groups | None:
    """Classes of the jobs that want devices; None where answers by class are of no use."""
    from hocket.fleet.rounds.kernels.group import group

    sees_speeds = _SEES_SPEEDS.get(state.rules.policy)
    if sees_speeds is None or state.pair_table is not None:
        return None
    alike = new_alike(len(jobs.rows), state.num_kinds, _MAX_CLASSES)
    num_classes = group(jobs, state.layout.largest_server, sees_speeds, _MAX_CLASSES, alike)
    if num_classes < 0:
        return None
    return Groups(alike.of, alike.num_in_order[:num_classes], alike.key[:num_classes].tobytes())


def class_shares(state: FleetState, groups: Groups) -> ClassAnswer | None:
    """Shares of classes; None where classes are nearly equal, or cannot run."""
    if state.rules.mechanism == "gavel":
        return _central_shares(state, groups)
    known = _tables(groups.key, tuple(state.layout.num_devices.tolist()))
    if known is None:
        return None
    num_jobs = np.empty(len(groups.num_alike))
    num_jobs[known.place] = groups.num_alike
    crowd = known.crowd._replace(num_jobs=table(num_jobs, np.float64))
    shares, warm, num_rungs = _climb(crowd, known, state.warm)
    notes = {"classes": str(len(num_jobs)), "levels": str(num_rungs)}
    return ClassAnswer(trim((shares @ known.spread)[known.place]), warm, notes)


def _central_shares(state: FleetState, groups: Groups) -> ClassAnswer | None:
    """Gavel's solver makes the lowest job highest and leaves the others where it passed them."""
    num_devices = state.layout.num_devices
    even = _central_tables(groups.key, tuple(num_devices.tolist()))
    if even is None:
        return None
    shares, _ = spread_central(even, groups.num_alike, num_devices)
    return ClassAnswer(trim(shares), None, {"classes": str(len(shares)), "levels": "1"})


def _climb(crowd: Crowd, known: Known, warm: Warm | None) -> tuple[FloatArray, Warm, int]:
    """Rung by rung, as `solve.water_filling.fill`; what it knew at the first serves next time."""
    from hocket.fleet.rounds.kernels.climb import climb

    num_classes, num_pools = crowd.rates.shape
    ascent = new_ascent(MAX_QUESTIONS, num_pools, num_classes)
    demands, top, found = known.owed, known.top, list[Warm]()
    while len(found) < MAX_RUNGS:
        num_known = _first_questions(ascent, num_pools, warm)
        hint = warm.level if warm is not None and 0.0 < warm.level < top else 0.0
        level, num_asked, num_rising = climb(crowd, demands, top, hint, num_known, ascent)
        is_used = ascent.weight[:num_asked] > 0
        warm = Warm(prices=ascent.questions[0, :num_asked][is_used], level=level)
        found.append(warm)
        if num_rising == 0:
            break
        cap = ascent.by_class[2].copy()
        demands, top = owed(cap), _top(cap)
    return _within_limits(crowd, ascent.shares), found[0], len(found)


def _first_questions(ascent: Ascent, num_pools: int, warm: Warm | None) -> int:
    prices = ascent.questions[0]
    if warm is None or warm.prices.shape[1] != num_pools or not len(warm.prices):
        prices[0] = 1.0 / num_pools
        return 1
    num_known = min(len(warm.prices), MAX_QUESTIONS // 4)
    prices[:num_known] = warm.prices[:num_known]
    return num_known


def _within_limits(crowd: Crowd, shares: FloatArray) -> FloatArray:
    """Shares that use no more than all devices, and no more than all time of a job."""
    used = (crowd.gang * crowd.num_jobs) @ shares
    load = used / crowd.capacity
    times = shares.sum(axis=1)
    return np.asarray(shares / max(1.0, float(load.max()), float(times.max(initial=0.0))))


def _top(cap: FloatArray) -> float:
    return max(float(cap.max(initial=0.0)), 1e-300)


@lru_cache(maxsize=4096)
def _central_tables(key: bytes, num_devices: tuple[int, ...]) -> Even | None:
    """The program of the kinds that there are; None where a class cannot run."""
    num_kinds = len(num_devices)
    values = np.frombuffer(key).reshape(-1, num_kinds + 2)
    market = _market(values[:, :num_kinds], values[:, -2], values[:, -1], num_devices)
    rates = las_ladder(market).rates
    if not rates.any(axis=1).all():
        return None
    return las_program(rates, values[:, -2], market.num_devices)


@lru_cache(maxsize=4096)
def _tables(key: bytes, num_devices: tuple[int, ...]) -> Known | None:
    """Tables of the solver with one job of each class; None where classes are nearly equal."""
    num_kinds = len(num_devices)
    values = np.frombuffer(key).reshape(-1, num_kinds + 2)
    market = _market(values[:, :num_kinds], values[:, -2], values[:, -1], num_devices)
    setup = set_up(market, las_ladder(market))
    if len(setup.classes.first) < len(values) or not setup.can_run.all():
        return None
    cap = np.asarray(setup.crowd.rates.max(axis=1, initial=0.0))
    return Known(setup.crowd, owed(cap), _top(cap), setup.spread, setup.classes.of)


def _market(
    steps_per_s: FloatArray, gang: FloatArray, weight: FloatArray, num_devices: tuple[int, ...]
) -> Market:
    count = len(gang)
    zeros, none = np.zeros(count), np.zeros(count, dtype=np.int64)
    return Market(
        kinds=tuple(map(str, range(len(num_devices)))),
        num_devices=np.array(num_devices),
        price_per_hour=np.ones(len(num_devices)),
        ids=tuple(map(str, range(count))),
        steps_per_s=steps_per_s,
        gang=gang.astype(np.int64),
        weight=weight,
        remaining_steps=np.full(count, np.inf),
        elapsed_s=zeros,
        deadline_s=np.full(count, np.inf),
        isolated_s=zeros,
        arrival=none,
        team_of=none,
        team_weight=np.ones(1),
    )
