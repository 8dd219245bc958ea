"""A model whose memory plans are made once, chosen and trained for many budgets.

Plans are chosen as ``hocket.prepare(memory=, on=, replay=False)`` chooses them on a named machine:
``auto`` is one as it is detected, without rates that are measured on it. What three steps hold is
counted storage by storage on a processor, and by PyTorch's allocator on a GPU.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from allocations import allocations
from torch.utils._pytree import tree_leaves

from hocket.plan.make import make_problem
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.memory.maker import FULL_RECOMPUTE
from hocket.planners.placement.baselines import on_one_device
from hocket.runtime.offload.chunked_loss import supports_chunked_loss
from hocket.runtime.offload.dry_run import dry_runs_of
from hocket.runtime.offload.kernel_workspaces import workspaces_on
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions, TrainingTask
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop


def adamw(model: Any) -> torch.optim.Optimizer:
    """The update of all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass(eq=False)
class Case:
    """A model with its plans, and what each was rehearsed to hold; times are for ``on``."""

    model: Any
    batch: Any
    forward: Callable[..., Any] | None
    on: Any = "1xh200"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        update = planned_update(adamw(self.model), self.model)
        self.recipe = TraceOptions(update=update, device=str(self.device), forward=self.forward)
        task = TrainingTask(
            model=self.model, optimizer=adamw(self.model), batch=self.batch, recipe=self.recipe,
            device=self.device, options=LoopOptions(replay=False),
        )  # fmt: skip
        self.dry_runs = dry_runs_of(task)
        self.graph = self.dry_runs.graph
        self.in_chunks = supports_chunked_loss(self.model, self.graph)
        self.plan(self.on)
        self.step_s = 0.0
        """Of the plan that was counted last: the median of six steps, on a CPU of three."""
        self.losses: list[float] = []
        """Of these steps."""

    def plan(self, on: Any) -> None:
        """Make plans for a machine."""
        problem = make_problem(self.graph, on)
        alone = on_one_device(problem)
        self.frontier: Frontier = find_frontier(
            problem, alone, in_chunks=self.in_chunks, async_update=True
        )

    def dry_run(self, section: Memory) -> int:
        """The predicted peak of a plan."""
        return self.dry_runs.peak_bytes(section)

    def chosen(self, budget_bytes: int) -> BudgetPlan:
        """The plan of a budget."""
        return self.dry_runs.fastest_within_budget(budget_bytes, self.frontier)

    def budgets(self, count: int) -> list[int]:
        """Evenly from the leanest plan's peak up to the plain step's."""
        plain = self.chosen(2**60).peak_bytes
        assert plain is not None
        planned = [each for each in self.frontier.plans if each.memory is not None]
        lean = min(planned, key=lambda each: each.peak_bytes).memory
        assert lean is not None
        leanest = min(plain, self.dry_run(lean))
        return np.linspace(leanest, plain, count).astype(int).tolist()

    def loop(
        self, model: Any, kept: BudgetPlan, optimizer: Any = None, **options: Any
    ) -> TrainingLoop:
        """A model in training under a plan."""
        strategy = self.dry_runs.strategy(kept, model)
        return TrainingLoop(model, optimizer or adamw(model), strategy, LoopOptions(**options))

    def counted(self, kept: BudgetPlan) -> int:
        """The most that three steps held; on a GPU six are made, for the sake of ``step_s``."""
        model, self.losses = copy.deepcopy(self.model), []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        train = self.loop(model, kept)
        if self.device.type == "cuda":
            self.step_s = sorted(self._timed(train) for _ in range(6))[2]
            # Updates that are under way would hold the training when the next one is counted.
            train.state_dict()
            return int(torch.cuda.max_memory_allocated())
        tracker = MemoryTracker()
        with tracker:
            tracker.track(train._strategy.lasting)
            batch = dict(self.batch) if hasattr(self.batch, "keys") else self.batch
            tracker.track(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
            self.step_s = min(self._timed(train) for _ in range(3))
            train.state_dict()
        return tracker.peak_bytes

    def explained(self, kept: BudgetPlan) -> dict[str, Any]:
        """Where the predicted peak lies, and where that of a third step by the allocator's events:
        by phase, and what of it lives and dies inside one op."""
        model = copy.deepcopy(self.model)
        train = self.loop(model, kept)
        for _ in range(2):
            float(train.step(self.batch))
        train.state_dict()
        held = [*train._strategy.lasting, *tree_leaves(self.batch)]
        noted = allocations(
            lambda: float(train.step(self.batch)), self.device,
            [each for each in held if isinstance(each, torch.Tensor)],
        )  # fmt: skip
        # As above: it would be on the GPU when the next plan is rehearsed or counted.
        train.state_dict()
        most, seen = noted.peak(with_temporaries=True), noted.peak(with_temporaries=False)
        found = {
            "allocated_at": f"{most.phase}: {most.op}", "allocated": most.held_bytes,
            "without_temporaries": seen.held_bytes, "phases": noted.peaks(),
        }  # fmt: skip
        if self.device.type == "cuda":
            found["not_measured"] = workspaces_on(self.device).unknown
        return found

    def _timed(self, train: TrainingLoop) -> float:
        start = time.perf_counter()
        self.losses.append(float(train.step(self.batch)))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def full_recompute(self) -> tuple[int, float]:
        """Peak and predicted step of full activation checkpointing."""
        full = self.frontier.find(FULL_RECOMPUTE)
        assert full is not None
        assert full.memory is not None
        return self.dry_run(full.memory), full.step_s
