"""Offload and prefetch of tensors that autograd saves for the backward pass.

The unit of transfer is the storage: tensors that share a storage are copied and fetched together,
once for all blocks that save them. Parameters, buffers and the batch are never offloaded, nor are
storages that other code holds on the device. A copy to the host starts when autograd saves the
tensor. Device memory is released one block later, after the compute stream has waited for the copy.
It is thus never reused too early, and the peak does not depend on the speed of the bus.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.runtime.offload.copy_streams import (
    DONE,
    CopyEvent,
    CopyStreams,
    HostPool,
    as_dtype,
    typed_view,
)


@dataclass(eq=False)
class _OffloadedStorage:
    """A storage that was copied to the host; it lives as long as autograd references it."""

    on_device: torch.Tensor | None
    """The entire storage, in the dtype of the first tensor saved from it; None once released."""
    dtype: torch.dtype
    on_host: torch.Tensor
    pool: HostPool
    event: CopyEvent = DONE
    num_users: int = 0
    """Number of block calls that have saved the storage and not released it yet."""
    stays: bool = False
    """True if other code holds the storage on the device, so that offloading frees nothing."""
    versions: set[tuple[int, ...]] = field(default_factory=set)
    """Version counter and layout of each tensor saved from the storage."""

    def note(self, tensor: torch.Tensor) -> bool:
        """Record a tensor saved from the storage; return True if it may have been written after
        the copy.

        Parts of a storage that are written one by one, such as the gates of an LSTM cell, have
        separate version counters.
        """
        version, num_bytes = tensor._version, tensor.untyped_storage().nbytes()
        layout = (version, int(tensor.storage_offset()), *tensor.shape, *tensor.stride())
        is_new = version > 0 and self.versions.isdisjoint({layout, (version,)})
        self.versions.add(layout)
        if tensor.numel() * tensor.element_size() == num_bytes:
            self.versions.add((version,))
        return is_new

    def __del__(self) -> None:
        # The memory, on the device and on the host, may be reused only after the copy.
        self.event.wait()
        self.pool.give_back(self.on_host)


@dataclass(frozen=True)
class OffloadedView:
    """A saved tensor as a view of an offloaded storage."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class StepStorages:
    """Storages saved so far in a step: offloaded, or kept on the device."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_OffloadedStorage] | None]] = {}

    def clear(self) -> None:
        """Forget all storages at the beginning of a step."""
        self._known = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Mark a storage as staying on the device, even if a block would offload it."""
        storage = tensor.untyped_storage()
        found = self.find(storage)
        if isinstance(found, _OffloadedStorage) and tensor.layout == torch.strided:
            found.on_device, found.stays = _flat(tensor, found.dtype), True
        elif found is False:
            self.add(storage, None)

    def find(self, storage: torch.UntypedStorage) -> _OffloadedStorage | bool | None:
        """Return the offloaded storage, None if it stays on the device, or False if it is
        unknown."""
        of_storage, found = self._known.get(storage._cdata, (None, None))
        # Another storage may have been allocated at the same address.
        if of_storage is None or of_storage() is not storage:
            return False
        return None if found is None else found() or False

    def add(self, storage: torch.UntypedStorage, offloaded: _OffloadedStorage | None) -> None:
        """Register a storage as offloaded, or as staying on the device if ``offloaded`` is None."""
        # Weak references: the step's registry must not prolong the life of activations.
        ref = None if offloaded is None else weakref.ref(offloaded)
        self._known[storage._cdata] = weakref.ref(storage), ref


@dataclass(eq=False)
class OffloadedStorages:
    """Storages that one call of a block saves and offloads."""

    streams: CopyStreams
    pool: HostPool
    resident: frozenset[int]
    """Keys of storages that are never offloaded: parameters, buffers and the batch."""
    known: StepStorages
    max_bytes: float = float("inf")
    """Limit of offloaded bytes; storages beyond it stay on the device."""
    num_offered_bytes: int = 0
    """Bytes of all storages that could have been offloaded, within the limit or not."""
    _own: dict[weakref.ref[_OffloadedStorage], None] = field(default_factory=dict)
    """Weak references to the offloaded storages, in the order of saving."""
    _offered: set[int] = field(default_factory=set)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Start to offload a tensor; return the object that autograd saves in its place."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        # Device types are compared, because "cuda" and "cuda:0" are different device objects.
        is_elsewhere = tensor.device.type != self.streams.device.type
        stays = storage.nbytes() < SMALLEST_MOVED or key in self.resident or is_elsewhere
        if stays or tensor.layout != torch.strided:
            return tensor
        # An offered storage lives at least until the call returns, so its key is not reused.
        if key not in self._offered:
            self._offered.add(key)
            self.num_offered_bytes += storage.nbytes()
            if self.num_offered_bytes > self.max_bytes:
                self.known.keep(tensor)
        found = self.known.find(storage)
        if found is False:
            found = self._offload(tensor)
            self.known.add(storage, found)
        elif isinstance(found, _OffloadedStorage) and not found.stays and found.note(tensor):
            self._offload_again(found, tensor)
        if not isinstance(found, _OffloadedStorage) or found.stays:
            return tensor
        if (ref := weakref.ref(found)) not in self._own:
            self._own[ref] = None
            found.num_users += 1
        offset = int(tensor.storage_offset())
        return OffloadedView(found, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _offload(self, tensor: torch.Tensor) -> _OffloadedStorage:
        on_device = _flat(tensor, tensor.dtype)
        on_host = self.pool.take(tensor.untyped_storage().nbytes())
        event = self.streams.offload([(as_dtype(on_host, tensor.dtype), on_device)])
        found = _OffloadedStorage(on_device, tensor.dtype, on_host, self.pool, event)
        found.note(tensor)
        return found

    def _offload_again(self, found: _OffloadedStorage, tensor: torch.Tensor) -> None:
        """Copy a storage again because it was written in place after its first copy."""
        found.on_device = _flat(tensor, found.dtype)
        found.event = self.streams.offload(
            [(as_dtype(found.on_host, found.dtype), found.on_device)]
        )

    def release(self) -> None:
        """Make the compute stream wait for the copies to the host, then release device memory."""
        for found in self._alive():
            found.num_users -= 1
            if not found.num_users and not found.stays:
                found.event.wait()
                found.on_device = None

    def fetch(self) -> None:
        """Start to fetch all storages, the last saved ones first."""
        # Autograd needs the tensors in reverse order of saving.
        for found in reversed(self._alive()):
            if found.on_device is None:
                size = found.on_host.numel() // found.dtype.itemsize
                target = torch.empty(size, dtype=found.dtype, device=self.streams.device)
                found.on_device = target
                found.event = self.streams.fetch([(target, as_dtype(found.on_host, found.dtype))])

    def _alive(self) -> list[_OffloadedStorage]:
        return [found for ref in self._own if (found := ref()) is not None]

    def unpack(self, view: OffloadedView) -> torch.Tensor:
        """Return the tensor that autograd saved."""
        found = view.storage
        if found.on_device is None:
            self.fetch()
        found.event.wait()
        assert found.on_device is not None
        if view.dtype == found.dtype:
            return found.on_device.as_strided(view.shape, view.stride, view.offset)
        flat = found.on_device.view(torch.uint8)
        return typed_view(flat, view.dtype, view.shape, view.stride, view.offset)


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor's entire storage as a flat tensor of ``dtype``."""
    num_bytes = tensor.untyped_storage().nbytes()
    # Detached: a view with a grad_fn would keep alive the very op that saves it.
    flat = tensor.detach().as_strided((num_bytes // tensor.dtype.itemsize,), (1,), 0)
    return flat if dtype == tensor.dtype else as_dtype(flat.view(torch.uint8), dtype)
