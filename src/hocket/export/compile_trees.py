"""A planned collective as a program: who sends which chunks to whom, in an order without deadlock.

Every tree gets a range of chunks. All sends are in one global order, by level and then by tree;
a rank has one thread block for each neighbour that it sends to and one for each that it receives
from, and every block does its part of that order. A step only waits for steps of lower levels, so
nothing can wait in a circle. Shares become whole chunks: exactly where the denominators allow it
within a limit, otherwise rounded, and the loss is stated. O(sends).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

from hocket.base.errors import UsageError
from hocket.export.program import BlockStep, CollectiveProgram, Slot, ThreadBlock
from hocket.plan.sections.communication import Communication, Send

MAX_CHUNKS = 1024
"""Chunks of the whole message; executors hold a table of them."""
MAX_COUNT = 72
"""Chunks that one step may move in MSCCL's executors."""


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
    if section.collective == "alltoall":
        raise UsageError(
            "an all-to-all cannot be exported as a program yet",
            hint="write the schedule itself with -o",
        )
    number = {rank: index for index, rank in enumerate(section.ranks)}
    ranges, total, change = _ranges(section, max_chunks)
    moves = sorted(_moves(section, ranges, number), key=lambda m: (m.level, m.tree, m.first))
    return OrderedSends(tuple(moves), tuple(ranges), total, change)


def program_of(
    section: Communication, *, max_chunks: int = MAX_CHUNKS
) -> tuple[CollectiveProgram, float]:
    """The program, and the largest relative change of a share by rounding (0 where exact)."""
    compiled = moves_of(section, max_chunks=max_chunks)
    total, moves, count = compiled.num_chunks, compiled.moves, len(section.ranks)
    each = total // count
    is_gather = section.collective == "allgather"
    is_scatter = section.collective == "reducescatter"
    blocks = _Blocks(count, "o" if is_gather else "i")
    if is_gather:
        for rank in range(count):
            blocks.copy(rank, Slot("i", 0), Slot("o", rank * each), each, rank * each)
    for move in moves:
        blocks.add(move)
    if is_scatter:
        for rank in range(count):
            blocks.copy_after(rank, rank * each, each)
    return CollectiveProgram(
        name=f"hocket {section.algorithm}",
        collective=section.collective,
        blocks=blocks.finished(),
        num_input=(each if is_gather else total,) * count,
        num_output=(each if is_scatter else total,) * count,
        num_scratch=(0,) * count,
        in_place=not (is_gather or is_scatter),
        root=section.ranks.index(section.root),
    ), compiled.change


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
    """Whole numbers of chunks that add up, those with the largest rests rounded up."""
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


class _Blocks:
    """Thread blocks under construction, and which step last wrote which chunk of each rank."""

    def __init__(self, count: int, buffer: str) -> None:
        self.buffer = buffer
        self.steps: list[dict[tuple[str, int], list[BlockStep]]] = [{} for _ in range(count)]
        self.written: list[dict[int, tuple[tuple[str, int], int]]] = [{} for _ in range(count)]

    def add(self, move: RangeSend) -> None:
        slot = Slot(self.buffer, move.first)
        chunks = range(move.first, move.first + move.count)
        self._append(move.src, ("send", move.dst), chunks,
                     BlockStep(sources=(slot,), count=move.count, sends=True))  # fmt: skip
        key = ("receive", move.src)
        step = BlockStep(
            sources=(slot,) if move.is_reduce else (), targets=(slot,), count=move.count,
            receives=True,
        )  # fmt: skip
        self._append(move.dst, key, chunks if move.is_reduce else range(0), step)
        self._wrote(move.dst, key, chunks)

    def copy(self, rank: int, src: Slot, dst: Slot, count: int, first: int) -> None:
        key = ("copy", 0)
        self._append(rank, key, range(0), BlockStep(sources=(src,), targets=(dst,), count=count))
        self._wrote(rank, key, range(first, first + count))

    def copy_after(self, rank: int, first: int, count: int) -> None:
        """The rank's part of a reduced input into its output, once it is there."""
        step = BlockStep(sources=(Slot("i", first),), targets=(Slot("o", 0),), count=count)
        self._append(rank, ("copy", 0), range(first, first + count), step)

    def _wrote(self, rank: int, key: tuple[str, int], chunks: range) -> None:
        last = (key, len(self.steps[rank][key]) - 1)
        self.written[rank].update(dict.fromkeys(chunks, last))

    def _append(self, rank: int, key: tuple[str, int], reads: range, step: BlockStep) -> None:
        """A step that waits for all that wrote what it reads; more than one needs empty steps."""
        steps = self.steps[rank].setdefault(key, [])
        waits = {self.written[rank][c] for c in reads if c in self.written[rank]}
        needed = sorted({(k, n) for k, n in waits if k != key})
        latest: dict[tuple[str, int], int] = {}
        for other, index in needed:
            latest[other] = max(latest.get(other, 0), index)
        pending = list(latest.items())
        for other, index in pending[:-1]:
            steps.append(BlockStep(waits_for=(hash_of(other), index)))
        if pending:
            other, index = pending[-1]
            step = replace(step, waits_for=(hash_of(other), index))
        steps.append(step)

    def finished(self) -> tuple[tuple[ThreadBlock, ...], ...]:
        """The blocks with their numbers in place of their names."""
        return tuple(self._finished(rank) for rank in range(len(self.steps)))

    def _finished(self, rank: int) -> tuple[ThreadBlock, ...]:
        keys = sorted(self.steps[rank])
        number = {hash_of(key): index for index, key in enumerate(keys)}
        blocks = []
        for kind, peer in keys:
            steps = tuple(
                step if step.waits_for is None
                else replace(step, waits_for=(number[step.waits_for[0]], step.waits_for[1]))
                for step in self.steps[rank][kind, peer]
            )  # fmt: skip
            blocks.append(
                ThreadBlock(
                    steps,
                    receives_from=(peer, 0) if kind == "receive" else None,
                    sends_to=(peer, 0) if kind == "send" else None,
                )
            )
        return tuple(blocks)


def hash_of(key: tuple[str, int]) -> int:
    """A number for a block that has none yet."""
    return ("copy", "receive", "send").index(key[0]) * 2**20 + key[1]
