"""Buffers of the device that streamed blocks take turns in.

Each is as large as the largest streamed block, so that nothing is allocated while training. A block
is fetched into the buffer that was used longest ago and is not in use; the copy waits on the device
until the computation has left the buffer. Tensors that autograd saves and that look at a buffer are
noted by block and offset, and looked up where the block is when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hocket.runtime.offload.copy_streams import DONE, CopyEngines, Ticket, looking
from hocket.runtime.offload.parameter_blocks import Block


@dataclass(eq=False)
class BufferSlot:
    """One buffer."""

    buffer: torch.Tensor
    block: Block | None = None
    ticket: Ticket = DONE
    """Of the copy that brought the block."""
    left: Ticket = DONE
    """Where the computation last used it."""
    last_used: int = 0


@dataclass(frozen=True)
class SlotView:
    """A tensor that looked at a block's parameters."""

    block: Block
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""


class Slots:
    """The buffers, and which block is in which."""

    def __init__(self, engines: CopyEngines, num_bytes: int, count: int) -> None:
        self._engines = engines
        buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=engines.device)
            for _ in range(count if num_bytes else 0)
        ]
        # The computation may still be at work in memory that it has given back.
        free = engines.mark()
        self._slots = [BufferSlot(buffer, left=free) for buffer in buffers]
        self._by_storage = {slot.buffer.untyped_storage()._cdata: slot for slot in self._slots}
        self._clock = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All of them."""
        return [slot.buffer for slot in self._slots]

    def fetch(self, block: Block, in_use: set[Block]) -> BufferSlot | None:
        """Start to bring a block; None where every buffer is in use."""
        if slot := self.find(block):
            self._touch(slot)
            return slot
        free = [slot for slot in self._slots if slot.block not in in_use]
        if not free:
            return None
        slot = min(free, key=lambda each: each.last_used)
        assert block.copied is not None
        num_bytes = block.brought_bytes
        slot.block = block
        slot.ticket = self._engines.fetch(
            [(slot.buffer[:num_bytes], block.copied[:num_bytes])], slot.left, block.returned
        )
        self._touch(slot)
        return slot

    def find(self, block: Block) -> BufferSlot | None:
        """Where a block is, if it is."""
        return next((slot for slot in self._slots if slot.block is block), None)

    def leave(self, block: Block) -> None:
        """The computation has used a block."""
        if slot := self.find(block):
            slot.left = self._engines.mark()

    def forget(self, block: Block) -> None:
        """Its parameters have changed at home."""
        if slot := self.find(block):
            slot.block = None

    def forget_all(self) -> None:
        """Nothing is in the buffers any more."""
        for slot in self._slots:
            slot.block = None

    def noted(self, tensor: torch.Tensor) -> SlotView | None:
        """What stands for a tensor that looks at a buffer; None for others."""
        slot = self._by_storage.get(tensor.untyped_storage()._cdata)
        if slot is None or slot.block is None:
            return None
        offset = int(tensor.storage_offset())
        return SlotView(slot.block, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def looked_up(self, view: SlotView, in_use: set[Block]) -> torch.Tensor:
        """The tensor that a note stands for."""
        slot = self.fetch(view.block, in_use)
        assert slot is not None, "a block's backward pass has a buffer of its own"
        slot.ticket.wait()
        return looking(slot.buffer, view.dtype, view.shape, view.stride, view.offset)

    def _touch(self, slot: BufferSlot) -> None:
        self._clock += 1
        slot.last_used = self._clock


def slots_of(blocks: Iterable[Block], engines: CopyEngines, prefetch: int) -> Slots:
    """Buffers for the block that is computed and for those that come meanwhile."""
    sizes = [block.brought_bytes for block in blocks if block.is_streamed]
    return Slots(engines, max(sizes, default=0), 1 + max(1, prefetch))
