"""Kahn's topological order with a first-in first-out queue, compiled. O(reads log ops)."""

from __future__ import annotations

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps
from hocket.kernels.heaps import pop, push


@kernel
def _drain(freed: Heaps, order: LongArray, size: int) -> int:
    while freed.size[0] > 0:
        order[size] = pop(freed, ZERO)
        size += 1
    return size


@kernel
def walk(
    made_ptr: LongArray,
    user_ptr: LongArray,
    users: LongArray,
    waits: LongArray,
    freed: Heaps,
    order: LongArray,
) -> None:
    """Fill ``order``; ``waits`` counts reads of made tensors per op, ``freed`` is an empty heap.

    The ops that one op frees come in the order of the graph, whichever of its tensors they read.
    """
    for op in range(len(waits)):
        if waits[op] == 0:
            push(freed, ZERO, float(op), op)
    at, size = ZERO, _drain(freed, order, ZERO)
    while at < size:
        op = order[at]
        at += 1
        for tensor in range(made_ptr[op], made_ptr[op + 1]):
            for index in range(user_ptr[tensor], user_ptr[tensor + 1]):
                user = users[index]
                waits[user] -= 1
                if waits[user] == 0:
                    push(freed, ZERO, float(user), user)
        size = _drain(freed, order, size)
