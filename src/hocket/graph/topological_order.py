"""Topological order of ops or nodes, smallest position first, in compiled code.

Kahn's algorithm with a heap of the items whose sources are all listed. O(edges log items).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.base.errors import InputFileError
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps, new_heaps, table
from hocket.kernels.heaps import pop, push

Numbers = NDArray[np.integer[Any]]


def topological_order(
    names: Sequence[str], producer: IntArray, read_ptr: LongArray, reads: IntArray
) -> IntArray:
    """Return a topological order of the ops: the given order if it is one.

    Raises `InputFileError` with the name of an op that depends on itself.
    """
    num_ops = len(names)
    reader = np.repeat(np.arange(num_ops, dtype=np.int32), np.diff(read_ptr))
    made_by = producer[reads]
    # The given order is valid, so files of sorted graphs skip the heap.
    if np.all(made_by < reader):
        return np.arange(num_ops, dtype=np.int32)
    inner = made_by >= 0
    rank = ranks(np.arange(num_ops), made_by[inner], reader[inner])
    # Items on a cycle, or after one, never reach zero waiting sources.
    stuck = np.flatnonzero(rank < 0)
    if len(stuck):
        raise InputFileError(
            f"op {names[stuck[0]]!r} depends on itself through a cycle",
            hint="remove one of the dependencies of the cycle",
        )
    return np.argsort(rank).astype(np.int32)


def ranks(position: LongArray, src: Numbers, dst: Numbers) -> LongArray:
    """Per item: its place in a topological order of the edges; -1 after or on a cycle."""
    num_items = len(position)
    by_src = np.argsort(src, kind="stable")
    rank = np.full(num_items, -1, dtype=np.int64)
    _fill_ranks(
        table(pointers(np.bincount(src, minlength=num_items)), np.int64),
        table(dst[by_src], np.int64),
        table(position, np.float64),
        np.bincount(dst, minlength=num_items).astype(np.int64),
        new_heaps(np.array([0, num_items], dtype=np.int64)),
        rank,
    )
    return rank


@kernel
def _fill_ranks(
    target_ptr: LongArray,
    targets: LongArray,
    position: FloatArray,
    waits: LongArray,
    ready: Heaps,
    rank: LongArray,
) -> None:
    """Fill ``rank``; ``waits`` initially holds the number of sources of each item."""
    for item in range(len(rank)):
        if waits[item] == 0:
            push(ready, ZERO, position[item], item)
    num_ranked = 0
    while ready.size[0] > 0:
        item = pop(ready, ZERO)
        rank[item] = num_ranked
        num_ranked += 1
        for index in range(target_ptr[item], target_ptr[item + 1]):
            target = targets[index]
            waits[target] -= 1
            if waits[target] == 0:
                push(ready, ZERO, position[target], target)
