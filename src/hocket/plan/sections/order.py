"""The order section: in which order each device runs its ops, in one of two forms."""

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

_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, eq=False, kw_only=True)
class Order(Section):
    """A strict order per device, or what decides between ops that are ready; never both."""

    by_device: tuple[IntArray, ...] | None = None
    """Per device, its ops in the order in which they run."""
    priority: FloatArray | None = None
    """Of the ops that are ready, the device runs the one with the smallest value first."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        if self.by_device is not None:
            return {"by_device": [sequence.tolist() for sequence in self.by_device]}
        assert self.priority is not None
        return {"priority": self.priority.tolist()}

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Order:
        """The section of such data."""
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
        """Each device's ops once, and no contradiction of a dependency. O(ops + reads)."""
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
            op = names[odd[0]] if len(odd) and 0 <= odd[0] < len(names) else ""
            yield Violation(
                "order", f"the order of {name!r} is not its ops, each once ({op!r})", op, name
            )


def _precedence(order: tuple[IntArray, ...], problem: Problem) -> Iterator[Violation]:
    """Dependencies and planned order together must have no cycle."""
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
    sizes = np.bincount(label)
    op = int(np.flatnonzero(sizes[label] > 1)[0])
    name = problem.graph.op_names[op]
    yield Violation(
        "precedence",
        f"in the planned order op {name!r} would have to run before what it reads",
        name,
    )
