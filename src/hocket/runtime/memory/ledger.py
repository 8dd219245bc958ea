"""A byte-counting allocator: what tensors of a device hold, op by op, without such a device.

The rule is that of the memory model: the unit is the storage; an op's new storages are added, the
peak is noted, and a storage counts until the last tensor that looks at it is gone. What the host
holds is made `on_host`. Temporaries inside one op are not seen. Autograd adds up gradients in place
where nobody else looks at the first, but not under a mode such as this one: a sum whose first part
is gone at the next op counts as made in its place. O(outputs) per op.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_host_depth = threading.local()
_NO_NODE = -1
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules whose frames stand between an op and who asks for it."""


@contextmanager
def on_host() -> Iterator[None]:
    """Tensors that are made here are the host's: ledgers do not count them."""
    before = getattr(_host_depth, "value", 0)
    _host_depth.value = before + 1
    try:
        yield
    finally:
        _host_depth.value = before


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that ops make while it is entered, and of those it was told."""

    def __init__(self, unit_bytes: int = 1) -> None:
        """Storages take whole units, as an allocator gives them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit_bytes = unit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._sum: tuple[weakref.ref[Any], int] | None = None
        """The first part of autograd's last sum, and what was held with both parts and the sum."""
        self._node, self._made_by_node = _NO_NODE, set[int]()
        """Number of the node of the backward pass that is at work, and what storages it made."""
        # Storages are also let go by other threads, and by this one in the midst of counting.
        self._lock = threading.RLock()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there before, until they are gone."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())

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
            return func(*args, **(kwargs or {}))
        self._end_sum()
        self._note_node()
        result = func(*args, **(kwargs or {}))
        if getattr(_host_depth, "value", 0):
            return result
        if func is torch.ops.aten.add.Tensor and self._is_sum_of_autograd(args):
            self._add_sum(args[0].untyped_storage(), result.untyped_storage())
            return result
        unknown = [s for s in _storages(result) if s._cdata not in self._refs]
        if unknown:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in unknown:
                if storage._cdata not in given:
                    self._add(storage)
        return result

    def __exit__(self, *raised: Any) -> None:
        """What is held by now counts."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._end_sum()

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._count(storage)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _add_sum(self, part: torch.UntypedStorage, total: torch.UntypedStorage) -> None:
        self._count(total)
        known = self._refs.get(part._cdata)
        self._sum = (known or weakref.ref(part), self.held_bytes)

    def _end_sum(self) -> None:
        if self._sum is not None:
            part, held_bytes = self._sum
            self._sum = None
            now_bytes = self.held_bytes if part() is None else held_bytes
            self.peak_bytes = max(self.peak_bytes, now_bytes)

    def _is_sum_of_autograd(self, parts: tuple[Any, ...]) -> bool:
        """Whether the engine adds what a node has made to what another one has made before."""
        is_of_node = parts[0].untyped_storage()._cdata in self._made_by_node
        return self._node != _NO_NODE and not is_of_node and _is_asked_by_engine()

    def _note_node(self) -> None:
        is_backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if is_backward else None
        number = _NO_NODE if node is None else node._sequence_nr()
        if number != self._node:
            self._node = number
            self._made_by_node.clear()

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        num_bytes = -(-storage.nbytes() // self._unit_bytes) * self._unit_bytes

        def gone(ref: Any) -> None:
            with self._lock:
                # Its place may be another's by now.
                if self._refs.get(key) is ref:
                    del self._refs[key]
                self.held_bytes -= num_bytes

        with self._lock:
            if key not in self._refs and num_bytes:
                self._refs[key] = weakref.ref(storage, gone)
                self.held_bytes += num_bytes
                if self._node != _NO_NODE:
                    self._made_by_node.add(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = [values] if isinstance(values, torch.Tensor) else tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_asked_by_engine() -> bool:
    """Whether no Python code of a backward pass asks for the op that is counted."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals["__name__"] in _WRAPPERS:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
