"""Co-placement: sets of ops that share a device, chosen before placement.

Some ties are mandatory (groups of the graph, in-place updates on the device that stores the
tensor). The others save transfers that no good placement would make: backward ops are placed with
their forward op, views with their base, optimizer ops with their parameter, and an op whose results
go to a single unit with that unit. Chains of such ties can join whole models, so soft ties join
units only while the time and bytes of the result stay below a cap. O(ops + reads) per round of
chains, few rounds.

After the co-placement of Jeon et al., "Baechi: fast device placement of machine learning graphs",
SoCC 2020, which has no caps.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.coarsen.ties import (
    Ties,
    followers,
    hard_ties,
    in_place,
    is_linked,
    isolated,
    of_forward_ops,
    optimizers,
    partners,
    views,
)
from hocket.graph.coarsen.units import (
    Readers,
    UnitForest,
    find_sole_readers,
    join,
    joined,
    numbered,
    single_units,
)
from hocket.graph.graph import Graph, Phase
from hocket.kernels.containers import table

CHAIN_SHARE = 0.25
"""Fraction of the time cap at which chains stop.

Branches that could run in parallel end in one reader, and larger units would absorb them.
"""
_MAX_CHAIN_ROUNDS = 32
"""Limit on rounds of following chains and joining; real graphs take two or three rounds."""


def co_placed(
    graph: Graph,
    op_s: FloatArray,
    *,
    max_group_s: float,
    max_group_bytes: int,
    joins_gradients: bool = True,
) -> IntArray:
    """Per op: its co-placement unit, numbered by the first op of each unit.

    ``op_s`` are seconds per op. A unit exceeds a cap only by ops that must stay together: hard
    ties, backward ops with their partners, and views. With ``joins_gradients``, ops that add to one
    gradient in place (those of all time steps of a recurrent layer) are tied like other in-place
    ops.
    """
    units = single_units(np.where(np.isfinite(op_s), op_s, 0.0), brought_bytes(graph))
    for ties in (*hard_ties(graph), partners(graph), views(graph)):
        join(units, ties)
    # Several accumulations in one buffer would tie all time steps of a recurrent layer.
    worked_on = in_place(graph) if joins_gradients else of_forward_ops(graph, in_place(graph))
    for ties in (worked_on, optimizers(graph), followers(graph), isolated(graph)):
        # The order sets priorities: earlier ties use up the caps first.
        join(units, ties, max_group_s, max_group_bytes)
    _join_chains(graph, units, CHAIN_SHARE * max_group_s, max_group_bytes)
    return numbered(units)


def tied_ops(graph: Graph) -> IntArray:
    """Per op: the set of ops that move with its forward op, from hard and soft ties without caps.

    Unlike `co_placed` it follows no chains, and joins neither isolated ops nor in-place updates of
    results of the step.
    """
    soft = (partners(graph), views(graph), optimizers(graph), followers(graph))
    return joined(graph.num_ops, *hard_ties(graph), *soft)


def bound_ops(graph: Graph) -> IntArray:
    """Per op: its set of ops that no legal plan may separate, from hard ties only."""
    return joined(graph.num_ops, *hard_ties(graph))


def anchor_of(graph: Graph, unit_of: IntArray) -> IntArray:
    """Per unit: the op that represents its position in the forward pass.

    This is its first forward op that does work and has an edge to another op, because views of
    parameters, counters and backward ops can be ready long before and do not show where in the
    model the unit belongs. Units without such an op use their first forward op, else their first
    op.
    """
    is_forward = graph.op_phase == Phase.FORWARD
    rank = np.where(is_forward, np.where(graph.works & is_linked(graph), 0, 1), 2)
    order = np.lexsort((np.arange(graph.num_ops), rank, unit_of))
    _, first = np.unique(unit_of[order], return_index=True)
    return order[first].astype(np.int32)


def brought_bytes(graph: Graph) -> LongArray:
    """Per op: bytes that it keeps on its device for long.

    These are tensors from before the step that it is the first to read, its results that are held
    to the end of the step, and the activations that it makes for backward ops.
    """
    root, made = graph.root_of, graph.tensor_producer >= 0
    reader_phase = graph.op_phase[graph.users]
    is_saved = np.zeros(graph.num_tensors, dtype=np.bool_)
    read_tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.user_ptr))
    is_saved[root[read_tensor[reader_phase == Phase.BACKWARD]]] = True
    is_saved &= made & (graph.op_phase[np.where(made, graph.tensor_producer, 0)] == Phase.FORWARD)
    is_saved[root[graph.is_held]] = True
    counted = np.flatnonzero(is_saved & (graph.alias_of < 0) & (graph.owner_op >= 0))
    sums = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(sums, graph.owner_op[counted], graph.tensor_bytes[counted])
    return sums


def _join_chains(graph: Graph, units: UnitForest, max_s: float, max_bytes: int) -> None:
    """Join ops with the only other unit that reads their results, heaviest results first.

    This applies only to forward ops: gradients flow from all readers of a tensor to its producer,
    so for backward ops the rule would join branches that can run in parallel.
    """
    readers = Readers(
        table(graph.made_ptr, np.int64),
        table(graph.user_ptr, np.int64),
        table(graph.users, np.int64),
    )
    made = np.concatenate(([0], np.cumsum(graph.tensor_bytes)))
    weight = np.diff(made[graph.made_ptr])
    sole = np.empty(graph.num_ops, dtype=np.int64)
    for _ in range(_MAX_CHAIN_ROUNDS):
        find_sole_readers(units, readers, sole)
        ops = np.flatnonzero((sole >= 0) & (graph.op_phase == Phase.FORWARD))
        # Heaviest results first; of equals the later op, so that chains grow from their ends.
        ops = ops[np.lexsort((-ops, -weight[ops]))]
        if not join(units, Ties(ops, sole[ops]), max_s, max_bytes):
            break
