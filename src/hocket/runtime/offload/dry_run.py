"""Dry runs of training steps on fake tensors, which predict the peak memory of a memory plan.

A `BudgetedModel` runs one step of a plan on fake tensors under a memory tracker. The prediction
comes from the same code that trains, op by op. Optimizer state on the device is created before the
step, as it exists in all steps but the first. Updates on the host are skipped, because they need no
device memory. On CUDA, storages are rounded up to units of the allocator, and kernels take their
measured workspaces. The result includes the workspaces of cuBLAS and cuBLASLt (one each for the
threads of forward and backward), a margin for small tensors, and other allocations of the process.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_leaves

from hocket.base.errors import RunError
from hocket.base.units import format_bytes
from hocket.capture.fake import (
    NamedTensor,
    all_tensors,
    batch_tensors,
    fake_mode,
    fake_twins,
    map_batch,
    model_tensors,
    plain_batch,
)
from hocket.capture.packed import rows_are_whole
from hocket.capture.program import Program
from hocket.capture.swap import swapped_tensors
from hocket.graph.graph import Graph, Phase, Role
from hocket.hardware.allocation import ALIGNMENT_BYTES, aligned
from hocket.plan.sections.memory import Memory
from hocket.planners.memory.frontier import Frontier
from hocket.runtime.offload.allocator import card_bytes
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.host_adam import is_fused_adam, matches_torch
from hocket.runtime.offload.host_optimizer import wait_for_all
from hocket.runtime.offload.kernel_workspaces import workspaces_on
from hocket.runtime.offload.memory_tracker import MemoryTracker, WideStatistics, is_product
from hocket.runtime.offload.patched_forward import claim_model
from hocket.runtime.offload.plan_choice import BudgetPlan, fastest_within_budget
from hocket.runtime.optimizer_parts import part_of, updates_in_parts, without_parameters
from hocket.runtime.process_settings import deferred_gc
from hocket.runtime.replay import AS_ASKED, NOT_CUDA
from hocket.runtime.strategy import TrainingTask
from hocket.simulate.rewriting.casts import CAST

_CUBLAS_BYTES = {9: 32 * 2**20}
"""cuBLAS workspace that PyTorch allocates, by major compute capability."""
_OTHER_CUBLAS_BYTES = 8_519_680
_CUBLASLT_BYTES = 2**20
_MAX_BATCH_COPY = 0.02
"""Largest fraction of a budget for the static copy of a batch that a CUDA graph reads."""
_REPLAY_MARGIN = 0.005
"""Fraction of a budget reserved for replayed steps: on an H200 two deep ResNets held 0.42 and 0.47
% more than in their dry runs."""


@dataclass(frozen=True, eq=False)
class DryRuns:
    """Dry runs of memory plans for one traced training step; each result is cached."""

    task: TrainingTask
    graph: Graph
    program: Program
    _peaks: dict[Memory, int] = field(default_factory=dict)

    @cached_property
    def low_precision(self) -> dict[str, torch.dtype]:
        """Dtypes of parameters that every op casts to another dtype first, by name."""
        return low_precision_parameters(self.program)

    @cached_property
    def overhead_bytes(self) -> int:
        """Device bytes beyond the step's tensors: library workspaces and the process's other
        tensors."""
        has_products = any(is_product(self.graph.kind_of(op)) for op in range(self.graph.num_ops))
        return _overhead_bytes(self.task, has_products=has_products)

    @property
    def updates_early(self) -> bool:
        """True if blocks are updated as their gradients arrive, not after the backward pass."""
        return _updates_early(self.task)

    def card_bytes(self, section: Memory) -> int:
        """Return the device memory that steps under a plan need, including fragmentation and
        context."""
        is_replayed = not self.no_replay(section, section.budget_bytes[0])
        return card_bytes(self.task.device, self.peak_bytes(section), is_replayed=is_replayed)

    def peak_bytes(self, section: Memory) -> int:
        """Return the peak of allocated bytes under a plan, including the overhead of graph
        replay."""
        budget_bytes = section.budget_bytes[0]
        replay_bytes = 0
        if not self.no_replay(section, budget_bytes):
            replay_bytes = self._batch_bytes + int(_REPLAY_MARGIN * budget_bytes)
        # A replay holds its static batch in addition to everything that eager steps hold.
        return replay_bytes + self.eager_peak_bytes(section)

    def eager_peak_bytes(self, section: Memory) -> int:
        """Return the peak of eager steps under a plan, which does not depend on the budget;
        cached."""
        # Frontier points that differ in their budget alone share one dry run.
        key = replace(section, budget_bytes=())
        if key not in self._peaks:
            self._peaks[key] = dry_run_peak_bytes(self.task, section, self._setup)
        return self._peaks[key]

    @property
    def _setup(self) -> BudgetSetup:
        return BudgetSetup(
            graph=self.graph, low_precision=self.low_precision, outputs=self.task.options.outputs
        )

    @cached_property
    def _batch_bytes(self) -> int:
        """Bytes of the batch on the device, which a CUDA graph copies to a static batch."""
        tensors = {id(t): t for _, t in batch_tensors(plain_batch(self.task.batch))}
        return sum(aligned(t.nbytes) for t in tensors.values() if t.device.type == "cuda")

    def no_replay(self, section: Memory | None, budget_bytes: int) -> str:
        """Return the reason why steps are not replayed as CUDA graphs, or an empty string.

        With ``section`` None, only reasons that hold for every plan are considered.
        """
        options = self.task.options
        if not options.replay:
            return AS_ASKED
        if self.task.device.type != "cuda":
            return NOT_CUDA
        if options.outputs:
            return "outputs=True holds what a replay would overwrite"
        if self.program.unseen:
            return f"a traced step does not show all: {self.program.unseen}"
        if self._batch_bytes > _MAX_BATCH_COPY * budget_bytes:
            return (
                f"a copy of the batch would take {format_bytes(self._batch_bytes)} of the budget; "
                "give batches that are on the host"
            )
        return "" if section is None else section.replay_hindrance(self.graph)

    def fastest_within_budget(self, budget_bytes: int, frontier: Frontier) -> BudgetPlan:
        """Return the fastest plan within a budget; raises `NoFeasiblePlanError` if none fits."""
        overhead_bytes = card_bytes(self.task.device, self.overhead_bytes)
        plan = fastest_within_budget(budget_bytes, frontier, self.card_bytes, overhead_bytes)
        return plan._replace(allocated_bytes=self.peak_bytes(plan.section))

    def strategy(self, plan: BudgetPlan, model: nn.Module | None = None) -> BudgetedModel:
        """Return the strategy of a plan, for the task's model or a ``model`` of the same
        structure."""
        task, budget_bytes = self.task, plan.section.budget_bytes[0]
        setup = replace(self._setup, no_replay=self.no_replay(plan.section, budget_bytes))
        model = task.model if model is None else model
        if setup.low_precision and any(b.update == "host" for b in plan.section.blocks):
            part = part_of(task.optimizer, {}, fused=task.device.type == "cuda")
            # Compiles the host's kernel now, so that the first update does not wait for it.
            if is_fused_adam(part):
                matches_torch()
        return BudgetedModel(model, task.batch, task.recipe, plan, task.device, setup)


def dry_runs_of(task: TrainingTask) -> DryRuns:
    """Trace the step of a training task for dry runs; raises `UntraceableError`."""
    graph, program = task.recipe.trace(task.model, task.batch, "train", is_run=False)
    return DryRuns(task, graph, program)


def low_precision_parameters(program: Program) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter that every op of forward and backward casts to it first.

    Autocast causes such casts. Uploading values that the host has cast gives the same results.
    """
    found: dict[int, set[torch.dtype | None]] = {t: set() for t in program.parameters.values()}
    for call in program.calls:
        if call.phase == Phase.OPTIMIZER:
            continue
        dtype = call.kwargs.get("dtype") if str(call.function).startswith(CAST) else None
        for tensor in call.reads:
            if tensor in found:
                found[tensor].add(dtype)
    return {
        name: dtype
        for name, tensor in program.parameters.items()
        # One uncast read (None) or two different casts need the parameter's own dtype.
        if len(found[tensor]) == 1 and isinstance(dtype := next(iter(found[tensor])), torch.dtype)
    }


# ── one dry run ──────────────────────────────────────────────────────────────────────────────────


def dry_run_peak_bytes(task: TrainingTask, memory: Memory, setup: BudgetSetup | None = None) -> int:
    """Return the peak of a dry run under a memory plan; model and optimizer stay unchanged."""
    model, optimizer, device = task.model, task.optimizer, task.device
    setup = replace(setup or BudgetSetup(), is_dry_run=True)
    named = all_tensors(model, task.batch)
    mode = fake_mode(model)
    with mode:
        fakes = fake_twins([tensor for _, _, tensor in named], str(device))
        fake_states = _fake_states(optimizer, str(device))
    batch = map_batch(task.batch, fakes)
    # The warm-up step must not leave optimizer state behind for the measured step.
    first, own = (_fake_optimizer(optimizer, fakes, fake_states) for _ in range(2))
    tracker = _tracker(device)
    with (
        _unclaimed(model),
        swapped_tensors(model, fakes, task.recipe.forward, task.recipe.loss),
        nullcontext() if task.recipe.forward else rows_are_whole(task.batch),
        torch.random.fork_rng(),
        # Modes and fake tensors are per thread: backward must run on the thread that tracks.
        torch.autograd.set_multithreading_enabled(False),
        mode,
        WideStatistics(),  # type: ignore[no-untyped-call]
        tracker,
    ):
        plan = BudgetPlan(memory, 0)
        strategy = BudgetedModel(model, batch, task.recipe, plan, device, setup)
        tracker.track(strategy.lasting)
        tracker.track(fakes[id(tensor)] for tensor in _other_tensors(named, device))
        tracker.track(_resident_states(strategy, own))
        # A step may replace attributes of the model: this dict would keep the old tensors alive.
        del fakes
        last_loss = torch.zeros((), device=device)
        step = partial(_step, strategy, batch, task)
        tracker.peak_bytes = tracker.held_bytes
        with _readable(optimizer):
            if any(block.share < 1 for block in memory.blocks):
                # Fractions refer to bytes that an earlier step saved: the first step offloads all.
                step(first)
            del first
            peak_bytes = tracker.peak_bytes
            strategy.make_states(own)
            before_bytes = tracker.held_bytes
            # Temporaries of making all states at once are no part of a step.
            tracker.peak_bytes = max(peak_bytes, before_bytes)
            step(own)
            if tracker.held_bytes > before_bytes:
                # Tensors that the model keeps from a step add to the peak of the next one.
                step(own)
        del last_loss
    if device.type == "cuda":
        workspaces_on(device).keep()
        # Give back the memory of tensors that kernels were measured with.
        torch.cuda.empty_cache()
    overhead_bytes = _overhead_bytes(task, has_products=tracker.has_products)
    overhead_bytes += _small_bytes(device, model)
    return tracker.peak_bytes + overhead_bytes


def _updates_early(task: TrainingTask) -> bool:
    return task.options.clip_norm is None and updates_in_parts(task.optimizer)


def _step(
    strategy: BudgetedModel, batch: Any, task: TrainingTask, optimizer: torch.optim.Optimizer
) -> None:
    """Run one update with its microbatches, as the training loop does."""
    # The second batch finds the gradients of the first; further ones have the same peak.
    num_batches, clips = min(task.options.accumulate, 2), not _updates_early(task)
    for number in range(num_batches):
        strategy.expect(None if clips or num_batches > 1 else optimizer)
        with deferred_gc():
            output = strategy.train(batch, number + 1, 1.0)
    if clips:
        strategy.clip(1.0)
    strategy.update(optimizer)
    # The loss lives through the update; gradients are dropped before the next step.
    del output
    strategy.expect(None)
    for block in strategy.blocks:
        for parameter in block.parameters:
            parameter.grad = None


def _other_tensors(named: Iterable[NamedTensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield tensors of the batch, and plain attributes on the device type, which are not moved."""
    for _, role, tensor in named:
        if role == Role.INPUT or (role == Role.BUFFER and tensor.device.type == device.type):
            yield tensor


def _resident_states(strategy: BudgetedModel, own: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield state tensors of parameters on the device; none before the optimizer's first step."""
    resident = [block for block in strategy.blocks if block.master is None]
    for parameter in (p for block in resident for p in block.parameters):
        for value in own.state.get(parameter, {}).values():
            # Step counters are on the host.
            if isinstance(value, torch.Tensor) and value.dim():
                yield value


@contextmanager
def _unclaimed(model: nn.Module) -> Iterator[None]:
    """Release the model after a dry run, so that another strategy can train it."""
    try:
        yield
    finally:
        claim_model(model, None)


@contextmanager
def _readable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse optimizers that read values of tensors, because fake tensors have none."""
    try:
        yield
    except DataDependentOutputException:
        raise RunError(
            f"{type(optimizer).__name__} reads values of tensors, so its update on the device has "
            "no dry run",
            hint="give it less memory, so that the host updates, or use another optimizer",
        ) from None


def _tracker(device: torch.device) -> MemoryTracker:
    if device.type != "cuda":
        return MemoryTracker()
    return MemoryTracker(ALIGNMENT_BYTES, workspaces_on(device).workspace_bytes)


def _fake_states(optimizer: torch.optim.Optimizer, device: str) -> dict[int, Any]:
    """Return fake tensors for optimizer states, except scalars such as step counters."""
    tensors = [
        value
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return fake_twins(tensors, device)


def _fake_optimizer(
    optimizer: torch.optim.Optimizer, fakes: Mapping[int, Any], states: Mapping[int, Any]
) -> torch.optim.Optimizer:
    own = without_parameters(optimizer)
    own.param_groups = [
        {**group, "params": [fakes[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    for parameter, of_parameter in optimizer.state.items():
        own.state[fakes[id(parameter)]] = {
            key: states[id(value)] if id(value) in states
            else value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in of_parameter.items()
        }  # fmt: skip
    return own


# ── memory of the device beside the step's tensors ───────────────────────────────────────────────


def _overhead_bytes(task: TrainingTask, *, has_products: bool) -> int:
    """Return the device bytes of library workspaces and of the process's other tensors."""
    if task.device.type != "cuda":
        return 0
    major, _ = torch.cuda.get_device_capability(task.device)
    cublas = [_CUBLAS_BYTES.get(major, _OTHER_CUBLAS_BYTES), _CUBLASLT_BYTES]
    workspaces = 2 * cublas if has_products else []
    return sum(workspaces) + _others_bytes(task, workspaces)


def _small_bytes(device: torch.device, model: nn.Module) -> int:
    """Return a margin of one allocation unit for each tensor of the model.

    It covers step counters, which fused kernels hold on the device, and statistics of norms, which
    lived longer on a GPU than in the dry run (11 KiB of 137 MB).
    """
    if device.type != "cuda":
        return 0
    return ALIGNMENT_BYTES * sum(1 for _ in model_tensors(model))


def _others_bytes(task: TrainingTask, workspaces: Sequence[int]) -> int:
    """Return the bytes of PyTorch's allocator that are in use outside of this training."""
    device = task.device
    states = (leaf for states in task.optimizer.state.values() for leaf in tree_leaves(states))
    own = [tensor for _, _, tensor in all_tensors(task.model, task.batch)]
    own += [leaf for leaf in states if isinstance(leaf, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t for t in own if t.device.type == "cuda"}
    held = sum(aligned(tensor.untyped_storage().nbytes()) for tensor in storages.values())
    held += _present_bytes(device, workspaces)
    if torch.cuda.memory_allocated(device) > held:
        # Host jobs and reference cycles may keep an earlier training alive.
        wait_for_all()
        gc.collect()
    return max(0, torch.cuda.memory_allocated(device) - held)


def _present_bytes(device: torch.device, workspaces: Sequence[int]) -> int:
    """Return the bytes of workspaces that exist already: the first matrix product allocates
    them."""
    index: int | None = device.index
    index = torch.cuda.current_device() if index is None else index
    missing = Counter(workspaces)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    found = 0
    for block in (b for s in segments if s["device"] == index for b in s["blocks"]):
        if block["state"] == "active_allocated" and missing[block["requested_size"]]:
            missing[block["requested_size"]] -= 1
            found += int(block["size"])
    return found
