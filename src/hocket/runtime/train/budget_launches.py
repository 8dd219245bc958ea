"""Whether steps within a budget are launched as a whole, and what that takes of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hocket.base.units import format_bytes
from hocket.capture.fake import batch_tensors, plain_batch
from hocket.capture.program import Program
from hocket.graph.graph import Graph
from hocket.hardware.allocation import aligned
from hocket.plan.sections.memory import Memory
from hocket.runtime.train.repeats import AS_ASKED, NOT_CUDA

MOST_OF_BUDGET = 0.02
"""That the copy of a batch may take which a graph reads, where the batch is on the device."""
BEYOND_REHEARSED = 0.005
"""Of a budget, left to replayed steps: on an H200 two deep ResNets held 0.42 and 0.47 % more than
rehearsed."""


@dataclass(frozen=True, eq=False)
class BudgetLaunches:
    """How steps of one model and batch are launched, by the memory plan that they keep."""

    graph: Graph
    refusal: str
    """Why no plan's steps are replayed; empty where some may be."""
    replayed_bytes: int
    """What a replayed step holds that a called one does not."""

    def refusal_of(self, section: Memory) -> str:
        """Why a plan's steps are not replayed; empty where they are."""
        return self.refusal or section.replay_hindrance(self.graph)

    def beside_bytes(self, section: Memory) -> int:
        """What steps of a plan hold beside what is rehearsed."""
        return 0 if self.refusal_of(section) else self.replayed_bytes


def budget_launches(
    graph: Graph, program: Program, batch: Any, device: torch.device, budget_bytes: int, *,
    replay: bool,
) -> BudgetLaunches:  # fmt: skip
    """How steps may be launched within a budget; ``replay`` says whether as a whole."""
    there = {id(t): t for _, t in batch_tensors(plain_batch(batch)) if t.device.type == "cuda"}
    copied_bytes = sum(aligned(tensor.nbytes) for tensor in there.values())
    if not replay:
        refusal = AS_ASKED
    elif device.type != "cuda":
        refusal = NOT_CUDA
    elif program.unseen:
        refusal = f"a recorded step does not show all: {program.unseen}"
    elif copied_bytes > MOST_OF_BUDGET * budget_bytes:
        refusal = (
            f"a copy of the batch would take {format_bytes(copied_bytes)} of the budget; give "
            "batches that are on the host"
        )
    else:
        refusal = ""
    return BudgetLaunches(graph, refusal, copied_bytes + int(BEYOND_REHEARSED * budget_bytes))
