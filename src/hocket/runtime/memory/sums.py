"""Which sums of gradients autograd makes in place, told under a mode that keeps it from doing so.

Where gradients of one tensor come from several ops, autograd's engine adds the later ones to the
first, and in place where nobody but itself holds that one: no other tensor, storage or Python
object (``can_accumulate_inplace`` in PyTorch). Under a dispatch mode it calls `add` every time, but
who holds the first can be counted all the same. The counts are compared with those of a sum that
is known to be made in place, so that nothing has to be known of how a version of PyTorch counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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
    """Whether an op is the engine's sum of two gradients and, without a mode, made in the first's
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
    """Whether every place of its memory is one of its elements'."""
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
