"""Matching by weight, compiled; what it does stands in `matching`."""

from __future__ import annotations

from hocket.base.arrays import FloatArray, IntArray
from hocket.kernels import kernel
from hocket.planners.favourites.net import ReaderPairs


@kernel
def _best_offer(net: ReaderPairs, weight: FloatArray, chosen: IntArray, op: int) -> int:
    """The heaviest edge into ``op`` that its producer would take instead of what it has; or -1."""
    best = -1
    for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
        if weight[edge] <= 0.0 or (best >= 0 and weight[edge] <= weight[best]):
            continue
        rival = chosen[net.src[edge]]
        if rival >= 0 and weight[rival] > weight[edge]:
            continue
        if rival < 0 or weight[rival] < weight[edge] or edge < rival:
            best = edge
    return best


@kernel
def match_heaviest(net: ReaderPairs, weight: FloatArray, chosen: IntArray, taken: IntArray) -> None:
    """Match producers and readers as if edges were taken from the heaviest down, ties in order.

    ``chosen`` gets the edge of each producer, ``taken`` that of each reader, -1 for none.
    """
    for op in range(len(chosen)):
        chosen[op] = taken[op] = -1
    for op in range(len(chosen)):
        reader = op
        while reader >= 0:
            edge = _best_offer(net, weight, chosen, reader)
            if edge < 0:
                break
            rival = chosen[net.src[edge]]
            chosen[net.src[edge]] = taken[reader] = edge
            reader = -1
            if rival >= 0:
                reader = net.dst[rival]
                taken[reader] = -1


@kernel
def match_once(net: ReaderPairs, weight: FloatArray, chosen: IntArray, taken: IntArray) -> None:
    """One matching; see `match_heaviest`."""
    match_heaviest(net, weight, chosen, taken)
