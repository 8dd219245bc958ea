"""Refine an order at its peak: run the peak's op at its cheapest moment, then the next peak's.

The minimum cut of the op with the most bytes says which ops should have run by then. They are put
before it and the rest behind it, for good, and both parts are hoisted again; this goes on with the
next peak until the target is reached, or until a peak's cheapest moment under what was fixed before
is above it. Then the ops in conflict are known, and the next round gives the last one precedence.
O(walks · (cut + hoist)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.memory.cut import minimum_cut
from hocket.planners.memory.hoist import SHORT_REACH, hoisted
from hocket.planners.memory.storages import Storages, passing_through
from hocket.planners.memory.walk import memory_curve, peak_bytes

_MAX_ROUNDS = 8
_TURNS = 6
_REACH_PER_CUT = 3
"""A walk takes as long as about so many cuts as this goes into its reach."""


class Found(NamedTuple):
    """An order and the most bytes that it holds."""

    peak_bytes: int
    order: LongArray


@dataclass
class WorkLeft:
    """How much a search may still do: counted, so that results never depend on the clock."""

    left: int
    """In cuts; a walk over the graph counts as several."""

    def walk(self, reach: int) -> bool:
        """Whether one more walk may be made; it is counted."""
        self.left -= max(reach // _REACH_PER_CUT, 1)
        return self.left >= 0

    def cut(self) -> bool:
        """Whether one more cut may be made; it is counted."""
        self.left -= 1
        return self.left >= 0


def hoisted_both_ways(
    storages: Storages, base: LongArray, target: int, effort: WorkLeft, reach: int = SHORT_REACH
) -> Found:
    """The best of a few walks from both ends, each along the order of the one before.

    They end where one stays within ``target``, which running ahead may not exceed.
    """
    best, order = Found(peak_bytes(storages, base), base), base
    for turn in range(_TURNS):
        is_backwards = turn % 2 == 1
        before = best.peak_bytes
        if before <= target or not effort.walk(reach):
            break
        order, peak = hoisted(storages, order, target, backwards=is_backwards, reach=reach)
        if peak < before:
            best = Found(peak, order)
        elif is_backwards:
            break
    return best


def refined(storages: Storages, found: Found, target: int, effort: WorkLeft) -> Found:
    """A better order, as far as one is found with peaks above ``target``."""
    best = found
    first: list[int] = []
    for _ in range(_MAX_ROUNDS):
        if best.peak_bytes <= target or effort.left <= 0:
            break
        now, conflict = _fixed_in_turn(storages, best, first, target, effort)
        if now.peak_bytes < best.peak_bytes:
            best = now
        elif conflict < 0 or first[:1] == [conflict]:
            break
        if conflict >= 0:
            first = [conflict, *(op for op in first if op != conflict)]
    return best


def _fixed_in_turn(
    storages: Storages, found: Found, first: list[int], target: int, effort: WorkLeft
) -> tuple[Found, int]:
    """Fix the moments of ops, those of ``first`` before others; the op that had none, or -1."""
    best, order = found, found.order
    waiting = list(first)
    while effort.cut():
        curve = memory_curve(storages, order)
        if curve.max(initial=0) <= target:
            break
        op = waiting.pop(0) if waiting else int(order[int(np.argmax(curve))])
        cut = minimum_cut(storages, op)
        if cut.num_bytes > target:
            return best, op
        storages = passing_through(storages, cut.has_run, op)
        rest = ~cut.has_run
        rest[op] = False
        base = np.concatenate((order[cut.has_run[order]], np.array([op]), order[rest[order]]))
        now = hoisted_both_ways(storages, base, target, effort)
        order = now.order
        if now.peak_bytes < best.peak_bytes:
            best = now
    return best, -1
