"""Disk cache of memory plans, and correction of a plan by the measured times of its first steps.

The search for a plan takes seconds to a minute, because plans are simulated and the best ones get
dry runs. Its result depends only on the traced step, the device, the budget and software versions,
and is cached on disk. Each process checks again that a cached plan fits, because the CUDA context
and other tensors differ between processes.

Plans are ranked by predicted times. Two types of plans have different prediction errors: plans that
copy between host and device depend on links and the host, plans that recompute on the device alone.
The first steps of training are therefore timed. If they take longer than predicted, the fastest
plan of the other type that fits is run for the same number of steps, and training continues with
the faster of the two. The cache marks that plan as confirmed, so that later runs start with it.
"""

from __future__ import annotations

import platform
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hocket.base import disk_cache
from hocket.base.errors import HocketError, NoFeasiblePlanError, RunError
from hocket.base.units import format_seconds
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import Frontier
from hocket.runtime.offload.allocator import card_bytes
from hocket.runtime.offload.budgeted_model import BudgetedModel
from hocket.runtime.offload.dry_run import DryRuns
from hocket.runtime.offload.patched_forward import released_model
from hocket.runtime.offload.plan_choice import BudgetPlan

_KIND = "memory-plans"


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """Cache entry for the plan of one step and budget."""

    dry_runs: DryRuns
    problem: Problem
    budget_bytes: int

    def recall(self) -> tuple[BudgetPlan, bool] | None:
        """Return the cached plan and whether measured steps confirmed it.

        Returns None if there is no cached plan, or if it exceeds the budget in this process.
        """
        found = disk_cache.recall(_KIND, self._key)
        try:
            section = Memory.from_data(found["section"], self.problem)
            allocated_bytes, step_s = int(found["allocated_bytes"]), found["step_s"]
            is_confirmed = bool(found["is_confirmed"])
        except (HocketError, KeyError, TypeError, ValueError):
            return None
        is_replayed = not self.dry_runs.no_replay(section, self.budget_bytes)
        device = self.dry_runs.task.device
        needed = card_bytes(device, allocated_bytes, is_replayed=is_replayed)
        if needed > self.budget_bytes:
            return None
        return BudgetPlan(section, needed, step_s, allocated_bytes), is_confirmed

    def keep(self, plan: BudgetPlan, *, is_confirmed: bool) -> None:
        """Store a plan on disk; the plain step, which has no blocks, is not stored."""
        if plan.section.blocks and plan.allocated_bytes is not None:
            value = {"section": plan.section.to_data(), "allocated_bytes": plan.allocated_bytes,
                     "step_s": plan.step_s, "is_confirmed": is_confirmed}  # fmt: skip
            disk_cache.keep(_KIND, self._key, value)

    @property
    def _key(self) -> dict[str, Any]:
        dry_runs, task = self.dry_runs, self.dry_runs.task
        device, options = task.device, task.options
        return {
            "graph": dry_runs.graph.content_hash,
            "cluster": self.problem.cluster.content_hash,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "host": platform.node(),
            "budget_bytes": self.budget_bytes,
            "overhead_bytes": dry_runs.overhead_bytes,
            "optimizer": type(task.optimizer).__qualname__,
            "has_state": bool(task.optimizer.state),
            "async_update": options.async_update,
            "clips": not dry_runs.updates_early,
            "accumulates": options.accumulate > 1,
            "replay": options.replay,
            "outputs": options.outputs,
            "torch": torch.__version__,
            "hocket": disk_cache.source_digest(),
        }


NUM_WARM_UP, NUM_TIMED = 3, 3
LATE = 1.05
"""Multiple of the predicted step time beyond which a second plan is tried."""
GAIN = 0.97
"""Largest fraction of the measured step time at which another plan is tried (predicted) or kept
(measured)."""


class PlanChangeWarning(UserWarning):
    """Training continues with a plan other than the one with the shortest predicted step."""


@dataclass(eq=False)
class PlanCorrection:
    """Times the first steps within a budget, and switches to another plan if it is faster."""

    dry_runs: DryRuns
    make_frontier: Callable[[], Frontier]
    first: BudgetedModel
    confirm: Callable[[BudgetPlan], None] = lambda plan: None
    """Called with the plan that continues."""
    is_over: bool = False
    _second: BudgetedModel | None = None
    _first_s: float = 0.0
    _num_steps: int = 0
    _times: list[float] = field(default_factory=list)

    def note(self, step_s: float) -> BudgetedModel | None:
        """Record the time of a step; return the strategy to switch to, or None to continue."""
        self._num_steps += 1
        if self._num_steps > NUM_WARM_UP:
            # The steps before allocate memory and capture graphs, so they take longer.
            self._times.append(step_s)
        if len(self._times) < NUM_TIMED:
            return None
        measured_s = statistics.median(self._times)
        self._num_steps, self._times = 0, []
        return self._compare(measured_s) if self._second else self._try_other(measured_s)

    def _try_other(self, measured_s: float) -> BudgetedModel | None:
        """Start another plan if it may be faster."""
        self._first_s, predicted_s = measured_s, self.first.predicted_s
        other = None
        if predicted_s is not None and measured_s > LATE * predicted_s:
            other = self._other(GAIN * measured_s)
        if other is None:
            self._end(self.first)
            return None
        with released_model(self.dry_runs.task.model):
            self._second = self.dry_runs.strategy(other)
        return self._second

    def _other(self, below_s: float) -> BudgetPlan | None:
        """Return the fastest plan of the other type, or None.

        The type is with host copies if the first plan has none, else without host copies.
        """
        section, graph = self.first.budget_plan.section, self.dry_runs.graph
        moves = bool(section.replay_hindrance(graph))
        frontier = self.make_frontier()
        plans = tuple(
            plan for plan in frontier.plans
            if plan.memory is not None and bool(plan.moved_bytes) is not moves
            and plan.step_s < below_s
        )  # fmt: skip
        keeping = frontier.keeping if moves else ()
        if not plans and not keeping:
            return None
        # A frontier must not be empty, even if only its `keeping` plans are candidates.
        others = replace(frontier, plans=plans or frontier.plans, keeping=keeping)
        try:
            found = self.dry_runs.fastest_within_budget(section.budget_bytes[0], others)
        except (NoFeasiblePlanError, RunError):
            return None
        is_other = bool(found.section.replay_hindrance(graph)) is not moves
        return found if is_other and (found.step_s or below_s) < below_s else None

    def _compare(self, measured_s: float) -> BudgetedModel | None:
        """Continue with the faster plan; return its strategy if that is the first one."""
        assert self._second is not None
        before, now = format_seconds(self._first_s), format_seconds(measured_s)
        if measured_s < GAIN * self._first_s:
            predicted = format_seconds(self.first.predicted_s or 0.0)
            warnings.warn(
                f"steps took {before} ({predicted} predicted): training continues with another "
                f"memory plan, {now} per step",
                PlanChangeWarning,
                6,
            )
            self._end(self._second)
            return None
        self._second.leave()
        self.first.come_back()
        self._end(self.first)
        return self.first

    def _end(self, chosen: BudgetedModel) -> None:
        self.is_over = True
        self.confirm(chosen.budget_plan)
