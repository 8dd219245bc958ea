"""`BudgetedModel`: trains a PyTorch model within a memory budget, according to its memory plan.

The modules of each block are called through hooks (`hooks`) that apply the block's policy: saved
tensors stay on the device, are offloaded or recomputed, and parameters are resident on the device
or fetched from the host. Gradients of host-resident blocks are copied to the host as soon as they
are complete, and the user's optimizer updates each block on the host or the device while the
backward pass continues. Code and parameter objects of the model do not change: patched forwards
call the hooks, and between steps parameters are views of their master copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hocket.base.errors import UsageError
from hocket.base.units import format_apart, typed_bytes
from hocket.capture.fake import model_tensors, plain_batch
from hocket.capture.loss import ChosenLoss
from hocket.capture.model import CaptureWarning
from hocket.capture.step import apply_model
from hocket.graph.graph import Graph
from hocket.runtime.batches import (
    detached,
    larger_batch_warning,
    on_device,
    order_changed_warning,
    signature_of,
)
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.model_tensors import ModelTree, replaced_error
from hocket.runtime.offload.allocator import context_bytes
from hocket.runtime.offload.budget_graph import BudgetGraph
from hocket.runtime.offload.chunked_loss import Head
from hocket.runtime.offload.copy_streams import CopyStreams, HeldUntil, HostPool
from hocket.runtime.offload.gradient_buffers import (
    GradientBuffers,
    Gradients,
    set_aside_host_gradients,
)
from hocket.runtime.offload.hooks import BlockHooks
from hocket.runtime.offload.host_optimizer import HostOptimizerThread, OptimizerSteps, host_step
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import find_head, model_blocks
from hocket.runtime.offload.parameter_blocks import Block, blocks_by_module, place_parameters
from hocket.runtime.offload.patched_forward import (
    claim_model,
    eager_only,
    patch_forward,
    restore_forwards,
    retrained_error,
)
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.offload.prefetch import staging_buffers
from hocket.runtime.offload.state_swap import StateSwap
from hocket.runtime.optimizer_parts import updates_in_parts
from hocket.runtime.replay import AS_ASKED
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.trace_options import TraceOptions, Weight, autocast_state, in_mode

_NUM_MEASURED_STEPS = 2
"""Steps measured if there was no dry run; the second one has all of the optimizer's state."""


class BudgetExceededWarning(UserWarning):
    """Steps of a model that could not be traced exceed their memory budget."""


@dataclass(frozen=True, kw_only=True)
class BudgetSetup:
    """Facts about a model and its training loop that are not in the memory plan."""

    graph: Graph | None = None
    """The traced step, or None if the model cannot be traced."""
    low_precision: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of parameters that every op casts to another dtype first, by name."""
    outputs: bool = False
    """True if steps return all outputs of the model, not only single numbers."""
    lost: str = ""
    """Text of a warning that the user has got already; further warnings are suppressed."""
    no_replay: str = AS_ASKED
    """Reason why steps are not replayed as CUDA graphs, or an empty string."""
    is_dry_run: bool = False
    """True if tensors are fake and the host's work is skipped."""


class BudgetedModel(Strategy):
    """Strategy that trains a model within a memory budget."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        trace: TraceOptions,
        plan: BudgetPlan,
        device: torch.device,
        setup: BudgetSetup | None = None,
    ) -> None:
        setup = setup or BudgetSetup()
        memory, is_dry_run = plan.section, setup.is_dry_run
        self._model, self._trace, self.budget_plan, self._memory = model, trace, plan, memory
        self._setup = setup
        self.predicted_s, self.lost = plan.step_s, setup.lost
        self._planned_batch = signature_of(batch)
        self._planned_autocast = autocast_state() if setup.low_precision else ()
        self._loss = ChosenLoss(trace.loss)
        if setup.outputs and memory.loss_chunks > 1:
            raise UsageError(
                "outputs=True, but the memory plan computes logits and loss in chunks",
                hint="leave outputs=True out, or plan with loss_chunks 1",
            )
        is_real = device.type == "cuda" and not is_dry_run
        self._optimizer: torch.optim.Optimizer | None = None
        """Optimizer that updates blocks as their gradients arrive, or None."""
        self._is_own_loop = False
        """True if the user's loop calls ``loss.backward()``."""
        self._detached: _DetachedStorage | None = None

        self.blocks = model_blocks(model, memory, setup.graph)
        self._streams = CopyStreams(device, is_real=is_real, is_dry_run=is_dry_run)
        self._pool = HostPool(pinned=is_real)
        self._host_optimizer = HostOptimizerThread(is_dry_run=is_dry_run)
        self._steps = OptimizerSteps(device, is_real=is_real, is_dry_run=is_dry_run)
        self._gradient_buffers = GradientBuffers(self._streams, self._pool, self._host_optimizer)
        self._update_reads = HeldUntil()
        """Gradients that running updates on the device still read."""
        place_parameters(model, self.blocks, self._streams, setup.low_precision)
        self._staging = staging_buffers(self.blocks, self._streams, memory.prefetch)
        # On its own streams, so that state does not queue behind parameters and saved tensors.
        swap_streams = CopyStreams(device, is_real=is_real, is_dry_run=is_dry_run)
        self._state_swap = StateSwap(self.blocks, swap_streams, self._steps.step_on_device)
        self._hooks = BlockHooks(
            streams=self._streams,
            staging=self._staging,
            pool=self._pool,
            host_optimizer=self._host_optimizer,
            events=self,
            resident_storages=frozenset(t.untyped_storage()._cdata for t in self.lasting),
            offloads_saved=any(block.offloads_saved for block in self.blocks),
            prefetch=memory.prefetch,
            restores_rng=not is_dry_run,
        )
        self._head = find_head(model, memory, setup.graph, self.blocks)
        # Without asynchronous updates nothing runs between steps, so state dicts need no wait.
        self._waits = _StateDictWaits(
            self._settle, is_needed=memory.async_update and not is_dry_run
        )
        self._patch_forwards()
        self._graph = BudgetGraph(model, device, setup.no_replay)
        self._peak = _MeasuredPeak(trace.name, device)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}
        self._tree = ModelTree(model, everything=False)

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Set the optimizer that updates each block as its gradients arrive.

        None defers all updates to `update`.
        """
        self._steps.place_states(optimizer, self.blocks)
        self._optimizer = optimizer if optimizer and updates_in_parts(optimizer) else None

    def feed(self, reducer: GradientReducer) -> None:
        """Ignore the reducer during the pass: it reads ``parameter.grad`` afterwards.

        Autograd's hooks would pass it gradients before they are copied to the host.
        """

    @property
    def replays(self) -> str:
        """Description of how the next step is launched."""
        return self._graph.replay.message

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward, and the updates of the optimizer set by `expect`."""
        self._require_model()
        self._check_shapes(batch)
        with self._peak.measured(self.budget_plan, lambda: self.lasting, batch):
            output = self._graph(batch, weight, self._optimizer, self._passes)
        if self._optimizer is None and not self._memory.async_update:
            # Accumulated gradients can be read as `parameter.grad`.
            self._settle()
        return output

    def _passes(self, batch: Any, weight: Weight) -> StepOutput:
        loss, outputs = self._forward(batch)
        # Logits that nobody reads are not held through the backward pass.
        outputs = detached(outputs) if self._setup.outputs else tree_map(_single_number, outputs)
        # The weight scales gradients only: the reported loss stays unweighted.
        loss.backward(torch.ones_like(loss).mul_(weight))  # type: ignore[no-untyped-call]
        return StepOutput(loss.detach(), outputs)

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Run the forward pass; the user's loop calls ``loss.backward()``."""
        self._optimizer = None
        self._begin(batch)
        output = self._forward(batch)
        self._is_own_loop = True
        return output

    def _begin(self, batch: Any) -> None:
        """Check model and batch, and release the CUDA graph, before a pass outside of `train`."""
        self._require_model()
        self._check_shapes(batch)
        self._graph.release()

    def _forward(self, batch: Any) -> StepOutput:
        self._is_own_loop = False
        batch = self._enter(batch)
        self._state_swap.cancel()
        with self._hooks.outside_blocks():
            returned = self._apply(batch)
            loss = self._loss(returned)
        if loss.requires_grad:
            loss.register_hook(lambda _: self._hooks.begin_backward())  # type: ignore[no-untyped-call]
        return StepOutput(loss, returned)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the blocks that were not updated during the backward pass."""
        # Learning-rate schedulers warn unless `optimizer.step` was called before them.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._waits.add(optimizer)
        if not updates_in_parts(optimizer):
            self._settle()
            self._steps.step_whole(optimizer)
        elif self._optimizer is None:
            self._update_all(optimizer)
        if not self._memory.async_update:
            self._settle()

    def _update_all(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps.place_states(optimizer, self.blocks)
        resident: list[nn.Parameter] = []
        for block in self.blocks:
            if block.master is None:
                resident += block.parameters
                continue
            self._wait(block)
            # `_settle`, which `clip` calls, has moved host gradients to `parameter.grad`.
            gradients = {p: p.grad for p in block.parameters if p.grad is not None}
            for parameter in gradients:
                parameter.grad = None
            block.host_gradients = block.host_gradients | gradients
            part = self._steps.on_host(optimizer, block)
            self._host_optimizer.submit(block, partial(self._update_on_host, block, part))
        self._steps.step_on_device(self._steps.on_device(optimizer, resident))

    def clip(self, max_norm: float) -> None:
        """Clip all gradients, on host and device, by their global norm."""
        self._settle()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for running updates, and drop empty optimizer states of parameters never updated."""
        self._require_model()
        self._settle()
        for parameter in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]

    def evaluate(self, batch: Any) -> StepOutput:
        """Compute the loss without gradients."""
        self._begin(batch)
        with torch.no_grad(), in_mode(self._model, is_training=False):
            output = self._forward(batch)
        self._use_masters()
        return output

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs, without gradients."""
        self._require_model()
        self._graph.release()
        with torch.no_grad(), in_mode(self._model, is_training=False):
            returned = self._apply(self._enter(batch))
        self._use_masters()
        return returned

    def _use_masters(self) -> None:
        """Make parameters views of their master copies, so that the user's writes change the
        masters."""
        for block in self.blocks:
            block.use_master()

    def _apply(self, batch: Any) -> Any:
        with _without_cache(self._model) if torch.is_grad_enabled() else nullcontext():
            return (self._trace.forward or apply_model)(self._model, batch)

    def leave(self) -> None:
        """Restore the model's forwards and free device buffers, so that another strategy can train
        it."""
        self._settle()
        self._graph.release()
        self._staging.invalidate_all()
        buffers = [*self._buffers, *self._state_swap.buffers]
        self._detached = _DetachedStorage(self.blocks, buffers, self._streams)
        self._restore_forwards()

    def come_back(self) -> None:
        """Undo `leave`: allocate the buffers again and patch the model."""
        assert self._detached is not None
        self._restore_forwards()
        self._detached.attach()
        # The other strategy may have moved the optimizer's state.
        self._steps.forget_places()
        self._patch_forwards()
        self._detached = None

    def _restore_forwards(self) -> None:
        restore_forwards(module for block in self.blocks for module in block.modules.values())
        claim_model(self._model, None)
        self._waits.remove()

    def _require_model(self) -> None:
        if self._detached is not None:
            raise retrained_error()
        if not self._tree.is_same():
            raise replaced_error()
        if self._planned_autocast and autocast_state() != self._planned_autocast:
            raise UsageError(
                "parameters have low-precision copies for the autocast that hocket.prepare was "
                "called under, and this call is not under it",
                hint="call hocket.prepare outside of autocast, or steps inside of the same",
            )

    # ── gradients and updates: see `BackwardEvents` ──────────────────────────────────────────

    def begin_backward(self) -> None:
        """Clear ``parameter.grad`` of host gradients, because autograd adds device gradients to
        it."""
        set_aside_host_gradients(self.blocks)

    def begin_block(self, block: Block) -> None:
        """Prefetch the optimizer state of a block whose gradients will be complete next."""
        self._state_swap.prefetch(block, self._optimizer)

    def finish_block(self, block: Block) -> None:
        """Update a block whose gradients are complete, or copy its gradients to the host."""
        if block.master is None:
            if self._optimizer is not None:
                self._update_on_device(block)
            return
        found = {p: p.grad for p in block.parameters if p.grad is not None}
        if not found:
            return
        for parameter in found:
            parameter.grad = None
        block.use_master()
        # The state swap declines blocks without state or with gradients accumulated on the host.
        update = self._state_swap.update(block, self._optimizer, found)
        if update is not None:
            self._update_reads.hold(list(found.values()), update.gradients_read)
            block.written_back = update.written_back
            self._staging.invalidate(block)
            return
        part = None if self._optimizer is None else self._steps.on_host(self._optimizer, block)
        buffer, gradients = self._gradient_buffers.offload(block, found, is_used=part is not None)
        work = partial(self._accumulate_on_host, block, buffer, gradients, part)
        self._host_optimizer.submit(block, work, block.gradients_sent)
        self._staging.invalidate(block)

    def finish_step(self) -> None:
        """Finish the block of shared parameters, and release gradients after copies and updates."""
        self.finish_block(self.blocks[-1])
        self._gradient_buffers.in_flight.release()
        self._update_reads.release()
        if self._is_own_loop:
            self._settle()

    def order_changed(self) -> None:
        """Warn that the order of block calls differs from the last step, so prefetches fail."""
        self._warn(order_changed_warning(self._trace.name))

    def _accumulate_on_host(
        self, block: Block, buffer: torch.Tensor, gradients: Gradients,
        part: torch.optim.Optimizer | None,
    ) -> Iterator[None]:  # fmt: skip
        """Add arrived gradients, then update the block if ``part`` is set; runs on the host
        thread."""
        self._gradient_buffers.accumulate(block, buffer, gradients)
        if part is not None:
            yield from self._update_on_host(block, part)

    def _update_on_host(self, block: Block, part: torch.optim.Optimizer) -> Iterator[None]:
        block.is_stale = True
        with self._gradient_buffers.used(block):
            yield from host_step(block, part)

    def _update_on_device(self, block: Block) -> None:
        assert self._optimizer is not None
        if any(p.grad is not None for p in block.parameters):
            part = self._steps.on_device(self._optimizer, block.parameters)
            self._steps.step_on_device(part)
            for parameter in block.parameters:
                parameter.grad = None

    def make_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Create states on the device and states to be swapped in, as a first optimizer step
        would."""
        if not optimizer.state:
            self._steps.make_states(optimizer, self.blocks)
        self._state_swap.prepare(optimizer)

    def _settle(self) -> None:
        """Finish all updates, and make parameters and gradients readable on the host."""
        for block in self.blocks:
            self._wait(block)
            block.require_own_storage()
            block.use_master()
            for parameter, gradient in block.host_gradients.items():
                parameter.grad = gradient
            block.host_gradients = {}

    def _wait(self, block: Block) -> None:
        """Wait until all updates of a block have reached its master copy."""
        self._host_optimizer.wait(block)
        block.written_back.synchronize()

    # ── setting up ───────────────────────────────────────────────────────────────────────────

    @property
    def _buffers(self) -> list[torch.Tensor]:
        """Device buffers for parameters of host-resident blocks."""
        residents = [block.resident for block in self.blocks if block.resident is not None]
        return [*self._staging.buffers, *residents]

    @property
    def lasting(self) -> list[torch.Tensor]:
        """Tensors that stay on the device between steps, except for optimizer state."""
        lasting = [*self._model.buffers(), *self._buffers]
        for block in self.blocks:
            lasting += block.parameters if block.master is None else ()
        return lasting

    def _enter(self, batch: Any) -> Any:
        """Begin a forward pass; return the batch on the device.

        Drops gradients of a failed backward pass, and fetches parameters that several blocks
        use.
        """
        batch = on_device(batch, self._streams.device)
        if self._hooks.is_backward_unfinished:
            self._gradient_buffers.drop(self.blocks)
        self._hooks.begin(batch)
        shared = self.blocks[-1]
        if shared.master is not None:
            self._hooks.fetch_shared(shared)
        return batch

    def _patch_forwards(self) -> None:
        self._waits.add(self._model)
        claim_model(self._model, self)
        for path, blocks in blocks_by_module(self.blocks).items():
            block, module = blocks[-1], blocks[-1].modules[path]
            own = module.forward
            if module is self._head:
                call = partial(self._call_head, block, own, module)
            else:
                call = partial(self._call, path, blocks, own)
            patch_forward(module, self, call if self._setup.is_dry_run else eager_only(own, call))

    def _call(self, path: str, blocks: list[Block], forward: Any, *args: Any, **kwargs: Any) -> Any:
        block = self._hooks.block_of_call(path, blocks)
        can_recompute = path not in block.not_recomputable
        return self._hooks.call(block, forward, args, kwargs, can_recompute=can_recompute)

    def _call_head(self, block: Block, forward: Any, head: nn.Linear, rows: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self._hooks.call(block, forward, (rows,), {})
        call = partial(self._call_within, block)
        return Head(head, call, self._memory.loss_chunks).lazy_logits(rows)

    def _call_within(self, block: Block, function: Callable[[], Any]) -> Any:
        return self._hooks.call(block, function, (), {})

    def _check_shapes(self, batch: Any) -> None:
        self._warn(larger_batch_warning(self._planned_batch, signature_of(batch)))

    def _warn(self, message: str) -> None:
        if message and not self.lost:
            self.lost = message
            warnings.warn(message, CaptureWarning, 2)


def _single_number(value: Any) -> Any:
    """Detach a single number; return None for other values, such as caches that hold the graph."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return value if isinstance(value, int | float | str) else None


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Switch off key-value caches of Hugging Face models.

    They hold copies that no gradient needs, and recompute would append to them a second time.
    """
    # Encoders and decoders may have configurations of their own.
    # Modules of one model often share a configuration object, hence the key by identity.
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching: list[Any] = [each for each in found.values() if getattr(each, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


class _DetachedStorage:
    """Device memory that a strategy frees while another strategy trains its model.

    Buffers and their views remain as tensor objects; only their storages are empty meanwhile.
    """

    def __init__(
        self, blocks: Sequence[Block], buffers: Iterable[torch.Tensor], streams: CopyStreams
    ) -> None:
        """Free the buffers; no update of these blocks may be running."""
        self._blocks, self._streams = blocks, streams
        for block in blocks:
            for parameter in block.parameters if block.master is not None else ():
                # Master copies share one buffer; a model's own parameters have each their memory.
                parameter.data = parameter.data.clone()
        # Prefetches may still write.
        streams.synchronize()
        storages = {b.untyped_storage()._cdata: b.untyped_storage() for b in buffers}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def attach(self) -> None:
        """Allocate the memory again, and move parameters to where the memory plan places them."""
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)
        # Computation may still use memory that it has freed.
        self._streams.synchronize()
        for block in self._blocks:
            block.write_back()
            for parameter in block.parameters if block.master is None else ():
                parameter.data = parameter.data.to(self._streams.device)


class _WaitingHook:
    """State-dict hook that waits for asynchronous updates."""

    # Copies of a model copy its hooks: without `__deepcopy__` they would copy the strategy too.
    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __call__(self, *_: object) -> None:
        """Wait for updates before a state dict is saved or loaded."""
        self._wait()

    def __deepcopy__(self, memo: object) -> _WaitingHook:
        """Wait before a model is copied; the hook of the copy waits for nothing."""
        self._wait()
        return _WaitingHook(_nothing)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle: reading a pickled model would require hocket."""
        raise UsageError(
            "a model with async_update=True cannot be pickled as a whole",
            hint="save model.state_dict(), or copy.deepcopy(model); or leave async_update out",
        )


def _nothing() -> None:
    """Wait for nothing."""


class _StateDictWaits:
    """Makes ``state_dict()`` and ``load_state_dict()`` wait for asynchronous updates."""

    def __init__(self, wait: Callable[[], None], *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._hook = _WaitingHook(wait)
        self._handles: dict[object, list[RemovableHandle]] = {}

    def add(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """Register the hooks of a model or an optimizer."""
        if owner not in self._handles and self._is_needed:
            self._handles[owner] = [
                owner.register_state_dict_pre_hook(self._hook),
                owner.register_load_state_dict_pre_hook(self._hook),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()


class _MeasuredPeak:
    """Measures the first steps of a model without a dry run, and warns if they exceed the
    budget."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._num_left = _NUM_MEASURED_STEPS
        self._peak_bytes = 0

    @contextmanager
    def measured(
        self, plan: BudgetPlan, lasting: Callable[[], Iterable[torch.Tensor]], batch: Any
    ) -> Iterator[None]:
        """Measure a step; ``lasting`` returns the tensors on the device besides the batch."""
        if plan.peak_bytes is not None or not self._num_left:
            yield
            return
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak_bytes = torch.cuda.max_memory_reserved(self._device) + context_bytes(self._device)
        else:
            leaves = tree_leaves(plain_batch(batch))
            tracker = MemoryTracker()
            tracker.track([*lasting(), *(x for x in leaves if isinstance(x, torch.Tensor))])
            with tracker:
                yield
            peak_bytes = tracker.peak_bytes
        # Optimizer state exists from the second step on, so the first step alone reads too low.
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self._num_left -= 1
        budget_bytes = plan.section.budget_bytes[0]
        if not self._num_left and self._peak_bytes > budget_bytes:
            peak, budget = format_apart(self._peak_bytes, budget_bytes)
            warnings.warn(
                f"steps of {self._name} hold {peak}, but the budget is {budget}: the model could "
                "not be traced, and uses as little memory as possible; give it memory="
                f'"{typed_bytes(self._peak_bytes)}", or make the batch smaller',
                BudgetExceededWarning,
                6,
            )
