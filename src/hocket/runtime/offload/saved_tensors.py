"""What autograd saves in the visits of a step, on its way to the host and back.

The unit is the storage: tensors that look at one storage go and come back together, once for all
visits that save them. Parameters, buffers and the batch never go, nor does what anything keeps that
is not offloaded. Copies to the host begin at once; the device's memory is given up one visit later,
when the computation has waited for the copy, so that it is never used again too early and the peak
does not depend on the bus.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.runtime.offload.copy_streams import (
    DONE,
    CopyEngines,
    HostPool,
    Ticket,
    looking,
    whole_numbers,
)


@dataclass(eq=False)
class _Saved:
    """A storage that was sent; it is there for as long as autograd wants it back."""

    there: torch.Tensor | None
    """All of it on the device, in the type of the first tensor that looked at it."""
    like: torch.dtype
    on_host: torch.Tensor
    pool: HostPool
    ticket: Ticket = DONE
    num_holding: int = 0
    """Visits of the forward pass that are not over for it."""
    stays: bool = False
    """True if something else keeps it on the device."""
    seen: set[tuple[int, ...]] = field(default_factory=set)
    """Of what was saved of it: how often that had been changed, where it is and how it lies."""

    def note(self, tensor: torch.Tensor) -> bool:
        """Note what is saved of it; whether that may have been changed in place since it was sent:
        parts of a storage that are changed one by one, as gates of cells are, count apart."""
        version, num_bytes = tensor._version, tensor.untyped_storage().nbytes()
        look = (version, int(tensor.storage_offset()), *tensor.shape, *tensor.stride())
        is_new = version > 0 and self.seen.isdisjoint({look, (version,)})
        self.seen.add(look)
        if tensor.numel() * tensor.element_size() == num_bytes:
            self.seen.add((version,))
        return is_new

    def __del__(self) -> None:
        # What takes its place on the device or on the host comes after the copy.
        self.ticket.wait()
        self.pool.give_back(self.on_host)


@dataclass(frozen=True)
class SavedView:
    """A tensor that looked at a storage."""

    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class KnownStorages:
    """Storages that a step has saved so far: those that are sent, and those that stay."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Saved] | None]] = {}

    def clear(self) -> None:
        """A step begins."""
        self._known = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """A storage stays on the device, whoever else would send it."""
        storage = tensor.untyped_storage()
        saved = self.find(storage)
        if isinstance(saved, _Saved) and tensor.layout == torch.strided:
            saved.there, saved.stays = _whole(tensor, saved.like), True
        elif saved is False:
            self.add(storage, None)

    def find(self, storage: torch.UntypedStorage) -> _Saved | bool | None:
        """What was sent of a storage, None where it stays, False where it was not seen."""
        of_storage, saved = self._known.get(storage._cdata, (None, None))
        # Another storage may lie where one was.
        if of_storage is None or of_storage() is not storage:
            return False
        return None if saved is None else saved() or False

    def add(self, storage: torch.UntypedStorage, saved: _Saved | None) -> None:
        """Note a storage."""
        sent = None if saved is None else weakref.ref(saved)
        self._known[storage._cdata] = weakref.ref(storage), sent


@dataclass(eq=False)
class SavedStorages:
    """Storages of one visit that are offloaded."""

    engines: CopyEngines
    pool: HostPool
    lasting: frozenset[int]
    """Storages that are there at all times: parameters, buffers and the batch."""
    known: KnownStorages
    most_bytes: float = float("inf")
    """What is beyond it stays."""
    num_offered_bytes: int = 0
    _own: dict[weakref.ref[_Saved], None] = field(default_factory=dict)
    """In the order of saving."""
    _offered: set[int] = field(default_factory=set)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds in place of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A device without a number is the same as the one that tensors name.
        is_elsewhere = tensor.device.type != self.engines.device.type
        stays = storage.nbytes() < SMALLEST_MOVED or key in self.lasting or is_elsewhere
        if stays or tensor.layout != torch.strided:
            return tensor
        # What is offered is held at least until the visit is over: its place is no other's.
        if key not in self._offered:
            self._offered.add(key)
            self.num_offered_bytes += storage.nbytes()
            if self.num_offered_bytes > self.most_bytes:
                self.known.keep(tensor)
        saved = self.known.find(storage)
        if saved is False:
            saved = self._send(tensor)
            self.known.add(storage, saved)
        elif isinstance(saved, _Saved) and not saved.stays and saved.note(tensor):
            self._send_again(saved, tensor)
        if not isinstance(saved, _Saved) or saved.stays:
            return tensor
        if (ref := weakref.ref(saved)) not in self._own:
            self._own[ref] = None
            saved.num_holding += 1
        offset = int(tensor.storage_offset())
        return SavedView(saved, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _send(self, tensor: torch.Tensor) -> _Saved:
        there = _whole(tensor, tensor.dtype)
        host = self.pool.take(tensor.untyped_storage().nbytes())
        ticket = self.engines.send([(whole_numbers(host, tensor.dtype), there)])
        saved = _Saved(there, tensor.dtype, host, self.pool, ticket)
        saved.note(tensor)
        return saved

    def _send_again(self, saved: _Saved, tensor: torch.Tensor) -> None:
        saved.there = _whole(tensor, saved.like)
        target = whole_numbers(saved.on_host, saved.like)
        saved.ticket = self.engines.send([(target, saved.there)])

    def let_go(self) -> None:
        """Give up the device's memory."""
        for saved in self._alive():
            saved.num_holding -= 1
            if not saved.num_holding and not saved.stays:
                saved.ticket.wait()
                saved.there = None

    def fetch(self) -> None:
        """Start to bring everything back, what was saved last first."""
        for saved in reversed(self._alive()):
            if saved.there is None:
                size = saved.on_host.numel() // saved.like.itemsize
                there = torch.empty(size, dtype=saved.like, device=self.engines.device)
                saved.there = there
                source = whole_numbers(saved.on_host, saved.like)
                saved.ticket = self.engines.fetch([(there, source)])

    def _alive(self) -> list[_Saved]:
        return [saved for ref in self._own if (saved := ref()) is not None]

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


def _whole(tensor: torch.Tensor, like: torch.dtype) -> torch.Tensor:
    """All that a tensor's storage has, in a type."""
    num_bytes, dtype = tensor.untyped_storage().nbytes(), tensor.dtype
    # A look at a result that knows the op which saves it would keep that op alive.
    there = tensor.detach().as_strided((num_bytes // dtype.itemsize,), (1,), 0)
    return there if like == dtype else whole_numbers(there.view(torch.uint8), like)
