"""Disk cache of memory plans, by traced step, device and budget.

Finding a plan takes seconds to a minute, because plans are simulated and the best get dry runs.
Both depend only on the traced step, the device, the budget and software versions. Whether a cached
plan fits is checked again, because the CUDA context and other tensors differ between processes.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch

from hocket.base import disk_cache
from hocket.base.errors import HocketError
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import Memory
from hocket.runtime.offload.allocator import card_bytes
from hocket.runtime.offload.dry_run import DryRuns
from hocket.runtime.offload.plan_choice import BudgetPlan

_KIND = "memory-plans"


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """Cache entry for the plan of one step and budget."""

    dry_runs: DryRuns
    problem: Problem
    budget_bytes: int

    def recall(self) -> tuple[BudgetPlan, bool] | None:
        """Return the cached plan, and True if first steps confirmed it; None if absent or too
        large."""
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
        """Keep a plan on disk, except for the plain step, which has no blocks."""
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
