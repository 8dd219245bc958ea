"""What no placement can get below: the bytes of ops that must sit together, and of the whole step.

An op needs all that it reads, makes and works with at one instant; ops that must sit together also
need, all the time, what lives with them from before the step. At its end a step holds everything
that stays. O(ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Graph
from hocket.planners.placement.memory.ledger import home_ops


def held_at_end_bytes(graph: Graph) -> int:
    """Bytes on all devices together when the step ends, at least."""
    stays = np.zeros(graph.num_tensors, dtype=np.bool_)
    stays[graph.root_of[graph.is_held]] = True
    return int(graph.held_bytes[stays].sum())


def tie_needs(graph: Graph, tie_of: IntArray) -> LongArray:
    """Bytes that the device of each set of tied ops must have, at least."""
    count, root = int(tie_of.max(initial=-1)) + 1, graph.root_of
    before, home = graph.tensor_producer < 0, home_ops(graph)
    lives = np.flatnonzero(before & (home >= 0) & (graph.alias_of < 0))
    always = np.zeros(count, dtype=np.int64)
    np.add.at(always, tie_of[home[lives]], graph.tensor_bytes[lives])

    made = np.flatnonzero(~before & graph.is_held & (graph.alias_of < 0))
    at_end = always.copy()
    np.add.at(at_end, tie_of[graph.tensor_producer[made]], graph.tensor_bytes[made])

    at_once = np.zeros(count, dtype=np.int64)
    np.maximum.at(at_once, tie_of, _op_bytes(graph, tie_of, np.where(before, home, -1)[root]))
    least: LongArray = np.maximum(always + at_once, at_end)
    return least


def _op_bytes(graph: Graph, tie_of: IntArray, home_of_storage: IntArray) -> LongArray:
    """Bytes that each op needs while it runs, besides what lives with its tied ops anyway.

    Of several views of one storage only the largest is sure to take bytes of its own.
    """
    size = _least_bytes(graph)
    reader = graph.reader
    home = home_of_storage[graph.reads]
    lives_here = (home >= 0) & (tie_of[home] == tie_of[reader])
    reader, tensor = reader[~lives_here], graph.reads[~lives_here]
    order = np.lexsort((-size[tensor], graph.root_of[tensor], reader))
    reader, tensor = reader[order], tensor[order]
    storage = graph.root_of[tensor]
    is_largest = np.ones(len(reader), dtype=np.bool_)
    is_largest[1:] = (reader[1:] != reader[:-1]) | (storage[1:] != storage[:-1])
    needed = graph.workspace_bytes.astype(np.int64)
    np.add.at(needed, reader[is_largest], size[tensor[is_largest]])
    made = np.flatnonzero(graph.tensor_producer >= 0)
    np.add.at(needed, graph.tensor_producer[made], graph.held_bytes[made])
    return needed


def _least_bytes(graph: Graph) -> LongArray:
    """Bytes that each tensor takes where it is, at least: as a copy, or in what it is a view of.

    An expanded view is larger than its storage, a slice smaller.
    """
    least = graph.tensor_bytes.astype(np.int64)
    base = np.where(graph.alias_of >= 0, graph.alias_of, np.arange(graph.num_tensors))
    while True:
        # Each round doubles the length of the chains that are followed.
        least = np.minimum(least, least[base])
        if np.array_equal(further := base[base], base):
            return least
        base = further
