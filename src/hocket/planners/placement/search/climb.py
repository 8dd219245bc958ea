"""Climb: try the most promising moves, take the first that is better, look again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.planners.placement.search.critical import find_critical
from hocket.planners.placement.search.moves import Move, moves
from hocket.planners.placement.search.state import LocalSearch
from hocket.planners.placement.search.units import SearchUnits

_CHUNK = 16
_FRESH_ORDER = 4
"""After so many accepted moves the order is made anew, if that is better."""


@dataclass
class Luck:
    """How often moves of each kind were tried and were better: those that work come first."""

    tried: dict[str, int] = field(default_factory=dict)
    better: dict[str, int] = field(default_factory=dict)

    def expected_s(self, move: Move) -> float:
        """What a move gains times how often its kind works."""
        share = (1 + self.better.get(move.kind, 0)) / (1 + self.tried.get(move.kind, 0))
        return move.gain_s * share if move.gain_s > 0 else move.gain_s / share

    def count(self, moves: list[Move], found: int) -> None:
        """Learn from moves that were tried up to the one that was better (-1: none)."""
        for move in moves if found < 0 else moves[: found + 1]:
            self.tried[move.kind] = self.tried.get(move.kind, 0) + 1
        if found >= 0:
            kind = moves[found].kind
            self.better[kind] = self.better.get(kind, 0) + 1


def climb(search: LocalSearch, units: SearchUnits, budget: int) -> bool:
    """Accept better moves until none is found or ``budget`` evaluations are spent; whether any."""
    luck, tried = Luck(), set[tuple[str, tuple[int | bytes, ...]]]()
    stop_at = max(search.budget - budget, 0)
    num_accepted, num_since = 0, 0
    while search.budget > stop_at:
        critical = find_critical(search, units)
        listed = sorted(
            (move for move in moves(search, units, critical) if (move.kind, move.key) not in tried),
            key=luck.expected_s,
            reverse=True,
        )
        found = _first_better(search, listed, stop_at, luck, tried)
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
    listed: list[Move],
    stop_at: int,
    luck: Luck,
    tried: set[tuple[str, tuple[int | bytes, ...]]],
) -> bool:
    for at in range(0, len(listed), _CHUNK):
        chunk = listed[at : at + min(_CHUNK, search.budget - stop_at)]
        if not chunk:
            return False
        found = search.first_better([move.make() for move in chunk])
        luck.count(chunk, found)
        tried.update((move.kind, move.key) for move in (chunk if found < 0 else chunk[: found + 1]))
        if found >= 0:
            return True
    return False
