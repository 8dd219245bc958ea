"""Record attention and dropout as accelerators run them, on a machine without one.

On a CPU, PyTorch splits attention with dropout or a mask into products and a softmax with large
intermediate matrices; CUDA runs one fused kernel that stores only its output. Fake tensors can run
the fused op without a device. `fused_kernels` registers functions for the CPU's autograd key that
call the fused ops, so that the graph has the ops and memory of the target machine, not of the
machine that plans. The dispatcher calls these functions below autocast, after queries, keys, values
and float masks were cast, also for attention inside PyTorch's own modules.

The kernel that CUDA chooses depends on dtype, head width, mask and grouping
(``benchmarks/cost/predict_kernels.py``, H200, PyTorch 2.11): 16-bit heads of up to 256 elements use
a fused kernel that reads shared keys directly; 32-bit or wider heads are fused only if each head
has its own keys, otherwise the score matrix is written to memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ACCELERATOR = "accelerator"
"""Device type whose kernels are recorded by default; the machine itself needs no such device."""
_ALIGNMENT = 16
"""The fused kernel requires masks whose row length is a multiple of this number of elements."""
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256
"""Head width up to which 16-bit attention is fused even if heads share keys (grouped attention)."""


def kernel_library() -> Any:
    """Library of replacement kernels for PyTorch ops, registered while the object lives."""
    make: Any = torch.library.Library
    return make("aten", "IMPL")


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Make attention and dropout in this thread dispatch to the fused ops of accelerators."""
    # Kernels are registered for the process, in which other threads may run real models.
    here = threading.get_ident()
    plain_attention = torch.ops.aten.scaled_dot_product_attention.default.decompose
    plain_dropout = torch.ops.aten.dropout.default.decompose

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_fused = threading.get_ident() == here and query.dim() == 4
        return (_fused if is_fused else plain_attention)(query, *args, **kwargs)

    def dropout(given: torch.Tensor, p: float, train: bool) -> Any:
        if threading.get_ident() != here or not train or not 0 < p < 1:
            return plain_dropout(given, p, train)
        # CUDA's dropout saves a mask with one byte per element, the CPU's one of the input's dtype.
        return torch.ops.aten.native_dropout(given, p, train)[0]

    library = kernel_library()
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    library.impl("dropout", dropout, "AutogradCPU")
    try:
        yield
    finally:
        del library


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Attention by the kernel that CUDA chooses for these dtypes and shapes."""
    aten, scale = torch.ops.aten, options.get("scale")
    if options.get("enable_gqa") and query.shape[1] != key.shape[1]:
        if query.dtype not in _HALF or query.shape[-1] > _WIDEST:
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
            )[0]
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as an additive bias, expanded and padded to the fused kernel's layout."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf")).to(query.dtype)
    missing = -mask.shape[-1] % _ALIGNMENT
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : key.shape[2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
