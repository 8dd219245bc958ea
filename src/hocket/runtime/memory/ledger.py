"""A byte-counting allocator: what tensors of a device hold, op by op, without such a device.

The rule is that of the memory model: the unit is the storage; an op's new storages are added, the
peak is noted, and a storage counts until the last tensor that looks at it is gone. What the host
holds is made `on_host`. Temporaries inside one op are not seen, unless somebody knows of them.
Autograd adds up gradients in place, but not under a mode such as this one: a sum that would be
counts as made in place (`sums`). O(outputs) per op.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.runtime.memory.sums import (
    NO_NODE,
    current_node,
    held_by_engine_alone,
    is_made_in_place,
)

TakesBeside = Callable[[Any, tuple[Any, ...], Mapping[str, Any] | None], int]
"""Tells what an op with these arguments takes for a moment beside its results, in bytes."""
PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul",
    "_addmm_activation", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
))  # fmt: skip
"""Names of ops that multiply matrices by a library which keeps a workspace."""
_host_depth = threading.local()


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors that are made here are the host's: ledgers do not count them."""
    before = getattr(_host_depth, "value", 0)
    _host_depth.value = before + 1
    try:
        yield
    finally:
        _host_depth.value = before


def is_product(kind: str) -> bool:
    """Whether an op, such as ``aten.mm.default``, multiplies matrices by such a library."""
    return kind.removeprefix("aten.").partition(".")[0].rstrip("_") in PRODUCTS


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that ops make while it is entered, and of those it was told."""

    def __init__(self, unit_bytes: int = 1, beside: TakesBeside | None = None) -> None:
        """Storages take whole units, as an allocator gives them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit_bytes, self._beside = unit_bytes, beside
        self._alone = held_by_engine_alone()
        self.held_bytes = 0
        self.peak_bytes = 0
        self.has_products = False
        """Whether there was a product of matrices, for which libraries keep workspaces."""
        self.peak_at = ""
        """The op of the peak, and before it the node of the backward pass that wanted it."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._makers: dict[int, int] = {}
        """By storage the node of the backward pass that made it."""
        # Storages are also let go by other threads, and by this one in the midst of counting.
        self._lock = threading.RLock()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there before, until they are gone."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the op and count what it made."""
        if func is torch.ops.prim.device.default:
            # Up to half of all that is dispatched.
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        in_place = is_made_in_place(func, args, kwargs, self._alone, self._maker_of)
        result = func(*args, **(kwargs or {}))
        if getattr(_host_depth, "value", 0):
            return result
        unknown = [s for s in _storages(result) if s._cdata not in self._refs]
        if unknown:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in unknown:
                if storage._cdata not in given:
                    self._add(storage)
        self.has_products = self.has_products or is_product(str(func))
        if not in_place:
            beside = 0 if self._beside is None else self._beside(func, args, kwargs)
            self._note_peak(self.held_bytes + beside, func)
        return result

    def _maker_of(self, tensor: torch.Tensor) -> int | None:
        return self._makers.get(tensor.untyped_storage()._cdata)

    def _note_peak(self, num_bytes: int, func: Any) -> None:
        if num_bytes > self.peak_bytes:
            node = torch._C._current_autograd_node() if current_node() != NO_NODE else None
            self.peak_bytes = num_bytes
            self.peak_at = f"{func}" if node is None else f"{node.name()} {func}"

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        num_bytes = -(-storage.nbytes() // self._unit_bytes) * self._unit_bytes

        def gone(ref: Any) -> None:
            with self._lock:
                # Its place may be another's by now.
                if self._refs.get(key) is ref:
                    del self._refs[key], self._makers[key]
                self.held_bytes -= num_bytes

        with self._lock:
            if key not in self._refs and num_bytes:
                self._refs[key] = weakref.ref(storage, gone)
                self._makers[key] = current_node()
                self.held_bytes += num_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = [values] if isinstance(values, torch.Tensor) else tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
