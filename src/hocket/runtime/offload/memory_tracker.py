"""What batch norms of 16-bit floats keep on a processor, where tensors have no memory.

Where weights have 32 bits, PyTorch keeps mean and deviation in 32 bits, and for fake tensors takes
them for 16: a rehearsal would count too little. O(1) per op.
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

# A byte-counting allocator: what tensors of a device hold, op by op, without such a device.
#
# The rule is that of the memory model: the unit is the storage; an op's new storages are added,
# the peak is noted, and a storage counts until the last tensor that looks at it is gone. What the
# host holds is made `on_host`. Temporaries inside one op are not seen, unless somebody knows of
# them. Autograd adds up gradients in place, but not under a mode such as this one: a sum that
# would be counts as made in place (`sums`). O(outputs) per op.


# Which sums of gradients autograd makes in place, told under a mode that keeps it from doing so.
#
# Where gradients of one tensor come from several ops, autograd's engine adds the later ones to the
# first, and in place where nobody but itself holds that one: no other tensor, storage or Python
# object (``can_accumulate_inplace`` in PyTorch). Under a dispatch mode it calls `add` every time,
# but who holds the first can be counted all the same. The counts are compared with those of a sum
# that is known to be made in place, so that nothing has to be known of how a version of PyTorch
# counts.

_ADD = torch.ops.aten.add.Tensor
Holders = tuple[int, int, int, int]
"""How many hold a tensor in PyTorch and in Python, and how many its storage."""
NO_NODE = -1


def current_node() -> int:
    """The number of the node that the backward pass is at; `NO_NODE` outside of one."""
    if torch._C._current_graph_task_id() == NO_NODE:
        return NO_NODE
    node: Any = torch._C._current_autograd_node()
    return NO_NODE if node is None else int(node._sequence_nr())


def is_made_in_place(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    alone: Mapping[type, Holders],
    maker_of: Callable[[torch.Tensor], int | None],
) -> bool:
    """True if an op is the engine's sum of two gradients and, without a mode, made in the first's
    place; ``alone`` is `held_by_engine_alone`, ``maker_of`` tells which node made a tensor."""
    if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    # Asked before the tensor has another name here: that would be one more who holds it.
    if type(args[0]) not in alone or _holders(args[0]) != alone[type(args[0])]:
        return False
    node = current_node()
    if node == NO_NODE or not _is_dense(args[0]):
        return False
    # What a node's own formula adds up is never in place; the engine adds two results of one node
    # where both are gradients of the same tensor.
    return maker_of(args[0]) != node or _gives_twice(torch._C._current_autograd_node())


def _holders(tensor: torch.Tensor) -> Holders:
    storage = tensor.untyped_storage()
    return (
        tensor._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(tensor),
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if every place of its memory is one of its elements'."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    extent = 1
    for stride, size in dims:
        if size != 1 and stride != extent:
            return False
        extent *= size
    return True


def _gives_twice(node: Any) -> bool:
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


@cache
def held_by_engine_alone() -> Mapping[type, Holders]:
    """The counts of a gradient that others are added to in place, of each kind of tensor."""
    found: dict[type, Holders] = {}

    class SumsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
            # Products give gradients of their own, which nobody saw before.
            products = [leaf * 2, leaf * 3]
            with SumsSeen():  # type: ignore[no-untyped-call]
                torch.autograd.backward(products, [one, one])
    return found


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
    """True if an op, such as ``aten.mm.default``, multiplies matrices by such a library."""
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


# What batch norms of 16-bit floats keep on a processor, where tensors have no memory.
#
# Where weights have 32 bits, PyTorch keeps mean and deviation in 32 bits, and for fake tensors
# takes them for 16: a rehearsal would count too little. O(1) per op.


_NORM = torch.ops.aten.native_batch_norm.default
_SHORT = (torch.bfloat16, torch.float16)


class WideStatistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has fake batch norms keep as much as real ones do."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the op, and widen what it keeps."""
        result = func(*args, **(kwargs or {}))
        if func is not _NORM or args[1] is None:
            return result
        rows, weight = args[:2]
        if rows.device.type != "cpu" or rows.dtype not in _SHORT or weight.dtype in _SHORT:
            return result
        made, *kept = result
        return made, *(each.to(weight.dtype) for each in kept)
