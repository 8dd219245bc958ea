"""What kernels of a GPU take beside their results: each kind of call is made once, and measured.

Libraries choose kernels, and workspaces for them, by shapes, layouts and types (cuDNN's attention
takes several times its results, convolutions up to hundreds of MB), and nothing but the call itself
tells which. A kind of call is an op with the shapes, strides and types of its tensors and its other
arguments; it is made on tensors of zeros, beside which nothing runs, and PyTorch's allocator says
how much more than the results there was meanwhile. Only calls are made that change nothing and
whose kernels zeros cannot harm; generators of random numbers are the caller's to keep. The
allocator's peak is reset. One call for each kind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.runtime.offload.copy_streams import extent

KernelCall = Callable[[], Any]
_MIN_BYTES = 2**20
"""Calls whose tensors are smaller take nothing worth measuring."""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_",
              "_cudnn_attention_")  # fmt: skip
"""Beginnings of names: such ops may draw random numbers, and are given seeds."""
_RECURRENT = "_cudnn_rnn"
"""Likewise; its reserve is numbers in bytes."""
_EMBEDDING_GRADIENT = "embedding_dense_backward"
"""Is given numbers of rows, of which 0 is one."""


class Workspaces:
    """Bytes that calls take beside what they return, by kind."""

    def __init__(self, device: torch.device, measure: Callable[[KernelCall], int]) -> None:
        """``measure`` makes a call and tells how much more than its results was held meanwhile."""
        self._device, self._measure = device, measure
        self._found: dict[Any, int] = {}
        self.unknown: dict[str, str] = {}
        """Why calls could not be made, by op."""

    def beside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> int:
        """What a call takes; 0 where that is not known."""
        if not _is_worth_a_call(func):
            return 0
        leaves, form = tree_flatten((args, dict(kwargs or {})))
        if not self._can_be_made(func, [v for v in leaves if isinstance(v, torch.Tensor)]):
            return 0
        key = func, _settings(), tuple(kwargs or ()), tuple(_kind(leaf) for leaf in leaves)
        if key not in self._found:
            self._found[key] = self._measured(func, leaves, form)
        return self._found[key]

    def _can_be_made(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        here = [t for t in tensors if t.device.type == self._device.type]
        # Other whole numbers may be places, or sizes, that zeros are not.
        takes_zeros = _name(func).startswith((*_ATTENTION, _RECURRENT, _EMBEDDING_GRADIENT))
        if not takes_zeros and not all(t.is_floating_point() for t in here):
            return False
        return sum(t.untyped_storage().nbytes() for t in here) >= _MIN_BYTES

    def _measured(self, func: Any, leaves: list[Any], form: Any) -> int:
        with unset_fake_temporarily():
            try:
                real = [_zeros(v) if isinstance(v, torch.Tensor) else v for v in leaves]
                args, kwargs = tree_unflatten(real, form)
                return self._measure(lambda: func(*args, **kwargs))
            # There is no room for it by itself, or the device has no such kernel.
            except RuntimeError as error:
                self.unknown[_name(func)] = str(error)
                return 0


@cache
def workspaces_on(device: torch.device) -> Workspaces:
    """Those of a GPU."""

    def measure(call: KernelCall) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        with warnings.catch_warnings():
            # Weights of recurrent layers are not in one piece, as they will not be.
            warnings.simplefilter("ignore")
            result = call()
        held = torch.cuda.memory_allocated(device)
        del result
        return max(0, torch.cuda.max_memory_allocated(device) - held)

    return Workspaces(device, measure)


@cache
def _is_worth_a_call(func: Any) -> bool:
    """True if an op only computes something, in a way that may want room."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    if func.is_view or func._schema.is_mutable:
        return False
    draws = torch.Tag.nondeterministic_seeded in func.tags
    draws = draws and not _name(func).startswith((*_ATTENTION, _RECURRENT))
    gives = any(isinstance(each.type, torch.TensorType) for each in func._schema.returns)
    return gives and not draws and torch.Tag.pointwise not in func.tags


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _settings() -> tuple[bool, ...]:
    """What kernels are chosen by beside the arguments."""
    return (
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in the layout of a tensor."""
    room = torch.zeros(extent(tensor), dtype=tensor.dtype, device=tensor.device)
    return room.as_strided(tensor.shape, tensor.stride())
