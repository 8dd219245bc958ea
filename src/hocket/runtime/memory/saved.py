"""What autograd saves in one visit of a block, on its way to the host and back.

The unit is the storage: tensors that look at one storage go and come back together, and parameters
and buffers of the model never go. Of the block's inputs only the output of the block before goes;
what all blocks share (masks, positions) is kept. Copies to the host begin at once; the device's
memory is given up one block later, when the computation has waited for the copy, so that it is
never used again too early and the peak does not depend on the bus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.runtime.memory.copies import (
    DONE,
    CopyEngines,
    HostPool,
    Ticket,
    looking,
    whole_numbers,
)

_MIN_BYTES = 1024
"""Smaller storages stay: a copy costs more than they weigh."""


@dataclass(eq=False)
class _Saved:
    """A storage."""

    there: torch.Tensor | None
    """All of it on the device, in the type of the first tensor that looked at it."""
    like: torch.dtype
    num_bytes: int
    on_host: torch.Tensor | None = None
    ticket: Ticket = DONE


@dataclass(frozen=True)
class SavedView:
    """A tensor that looked at a storage."""

    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class SavedStorages:
    """Storages of one visit that are offloaded."""

    engines: CopyEngines
    pool: HostPool
    kept: frozenset[int]
    """Storages that are not to go: parameters, buffers, inputs of several blocks."""
    most_bytes: float = float("inf")
    """What is beyond it stays."""
    num_offered_bytes: int = 0
    _saved: dict[int, _Saved] = field(default_factory=dict)
    _beyond: set[int] = field(default_factory=set)
    """Storages that stay because the others are enough; autograd holds them, so none of these
    comes to lie where another was."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds in place of a tensor."""
        storage = tensor.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        # A device without a number is the same as the one that tensors name.
        is_elsewhere = tensor.device.type != self.engines.device.type
        stays = num_bytes < _MIN_BYTES or key in self.kept or is_elsewhere
        if stays or tensor.layout != torch.strided or key in self._beyond:
            return tensor
        if key not in self._saved:
            self.num_offered_bytes += num_bytes
            if self.num_offered_bytes > self.most_bytes:
                self._beyond.add(key)
                return tensor
            self._saved[key] = self._send(tensor)
        saved = self._saved[key]
        offset = int(tensor.storage_offset())
        return SavedView(saved, tensor.dtype, tensor.shape, tensor.stride(), offset)

    @torch.no_grad()
    def _send(self, tensor: torch.Tensor) -> _Saved:
        num_bytes, dtype = tensor.untyped_storage().nbytes(), tensor.dtype
        there = tensor.as_strided((num_bytes // dtype.itemsize,), (1,), 0)
        host = self.pool.take(num_bytes)
        ticket = self.engines.send([(whole_numbers(host, dtype), there)])
        return _Saved(there, dtype, num_bytes, host, ticket)

    def let_go(self) -> None:
        """Give up the device's memory."""
        for saved in self._saved.values():
            if saved.there is not None:
                saved.ticket.wait()
                saved.there = None
        # Storages of the device may come to lie where these were.
        self._saved = dict(enumerate(self._saved.values()))

    def fetch(self) -> None:
        """Start to bring everything back."""
        for saved in self._saved.values():
            if saved.there is None and saved.on_host is not None:
                size, device = saved.num_bytes // saved.like.itemsize, self.engines.device
                saved.there = there = torch.empty(size, dtype=saved.like, device=device)
                saved.ticket = self.engines.fetch(
                    [(there, whole_numbers(saved.on_host, saved.like))]
                )

    def unpack(self, view: SavedView) -> torch.Tensor:
        """The tensor that autograd wants back."""
        if view.saved.there is None:
            self.fetch()
        view.saved.ticket.wait()
        there = view.saved.there
        assert there is not None
        if view.dtype == view.saved.like:
            return there.as_strided(view.shape, view.stride, view.offset)
        return looking(there.view(torch.uint8), view.dtype, view.shape, view.stride, view.offset)

    def forget(self) -> None:
        """The backward pass of the visit is over."""
        for saved in self._saved.values():
            saved.there = None
            if saved.on_host is not None:
                self.pool.give_back(saved.on_host)
                saved.on_host = None
        self._saved.clear()
