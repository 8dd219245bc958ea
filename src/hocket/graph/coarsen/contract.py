"""Contraction of a graph of ops into nodes without creating a cycle.

An edge is contracted if it is the only edge from its source or the only edge into its target, the
rule of Baechi: a cycle would need a second path between the two. Many edges are contracted at once:
merging every source that has a single target into that target makes trees. Edges to other trees
leave a tree only from its root, so a cycle of trees would be a cycle of ops; the same holds in the
other direction. Both are done in turn, each on the result of the one before,
until nothing more joins. O(edges log edges) per round, few rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, IntArray, LongArray, positions
from hocket.graph.coarsen.ties import Ties
from hocket.graph.coarsen.units import joined
from hocket.graph.graph import distinct
from hocket.graph.topological_order import ranks


class Edges(NamedTuple):
    """Distinct edges of an acyclic graph."""

    src: NDArray[np.integer[Any]]
    dst: NDArray[np.integer[Any]]


def contracted(part_of_op: LongArray, edges: Edges, label: LongArray) -> LongArray:
    """Join parts of the same label along edges without making a cycle; returns each op's part."""
    label, edges = _label_of_parts(part_of_op, label), quotient(part_of_op, edges)
    num_idle_rounds, by_target = 0, False
    # Two idle rounds: one for each direction.
    while num_idle_rounds < 2:
        end = edges.dst if by_target else edges.src
        is_only = np.bincount(end, minlength=len(label))[end] == 1
        chosen = np.flatnonzero(is_only & (label[edges.src] == label[edges.dst]))
        part = _joined(len(label), Ties(edges.src[chosen], edges.dst[chosen]))
        num_idle_rounds = 0 if len(chosen) else num_idle_rounds + 1
        by_target = not by_target
        part_of_op, edges = part[part_of_op], quotient(part, edges)
        label = _label_of_parts(part, label)
    return part_of_op


def joined_ends(edges: Edges, label: LongArray, is_last: BoolArray) -> LongArray:
    """Join ops of the same label through which no cycle can pass; returns the part of each op.

    An op without any edge joins the first op of its label that has one. Of the ops marked by
    ``is_last``, those that nothing reads become one part per label.
    """
    has_target, has_source = (np.bincount(ends, minlength=len(label)) > 0 for ends in edges)
    is_alone = ~has_target & ~has_source
    alone = np.flatnonzero(is_alone)
    last = np.flatnonzero(is_last & ~has_target & ~is_alone)
    with_alone = _first_of_label(label, alone, np.flatnonzero(~is_alone))
    with_last = _first_of_label(label, last)
    return _joined(len(label), Ties(alone, with_alone[alone]), Ties(last, with_last[last]))


def _first_of_label(label: LongArray, *ops: LongArray) -> LongArray:
    """Per op: the first op of its label in the last of the given lists that contains one."""
    first = np.zeros(int(label.max(initial=0)) + 1, dtype=np.int64)
    for chosen in ops:
        # In reverse, so that the first op of each label is written last and stays.
        first[label[chosen[::-1]]] = chosen[::-1]
    return first[label]


def quotient(part: LongArray, edges: Edges) -> Edges:
    """Return the distinct edges between different parts."""
    src, dst = part[edges.src], part[edges.dst]
    crosses = src != dst
    count = int(part.max(initial=0)) + 1
    # One integer per edge, sorted by target, so that duplicates are adjacent.
    key = distinct(dst[crosses] * count + src[crosses])
    return Edges(key % count, key // count)


def strong_components(edges: Edges, count: int) -> IntArray:
    """Per item: its strongly connected component, numbered by their smallest members."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    matrix = coo_array((np.ones(len(edges.src), dtype=np.bool_), edges), (count, count))
    _, label = connected_components(matrix, directed=True, connection="strong")
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return positions(np.argsort(first))[inverse].astype(np.int32)


def in_order(part_of_op: LongArray, edges: Edges) -> LongArray:
    """Per op: its part, renumbered in a topological order of the edges between ops.

    Of all parts that could be next, the one with the smallest first op comes next.
    """
    num_parts = int(part_of_op.max(initial=-1)) + 1
    first = np.full(num_parts, len(part_of_op))
    np.minimum.at(first, part_of_op, np.arange(len(part_of_op)))
    rank = ranks(first, *quotient(part_of_op, edges))
    assert rank.min(initial=0) >= 0, "parts in a cycle have no order"
    return rank[part_of_op]


def _joined(count: int, *ties: Ties) -> LongArray:
    return joined(count, *ties).astype(np.int64)


def _label_of_parts(part: LongArray, label: LongArray) -> LongArray:
    labels = np.zeros(int(part.max(initial=-1)) + 1, dtype=np.int64)
    labels[part] = label
    return labels
