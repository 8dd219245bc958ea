"""Correct the choice of a memory plan once, by the times of its first steps.

Plans are ranked by predicted times, and two errors differ between kinds of plans: those that move
bytes depend on links and the host, those that recompute on the device alone. So the first steps are
timed. Where they take longer than predicted, the fastest plan of the other kind that keeps the
budget is tried for as many steps in the same training, and the faster one goes on.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hocket.base.errors import NoFeasiblePlanError, RunError
from hocket.base.units import format_seconds
from hocket.planners.memory.frontier import Frontier
from hocket.runtime.offload.budgeted_model import Budgeted
from hocket.runtime.offload.dry_run import Rehearsals
from hocket.runtime.offload.patched_forward import taken_over
from hocket.runtime.offload.plan_choice import KeptBudget

NUM_WARM_UP, NUM_TIMED = 3, 3
LATE = 1.05
"""Steps that take so many times what was predicted are worth a second plan."""
GAIN = 0.97
"""Of a step, what another plan is predicted to take at most to be tried, and takes to stay."""


class PlanChangeWarning(UserWarning):
    """Another memory plan than the one that was predicted to be the fastest goes on."""


@dataclass(eq=False)
class PlanCorrection:
    """The first steps of a training within a budget."""

    rehearsals: Rehearsals
    make_frontier: Callable[[], Frontier]
    first: Budgeted
    confirm: Callable[[KeptBudget], None] = lambda kept: None
    """Is told which plan goes on."""
    is_over: bool = False
    _second: Budgeted | None = None
    _first_s: float = 0.0
    _num_steps: int = 0
    _times: list[float] = field(default_factory=list)

    def note(self, step_s: float) -> Budgeted | None:
        """Note a step that has ended on the device; what runs the next ones, where that changes."""
        self._num_steps += 1
        if self._num_steps > NUM_WARM_UP:
            self._times.append(step_s)
        if len(self._times) < NUM_TIMED:
            return None
        measured_s = statistics.median(self._times)
        self._num_steps, self._times = 0, []
        return self._compared(measured_s) if self._second else self._tried(measured_s)

    def _tried(self, measured_s: float) -> Budgeted | None:
        """Start with another plan where that may be faster."""
        self._first_s, predicted_s = measured_s, self.first.predicted_s
        other = None
        if predicted_s is not None and measured_s > LATE * predicted_s:
            other = self._other(GAIN * measured_s)
        if other is None:
            self._end(self.first)
            return None
        with taken_over(self.rehearsals.model):
            self._second = self.rehearsals.strategy(other)
        return self._second

    def _other(self, below_s: float) -> KeptBudget | None:
        """The fastest plan of the other kind: that moves nothing, where the first one does."""
        section = self.first.kept.section
        moves = bool(section.replay_hindrance(self.rehearsals.graph))
        frontier = self.make_frontier()
        plans = tuple(
            plan for plan in frontier.plans
            if plan.memory is not None and bool(plan.moved_bytes) is not moves
            and plan.step_s < below_s
        )  # fmt: skip
        keeping = frontier.keeping if moves else ()
        if not plans and not keeping:
            return None
        # Something has to be the smallest, also where only plans that keep some blocks are left.
        others = replace(frontier, plans=plans or frontier.plans, keeping=keeping)
        try:
            found = self.rehearsals.fastest_that_keeps(section.budget_bytes[0], others)
        except (NoFeasiblePlanError, RunError):
            return None
        is_other = bool(found.section.replay_hindrance(self.rehearsals.graph)) is not moves
        return found if is_other and (found.step_s or below_s) < below_s else None

    def _compared(self, measured_s: float) -> Budgeted | None:
        """The faster one goes on."""
        assert self._second is not None
        before, now = format_seconds(self._first_s), format_seconds(measured_s)
        if measured_s < GAIN * self._first_s:
            predicted = format_seconds(self.first.predicted_s or 0.0)
            warnings.warn(
                f"steps took {before} ({predicted} predicted): another memory plan goes on, with "
                f"{now} a step",
                PlanChangeWarning,
                6,
            )
            self._end(self._second)
            return None
        self._second.leave()
        self.first.come_back()
        self._end(self.first)
        return self.first

    def _end(self, going_on: Budgeted) -> None:
        self.is_over = True
        self.confirm(going_on.kept)
