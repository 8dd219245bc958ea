"""What moves as one when memory is short, from large to small.

Layers are units that read the same parameters: together they need them once. Units are ops that
gain nothing from being apart (an op, its backward op, its optimizer op). The least is what every
plan must keep together (`bound_ops`). O(ops + reads).
"""

from __future__ import annotations

from hocket.base.arrays import IntArray
from hocket.graph.coarsen.ties import Ties, followers, hard_ties, optimizers, partners, views
from hocket.graph.coarsen.units import joined
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
    return joined(graph.num_ops, *hard_ties(graph), *soft)


def layers(graph: Graph, unit_of: IntArray) -> IntArray:
    """The layer of each op: units that read the same parameters or state are in one."""
    root, home = graph.root_of[graph.reads], home_ops(graph)
    is_shared = (home >= 0) & (graph.tensor_role != Role.INPUT) & (graph.tensor_bytes > 0)
    reader = graph.reader
    kept = is_shared[root]
    num_units = int(unit_of.max(initial=-1)) + 1
    same = Ties(unit_of[reader[kept]], unit_of[home[root[kept]]])
    # Units and layers are both numbered by their first members, so layers are by their first ops.
    return joined(num_units, same)[unit_of]
