"""Updates host-resident blocks on the device, by swapping optimizer state in and out.

Memory bandwidth limits updates on the host, while the bus often has bandwidth to spare. If a block
is updated on the device, its gradients need not be copied to the host. When the block's backward
pass begins, its master parameters and optimizer state are fetched in chunks. They are updated once
the gradients are complete, and written back together with their low-precision copy. A fixed number
of staging buffers holds the chunks, so that memory use does not depend on the speed of the bus.
Transfers and updates overlap with computation, which waits for them only before it frees gradients.
The host updates the block instead if the optimizer has no state for it yet, or if gradients are
accumulated on the host.

A chunk contains consecutive parameters of a block with their optimizer state. An elementwise
optimizer allows chunks that contain a slice of a large parameter and of its state tensors. Byte
ranges that are adjacent on both host and device are merged into one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.hardware.allocation import ALIGNMENT_BYTES, aligned
from hocket.runtime.offload.copy_streams import (
    DONE,
    CopyEvent,
    CopyPair,
    CopyStreams,
    host_buffer,
    typed_view,
)
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.parameter_blocks import Block, BufferView, ParameterView
from hocket.runtime.optimizer_parts import has_fused_kernels, part_of
from hocket.simulate.rewriting.host_parameters import NUM_STAGING_BUFFERS, PIECE_BYTES, runs_within

NUM_BUFFERS, CHUNK_BYTES = NUM_STAGING_BUFFERS, PIECE_BYTES


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One state tensor of one parameter, and its position in the host buffer of its block."""

    parameter: nn.Parameter
    key: str
    value: torch.Tensor
    """State tensor as a view of the host buffer."""
    start: int

    @property
    def place(self) -> BufferView:
        """Position of the tensor in the host buffer."""
        value = self.value
        return BufferView(value.dtype, tuple(value.shape), value.stride(), self.start)


@dataclass(frozen=True, eq=False)
class _BlockState:
    """The optimizer state of a block in one host buffer."""

    buffer: torch.Tensor
    entries: tuple[StateEntry, ...]

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer still uses these tensors; loading a checkpoint replaces them."""
        return all(optimizer.state[e.parameter].get(e.key) is e.value for e in self.entries)


# ── chunks ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class CopyRange:
    """A byte range of a host buffer, and its offset in a device buffer."""

    base: torch.Tensor
    start: int
    stop: int
    offset: int
    is_written_back: bool = True

    def pair(self, buffer: torch.Tensor) -> CopyPair:
        """Return the range in a device buffer, and in the host buffer."""
        num_bytes = self.stop - self.start
        return buffer[self.offset : self.offset + num_bytes], self.base[self.start : self.stop]

    def continues_with(self, other: CopyRange) -> bool:
        """True if one copy can move this range together with ``other``."""
        # Only alignment padding may lie between the two: it can be copied without harm.
        is_near = 0 <= other.start - self.stop < ALIGNMENT_BYTES
        is_aligned = other.start - self.start == other.offset - self.offset
        is_same = self.base is other.base and self.is_written_back == other.is_written_back
        return is_same and is_near and is_aligned


class CopyRanges(list[CopyRange]):
    """Ranges of host buffers that are consecutive in a device buffer; adjacent ones are joined."""

    num_bytes = 0
    """Bytes in the device buffer."""

    def add(
        self, base: torch.Tensor, place: BufferView, elements: slice | None, *,
        is_written_back: bool = True,
    ) -> BufferView:  # fmt: skip
        """Add a tensor, or a slice of its elements; return its position in the device buffer."""
        view = _view(place, self.num_bytes, elements)
        start = place.start + (0 if elements is None else elements.start * view.dtype.itemsize)
        added = CopyRange(base, start, start + view.num_bytes, view.start, is_written_back)
        if self and self[-1].continues_with(added):
            added = replace(self.pop(), stop=added.stop)
        self.append(added)
        self.num_bytes = view.stop
        return view


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """A parameter with its state, or a slice of its elements in memory order."""

    master: ParameterView
    upload: ParameterView
    states: list[StateEntry]
    elements: slice | None
    """Slice of the elements; None for all."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the master copy."""
        return _view(self.master, 0, self.elements).num_bytes

    @property
    def is_last(self) -> bool:
        """True if the parameter has no later slice."""
        return self.elements is None or self.elements.stop == self.master.parameter.numel()

    def slice_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the slice's elements."""
        if self.elements is None:
            return gradient
        # Slices count elements in the memory order of the master copy.
        if gradient.stride() != self.master.stride:
            laid = torch.empty_strided(
                self.master.shape, self.master.stride, dtype=gradient.dtype, device=gradient.device
            )
            gradient = laid.copy_(gradient)
        size = self.elements.stop - self.elements.start
        return gradient.as_strided((size,), (1,), gradient.storage_offset() + self.elements.start)


@dataclass(frozen=True, eq=False)
class ChunkPart:
    """Positions of a parameter, or of a slice of it, in the device buffers."""

    slice: ParameterSlice
    master: BufferView
    """Position of the master copy in a staging buffer."""
    state: Mapping[str, BufferView]
    gradient: BufferView
    """Position of the full-precision gradient in the cast buffer."""
    low_precision: BufferView | None
    """Position of the updated low-precision copy in the cast buffer; None if there is none."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter."""
        return self.slice.master.parameter


@dataclass(frozen=True, eq=False)
class StateChunk:
    """Parameters and optimizer state that are swapped in and out together."""

    parts: list[ChunkPart]
    ranges: CopyRanges
    low_precision: CopyRanges
    """Ranges of the low-precision copy that are written back from the cast buffer."""
    cast_bytes: int

    def swap_in(self, staging: torch.Tensor) -> list[CopyPair]:
        """Return the copies from the host to a staging buffer."""
        return [each.pair(staging) for each in self.ranges]

    def swap_out(self, staging: torch.Tensor, cast: torch.Tensor) -> list[CopyPair]:
        """Return the copies from a staging buffer and the cast buffer to the host."""
        pairs = [each.pair(staging) for each in self.ranges if each.is_written_back]
        pairs += [each.pair(cast) for each in self.low_precision]
        # `swap_in` lists (device, host); copies are (target, source).
        return [(on_host, on_device) for on_device, on_host in pairs]


def cut_chunks(block: Block, state: _BlockState, *, is_split: bool) -> list[StateChunk]:
    """Split a block into chunks; ``is_split`` allows slices of parameters."""
    by_parameter: dict[nn.Parameter, list[StateEntry]] = {}
    for entry in state.entries:
        by_parameter.setdefault(entry.parameter, []).append(entry)
    cuts = []
    for master, upload in zip(block.master_layout.places, block.upload_layout.places, strict=True):
        if states := by_parameter.get(master.parameter):
            # Slices are taken in the order of memory, so layouts must agree.
            are_alike = all(
                entry.value.shape == master.shape and entry.value.stride() == master.stride
                for entry in states
                if entry.value.dim()
            )
            slices = _slices(master) if is_split and are_alike else [None]
            cuts += [ParameterSlice(master, upload, states, elements) for elements in slices]
    sizes = [cut.num_bytes for cut in cuts]
    return [_chunk(block, state.buffer, cuts[a:b]) for a, b in runs_within(sizes, CHUNK_BYTES)]


def _slices(place: ParameterView) -> list[slice | None]:
    if place.num_bytes <= CHUNK_BYTES:
        return [None]
    # Even slices, which begin where every type is aligned.
    count = -(-place.num_bytes // CHUNK_BYTES)
    total = place.num_bytes // place.dtype.itemsize
    step = aligned(-(-total // count))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _chunk(block: Block, buffer: torch.Tensor, cuts: Sequence[ParameterSlice]) -> StateChunk:
    assert block.master is not None
    assert block.upload is not None
    ranges, low_precision, parts, at = CopyRanges(), CopyRanges(), list[ChunkPart](), 0
    is_cast = block.upload is not block.master
    masters = [ranges.add(block.master, cut.master, cut.elements) for cut in cuts]
    for cut, master in zip(cuts, masters, strict=True):
        # A step counter is counted up once, with the last slice.
        state = {
            entry.key: ranges.add(buffer, entry.place, cut.elements) if entry.value.dim()
            else ranges.add(buffer, entry.place, None, is_written_back=cut.is_last)
            for entry in cut.states
        }  # fmt: skip
        gradient = _view(cut.master, at, cut.elements)
        at = gradient.stop
        low = low_precision.add(block.upload, cut.upload, cut.elements) if is_cast else None
        parts.append(ChunkPart(cut, master, state, gradient, low))
    return StateChunk(parts, ranges, low_precision, at if is_cast else 0)


def _view(place: BufferView, start: int, elements: slice | None) -> BufferView:
    """Return the position of a tensor, or of a slice of its elements, moved to ``start``."""
    if elements is not None:
        return BufferView(place.dtype, (elements.stop - elements.start,), (1,), start)
    return BufferView(place.dtype, tuple(place.shape), tuple(place.stride), start)


# ── swaps ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _StateBuffer:
    """Staging buffer on the device for one chunk."""

    buffer: torch.Tensor
    ready: CopyEvent = DONE
    last_use: CopyEvent = DONE


@dataclass(frozen=True)
class DeviceUpdate:
    """Events of a running update: after its last read of gradients, and after its write-back."""

    gradients_read: CopyEvent
    written_back: CopyEvent


class StateSwap:
    """Swaps optimizer state in, updates blocks on the device, and writes the state back."""

    def __init__(
        self,
        blocks: Sequence[Block],
        streams: CopyStreams,
        step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """``streams`` are used by nothing else; ``step`` runs an optimizer's step on the device."""
        self._blocks = [block for block in blocks if block.updates_on_device]
        self._streams, self._step = streams, step
        self._states: dict[Block, _BlockState] = {}
        self._chunks: dict[Block, list[StateChunk]] = {}
        self._staging: list[_StateBuffer] = []
        self._turn = 0
        self._cast = self._allocate(0)
        """Full-precision gradients of a chunk, overwritten by its low-precision copy after the
        update."""
        self._prefetched: dict[Block, list[_StateBuffer]] = {}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Device buffers that swaps use."""
        return [*(staging.buffer for staging in self._staging), self._cast]

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate device buffers for all states that exist."""
        for block in self._blocks:
            self._find_chunks(block, optimizer)

    def prefetch(self, block: Block, optimizer: torch.optim.Optimizer | None) -> None:
        """Start to fetch master parameters and state of a block, unless the host will update it."""
        # Gradients of earlier microbatches are on the host, so the update must run there.
        if not block.updates_on_device or optimizer is None or block.host_gradients:
            return
        self.cancel()
        if chunks := self._find_chunks(block, optimizer):
            first = chunks[: len(self._staging)]
            self._prefetched[block] = [self._fetch(block, chunk) for chunk in first]

    def cancel(self) -> None:
        """Drop prefetched chunks whose updates did not follow."""
        for buffers in self._prefetched.values():
            for staging in buffers:
                # The fetch may still be writing, so the buffer is free only after it.
                staging.last_use = staging.ready
        self._prefetched.clear()

    def update(
        self,
        block: Block,
        optimizer: torch.optim.Optimizer | None,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> DeviceUpdate | None:
        """Update a block with gradients on the device; return None if the host has to update it."""
        prefetched = self._prefetched.get(block)
        if prefetched is None or optimizer is None or not self._has_state(block, gradients):
            self.cancel()
            return None
        del self._prefetched[block]
        complete, read = self._streams.record_event(), DONE
        with torch.no_grad(), self._streams.offload_stream():
            complete.wait()
            for number, chunk in enumerate(self._chunks[block]):
                is_here = number < len(prefetched)
                staging = prefetched[number] if is_here else self._fetch(block, chunk)
                staging.ready.wait()
                self._update_chunk(optimizer, chunk, staging, gradients)
                read = self._streams.record_event()
                self._write_back(chunk, staging)
        return DeviceUpdate(read, staging.last_use)

    def _fetch(self, block: Block, chunk: StateChunk) -> _StateBuffer:
        """Fetch a chunk once its staging buffer is free and the last write-back has finished."""
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % len(self._staging)
        staging.ready = self._streams.fetch(
            chunk.swap_in(staging.buffer), staging.last_use, block.written_back
        )
        return staging

    def _update_chunk(
        self,
        optimizer: torch.optim.Optimizer,
        chunk: StateChunk,
        staging: _StateBuffer,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Run one step of the user's optimizer on a chunk."""
        masters: dict[nn.Parameter, nn.Parameter] = {}
        swapped: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for part in chunk.parts:
            gradient = gradients.get(part.parameter)
            if gradient is None:
                continue
            master = nn.Parameter(part.master.of(staging.buffer), requires_grad=False)
            gradient = part.slice.slice_gradient(gradient)
            if gradient.dtype != master.dtype:
                gradient = part.gradient.of(self._cast).copy_(gradient)
            master.grad = gradient
            masters[part.parameter] = master
            swapped[part.parameter] = {k: v.of(staging.buffer) for k, v in part.state.items()}
        own = part_of(optimizer, masters, fused=self._streams.is_real)
        host_states = {part.parameter: _host_state(optimizer, part) for part in chunk.parts}
        for parameter, master in masters.items():
            own.state[master] = {**host_states[parameter], **swapped[parameter]}
        self._step(own)
        for parameter, master in masters.items():
            _take_over(own.state[master], swapped[parameter], host_states[parameter])

    def _write_back(self, chunk: StateChunk, staging: _StateBuffer) -> None:
        """Copy a chunk to the host, and record the last use of its staging buffer."""
        if chunk.low_precision:
            both = [(low, part.master) for part in chunk.parts if (low := part.low_precision)]
            casts = [low.of(self._cast) for low, _ in both]
            torch._foreach_copy_(casts, [master.of(staging.buffer) for _, master in both])
        for target, source in chunk.swap_out(staging.buffer, self._cast):
            target.copy_(source, non_blocking=True)
        staging.last_use = self._streams.record_event()

    # ── state on the host ────────────────────────────────────────────────────────────────────

    def _find_chunks(self, block: Block, optimizer: torch.optim.Optimizer) -> list[StateChunk]:
        """Return the block's chunks, and ensure large enough buffers; empty without state."""
        state = self._state(block, optimizer)
        if state is None:
            return []
        if block not in self._chunks:
            # Fused optimizers update each element by itself.
            is_split = has_fused_kernels(optimizer)
            self._chunks[block] = cut_chunks(block, state, is_split=is_split)
            self._ensure_buffers(self._chunks[block])
        return self._chunks[block]

    def _ensure_buffers(self, chunks: Sequence[StateChunk]) -> None:
        """Allocate larger buffers if the chunks need them."""
        num_bytes = max(chunk.ranges.num_bytes for chunk in chunks)
        if not self._staging or self._staging[0].buffer.numel() < num_bytes:
            self._synchronize()
            self._staging = []
            buffers = [self._allocate(num_bytes) for _ in range(NUM_BUFFERS)]
            # Computation may still use memory that it has freed.
            free = self._streams.record_event()
            self._staging = [_StateBuffer(buffer, last_use=free) for buffer in buffers]
            self._turn = 0
        cast_bytes = max(chunk.cast_bytes for chunk in chunks)
        if self._cast.numel() < cast_bytes:
            self._synchronize()
            self._cast = self._allocate(cast_bytes)

    def _synchronize(self) -> None:
        for staging in self._staging:
            staging.last_use.synchronize()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._streams.device)

    def _state(self, block: Block, optimizer: torch.optim.Optimizer) -> _BlockState | None:
        """Return the block's state in one buffer; None if a trained parameter has no state yet."""
        found = self._states.get(block)
        if found is not None and found.is_of(optimizer):
            return found
        # Chunks refer to the earlier state buffer.
        self._chunks.pop(block, None)
        # The host reads step counters, except for fused kernels, which want them on the device.
        swaps_counters = self._streams.is_real and has_fused_kernels(optimizer)
        values = [
            (parameter, key, value)
            for parameter in block.parameters
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and (value.dim() or swaps_counters)
        ]
        having = {parameter for parameter, _, _ in values}
        if not having or any(p.requires_grad and p not in having for p in block.parameters):
            return None
        self._states[block] = self._in_one_buffer(values, optimizer)
        return self._states[block]

    @torch.no_grad()
    def _in_one_buffer(
        self, values: list[tuple[nn.Parameter, str, torch.Tensor]], optimizer: torch.optim.Optimizer
    ) -> _BlockState:
        sizes = [aligned(value.numel() * value.dtype.itemsize) for _, _, value in values]
        buffer = host_buffer(sum(sizes), pinned=self._streams.is_real)
        entries, start = [], 0
        with on_host():
            for (parameter, key, value), size in zip(values, sizes, strict=True):
                # A state tensor with gaps gets a dense layout, so that its range has none.
                dense = torch.empty_like(value, device="meta")
                offset = start // value.dtype.itemsize
                own = typed_view(buffer, value.dtype, value.shape, dense.stride(), offset)
                own.copy_(value)
                optimizer.state[parameter][key] = own
                entries.append(StateEntry(parameter, key, own, start))
                start += size
        return _BlockState(buffer, tuple(entries))

    def _has_state(self, block: Block, gradients: Mapping[nn.Parameter, torch.Tensor]) -> bool:
        having = {entry.parameter for entry in self._states[block].entries}
        return all(parameter in having for parameter in gradients)


def _host_state(optimizer: torch.optim.Optimizer, part: ChunkPart) -> dict[str, Any]:
    """Return a part's state on the host; parts before the last get a copy of the step counters."""
    state: dict[str, Any] = optimizer.state[part.parameter]
    if part.slice.is_last:
        return state
    # Step counters are real tensors in a dry run, too.
    with on_host(), unset_fake_temporarily():
        return {k: v.clone() if isinstance(v, torch.Tensor) and not v.dim() else v
                for k, v in state.items()}  # fmt: skip


def _take_over(
    after: Mapping[str, Any], swapped: Mapping[str, torch.Tensor], on_host: dict[str, Any]
) -> None:
    """Store states that an optimizer replaced instead of writing to them."""
    for key, value in after.items():
        if key not in swapped:
            on_host[key] = value
        elif value is not swapped[key]:
            swapped[key].copy_(value)
