"""Heads and tails: how early each op can start, and how much must follow its end.

Take op j on a device of a given class. A predecessor i is either on the same device or its tensor
was transferred; then j starts no earlier than end(i) + transfer. The same holds for any ancestor:
if it is on another device, each path from it to j has at least one transfer. So for a start before
some time T, every ancestor that could not arrive from elsewhere before T ran on j's device, one
after another with all others of that kind, none before its own head. The head of j is the smallest
T for which they fit before T: ancestors join in the order in which they force themselves in, until
the next one need not. Nothing is assumed about transfers but their least time, so the bound holds
for every transfer mode. Tails are heads of the reversed graph: children that must stay with their
parent run one after another behind it.

The idea of ancestors that must sit together is from Papadimitriou and Yannakakis, "Towards an
architecture-independent analysis of parallel algorithms" (1990), with transfers of different length
as in Jain and Rajaraman (1994) and without running ops twice.
O(classes · (reads · classes + ops · m (m + log reads))) with at most m ops put together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.graph.graph import Graph
from hocket.kernels.containers import table
from hocket.planners.bounds.classes import BoundClasses
from hocket.planners.bounds.tables import Sides, new_together, new_tree
from hocket.planners.bounds.units import BoundUnits


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads:
    """Per class and op, for any plan that puts the op on that class; infinite where none does."""

    head_s: FloatArray
    """[class, op]: the op starts no earlier."""
    tail_s: FloatArray
    """[class, op]: the step ends at least this long after the op."""

    def path_s(self, op_s: FloatArray) -> FloatArray:
        """Per op: the shortest step that any class allows it."""
        shortest: FloatArray = (self.head_s + op_s + self.tail_s).min(axis=0)
        return shortest


def find_heads(graph: Graph, units: BoundUnits, classes: BoundClasses) -> Heads:
    """Heads and tails of all ops."""
    return Heads(
        head_s=_one_side(_before(graph), graph.num_ops, units, classes, backwards=False),
        tail_s=_one_side(_after(graph), graph.num_ops, units, classes, backwards=True),
    )


def windows_s(
    part_of_op: LongArray, head_s: FloatArray, tail_s: FloatArray, work_s: FloatArray
) -> FloatArray:
    """Per part, a set of ops: the largest smallest head + sum of work + smallest tail over subsets.

    Where the work of a part is done one after another, or is the share of it that falls to each
    device, no step is shorter. The largest is reached by a subset of all ops with heads and tails
    from some value on. O(ops log ops).
    """
    from hocket.planners.bounds import kernels

    num_parts = int(part_of_op.max(initial=-1)) + 1
    sizes = np.bincount(part_of_op, minlength=num_parts)
    ptr = pointers(sizes)
    by_tail = np.lexsort((tail_s, part_of_op))
    leaf = np.empty(len(part_of_op), dtype=np.int64)
    leaf[by_tail] = np.arange(len(part_of_op)) - np.repeat(ptr[:-1], sizes)
    longest_s = np.zeros(num_parts)
    kernels.find_windows(
        table(ptr, np.int64),
        table(np.lexsort((-head_s, part_of_op)), np.int64),
        table(leaf, np.int64),
        table(head_s, np.float64),
        table(tail_s, np.float64),
        table(work_s, np.float64),
        new_tree(int(sizes.max(initial=1))),
        longest_s,
    )
    return longest_s


def _before(graph: Graph) -> tuple[LongArray, LongArray, LongArray]:
    """Per op, ascending: itself, what it reads, and the ops that make that."""
    reader = graph.reader
    producer = graph.tensor_producer[graph.reads]
    made = producer >= 0
    return reader[made], graph.reads[made].astype(np.int64), producer[made].astype(np.int64)


def _after(graph: Graph) -> tuple[LongArray, LongArray, LongArray]:
    """Per op, ascending: itself, what it makes, and the ops that read that."""
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.user_ptr))
    producer = graph.tensor_producer[tensor].astype(np.int64)
    made = producer >= 0
    return producer[made], tensor[made], graph.users[made].astype(np.int64)


def _one_side(
    neighbours: tuple[LongArray, LongArray, LongArray],
    num_ops: int,
    units: BoundUnits,
    classes: BoundClasses,
    *,
    backwards: bool,
) -> FloatArray:
    from hocket.planners.bounds import kernels

    op, tensor, other = neighbours
    degree = np.bincount(op, minlength=num_ops)
    work = classes.work[tensor]
    joined = np.isfinite(classes.latency_s)
    least_unit_s = classes.unit_s[joined].min() if joined.any() else 0.0
    sides = Sides(
        ptr=table(pointers(degree), np.int64),
        op=table(other, np.int64),
        work=table(work, np.float64),
        least_s=table(classes.latency_s.min() + work * least_unit_s, np.float64),
        latency_s=table(classes.latency_s.T if backwards else classes.latency_s, np.float64),
        unit_s=table(classes.unit_s.T if backwards else classes.unit_s, np.float64),
        op_s=table(classes.op_s.min(axis=0), np.float64),
        unit=table(units.of_op, np.int64),
        end_s=np.full(num_ops, np.inf),
    )
    start_s, end_s = np.empty_like(classes.op_s), np.empty_like(classes.op_s)
    together = new_together(num_ops, int(degree.max(initial=0)))
    op_s = table(classes.op_s, np.float64)
    kernels.find_heads(sides, op_s, together, start_s, end_s, backwards)
    return start_s
