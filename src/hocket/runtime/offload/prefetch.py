"""Staging buffers on the device for blocks with streamed parameters.

Each buffer is as large as the largest streamed block, so that nothing is allocated during training.
A block is fetched into the least recently used buffer that no computation uses; the copy stream
waits until queued computation has finished with the buffer. If autograd saves a view of a staging
buffer, block and offset are saved instead. The view is resolved in the buffer that holds the block
when the backward pass needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hocket.runtime.offload.copy_streams import DONE, CopyEvent, CopyStreams, typed_view
from hocket.runtime.offload.parameter_blocks import Block


@dataclass(eq=False)
class StagingBuffer:
    """One staging buffer, and the block that it holds."""

    buffer: torch.Tensor
    block: Block | None = None
    ready: CopyEvent = DONE
    """Completion of the copy that fetched the block."""
    last_use: CopyEvent = DONE
    """Event after the last use of the buffer by computation."""
    used_at: int = 0


@dataclass(frozen=True)
class StagedView:
    """A saved tensor that is a view of a block's parameters."""

    block: Block
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset in elements."""


class StagingBuffers:
    """Cache of streamed blocks in staging buffers, with least-recently-used replacement."""

    def __init__(self, streams: CopyStreams, num_bytes: int, count: int) -> None:
        self._streams = streams
        buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=streams.device)
            for _ in range(count if num_bytes else 0)
        ]
        # Computation may still use memory that it has freed.
        free = streams.record_event()
        self._staging = [StagingBuffer(buffer, last_use=free) for buffer in buffers]
        self._by_storage = {each.buffer.untyped_storage()._cdata: each for each in self._staging}
        self._clock = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Device tensors of all staging buffers."""
        return [each.buffer for each in self._staging]

    def fetch(self, block: Block, in_use: set[Block]) -> StagingBuffer | None:
        """Start to fetch a block's parameters; return None if every buffer is in use."""
        if found := self.find(block):
            self._touch(found)
            return found
        free = [each for each in self._staging if each.block not in in_use]
        if not free:
            return None
        staging = min(free, key=lambda each: each.used_at)
        assert block.upload is not None
        num_bytes = block.fetched_bytes
        staging.block = block
        pair = (staging.buffer[:num_bytes], block.upload[:num_bytes])
        staging.ready = self._streams.fetch([pair], staging.last_use, block.written_back)
        self._touch(staging)
        return staging

    def find(self, block: Block) -> StagingBuffer | None:
        """Return the staging buffer that holds a block, or None."""
        return next((each for each in self._staging if each.block is block), None)

    def leave(self, block: Block) -> None:
        """Record an event after computation has used a block's buffer."""
        if staging := self.find(block):
            staging.last_use = self._streams.record_event()

    def invalidate(self, block: Block) -> None:
        """Discard the staged copy of a block whose parameters have changed on the host."""
        if staging := self.find(block):
            staging.block = None

    def invalidate_all(self) -> None:
        """Discard the staged copies of all blocks."""
        for staging in self._staging:
            staging.block = None

    def describe(self, tensor: torch.Tensor) -> StagedView | None:
        """Describe a view of a staging buffer, for saving; return None for other tensors."""
        staging = self._by_storage.get(tensor.untyped_storage()._cdata)
        if staging is None or staging.block is None:
            return None
        offset = int(tensor.storage_offset())
        return StagedView(staging.block, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def resolve(self, view: StagedView, in_use: set[Block]) -> torch.Tensor:
        """Return the described tensor from the buffer that holds its block, after a fetch if
        needed."""
        # The buffer may hold another block by now, since views do not keep their buffer.
        staging = self.fetch(view.block, in_use)
        assert staging is not None, "a block's backward pass has a buffer of its own"
        staging.ready.wait()
        return typed_view(staging.buffer, view.dtype, view.shape, view.stride, view.offset)

    def _touch(self, staging: StagingBuffer) -> None:
        self._clock += 1
        staging.used_at = self._clock


def staging_buffers(blocks: Iterable[Block], streams: CopyStreams, prefetch: int) -> StagingBuffers:
    """Make one staging buffer for the running block, and one for each block to prefetch."""
    # Two buffers at least: the next block's copy runs while the current block computes.
    sizes = [block.fetched_bytes for block in blocks if block.is_streamed]
    return StagingBuffers(streams, max(sizes, default=0), 1 + max(1, prefetch))
