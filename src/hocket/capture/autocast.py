"""CUDA's autocast, recorded on fake tensors of a CPU.

A step that is recorded for an accelerator has tensors of a CPU, on which
``torch.autocast("cuda")`` does nothing; without CUDA PyTorch even disables it. While such a step is
recorded, autocast for CUDA becomes that of the CPU in the same type: it casts the inputs of
matrix products and convolutions and caches casts of weights as CUDA's does. Ops that only CUDA's
autocast casts (norms, softmax, sums, powers: to float32) get kernels of their own at the
CPU's autocast key. PyTorch registers CUDA's kernels in every build, so that the dispatcher
itself says which ops those are.
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

_LOWER = frozenset(
    {
        "_convolution",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "einsum",
        "chain_matmul",
        "linalg_multi_dot",
        "mv",
        "addmv",
        "addr",
        "lstm_cell",
        "gru_cell",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
    }
)
"""Ops that run in the autocast type: what they call is in the CPU's list."""
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
"""Ops whose inputs are cast to the widest of their types."""


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Have autocast that this thread enters for CUDA act on fake tensors of a CPU."""
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
    """Kernels for the ops that CUDA's autocast casts and the CPU's does not."""
    here = threading.get_ident()
    library = kernel_library()
    for name, function in _cuda_only():
        library.impl(name, _kernel(function, _policy(name, function), here), "AutocastCPU")
    return library


@cache
def _cuda_only() -> tuple[tuple[str, Any], ...]:
    """Names and overloads of ops in CUDA's lists that the CPU's lack."""
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
    """Ask for a float32 result where the caller names no type: the op then casts as it reads."""
    is_named = kwargs.get("dtype") is not None or (len(args) > index and args[index] is not None)
    if is_named or not (isinstance(args[0], torch.Tensor) and _is_cast(args[0])):
        return args, kwargs
    return args[:index], {**kwargs, "dtype": torch.float32}
