"""The sends of a planned collective in an order without deadlock, over whole chunks.

Every tree gets a range of chunks. All sends are in one global order, by level and then by tree. A
send only waits for sends of lower levels, so no circular wait is possible. Shares of the message
become whole chunks: exactly where the denominators allow it within a limit, otherwise rounded, and
the largest change is returned. O(sends).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from hocket.plan.sections.communication import Communication, Send

MAX_CHUNKS = 1024
"""Chunks of the whole message; MSCCL++ holds a table of them."""
MAX_COUNT = 72
"""Chunks that one step may move."""


@dataclass(frozen=True)
class RangeSend:
    """One send of one range of chunks."""

    level: int
    tree: int
    src: int
    dst: int
    first: int
    count: int
    is_reduce: bool


@dataclass(frozen=True)
class OrderedSends:
    """All sends of a collective in an order that works."""

    moves: tuple[RangeSend, ...]
    ranges: tuple[tuple[int, int], ...]
    """First chunk and number of chunks of each tree."""
    num_chunks: int
    change: float
    """The largest relative change of a share by rounding; 0 where exact."""


def moves_of(section: Communication, *, max_chunks: int = MAX_CHUNKS) -> OrderedSends:
    """The sends of every tree over its range of chunks."""
    number = {rank: index for index, rank in enumerate(section.ranks)}
    ranges, total, change = _ranges(section, max_chunks)
    moves = sorted(_moves(section, ranges, number), key=lambda m: (m.level, m.tree, m.first))
    return OrderedSends(tuple(moves), tuple(ranges), total, change)


def _ranges(section: Communication, max_chunks: int) -> tuple[list[tuple[int, int]], int, float]:
    """First chunk and number of chunks of each tree, chunks in all, and the worst change."""
    shares = [tree.share for tree in section.trees]
    by_root = section.collective in ("allgather", "reducescatter")
    groups = len(section.ranks) if by_root else 1
    total = lcm(*(share.denominator for share in shares), groups)
    if total > max_chunks:
        total = max(max_chunks // groups, len(shares)) * groups
    owner = {rank: index for index, rank in enumerate(section.ranks)}
    counts = [0] * len(shares)
    for group in range(groups):
        members = [n for n, tree in enumerate(section.trees)
                   if not by_root or owner[tree.root] == group]  # fmt: skip
        _round(members, shares, total, total // groups, counts)
    change = max(
        abs(float(Fraction(n, total) / share) - 1) for n, share in zip(counts, shares, strict=True)
    )
    starts, at = [0] * len(shares), 0
    order = sorted(range(len(shares)), key=lambda n: owner[section.trees[n].root] if by_root else 0)
    for n in order:
        starts[n] = at
        at += counts[n]
    return list(zip(starts, counts, strict=True)), total, change


def _round(
    members: list[int], shares: list[Fraction], total: int, wanted: int, counts: list[int]
) -> None:
    """Round shares to whole chunks that add up, the largest remainders up."""
    for n in members:
        counts[n] = int(shares[n] * total)
    rest = sorted(members, key=lambda n: (counts[n] - shares[n] * total, n))
    for n in rest[: wanted - sum(counts[m] for m in members)]:
        counts[n] += 1


def _moves(
    section: Communication, ranges: list[tuple[int, int]], number: dict[str, int]
) -> list[RangeSend]:
    moves: list[RangeSend] = []
    for index, (tree, (start, count)) in enumerate(zip(section.trees, ranges, strict=True)):
        ready: dict[str, int] = defaultdict(int)

        def add(send: Send, level: int, is_reduce: bool, index: int = index,
                start: int = start, count: int = count) -> None:  # fmt: skip
            for first in range(start, start + count, MAX_COUNT):
                size = min(MAX_COUNT, start + count - first)
                moves.append(
                    RangeSend(
                        level, index, number[send.src], number[send.dst], first, size, is_reduce
                    )
                )

        for send in tree.reduce:
            add(send, ready[send.src], True)
            # Two children must not add to the same chunks at once: the second comes a level later.
            ready[send.dst] = max(ready[send.dst], ready[send.src]) + 1
        has = {tree.root: ready[tree.root]}
        for send in tree.broadcast:
            add(send, has[send.src], False)
            has[send.dst] = has[send.src] + 1
    return moves
