"""The placement section: the device that runs each op.

Every op must be on an existing device that can run it, and ops of one group on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base import fields
from hocket.base.arrays import IntArray
from hocket.base.errors import InputFileError
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem


@dataclass(frozen=True, eq=False)
class Placement(Section):
    """The device of each op."""

    device_of: IntArray

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {"device_of": self.device_of.tolist()}

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Placement:
        """Read the section from plain data; raises `InputFileError`."""
        entry = fields.record(data, "placement", required=("device_of",), optional=("devices",))
        names = list(problem.cluster.device_names)
        if entry.get("devices", names) != names:
            raise InputFileError("placement.devices are not the devices of the plan's cluster")
        path, num_ops = "placement.device_of", problem.graph.num_ops
        fields.sized(entry["device_of"], path, num_ops, "one device for each op of the graph")
        last = problem.cluster.num_devices - 1
        return cls(fields.int_column(entry["device_of"], path, 0, last).astype(np.int32))

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check that every op is on a device that can run it, with its group. O(ops)."""
        wrong = list(self.wrong_devices(problem))
        # Ops on missing devices would make the check of groups fail.
        yield from wrong or self._groups_apart(problem)

    def wrong_devices(self, problem: Problem) -> Iterator[Violation]:
        """Yield ops on devices that do not exist or cannot run them."""
        yield from list(self._misplaced(problem)) or self._unable(problem)

    def _misplaced(self, problem: Problem) -> Iterator[Violation]:
        names, num_devices = problem.graph.op_names, problem.cluster.num_devices
        device_of = self.device_of
        if len(device_of) != len(names):
            yield Violation("placed", f"{len(device_of)} placements for {len(names)} ops")
            return
        for op in np.flatnonzero((device_of < 0) | (device_of >= num_devices)):
            yield Violation(
                "placed",
                f"op {names[op]!r} is on device {device_of[op]}, but there are {num_devices}",
                op=names[op],
            )

    def _unable(self, problem: Problem) -> Iterator[Violation]:
        costs, device_of = problem.costs, self.device_of
        seconds = costs.op_s[costs.device_row[device_of], np.arange(len(device_of))]
        for op in np.flatnonzero(~np.isfinite(seconds)):
            name, device = problem.graph.op_names[op], problem.cluster.devices[device_of[op]].name
            yield Violation("can run", f"op {name!r} cannot run on {device!r}", name, device)

    def _groups_apart(self, problem: Problem) -> Iterator[Violation]:
        graph, device_of = problem.graph, self.device_of
        grouped = np.flatnonzero(graph.group >= 0)
        if not len(grouped):
            return
        _, first, member = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
        leader = grouped[first][member]
        apart = device_of[grouped] != device_of[leader]
        names = problem.cluster.device_names
        for op, first_op in zip(grouped[apart], leader[apart], strict=True):
            device, other = names[device_of[op]], names[device_of[first_op]]
            yield Violation(
                "groups",
                f"op {graph.op_names[op]!r} is on {device!r} but must be with "
                f"{graph.op_names[first_op]!r} on {other!r}",
                graph.op_names[op],
                device,
            )
