"""The priority section: gradients are sent in the order in which the next forward pass needs them.

The backward pass makes gradients of the last layers first, but the next step needs those of the
first layers first. So gradients are split into slices, and the slice whose layer runs earliest is
always sent next. If slices may still be in flight when the next step starts, each layer of its
forward pass waits for its own gradients alone (P3, Jayarajan et al., MLSys 2019). The section
accompanies `Parallel` and does not change the results of the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.base import fields
from hocket.plan.sections.parallel import Parallel
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

# At least one 32-bit element per slice.
_LEAST_BYTES = 4
_MAX_BYTES = 2**40


@dataclass(frozen=True, kw_only=True)
class Priority(Section):
    """Size of gradient slices, and whether they may be in flight when the next step starts."""

    slice_bytes: int
    """Bytes of one gradient slice, which is sent as one message."""
    crosses: bool = True
    """True if each layer of the next forward pass waits for its own gradients only, not for all."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {"slice_bytes": self.slice_bytes, "crosses": self.crosses}

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Priority:
        """Read the section from plain data; raises `InputFileError`."""
        entry = fields.record(data, "priority", required=("slice_bytes", "crosses"))
        size = fields.integer(
            entry["slice_bytes"], "priority.slice_bytes", _LEAST_BYTES, _MAX_BYTES
        )
        return cls(slice_bytes=size, crosses=fields.flag(entry["crosses"], "priority.crosses"))

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check that replicas are single devices with one microbatch and all parameters."""
        parallel = plan.get(Parallel)
        if parallel is None or not takes_priority(parallel):
            message = "gradients have an order where two or more devices take one microbatch each"
            yield Violation("priority", message)


def takes_priority(parallel: Parallel) -> bool:
    """Return True if a parallel section allows to send gradients in a planned order."""
    # The prioritized exchange is implemented only for replicas of one device and one microbatch.
    return (
        len(parallel.replicas) > 1
        and not parallel.sharded
        and all(len(r.devices) == len(r.microbatches) == 1 for r in parallel.replicas)
        and all(r.update == "device" and not r.recomputed for r in parallel.replicas)
    )
