"""The order section: the order in which each device runs its ops.

It is either a strict order per device, or a priority per op that decides between ready ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base import fields
from hocket.base.arrays import FloatArray, IntArray
from hocket.base.errors import InputFileError
from hocket.plan.sections.placement import Placement
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

# Infinity is the simulator's mark for undecided positions, so files may not contain it.
_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, eq=False, kw_only=True)
class Order(Section):
    """A strict order per device, or priorities between ready ops; never both."""

    by_device: tuple[IntArray, ...] | None = None
    """Ops of each device in the order in which they run."""
    priority: FloatArray | None = None
    """Priority of each op: a device runs the ready op with the smallest value first."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        if self.by_device is not None:
            return {"by_device": [sequence.tolist() for sequence in self.by_device]}
        assert self.priority is not None
        return {"priority": self.priority.tolist()}

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Order:
        """Read the section from plain data; raises `InputFileError`."""
        entry = fields.record(data, "order", optional=("by_device", "priority"))
        if len(entry) != 1:
            what = "has both by_device and priority" if entry else "says nothing"
            raise InputFileError(f"order {what}", hint="state one of the two")
        num_ops = problem.graph.num_ops
        if "priority" in entry:
            path, hint = "order.priority", "one number for each op of the graph"
            fields.sized(entry["priority"], path, num_ops, hint)
            numbers = fields.float_column(entry["priority"], path, -_LARGEST, _LARGEST)
            return cls(priority=numbers)
        path, hint = "order.by_device", "one list of ops for each device"
        rows = fields.sized(entry["by_device"], path, problem.cluster.num_devices, hint)
        columns = (
            fields.int_column(row, f"{path}[{n}]", 0, num_ops - 1) for n, row in enumerate(rows)
        )
        return cls(by_device=tuple(column.astype(np.int32) for column in columns))

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check that devices run their ops once, in an order without deadlock. O(ops + reads)."""
        placement = plan.get(Placement)
        if placement is None:
            yield Violation("order", "the plan orders ops that it does not place")
            return
        num_ops, priority = problem.graph.num_ops, self.priority
        if self.by_device is not None and priority is not None:
            yield Violation("order", "the plan has both an order and priorities")
        if priority is not None and (len(priority) != num_ops or np.any(np.isnan(priority))):
            yield Violation("order", "priorities must be one number per op")
        if self.by_device is not None:
            # A cycle can only be looked for in lists that name each op once.
            wrong = list(_not_once(self.by_device, placement.device_of, problem))
            yield from wrong or _precedence(self.by_device, problem)


def _not_once(
    order: tuple[IntArray, ...], device_of: IntArray, problem: Problem
) -> Iterator[Violation]:
    if len(order) != problem.cluster.num_devices:
        yield Violation("order", f"{len(order)} orders for {problem.cluster.num_devices} devices")
        return
    names = problem.graph.op_names
    for device, sequence in enumerate(order):
        name = problem.cluster.devices[device].name
        expected = np.flatnonzero(device_of == device)
        if not np.array_equal(np.sort(sequence), expected):
            odd = np.setxor1d(sequence, expected)
            op = names[int(odd[0])] if len(odd) and 0 <= odd[0] < len(names) else ""
            yield Violation(
                "order", f"the order of {name!r} is not its ops, each once ({op!r})", op, name
            )


def _precedence(order: tuple[IntArray, ...], problem: Problem) -> Iterator[Violation]:
    """Check that dependencies and planned order together have no cycle."""
    if all(np.all(np.diff(sequence) > 0) for sequence in order):
        return  # ascending positions of a topological order contradict nothing
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num_ops = problem.graph.num_ops
    src, dst = problem.graph.edges
    before = np.concatenate([src, *(sequence[:-1] for sequence in order)])
    after = np.concatenate([dst, *(sequence[1:] for sequence in order)])
    matrix = coo_array((np.ones(len(before), dtype=bool), (before, after)), (num_ops, num_ops))
    count, label = connected_components(matrix, directed=True, connection="strong")
    if count == num_ops:
        return
    inside = int(np.flatnonzero(label[src] == label[dst])[0])
    producer, reader = (problem.graph.op_names[ops[inside]] for ops in (src, dst))
    yield Violation(
        "precedence",
        f"in the planned order op {reader!r} can never start: it reads a result of {producer!r}, "
        "which runs after it or waits for it",
        reader,
    )
