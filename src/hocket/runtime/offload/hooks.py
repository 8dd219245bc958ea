"""Hooks around the calls of a model's blocks, which apply each block's memory policy.

Before a block's forward call its parameters are fetched. During the call, tensors that autograd
saves are offloaded, or dropped for recompute. After the call the parameters are released. Before a
block's backward pass, its parameters and saved tensors are fetched; after it, complete gradients go
to `BackwardEvents`, which updates the block or copies the gradients to the host. A block's backward
pass begins when the gradient of its output has been computed. Autograd runs the latest ops first,
so all later blocks have finished by then.

While a block computes, the next blocks in the order of the last step are prefetched. If the order
changes, blocks are fetched on demand, and the user is warned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hocket.base.errors import UsageError
from hocket.runtime.offload.copy_streams import CopyStreams, HostPool
from hocket.runtime.offload.host_optimizer import HostOptimizerThread
from hocket.runtime.offload.parameter_blocks import Block
from hocket.runtime.offload.prefetch import StagedView, StagingBuffers
from hocket.runtime.offload.recompute import Hooks, SavedTensor, recomputed, saved_as_is
from hocket.runtime.offload.saved_tensors import OffloadedStorages, OffloadedView, StepStorages

Forward = Callable[..., Any]


class BackwardEvents(Protocol):
    """Callbacks of the strategy that owns the blocks and handles their gradients."""

    def begin_backward(self) -> None:
        """Handle the beginning of the backward pass."""

    def begin_block(self, block: Block) -> None:
        """Handle the beginning of a block's last backward pass in this step."""

    def finish_block(self, block: Block) -> None:
        """Handle the complete gradients of a block."""

    def finish_step(self) -> None:
        """Handle the end of the backward pass."""

    def order_changed(self) -> None:
        """Handle a step that calls blocks in another order than the last step."""


@dataclass(eq=False)
class BlockCall:
    """One call of a block's module."""

    block: Block
    index: int
    saved: OffloadedStorages | None = None
    """Storages that the call offloads, or None if it offloads nothing."""
    first_node: int = field(default_factory=torch._C._autograd._get_sequence_nr)
    """Sequence number of the first autograd node that the call may have created."""
    has_gradients: bool = False
    """True if gradients reach ops of the call itself.

    False, for example, if the call only returns views of its inputs.
    """


@dataclass(eq=False)
class BlockHooks:
    """Hooks of one model, and the state of its current step."""

    streams: CopyStreams
    staging: StagingBuffers
    pool: HostPool
    host_optimizer: HostOptimizerThread
    events: BackwardEvents
    resident_storages: frozenset[int]
    """Keys of storages that stay on the device, such as parameters and buffers."""
    offloads_saved: bool
    """True if any block offloads saved tensors."""
    prefetch: int
    """Number of blocks to prefetch."""
    restores_rng: bool
    """True if recompute restores random number generators, which a dry run does not need."""
    is_backward_unfinished: bool = False
    """True if a backward pass has begun and not ended."""
    _forward: list[BlockCall] = field(default_factory=list)
    _backward: list[BlockCall] = field(default_factory=list)
    """Calls whose backward pass has begun and may still be running."""
    _order: list[Block] = field(default_factory=list)
    """Blocks in the order of the last step's calls."""
    _position: int = -1
    """Position of the current call in ``_order``."""
    _in_use: set[Block] = field(default_factory=set)
    _offered_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that each call of the last step could have offloaded, by index of the call."""
    _storages: StepStorages = field(default_factory=StepStorages)
    _batch: frozenset[int] = frozenset()
    """Keys of the storages of the step's batch."""
    _num_calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each module in this step, by path."""

    # ── forward ──────────────────────────────────────────────────────────────────────────────

    def begin(self, batch: Any) -> None:
        """Begin a step, and drop recorded calls whose backward pass never ran."""
        self._drop_calls()
        self._storages.clear()
        self._num_calls.clear()
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        self._batch = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
        self._backward, self._in_use, self.is_backward_unfinished = [], set(), False
        self._position = -1

    def block_of_call(self, path: str, blocks: Sequence[Block]) -> Block:
        """Return the block that the next call of a module belongs to."""
        count = self._num_calls[path]
        self._num_calls[path] += 1
        return blocks[count % len(blocks)]

    def call(
        self, block: Block, forward: Forward, args: Sequence[Any], kwargs: Any, *,
        can_recompute: bool = True,
    ) -> Any:  # fmt: skip
        """Call a block's module under the block's policy."""
        call = BlockCall(block, len(self._forward))
        self._locate(block)
        self._fetch_parameters(block)
        # Before the launch of the block's kernels: a wait for a host update would delay them.
        self._prefetch_next(waits=False)
        if not torch.is_grad_enabled():
            result = forward(*args, **kwargs)
            self._post_forward(call, result)
            return result
        self._forward.append(call)
        self._release_saved_before(call)
        call.saved = self._offloaded_storages(call)
        hooks = self._saved_tensor_hooks(call.saved)
        with _hooked(hooks), _without_cached_casts():
            if block.policy.activations == "recomputed" and can_recompute:
                result = recomputed(
                    block.module_state, forward, args, kwargs,
                    restores_rng=self.restores_rng and block.uses_rng, keeping=hooks,
                )  # fmt: skip
            else:
                result = forward(*args, **kwargs)
        if block.master is not None and block.is_changed:
            raise UsageError(
                f"the forward pass of {next(iter(block.modules))!r} writes into its parameters, "
                "whose master copy is on the host under this budget",
                hint="write to them between steps, or train with more memory or without memory=",
            )
        self._post_forward(call, result)
        return result

    def _locate(self, block: Block) -> None:
        """Set the position of a call in the order of the last step."""
        expected = self._position + 1
        if self._order[expected : expected + 1] == [block]:
            self._position = expected
        else:
            # After the end of the list (a block unseen in the last step) nothing is prefetched.
            found = [at for at, each in enumerate(self._order) if each is block]
            self._position = found[0] if found else len(self._order)

    def _fetch_parameters(self, block: Block) -> None:
        """Make a block's parameters available to the current stream, by a fetch if needed."""
        self._in_use.add(block)
        if block.master is None:
            return
        self._refresh(block)
        if block.resident is not None:
            self._refresh_resident(block, block.resident)
            block.resident_ready.wait()
            block.use_buffer(block.resident)
            return
        if not block.fetched_bytes:
            return
        staging = self.staging.fetch(block, self._in_use)
        assert staging is not None, "there are more buffers than blocks in use at once"
        staging.ready.wait()
        block.use_buffer(staging.buffer)

    def _refresh(self, block: Block) -> None:
        """Wait for a block's update; refresh the upload buffer if the user changed parameters."""
        self.host_optimizer.wait(block)
        block.require_own_storage()
        if block.is_changed:
            block.written_back.synchronize()
            block.use_master()
            block.refresh_upload()
            block.is_stale = True
            self.staging.invalidate(block)

    def _refresh_resident(self, block: Block, resident: torch.Tensor) -> None:
        """Start to update the permanent copy of a block on the device, if it is stale."""
        if block.is_stale:
            assert block.upload is not None
            block.resident_ready = self.streams.fetch([(resident, block.upload)], block.last_use)
            block.is_stale = False

    def fetch_shared(self, block: Block) -> None:
        """Fetch parameters that several blocks use, for an entire step."""
        # The refresh must not overwrite values that queued work still reads.
        block.last_use = self.streams.record_event()
        self._fetch_parameters(block)
        self._in_use.discard(block)

    def _prefetch_next(self, *, waits: bool) -> None:
        """Prefetch parameters of the next calls; if not ``waits``, stop at a running update."""
        after = self._position + 1
        for block in self._order[after : after + self.prefetch]:
            if block.master is None or not block.fetched_bytes or block in self._in_use:
                continue
            if not waits and not block.update_done.is_set():
                return
            self._refresh(block)
            if block.resident is not None:
                self._refresh_resident(block, block.resident)
            else:
                self.staging.fetch(block, self._in_use)

    def _offloaded_storages(self, call: BlockCall) -> OffloadedStorages | None:
        policy = call.block.policy
        if not call.block.offloads_saved:
            return None
        max_bytes = float("inf")
        if policy.activations == "offloaded" and policy.share < 1:
            # The first step offloads everything and learns how much that is.
            max_bytes = policy.share * self._offered_bytes.get(call.index, float("inf"))
        resident = self.resident_storages | self._batch
        return OffloadedStorages(self.streams, self.pool, resident, self._storages, max_bytes)

    def outside_blocks(self) -> AbstractContextManager[None]:
        """Return the context for ops outside of blocks, whose saved tensors stay on the device.

        Saved views of streamed parameters are fetched again when the backward pass needs them.
        """
        return _hooked(self._saved_tensor_hooks(None))

    def _saved_tensor_hooks(self, offloaded: OffloadedStorages | None) -> Hooks | None:
        """Return hooks that offload saved tensors, or keep them on the device.

        Returns None if no hook is needed: hooks cost host time for each saved tensor.
        """
        if not self.offloads_saved and not self.staging.buffers:
            return None

        def pack(tensor: torch.Tensor) -> Any:
            if view := self.staging.describe(tensor):
                return view
            if offloaded is None and self.offloads_saved:
                self._storages.keep(tensor)
            packed = tensor if offloaded is None else offloaded.pack(tensor)
            return saved_as_is(tensor) if packed is tensor else packed

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, StagedView):
                return self.staging.resolve(packed, self._in_use)
            if isinstance(packed, OffloadedView):
                assert offloaded is not None
                return offloaded.unpack(packed)
            saved: SavedTensor = packed
            return saved.get()

        return pack, unpack

    def _post_forward(self, call: BlockCall, result: Any) -> None:
        block = call.block
        self._release(block)
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if call.saved is not None:
            self._offered_bytes[call.index] = call.saved.num_offered_bytes
        if torch.is_grad_enabled() and (traced := [t for t in tensors if t.requires_grad]):
            call.has_gradients = any(_is_own(tensor, call.first_node) for tensor in traced)
            block.num_pending_backward += call.has_gradients
            results = _with_bases(traced, call.first_node)
            register_multi_grad_hook(results, lambda _: self._pre_backward(call), mode="any")
        # The block's kernels are launched, so the host may wait for updates meanwhile.
        self._prefetch_next(waits=True)

    def _release(self, block: Block) -> None:
        """Release a block's parameters after computation has used them."""
        self._in_use.discard(block)
        if block.resident is not None:
            block.last_use = self.streams.record_event()
        if block.is_streamed:
            self.staging.leave(block)
            block.use_master()

    def _release_saved_before(self, call: BlockCall) -> None:
        """Release the device memory of tensors that the call two positions earlier has
        offloaded."""
        for earlier in self._forward[max(0, call.index - 2) : max(0, call.index - 1)]:
            if earlier.saved is not None:
                earlier.saved.release()

    # ── backward ─────────────────────────────────────────────────────────────────────────────

    def _pre_backward(self, call: BlockCall) -> None:
        """Fetch parameters and saved tensors of a call, and prefetch for the calls before it."""
        # Autograd has finished these calls: gradients reach this call's output only afterwards.
        for later in self._backward:
            self._post_backward(later)
        self._backward = [call]
        self._fetch_parameters(call.block)
        if call.saved is not None:
            call.saved.fetch()
        for earlier in reversed(self._forward[max(0, call.index - self.prefetch) : call.index]):
            block = earlier.block
            if not block.num_pending_backward:
                # The model's own checkpointing called it in the backward pass, which is over: the
                # host may be updating what would be fetched.
                continue
            if block.is_streamed and block.fetched_bytes and block not in self._in_use:
                self.staging.fetch(block, self._in_use)
            if earlier.saved is not None:
                earlier.saved.fetch()
        if call.has_gradients and call.block.num_pending_backward == 1:
            self.events.begin_block(call.block)

    def begin_backward(self) -> None:
        """Begin the backward pass; called by a hook of the loss."""
        # Each loss of a sum calls this; after the first call gradients are this step's.
        if not self._backward:
            self.events.begin_backward()
        self.is_backward_unfinished = True
        # Calls in the backward pass (recompute) are not part of the order to prefetch.
        order = [each.block for each in self._forward]
        if self._order and order and order != self._order:
            self.events.order_changed()
        self._order = order
        Variable._execution_engine.queue_callback(self._end_backward)

    def _post_backward(self, call: BlockCall) -> None:
        block = call.block
        self._release(block)
        if not call.has_gradients:
            return
        # A retained graph has a second backward pass, for which no forward pass was counted.
        block.num_pending_backward = max(0, block.num_pending_backward - 1)
        if not block.num_pending_backward:
            self.events.finish_block(block)

    def _end_backward(self) -> None:
        for call in self._backward:
            self._post_backward(call)
        self._backward = []
        # Calls that do not affect the loss have no backward pass, and gradients of some calls do
        # not pass through their results.
        left = (c.block for c in self._forward
                if c.block.num_pending_backward or not c.has_gradients)  # fmt: skip
        # A block may have several calls, and is finished once.
        for block in dict.fromkeys(left):
            self.events.finish_block(block)
        self._drop_calls()
        self.events.finish_step()
        self.is_backward_unfinished = False

    def _drop_calls(self) -> None:
        for call in self._forward:
            call.block.num_pending_backward = 0
        self._forward = []


def _with_bases(results: Sequence[torch.Tensor], first_node: int) -> list[torch.Tensor]:
    """Return results together with the bases of views among them.

    A view that is changed in place later gets a new autograd node, and hooks of its old node never
    run.
    """
    bases = [result._base for result in results if _is_own(result, first_node)]
    return [*results, *(base for base in bases if base is not None and base.grad_fn is not None)]


def _is_own(result: torch.Tensor, first_node: int) -> bool:
    """True if the call itself computed a result, or the base of a view."""
    # Reading grad_fn creates the new node of a changed view; PyTorch 2.11 crashes if such a view
    # gets a hook before.
    node = result.grad_fn
    if result._base is not None:
        node = result._base.grad_fn
    return node is None or node._sequence_nr() >= first_node


def _hooked(hooks: Hooks | None) -> AbstractContextManager[None]:
    return nullcontext() if hooks is None else saved_tensors_hooks(*hooks)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Disable autocast's cache, which would keep all cast parameters until the step ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
