"""The sum of cross-entropies of a linear layer's results, made and differentiated chunk by chunk.

Chunks of the rows go through the layer one after the other, in the forward pass and again in the
backward pass, so that all logits never exist together (the idea of fused linear cross-entropies,
such as Liger's, with PyTorch's own kernels). Gradients of the weights are added up in place, in 32
bits where they come in 16: as many roundings as the plain layer has, and no third copy of the
largest gradient of a language model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hocket.runtime.autocast import autocast_dtype

_SHORT = (torch.bfloat16, torch.float16)


def summed_cross_entropy(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    num_chunks: int,
    dtype: torch.dtype,
    ignore_index: int,
) -> torch.Tensor:
    """The sum over rows of the cross-entropy of ``linear(rows, weight, bias)`` in ``dtype``."""
    how = (target, num_chunks, dtype, ignore_index, autocast_dtype(rows.device.type))
    total: torch.Tensor
    total = _ChunkedLoss.apply(rows, weight, bias, *how)  # type: ignore[no-untyped-call]
    return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Any, weight: Any, bias: Any, target: Any, num_chunks: int,
        dtype: torch.dtype, ignore_index: int, cast: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.how = num_chunks, dtype, ignore_index, cast
        layer = _layer(weight, bias, cast)
        chunks = zip(rows.chunk(num_chunks), target.chunk(num_chunks), strict=True)
        losses = [_loss(r, layer, labels, dtype, ignore_index) for r, labels in chunks]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        rows, weight, bias, target = ctx.saved_tensors
        num_chunks, dtype, ignore_index, cast = ctx.how
        wanted = ctx.needs_input_grad[:3]
        layer = [
            None if tensor is None else tensor.requires_grad_(is_wanted)
            for tensor, is_wanted in zip(_layer(weight, bias, cast), wanted[1:], strict=True)
        ]
        sums = [
            torch.zeros(t.shape, dtype=_sum_dtype(t.dtype), device=t.device) if is_wanted else None
            for t, is_wanted in zip((weight, bias), wanted[1:], strict=True)
        ]
        of_rows = torch.empty_like(rows) if wanted[0] else None
        start = 0
        for part, labels in zip(rows.chunk(num_chunks), target.chunk(num_chunks), strict=True):
            part = part.detach().requires_grad_(wanted[0])
            with torch.enable_grad(), _autocast(rows.device.type, cast):
                loss = _loss(part, layer, labels, dtype, ignore_index)
            inputs = [t for t in (part, *layer) if t is not None and t.requires_grad]
            found = list(torch.autograd.grad(loss, inputs, given))
            del loss
            if of_rows is not None:
                of_rows[start : start + len(part)].copy_(found.pop(0))
            start += len(part)
            for total in sums:
                if total is not None:
                    total.add_(found.pop(0))
        back = [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (weight, bias), strict=True)
        ]
        return of_rows, *back, None, None, None, None, None


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, cast: torch.dtype | None) -> list[Any]:
    """Weight and bias as the layer computes with them, once for all chunks."""
    return [
        None if tensor is None else tensor.detach().to(cast or tensor.dtype)
        for tensor in (weight, bias)
    ]


def _loss(
    rows: torch.Tensor, layer: list[Any], labels: torch.Tensor, dtype: torch.dtype,
    ignore_index: int,
) -> torch.Tensor:  # fmt: skip
    weight, bias = layer
    made = functional.linear(rows.to(weight.dtype), weight, bias).to(dtype)
    return functional.cross_entropy(made, labels, ignore_index=ignore_index, reduction="sum")


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _SHORT else dtype


def _autocast(kind: str, cast: torch.dtype | None) -> torch.autocast:
    return torch.autocast(kind, cast, enabled=cast is not None, cache_enabled=False)
