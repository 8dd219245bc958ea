"""Memory plans of one training: rehearsed, chosen by that, and carried out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hocket.base.units import format_bytes
from hocket.capture.fake import batch_tensors, plain_batch
from hocket.capture.program import Program
from hocket.graph.graph import Graph
from hocket.hardware.allocation import aligned
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import Frontier
from hocket.runtime.memory.allocator import card_bytes
from hocket.runtime.memory.rounding import rounded_parameters
from hocket.runtime.memory.updates import updates_in_parts
from hocket.runtime.task import LoopOptions
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget, fastest_that_keeps
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import RehearsedPeak, least_beside_bytes, rehearsed_peak
from hocket.runtime.train.repeats import AS_ASKED, NOT_CUDA

# Whether steps within a budget are launched as a whole, and what that takes of the budget.

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
    replay: bool, outputs: bool = False,
) -> BudgetLaunches:  # fmt: skip
    """How steps may be launched within a budget; ``replay`` says whether as a whole."""
    there = {id(t): t for _, t in batch_tensors(plain_batch(batch)) if t.device.type == "cuda"}
    copied_bytes = sum(aligned(tensor.nbytes) for tensor in there.values())
    if not replay:
        refusal = AS_ASKED
    elif device.type != "cuda":
        refusal = NOT_CUDA
    elif outputs:
        refusal = "outputs=True holds what a replay would overwrite"
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


@dataclass(frozen=True, eq=False)
class Rehearsals:
    """A model in training, whose memory plans are rehearsed; see `rehearsals_of`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    recipe: Recipe
    device: torch.device
    options: LoopOptions
    graph: Graph
    program: Program
    _peaks: dict[Memory, RehearsedPeak] = field(default_factory=dict)

    @cached_property
    def rounded(self) -> dict[str, torch.dtype]:
        """Parameters that every op reads in another type only, by name."""
        return rounded_parameters(self.program)

    @cached_property
    def beside_bytes(self) -> int:
        """Bytes on the device beside the step's tensors: workspaces and what others hold."""
        return least_beside_bytes(self.model, self.optimizer, self.batch, self.device, self.graph)

    def card_bytes(self, section: Memory) -> int:
        """What a card must have for steps under a plan: see `hocket.runtime.memory.allocator`."""
        launches = self.launches(section.budget_bytes[0])
        is_replayed = not launches.refusal_of(section)
        return card_bytes(self.device, self.peak_bytes(section), is_replayed=is_replayed)

    def peak_bytes(self, section: Memory) -> int:
        """The most that steps under a plan allocate, as they are launched within its budget."""
        launches = self.launches(section.budget_bytes[0])
        return launches.beside_bytes(section) + self.peak(section).num_bytes

    def peak(self, section: Memory) -> RehearsedPeak:
        """The most that steps hold which are called; whatever the budget, it is rehearsed once."""
        key = replace(section, budget_bytes=())
        if key not in self._peaks:
            self._peaks[key] = rehearsed_peak(
                self.model, self.optimizer, self.batch, self.recipe, section, self.device,
                graph=self.graph, rounded=self.rounded,
                clips=not self.updates_early, accumulate=self.options.accumulate,
                outputs=self.options.outputs,
            )  # fmt: skip
        return self._peaks[key]

    @property
    def updates_early(self) -> bool:
        """True if blocks are updated as their gradients come, before all are there."""
        return self.options.clip_norm is None and updates_in_parts(self.optimizer)

    def launches(self, budget_bytes: int) -> BudgetLaunches:
        """How steps within a budget are launched."""
        return budget_launches(
            self.graph, self.program, self.batch, self.device, budget_bytes,
            replay=self.options.replay, outputs=self.options.outputs,
        )  # fmt: skip

    def fastest_that_keeps(self, budget_bytes: int, frontier: Frontier) -> KeptBudget:
        """The plan of a budget; raises `NoFeasiblePlanError` where none keeps it."""
        beside_bytes = card_bytes(self.device, self.beside_bytes)
        kept = fastest_that_keeps(budget_bytes, frontier, self.card_bytes, beside_bytes)
        return kept._replace(allocated_bytes=self.peak_bytes(kept.section))

    def strategy(self, kept: KeptBudget, model: nn.Module | None = None) -> Budgeted:
        """What carries a plan out; a ``model`` that is like this one may be given."""
        launches = self.launches(kept.section.budget_bytes[0])
        return Budgeted(
            self.model if model is None else model, self.batch, self.recipe, kept, self.device,
            graph=self.graph, rounded=self.rounded, outputs=self.options.outputs,
            called=launches.refusal_of(kept.section),
        )  # fmt: skip


def rehearsals_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    device: torch.device,
    options: LoopOptions,
) -> Rehearsals:
    """The rehearsals of a step, which is recorded; raises `UntraceableError`."""
    graph, program = recipe.trace(model, batch, "train", is_run=False)
    return Rehearsals(model, optimizer, batch, recipe, device, options, graph, program)
