"""Shares of many jobs of few classes, at the cost of the classes only.

A policy that looks at nothing but throughputs, gang and weight gives jobs with the same three the
same answer, and which classes there are changes far less often than how many jobs each has. So the
tables of the solver are kept per set of classes, and only the numbers of jobs are new. The tables
are a pure function of the classes, put in order of their bytes: what was asked before does not show
in an answer. O(jobs) and one search for prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray
from hocket.compiled.containers import table
from hocket.fleet.allocation import Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.las import las_ladder
from hocket.fleet.rounds.state import State
from hocket.fleet.solve.ladder import Ladder
from hocket.fleet.solve.prices import highest_rung
from hocket.fleet.solve.setup import Setup, set_up, trim
from hocket.fleet.solve.water_filling import fill

Counts = NDArray[np.int64]
Answer = tuple[FloatArray, Warm, dict[str, str]]

_MAX_CLASSES = 256
"""More classes than this are hardly met twice."""
_SEEN: dict[str, Callable[[FloatArray], FloatArray]] = {
    "las": lambda steps_per_s: steps_per_s,
    "las-agnostic": lambda steps_per_s: np.asarray(steps_per_s > 0.0, dtype=float),
}
"""What max-min policies see of throughputs."""


class Groups(NamedTuple):
    """Jobs that are exactly alike."""

    of: Counts
    """``[job]``: its class."""
    num_alike: Counts
    key: bytes
    """Throughputs, gang and weight of all classes, in a fixed order."""


def class_shares(
    state: State, steps_per_s: FloatArray, gang: Counts, weight: FloatArray
) -> Answer | None:
    """Shares of jobs, what warms up the next answer, and notes; None where this way is no use."""
    see = _SEEN.get(state.rules.policy)
    if see is None or state.pair_table is not None:
        return None
    groups = _group(np.column_stack([see(steps_per_s), gang, weight]))
    if groups is None:
        return None
    num_devices = tuple(state.layout.num_devices.tolist())
    known = _tables(groups.key, num_devices)
    if known is None:
        return None
    setup, ladder = known
    num_jobs = np.empty(len(groups.num_alike))
    num_jobs[setup.classes.of] = groups.num_alike
    crowd = setup.crowd._replace(num_jobs=table(num_jobs, np.float64))
    rungs = fill(
        replace(setup, crowd=crowd),
        ladder,
        lambda demand_at, cap, warm: highest_rung(crowd, demand_at, cap, warm),
        state.warm,
    )
    shares = trim(setup.expand(rungs[-1].shares))
    notes = {"classes": str(len(num_jobs)), "levels": str(len(rungs))}
    return shares[groups.of], rungs[0].warm, notes


def _group(values: FloatArray) -> Groups | None:
    from hocket.fleet.rounds.kernels.group import group

    count, width = values.shape
    of, first, num_alike = np.empty((3, count), dtype=np.int64)
    slots = np.full(1 << (2 * count).bit_length(), -1)
    num_groups = group(values.view(np.int64), slots, of, first, num_alike)
    if num_groups > min(_MAX_CLASSES, (count + 1) // 2 + 8):
        return None
    classes = values[first[:num_groups]].view(f"V{8 * width}").ravel().tolist()
    order = sorted(range(num_groups), key=classes.__getitem__)
    rank = np.empty(num_groups, dtype=np.int64)
    rank[order] = np.arange(num_groups)
    return Groups(rank[of], num_alike[order], b"".join(classes[at] for at in order))


@lru_cache(maxsize=4096)
def _tables(key: bytes, num_devices: tuple[int, ...]) -> tuple[Setup, Ladder] | None:
    """Tables of the solver with one job of each class; None where classes are nearly equal."""
    num_kinds = len(num_devices)
    values = np.frombuffer(key).reshape(-1, num_kinds + 2)
    market = _market(values[:, :num_kinds], values[:, -2], values[:, -1], num_devices)
    ladder = las_ladder(market)
    setup = set_up(market, ladder)
    if len(setup.classes.first) < len(values) or not setup.can_run.all():
        return None
    return setup, ladder


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
