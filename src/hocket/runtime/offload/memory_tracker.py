"""Tracks the device memory of tensors op by op, without needing the device.

A dispatch mode counts every storage that an op allocates, until the last tensor of the storage is
freed, and records the peak of the sum. Memory allocated under `on_host` is not counted. Temporaries
within one op are not seen, except for measured workspaces. The cost is O(outputs) per op.

Autograd sums the gradients of one tensor in place if nothing else references the first gradient
(PyTorch's ``can_accumulate_inplace``). Under any dispatch mode autograd calls `add` instead, which
allocates. The tracker does not count this allocation if autograd would have summed in place without
the mode. To decide that, it compares the reference counts of the first gradient with those in a sum
that is known to be in place. This works whatever references a PyTorch version holds.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_ADD = torch.ops.aten.add.Tensor
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_SHORT = (torch.bfloat16, torch.float16)
_Holders = tuple[int, int, int, int]
"""Reference counts of a tensor in C++ and Python, and of its storage in C++ and Python."""
_NO_NODE = -1
WorkspaceBytes = Callable[[Any, tuple[Any, ...], Mapping[str, Any] | None], int]
"""Returns the bytes that an op with these arguments takes while it runs, beyond its results."""
_PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul",
    "_addmm_activation", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
))  # fmt: skip
"""Names of matrix-product ops, for which cuBLAS holds a workspace."""
_host_depth = threading.local()


@contextmanager
def on_host() -> Iterator[None]:
    """Mark allocations inside the context as host memory, which trackers do not count."""
    before = getattr(_host_depth, "value", 0)
    _host_depth.value = before + 1
    try:
        yield
    finally:
        _host_depth.value = before


def is_product(kind: str) -> bool:
    """True if an op, such as ``aten.mm.default``, is a matrix product."""
    return kind.removeprefix("aten.").partition(".")[0].rstrip("_") in _PRODUCTS


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tracked storages and of storages that ops allocate while it is entered."""

    def __init__(self, unit_bytes: int = 1, workspace: WorkspaceBytes | None = None) -> None:
        """Round storages up to units, as an allocator does; ``workspace`` returns the extra bytes
        of an op."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit_bytes, self._workspace = unit_bytes, workspace
        self._in_place = _in_place_holders()
        self.held_bytes = 0
        self.peak_bytes = 0
        self.has_products = False
        """True if a matrix product ran, for which libraries keep workspaces."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._makers: dict[int, int] = {}
        """Sequence number of the autograd node that allocated each storage."""
        # Storages are also freed by other threads, and by this one in the midst of counting.
        self._lock = threading.RLock()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count existing tensors until they are freed."""
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
        """Run an op, and count the storages that it allocates."""
        if func is torch.ops.prim.device.default:
            # Up to half of all calls query the device, so they are answered without dispatch.
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        in_place = self._is_in_place_sum(func, args, kwargs)
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
            workspace = 0 if self._workspace is None else self._workspace(func, args, kwargs)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes + workspace)
        return result

    def _is_in_place_sum(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> bool:
        """True if an op is autograd's sum of gradients, which is in place without a dispatch
        mode."""
        if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        # `args[0]` is not bound to a local name, which would add a reference.
        if (
            type(args[0]) not in self._in_place
            or _holders(args[0]) != self._in_place[type(args[0])]
        ):
            return False
        node = _current_node()
        if node == _NO_NODE or not _is_dense(args[0]):
            return False
        # An `add` within a node's own formula allocates. Autograd itself sums two results of one
        # node only if both are gradients of the same tensor, which is a repeated edge.
        maker = self._makers.get(args[0].untyped_storage()._cdata)
        return maker != node or _has_repeated_edge(torch._C._current_autograd_node())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        num_bytes = -(-storage.nbytes() // self._unit_bytes) * self._unit_bytes

        def freed(ref: Any) -> None:
            with self._lock:
                # Another storage may have this address by now.
                if self._refs.get(key) is ref:
                    del self._refs[key], self._makers[key]
                self.held_bytes -= num_bytes

        with self._lock:
            if key not in self._refs and num_bytes:
                self._refs[key] = weakref.ref(storage, freed)
                self._makers[key] = _current_node()
                self.held_bytes += num_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = [values] if isinstance(values, torch.Tensor) else tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


# ── sums of gradients ────────────────────────────────────────────────────────────────────────────


def _current_node() -> int:
    """Return the sequence number of the running autograd node; `_NO_NODE` outside of backward."""
    if torch._C._current_graph_task_id() == _NO_NODE:
        return _NO_NODE
    node: Any = torch._C._current_autograd_node()
    return _NO_NODE if node is None else int(node._sequence_nr())


def _holders(tensor: torch.Tensor) -> _Holders:
    storage = tensor.untyped_storage()
    return (
        tensor._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(tensor),
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor has neither gaps nor overlaps in memory."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True


def _has_repeated_edge(node: Any) -> bool:
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


@cache
def _in_place_holders() -> Mapping[type, _Holders]:
    """Return reference counts of gradients that autograd adds to in place, by tensor type."""
    found: dict[type, _Holders] = {}

    class SeenSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _ADD:
                found[type(args[0])] = _holders(args[0])
            return func(*args, **(kwargs or {}))

    for mode in (nullcontext(), FakeTensorMode()):
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), mode:
            leaf = torch.zeros(2, device="cpu", requires_grad=True)
            one = torch.ones(2, device="cpu")
            # Gradients of products are new tensors, which nobody else holds.
            products = [leaf * 2, leaf * 3]
            with SeenSums():  # type: ignore[no-untyped-call]
                torch.autograd.backward(products, [one, one])
    return found


class WideStatistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes batch norms save as many bytes on fake tensors as on real tensors.

    On a CPU PyTorch saves mean and deviation of 16-bit inputs in the dtype of 32-bit weights, but
    gives fake tensors the dtype of the inputs.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op, and widen the statistics that it saves."""
        result = func(*args, **(kwargs or {}))
        if func is not _BATCH_NORM or args[1] is None:
            return result
        rows, weight = args[:2]
        if rows.device.type != "cpu" or rows.dtype not in _SHORT or weight.dtype in _SHORT:
            return result
        output, *statistics = result
        return output, *(each.to(weight.dtype) for each in statistics)
