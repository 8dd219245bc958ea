"""Demand-driven emission: compute what the next result needs, and nothing before it is needed.

The ops that nobody waits for are visited in the graph's order, and each is preceded by what it
still misses, depth first. Where a file lists ops breadth first, or by chance, this is the better
order to start from. O(ops + precedences).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.storages import Direction, Storages


@kernel
def _emit(
    ways: Direction,
    roots: LongArray,
    has_run: NDArray[np.bool_],
    stack: LongArray,
    place: LongArray,
    order: LongArray,
) -> None:
    count = 0
    for root in roots:
        depth = 0
        stack[0] = root
        # Latest first: what was made last is what is held and waits to be used.
        place[0] = ways.before_ptr[root + 1]
        while depth >= 0:
            op = stack[depth]
            if place[depth] > ways.before_ptr[op]:
                place[depth] -= 1
                other = ways.before[place[depth]]
                if not has_run[other]:
                    depth += 1
                    stack[depth] = other
                    place[depth] = ways.before_ptr[other + 1]
                continue
            depth -= 1
            if not has_run[op]:
                has_run[op] = True
                order[count] = op
                count += 1


def demand_order(storages: Storages) -> LongArray:
    """All ops, each as late as the results before it allow."""
    ways, num_ops = storages.forwards, storages.num_ops
    roots = np.flatnonzero(np.diff(ways.after_ptr) == 0)
    order = zeros(num_ops)
    _emit(ways, roots, np.zeros(num_ops, dtype=np.bool_), zeros(num_ops), zeros(num_ops), order)
    return order
