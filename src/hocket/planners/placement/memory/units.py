"""What moves as one when memory is short, from large to small.

Layers are units that read the same parameters: together they need them once. Units are ops that
gain nothing from being apart (an op, its backward op, its optimizer op). Ties are the least that
every plan must keep: groups, and updates in place with the tensor that they update. O(ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import IntArray
from hocket.graph.coarsen.ties import Ties, followers, hard_ties, optimizers, partners, views
from hocket.graph.graph import Graph, Phase, Role
from hocket.planners.placement.memory.ledger import home_ops


def units(graph: Graph) -> IntArray:
    """The unit of each op."""
    idle = views(graph)
    # A backward view already follows its forward op; tied to what it views as well, it would join
    # the units on both sides.
    kept = (graph.op_phase[idle.first] == Phase.FORWARD) | (graph.partner[idle.first] < 0)
    soft = (
        partners(graph),
        Ties(idle.first[kept], idle.second[kept]),
        optimizers(graph),
        followers(graph),
    )
    return _joined(graph.num_ops, [*hard_ties(graph), *soft])


def ties(graph: Graph) -> IntArray:
    """The smallest sets of ops that may move, per op."""
    return _joined(graph.num_ops, list(hard_ties(graph)))


def layers(graph: Graph, unit_of: IntArray) -> IntArray:
    """The layer of each op: units that read the same parameters or state are in one."""
    root, home = graph.root_of[graph.reads], home_ops(graph)
    is_shared = (home >= 0) & (graph.tensor_role != Role.INPUT) & (graph.tensor_bytes > 0)
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
    kept = is_shared[root]
    num_units = int(unit_of.max(initial=-1)) + 1
    layer_of_unit = _joined(num_units, [Ties(unit_of[reader[kept]], unit_of[home[root[kept]]])])
    return _numbered(layer_of_unit[unit_of])


def _joined(count: int, pairs: list[Ties]) -> IntArray:
    """Components of the given pairs, numbered by their first member."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rows = np.concatenate([tie.first for tie in pairs]).astype(np.int32)
    cols = np.concatenate([tie.second for tie in pairs]).astype(np.int32)
    matrix = coo_array((np.ones(len(rows), dtype=bool), (rows, cols)), (count, count))
    _, label = connected_components(matrix, directed=False)
    return _numbered(label)


def _numbered(label: IntArray) -> IntArray:
    """The same sets, numbered by their first member."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse].astype(np.int32)
