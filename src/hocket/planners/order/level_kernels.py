"""Longest paths through a placed graph, compiled: to the end, and from the start."""

from __future__ import annotations

from typing import NamedTuple

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel


class Placed(NamedTuple):
    """Ops where they are, and what it takes to send their tensors."""

    device: LongArray
    duration_s: FloatArray
    made_ptr: LongArray
    user_ptr: LongArray
    users: LongArray
    work: FloatArray
    latency_s: FloatArray
    """[src, dst]"""
    unit_s: FloatArray
    """[src, dst]: seconds per unit of work."""


@kernel
def _transfer_s(placed: Placed, tensor: int, src: int, dst: int) -> float:
    if src == dst:
        return 0.0
    seconds: float = placed.latency_s[src, dst] + placed.work[tensor] * placed.unit_s[src, dst]
    return seconds


@kernel
def fill_levels(placed: Placed, to_end_s: FloatArray, from_start_s: FloatArray) -> None:
    """Per op, the longest path from its start to the end, and from the beginning to its start.

    ``from_start_s`` comes in as zeros.
    """
    for op in range(len(placed.device) - 1, -1, -1):
        src, longest_s = placed.device[op], 0.0
        for tensor in range(placed.made_ptr[op], placed.made_ptr[op + 1]):
            for index in range(placed.user_ptr[tensor], placed.user_ptr[tensor + 1]):
                user = placed.users[index]
                sent_s = _transfer_s(placed, tensor, src, placed.device[user])
                longest_s = max(longest_s, sent_s + to_end_s[user])
        to_end_s[op] = placed.duration_s[op] + longest_s
    for op in range(len(placed.device)):
        src, end_s = placed.device[op], from_start_s[op] + placed.duration_s[op]
        for tensor in range(placed.made_ptr[op], placed.made_ptr[op + 1]):
            for index in range(placed.user_ptr[tensor], placed.user_ptr[tensor + 1]):
                user = placed.users[index]
                sent_s = _transfer_s(placed, tensor, src, placed.device[user])
                from_start_s[user] = max(from_start_s[user], end_s + sent_s)
