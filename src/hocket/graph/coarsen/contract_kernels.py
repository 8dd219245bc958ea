"""Topological order in compiled code. O(edges + nodes log nodes)."""

from __future__ import annotations

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps
from hocket.kernels.heaps import pop, push


@kernel
def rank_nodes(
    target_ptr: LongArray,
    targets: LongArray,
    position: FloatArray,
    waits: LongArray,
    ready: Heaps,
    rank: LongArray,
) -> None:
    """Rank of each node in the topological order that takes the smallest position first.

    ``waits`` comes with the number of sources of each node.
    """
    for node in range(len(rank)):
        if waits[node] == 0:
            push(ready, ZERO, position[node], node)
    num_ranked = 0
    while ready.size[0] > 0:
        node = pop(ready, ZERO)
        rank[node] = num_ranked
        num_ranked += 1
        for index in range(target_ptr[node], target_ptr[node + 1]):
            target = targets[index]
            waits[target] -= 1
            if waits[target] == 0:
                push(ready, ZERO, position[target], target)
