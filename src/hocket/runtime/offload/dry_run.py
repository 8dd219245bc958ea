"""Memory plans of one training: rehearsed, chosen by that, and carried out."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

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
from hocket.runtime.offload.budgeted_model import Budgeted
from hocket.runtime.offload.host_adam import is_one_pass, tried_beside
from hocket.runtime.offload.host_optimizer import wait_for_all
from hocket.runtime.offload.kernel_workspaces import workspaces_on
from hocket.runtime.offload.memory_tracker import Ledger, WideStatistics, is_product
from hocket.runtime.offload.optimizer_parts import part_of, updates_in_parts, without_parameters
from hocket.runtime.offload.patched_forward import carry
from hocket.runtime.offload.plan_choice import KeptBudget, fastest_that_keeps
from hocket.runtime.task import LoopOptions
from hocket.runtime.train.cuda_graphs import AS_ASKED, NOT_CUDA
from hocket.runtime.train.deferred_gc import unsearched
from hocket.runtime.train.trace_options import Recipe
from hocket.simulate.rewriting.casts import CAST

# Parameters that a step only reads rounded: autocast turns them into 16-bit floats before use.
#
# The recorded step shows it: every op that reads the parameter, in forward or backward, is a cast
# to one and the same type. Copying the rounded values instead gives the same numbers.


def rounded_parameters(program: Program) -> dict[str, torch.dtype]:
    """The type that each such parameter is read in, by name."""
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
        if len(found[tensor]) == 1 and isinstance(dtype := next(iter(found[tensor])), torch.dtype)
    }


# A training step rehearsed on tensors without memory: the most bytes that it will hold.
#
# The step that a memory plan asks for is carried out by the very code that will do it, on fake
# tensors, under the byte-counting allocator; so what is predicted is what happens, op by op. The
# optimizer's state on the device is made before, as a first step would. Host updates are left out:
# they take nothing of the device; what they will run is compiled meanwhile. On CUDA storages take
# whole units of its allocator, kernels what they are measured to take beside their results
# (`workspaces`), and on top come the workspaces of cuBLAS and cuBLASLt, one each for the thread of
# the forward pass and for that of the backward pass, where matrices are multiplied, small tensors,
# and what the process holds on the device beside the training.


_WORKSPACE_BYTES = {9: 32 * 2**20}
"""Of cuBLAS under PyTorch, by major compute capability."""
_OTHER_WORKSPACE_BYTES = 8_519_680
_LT_WORKSPACE_BYTES = 2**20
"""Of cuBLASLt beside it."""


class RehearsedPeak(NamedTuple):
    """The most that a step will hold, and when."""

    num_bytes: int
    at: str
    """The op, and before it the node of the backward pass that wants it."""


def rehearsed_peak(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    recipe: Recipe,
    memory: Memory,
    device: torch.device,
    *,
    graph: Graph | None = None,
    rounded: Mapping[str, torch.dtype] | None = None,
    clips: bool = False,
    accumulate: int = 1,
    outputs: bool = False,
) -> RehearsedPeak:
    """The peak of steps of ``model`` under a memory plan; nothing that is given is changed."""
    named = all_tensors(model, batch)
    mode = fake_mode(model)
    with mode:
        twins = fake_twins([tensor for _, _, tensor in named], str(device))
        fakes = _fake_states(optimizer, str(device))
    fake_batch = map_batch(batch, twins)
    first, own = (_fake_optimizer(optimizer, twins, fakes) for _ in range(2))
    ledger = _ledger(device)
    is_compiled = bool(rounded) and _may_be_one_pass(optimizer, memory, device)
    with (
        _uncarried(model),
        swapped_tensors(model, twins, recipe.forward, recipe.loss),
        tried_beside() if is_compiled else nullcontext(),
        nullcontext() if recipe.forward else rows_are_whole(batch),
        torch.random.fork_rng(),
        torch.autograd.set_multithreading_enabled(False),
        mode,
        WideStatistics(),  # type: ignore[no-untyped-call]
        ledger,
    ):
        strategy = Budgeted(
            model,
            fake_batch,
            recipe,
            KeptBudget(memory, 0),
            device,
            graph=graph,
            rounded=rounded,
            is_rehearsal=True,
            outputs=outputs,
        )
        ledger.hold(strategy.lasting)
        ledger.hold(twins[id(tensor)] for tensor in _there_besides(named, device))
        ledger.hold(_states_here(strategy, own))
        # What a step puts in the place of an attribute is there instead of it.
        del twins
        last_loss = torch.zeros((), device=device)
        step = partial(_step, strategy, fake_batch, clips=clips, num_parts=min(accumulate, 2))
        ledger.peak_bytes = ledger.held_bytes
        with _readable(optimizer):
            if any(block.share < 1 for block in memory.blocks):
                # Shares are of what an earlier step saved: the first one sends everything.
                step(first)
            del first
            peak_bytes, peak_at = ledger.peak_bytes, ledger.peak_at
            strategy.make_states(own)
            before_bytes = ledger.held_bytes
            ledger.peak_bytes, ledger.peak_at = max(peak_bytes, before_bytes), peak_at
            step(own)
            if ledger.held_bytes > before_bytes:
                # What the model itself keeps of a step is there in the next one.
                step(own)
        del last_loss
    own_tensors = _own_tensors(model, optimizer, batch)
    if device.type == "cuda":
        # Tensors that kernels were measured with are gone, their room goes, too.
        torch.cuda.empty_cache()
    beside = _beside_bytes(device, own_tensors, has_products=ledger.has_products)
    beside += _small_bytes(device, model)
    return RehearsedPeak(ledger.peak_bytes + beside, ledger.peak_at)


def _step(
    strategy: Budgeted, batch: Any, optimizer: torch.optim.Optimizer, *, clips: bool, num_parts: int
) -> None:
    """An update as the loop makes it, of gradients that come in so many parts: those of earlier
    parts are there in the later ones."""
    for part in range(num_parts):
        strategy.expect(None if clips or num_parts > 1 else optimizer)
        with unsearched():
            carried = strategy.train(batch, part + 1, 1.0)
    if clips:
        strategy.clip(1.0)
    strategy.update(optimizer)
    # The loss is there beside the update; gradients are dropped before the next step.
    del carried
    strategy.expect(None)
    for block in strategy.blocks:
        for parameter in block.parameters:
            parameter.grad = None


def _there_besides(named: Iterable[NamedTensor], device: torch.device) -> Iterator[torch.Tensor]:
    """The batch, and tensors that the model has as plain attributes: where they are they stay."""
    for _, role, tensor in named:
        if role == Role.INPUT or (role == Role.BUFFER and tensor.device.type == device.type):
            yield tensor


def _states_here(strategy: Budgeted, own: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer that has made steps before keeps on the device."""
    for parameter in (
        p for block in strategy.blocks if block.home is None for p in block.parameters
    ):
        for value in own.state.get(parameter, {}).values():
            # Counters of steps are the host's.
            if isinstance(value, torch.Tensor) and value.dim():
                yield value


@contextmanager
def _uncarried(model: nn.Module) -> Iterator[None]:
    """Around a dry run: what it puts into the model is gone afterwards, so it has nothing to say
    about who trains the model."""
    try:
        yield
    finally:
        carry(model, None)


@contextmanager
def _readable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around updates, which may want numbers of tensors that have none."""
    try:
        yield
    except DataDependentOutputException:
        raise RunError(
            f"{type(optimizer).__name__} takes numbers out of tensors, so that its update on the "
            "device cannot be rehearsed",
            hint="give it less memory, so that the host updates, or use another optimizer",
        ) from None


def least_beside_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    device: torch.device,
    graph: Graph,
) -> int:
    """What every rehearsal adds to the bytes of tensors, whatever the plan."""
    has_products = any(is_product(graph.kind_of(op)) for op in range(graph.num_ops))
    return _beside_bytes(device, _own_tensors(model, optimizer, batch), has_products=has_products)


def _own_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> list[torch.Tensor]:
    """What there is of a training before its next step."""
    states = (leaf for states in optimizer.state.values() for leaf in tree_leaves(states))
    return [tensor for _, _, tensor in all_tensors(model, batch)] + [
        leaf for leaf in states if isinstance(leaf, torch.Tensor)]  # fmt: skip


def _beside_bytes(device: torch.device, own: Iterable[torch.Tensor], *, has_products: bool) -> int:
    workspaces = _workspaces(device) if has_products else []
    return sum(workspaces) + _others_bytes(device, own, workspaces)


def _may_be_one_pass(
    optimizer: torch.optim.Optimizer, memory: Memory, device: torch.device
) -> bool:
    """True if the host may update and round blocks in one pass over memory."""
    settings = part_of(optimizer, {}, fused=device.type == "cuda")
    return is_one_pass(settings) and any(block.update == "host" for block in memory.blocks)


def _ledger(device: torch.device) -> Ledger:
    if device.type != "cuda":
        return Ledger()
    return Ledger(ALIGNMENT_BYTES, workspaces_on(device).beside)


def _workspaces(device: torch.device) -> list[int]:
    """The workspaces of a step, in bytes."""
    if device.type != "cuda":
        return []
    major, _ = torch.cuda.get_device_capability(device)
    return 2 * [_WORKSPACE_BYTES.get(major, _OTHER_WORKSPACE_BYTES), _LT_WORKSPACE_BYTES]


def _small_bytes(device: torch.device, model: nn.Module) -> int:
    """Small tensors beside what is rehearsed, at most one for each that the model has: fused
    kernels count steps on the device, and statistics of norms were seen to stay longer there (11
    KiB of a net that held 137 MB)."""
    if device.type != "cuda":
        return 0
    return ALIGNMENT_BYTES * sum(1 for _ in model_tensors(model))


def _others_bytes(
    device: torch.device, own: Iterable[torch.Tensor], workspaces: Sequence[int]
) -> int:
    """What PyTorch's allocator has given to others than the training, its workspaces apart.

    A training that nobody has any more is no other: what it holds may go at any moment, and goes.
    """
    if device.type != "cuda":
        return 0
    storages = {t.untyped_storage()._cdata: t for t in own if t.device.type == "cuda"}
    held = sum(aligned(tensor.untyped_storage().nbytes()) for tensor in storages.values())
    held += _made_bytes(device, workspaces)
    if torch.cuda.memory_allocated(device) > held:
        wait_for_all()
        gc.collect()
    return max(0, torch.cuda.memory_allocated(device) - held)


def _made_bytes(device: torch.device, workspaces: Sequence[int]) -> int:
    """Of the workspaces of a step those that are there: the first product makes them."""
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


def _fake_states(optimizer: torch.optim.Optimizer, device: str) -> dict[int, Any]:
    """Fake twins of the states that are of a parameter's size."""
    tensors = [
        value
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return fake_twins(tensors, device)


def _fake_optimizer(
    optimizer: torch.optim.Optimizer, twins: Mapping[int, Any], fakes: Mapping[int, Any]
) -> torch.optim.Optimizer:
    own = without_parameters(optimizer)
    own.param_groups = [
        {**group, "params": [twins[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    for parameter, states in optimizer.state.items():
        own.state[twins[id(parameter)]] = {
            key: fakes[id(value)] if id(value) in fakes
            else value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in states.items()
        }  # fmt: skip
    return own


# Memory plans of one training: rehearsed, chosen by that, and carried out.

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
        """What a card must have for steps under a plan: see `hocket.runtime.offload.allocator`."""
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
