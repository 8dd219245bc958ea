"""The order nearest to a given one that keeps further precedences: smallest position first.

Kahn's algorithm with a heap of positions. O((ops + precedences) log ops).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from hocket.base.arrays import LongArray, positions
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, new_heaps, zeros
from hocket.kernels.heaps import pop, push
from hocket.planners.memory.storages import Direction, Storages

_ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


@kernel
def _sort(
    ways: Direction, waits: LongArray, position: LongArray, heap: Heaps, order: LongArray
) -> None:
    for op in range(len(waits)):
        if waits[op] == 0:
            push(heap, _ZERO, float(position[op]), op)
    for count in range(len(order)):
        op = pop(heap, _ZERO)
        order[count] = op
        for at in range(ways.after_ptr[op], ways.after_ptr[op + 1]):
            other = ways.after[at]
            waits[other] -= 1
            if waits[other] == 0:
                push(heap, _ZERO, float(position[other]), other)


def legal(storages: Storages, order: LongArray) -> LongArray:
    """The order with as few changes as the precedences of ``storages`` need."""
    ways, num_ops = storages.forwards, storages.num_ops
    found, heap = zeros(num_ops), new_heaps(np.array([0, num_ops + 1]))
    _sort(ways, ways.num_waits.copy(), positions(order), heap, found)
    return found
