"""The waves section: microbatches of a replica run concurrently on two streams of one device.

The first microbatch (wave tick) runs on the first stream, the second (wave tock) on the second, and
so on in turn. Tock starts when tick has run its first ``lead`` ops, so that its memory grows while
that of tick shrinks, and its kernels fill gaps of the other stream (Wavelet, Wang et al., MLSys
2021). The section accompanies `Parallel`, which has the size of each microbatch.

Gradients are summed in the order of the microbatches and the optimizer runs once per step, so the
result is bit-identical to gradient accumulation. With ``changes`` set to ``wave`` the optimizer
runs after each wave, as in the paper, on the mean of the gradients of this wave and the one before.
Then a wave is computed with parameters that are one update old, each stream holds a copy of the
parameters, and the result differs from accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.units import MOST_BYTES
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.parallel import Parallel
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

NUM_STREAMS = 2
Changes = Literal["step", "wave"]
CHANGES: tuple[Changes, ...] = get_args(Changes)
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Waves(Section):
    """When the second stream starts, when the optimizer runs, and the extra memory of two
    streams."""

    lead: int
    """Ops of the first microbatch that run before the second starts; 0 to start both together."""
    changes: Changes = "step"
    """When the optimizer runs: after each ``step`` or after each ``wave``."""
    separate_bytes: int = 0
    """Sum of the peaks of both streams, minus their joint peak. Captured streams reserve this much
    more, since CUDA's caching allocator never reuses memory of one stream for another."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "lead": self.lead,
            **({} if self.changes == "step" else {"changes": self.changes}),
            **({"separate_bytes": self.separate_bytes} if self.separate_bytes else {}),
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Waves:
        """Read the section from plain data; raises `InputFileError`."""
        entry = fields.record(
            data, "waves", required=("lead",), optional=("changes", "separate_bytes")
        )
        return cls(
            lead=fields.integer(entry["lead"], "waves.lead", 0, _MAX_COUNT),
            changes=fields.choice(entry.get("changes", "step"), "waves.changes", CHANGES),
            separate_bytes=fields.integer(
                entry.get("separate_bytes", 0), "waves.separate_bytes", 0, MOST_BYTES
            ),
        )

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check that replicas are single devices and have two microbatches or more."""
        parallel = plan.get(Parallel)
        if parallel is None:
            yield Violation("waves", "waves need microbatches, and the plan has none")
            return
        if parallel.sharded or any(len(replica.devices) > 1 for replica in parallel.replicas):
            yield Violation("waves", "waves need replicas of one device that has all weights")
        if any(r.update == "host" or r.recomputed for r in parallel.replicas):
            yield Violation("waves", "waves save activations and update on the device")
        counts = {len(replica.microbatches) for replica in parallel.replicas}
        if len(counts) != 1:
            yield Violation("waves", "replicas with waves have equally many microbatches")
        yield from self.wrong_ops(problem.graph, min(counts, default=0))

    def wrong_ops(self, graph: Graph, num_waves: int) -> Iterator[Violation]:
        """Yield violations for a graph that runs in ``num_waves`` microbatches."""
        if num_waves < NUM_STREAMS:
            yield Violation("waves", "waves need two microbatches or more")
            return
        num_passed = int((graph.op_phase != Phase.OPTIMIZER).sum())
        if self.lead > num_passed:
            yield Violation(
                "waves",
                f"the second stream begins after {self.lead} ops, a wave has {num_passed}",
            )
