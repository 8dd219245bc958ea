"""Climb: try the most promising moves, take the first that is better, look again."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from hocket.planners.placement.search.critical import find_critical
from hocket.planners.placement.search.moves import Move, moves
from hocket.planners.placement.search.state import LocalSearch
from hocket.planners.placement.search.units import SearchUnits

_CHUNK = 16
_FRESH_ORDER = 4
"""After so many accepted moves the order is made anew, if that is better."""

_Key = tuple[str, tuple[int | bytes, ...]]
"""What tells moves apart: kind and key."""


@dataclass
class Luck:
    """How often moves of each kind were tried and were better: those that work come first."""

    tried: dict[str, int] = field(default_factory=dict)
    better: dict[str, int] = field(default_factory=dict)

    def ranking(self) -> Callable[[Move], tuple[float, tuple[int, ...]]]:
        """A key that puts first what gains most, times how often its kind works by now."""
        share = {
            kind: (1 + self.better.get(kind, 0)) / (1 + tried) for kind, tried in self.tried.items()
        }

        def key(move: Move) -> tuple[float, tuple[int, ...]]:
            works = share.get(move.kind, 1.0)
            expected_s = move.gain_s * works if move.gain_s > 0 else move.gain_s / works
            return -expected_s, move.place

        return key

    def count(self, moves: list[Move], found: int) -> None:
        """Learn from moves that were tried up to the one that was better (-1: none)."""
        for move in moves if found < 0 else moves[: found + 1]:
            self.tried[move.kind] = self.tried.get(move.kind, 0) + 1
        if found >= 0:
            kind = moves[found].kind
            self.better[kind] = self.better.get(kind, 0) + 1


def climb(search: LocalSearch, units: SearchUnits, budget: int) -> bool:
    """Accept better moves until none is found or ``budget`` evaluations are spent; whether any."""
    luck, tried = Luck(), dict[_Key, int]()
    stop_at = max(search.budget - budget, 0)
    num_accepted, num_since, look = 0, 0, 0
    while search.budget > stop_at:
        look += 1
        ranked = heapq.merge(
            *moves(search, units, find_critical(search, units)), key=luck.ranking()
        )
        found = _first_better(search, ranked, stop_at, luck, tried, look)
        if found:
            num_accepted, num_since = num_accepted + 1, num_since + 1
            if num_accepted % _FRESH_ORDER == 0 and not search.is_strict:
                search.try_fresh_order()
        elif num_since:
            # What failed before may work now that other things moved.
            tried.clear()
            num_since = 0
        else:
            break
    return num_accepted > 0


def _first_better(
    search: LocalSearch,
    ranked: Iterator[Move],
    stop_at: int,
    luck: Luck,
    tried: dict[_Key, int],
    look: int,
) -> bool:
    """Make the first move that is better, of those that were not tried in an earlier look."""
    fresh = (move for move in ranked if tried.get((move.kind, move.key), look) == look)
    while chunk := list(islice(fresh, max(0, min(_CHUNK, search.budget - stop_at)))):
        found = search.first_better([move.make() for move in chunk])
        luck.count(chunk, found)
        seen = chunk if found < 0 else chunk[: found + 1]
        tried.update(((move.kind, move.key), look) for move in seen)
        if found >= 0:
            return True
    return False
