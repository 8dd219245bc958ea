"""The priority section: gradients travel in the order in which the next forward pass needs them.

Backward makes the gradients of the last layers first, and the next step needs those of the first
ones first. Cut into slices, the one whose layer is needed first always goes next; where they cross
the end of a step, each layer of the next forward pass waits for its own sums alone (P3, Jayarajan
et al., MLSys 2019). The section accompanies `Parallel`; the numbers of the training are the same
with and without it.
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

_LEAST_BYTES = 4
_MAX_BYTES = 2**40


@dataclass(frozen=True, kw_only=True)
class Priority(Section):
    """Gradient slices, and how far into the next step they may be in flight."""

    slice_bytes: int
    """Of a gradient that travel as one."""
    crosses: bool = True
    """True if layers of the next forward pass wait for their own sums alone, not all for all."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {"slice_bytes": self.slice_bytes, "crosses": self.crosses}

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Priority:
        """The section of such data."""
        entry = fields.record(data, "priority", required=("slice_bytes", "crosses"))
        size = fields.integer(
            entry["slice_bytes"], "priority.slice_bytes", _LEAST_BYTES, _MAX_BYTES
        )
        return cls(slice_bytes=size, crosses=fields.flag(entry["crosses"], "priority.crosses"))

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Replicas that are one device each, with all weights and one microbatch."""
        shares = plan.get(Parallel)
        if shares is None or not takes_priority(shares):
            message = "gradients have an order where two or more devices take one microbatch each"
            yield Violation("priority", message)


def takes_priority(shares: Parallel) -> bool:
    """True if the gradients of shares can be sent in an order of their own."""
    return (
        len(shares.replicas) > 1
        and not shares.sharded
        and all(len(r.devices) == len(r.microbatches) == 1 for r in shares.replicas)
        and all(r.update == "device" and not r.recomputed for r in shares.replicas)
    )
