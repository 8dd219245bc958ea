"""Record CUDA's autocast on fake CPU tensors.

A step recorded for an accelerator runs on CPU tensors, on which ``torch.autocast("cuda")`` has no
effect; without CUDA, PyTorch even disables it. While such a step is recorded, CUDA's autocast is
mapped to the CPU's with the same dtype, which casts inputs of matrix products and convolutions and
caches the casts of weights as CUDA's does. Ops that only CUDA's autocast casts to float32 (norms,
softmax, sums and powers) get kernels at the CPU's autocast key. The list of these ops is read from
the dispatcher, because PyTorch registers CUDA's autocast kernels in every build.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hocket.capture.attention import kernel_library

_LOWER = frozenset({
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum",
    "chain_matmul", "linalg_multi_dot", "mv", "addmv", "addr", "lstm_cell", "gru_cell",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
})  # fmt: skip
"""Ops in CUDA's lower-precision list that need no kernel here, because the ops that they call are
in the CPU's list."""
_WIDEST = frozenset(
    {
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "index_put",
        "tensordot",
        "scatter_add",
    }
)
"""Ops whose inputs are all promoted to the widest input dtype."""


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make CUDA autocast regions of this thread act on fake CPU tensors."""
    kernels = _register()
    own, here = torch.autocast.__init__, threading.get_ident()

    # Without CUDA the constructor disables itself, so no later hook could see the request.
    def make(
        autocast: torch.autocast, device_type: str, dtype: torch.dtype | None = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if device_type == "cuda" and threading.get_ident() == here:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        own(autocast, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = make  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]
        del kernels


def _register() -> Any:
    """Register kernels for ops that CUDA's autocast casts and the CPU's does not."""
    here = threading.get_ident()
    library = kernel_library()
    for name, function in _cuda_only():
        library.impl(name, _kernel(function, _policy(name, function), here), "AutocastCPU")
    return library


@cache
def _cuda_only() -> tuple[tuple[str, Any], ...]:
    """Names and overloads of ops in CUDA's autocast lists that the CPU's lists lack."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found: list[tuple[str, Any]] = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = full.partition("::")
        if namespace != "aten" or not has(full, "AutocastCUDA") or has(full, "AutocastCPU"):
            continue
        base, _, overload = name.partition(".")
        if base not in _LOWER:
            found.append((name, getattr(getattr(torch.ops.aten, base), overload or "default")))
    return tuple(found)


Policy = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]


def _policy(name: str, function: Any) -> Policy:
    if name.partition(".")[0] in _WIDEST:
        return _cast_to_widest
    position = [argument.name for argument in function._schema.arguments].index
    if any(argument.name == "dtype" for argument in function._schema.arguments):
        index = position("dtype")
        return lambda args, kwargs: _with_float32_result(args, kwargs, index)
    return lambda args, kwargs: (_cast(args, torch.float32), _cast(kwargs, torch.float32))


def _kernel(function: Any, policy: Policy, thread: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args, kwargs = policy(args, kwargs)
        # With autocast enabled, the call would dispatch to this kernel again.
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if _is_cast(t) else t, tree)


def _cast_to_widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    dtypes: set[torch.dtype] = set()
    tree_map_only(torch.Tensor, lambda t: dtypes.add(t.dtype) if _is_cast(t) else None, args)
    if torch.float32 not in dtypes:
        return args, kwargs
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


def _with_float32_result(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int
) -> tuple[Any, Any]:
    """Request a float32 result if the caller names no dtype; the op then casts while it reads."""
    is_named = kwargs.get("dtype") is not None or (len(args) > index and args[index] is not None)
    if is_named or not (isinstance(args[0], torch.Tensor) and _is_cast(args[0])):
        return args, kwargs
    return args[:index], {**kwargs, "dtype": torch.float32}
