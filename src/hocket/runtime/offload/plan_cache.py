"""Memory plans that were chosen before, for the same step, device and budget.

To find a plan takes seconds to a minute: plans are simulated, and the best of them run dry. Both
depend on the traced step, the device, the budget and the versions alone, so that the choice is kept
on disk. What the card must have is checked again, because the context and other tensors differ.
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
from hocket.runtime.offload.dry_run import Rehearsals
from hocket.runtime.offload.plan_choice import KeptBudget

_KIND = "memory-plans"


@dataclass(frozen=True, eq=False)
class KnownPlan:
    """The choice for one step, if there was one."""

    rehearsals: Rehearsals
    problem: Problem
    key: dict[str, Any]

    def recall(self) -> tuple[KeptBudget, bool] | None:
        """The choice, and whether its first steps have confirmed it; None where it is unknown."""
        found = disk_cache.recall(_KIND, self.key)
        try:
            section = Memory.from_data(found["section"], self.problem)
            allocated_bytes, step_s = int(found["allocated_bytes"]), found["step_s"]
            is_confirmed = bool(found["is_confirmed"])
        except (HocketError, KeyError, TypeError, ValueError):
            return None
        launches = self.rehearsals.launches(section.budget_bytes[0])
        is_replayed = not launches.refusal_of(section)
        needed = card_bytes(self.rehearsals.device, allocated_bytes, is_replayed=is_replayed)
        if needed > section.budget_bytes[0]:
            return None
        return KeptBudget(section, needed, step_s, allocated_bytes), is_confirmed

    def keep(self, kept: KeptBudget, *, is_confirmed: bool) -> None:
        """Keep a choice; plain steps have no section to keep."""
        if kept.section.blocks and kept.allocated_bytes is not None:
            value = {"section": kept.section.to_data(), "allocated_bytes": kept.allocated_bytes,
                     "step_s": kept.step_s, "is_confirmed": is_confirmed}  # fmt: skip
            disk_cache.keep(_KIND, self.key, value)


def known_plan(
    rehearsals: Rehearsals, problem: Problem, budget_bytes: int, beside_bytes: int
) -> KnownPlan:
    """The choice for a step within a budget; ``beside_bytes`` are those of other tensors."""
    device, options = rehearsals.device, rehearsals.options
    key = {
        "graph": rehearsals.graph.content_hash,
        "cluster": problem.cluster.content_hash,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "host": platform.node(),
        "budget_bytes": budget_bytes,
        "beside_bytes": beside_bytes,
        "optimizer": type(rehearsals.optimizer).__qualname__,
        "has_state": bool(rehearsals.optimizer.state),
        "async_update": options.async_update,
        "clips": not rehearsals.updates_early,
        "accumulates": options.accumulate > 1,
        "replay": options.replay,
        "outputs": options.outputs,
        "torch": torch.__version__,
        "hocket": disk_cache.source_digest(),
    }
    return KnownPlan(rehearsals, problem, key)
