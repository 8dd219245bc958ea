"""A memory section of a step, with the rewritten step and its simulated timeline.

`Fitted` derives from these what plans are compared by: peak bytes, bytes in host memory, copied
bytes, and the time of a step with synchronous or asynchronous updates on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hocket.base.units import format_bytes, format_seconds
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.async_updates import async_step_s, has_host_updates
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.step import BudgetedStep, moved_bytes
from hocket.simulate.rewriting.uses import Uses
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Fitted:
    """A memory section, the step that it was rewritten into, and its simulated timeline."""

    name: str
    memory: Memory | None
    """The memory section; None for the plain step."""
    step: BudgetedStep
    timeline: Timeline
    uses: Uses
    least_s: float
    """Shortest step time that is reported: that of the plain step, or the host's time to launch all
    ops if that is longer."""

    def __repr__(self) -> str:
        step, peak = format_seconds(self.step_s), format_bytes(self.peak_bytes)
        return f"Fitted({self.name!r}, step {step}, peak {peak})"

    @property
    def blocks(self) -> StepBlocks:
        """Blocks that the step is cut into."""
        return self.uses.blocks

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device."""
        return int(self.timeline.peak_bytes.max())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory: offloaded activations, and host-resident state."""
        if self.memory is None:
            return 0
        done = self.step.rewritten
        return int(done.moved_bytes[done.is_offload].sum()) + self.step.host_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes copied between device and host in one step."""
        return 0 if self.memory is None else sum(moved_bytes(self.step.rewritten))

    @property
    def finished_step_s(self) -> float:
        """Time of a step that ends when all of its updates have finished."""
        return max(self.timeline.makespan_s, self.least_s)

    @cached_property
    def async_step_s(self) -> float | None:
        """Time of a step among many with asynchronous updates on the host; None if there are none.

        At least ``least_s``, which is no shorter than the plain step.
        """
        if self.memory is None or not has_host_updates(self.step.rewritten.graph):
            return None
        return max(async_step_s(self.step, self.uses), self.least_s)

    @property
    def step_s(self) -> float:
        """Time of a step among many; updates are asynchronous if the section says so."""
        is_async = self.memory is not None and self.memory.async_update
        return (is_async and self.async_step_s) or self.finished_step_s

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key, lower is better: step time, then moved bytes, then peak."""
        return self.step_s, self.moved_bytes, self.peak_bytes
