"""A memory section of a step and what the simulator says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hocket.base.units import format_bytes, format_seconds
from hocket.plan.sections import Memory
from hocket.planners.memory.update_order import UpdateOrders, host_update_orders
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.following import (
    ASYNC,
    FINISHED,
    has_host_updates,
    period_s,
)
from hocket.simulate.rewriting.step import BudgetedStep, moved_bytes
from hocket.simulate.rewriting.uses import Uses
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Fitted:
    """A memory section and what the simulator says of it."""

    name: str
    memory: Memory | None
    """None for the plain step."""
    step: BudgetedStep
    timeline: Timeline
    uses: Uses
    least_s: float
    """Least step time that is claimed: that of the plain step, and the host's time to launch all
    ops."""

    def __repr__(self) -> str:
        step, peak = format_seconds(self.step_s), format_bytes(self.peak_bytes)
        return f"Fitted({self.name!r}, step {step}, peak {peak})"

    @property
    def blocks(self) -> StepBlocks:
        """The cut of the step."""
        return self.uses.blocks

    @property
    def peak_bytes(self) -> int:
        """The most that any device holds."""
        return int(self.timeline.peak_bytes.max())

    @property
    def host_bytes(self) -> int:
        """Bytes that wait on the host: offloaded activations, and host-resident state."""
        if self.memory is None:
            return 0
        done = self.step.rewritten
        return int(done.moved_bytes[done.is_offload].sum()) + self.step.host_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the link to the host in one step."""
        return 0 if self.memory is None else sum(moved_bytes(self.step.rewritten))

    @cached_property
    def update_orders(self) -> UpdateOrders | None:
        """Step times by the order of updates on the host; None without any."""
        return host_update_orders(self.step, self.uses, self.least_s)

    @cached_property
    def step_s(self) -> float:
        """Time of a step among many, with updates on the host finished or asynchronous as the
        section says. That is not claimed to make a step shorter than the plain one."""
        taken_s = self.timeline.makespan_s
        if self.memory is not None and has_host_updates(self.step.rewritten.graph):
            how = ASYNC if self.memory.async_update else FINISHED
            taken_s = period_s(self.step, self.uses, how)
        return max(taken_s, self.least_s)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Of two plans that fit the lower one is better: faster, else moving and holding less."""
        return self.step_s, self.moved_bytes, self.peak_bytes
