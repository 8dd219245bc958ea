"""Attention for processors in graphs that were captured for an accelerator.

Such a graph has the fused attention of accelerators, which processors lack. Without dropout the
fused kernel of the processor takes its place, which is what the unsplit model would run there; with
dropout, products and a softmax do, and the mask is drawn again in backward from the seed that
forward kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.capture.program import Call, TensorSpec
from hocket.runtime.package import conformed

FUSED_ATTENTION = "aten._scaled_dot_product_efficient_attention"
_BACKWARD = "aten._scaled_dot_product_efficient_attention_backward"


def stand_in(
    call: Call, outputs: Sequence[TensorSpec | None], device: torch.device
) -> Callable[..., Any] | None:
    """What runs instead of the recorded function on ``device``; None where nothing has to."""
    if device.type != "cpu" or call.cost.kind not in (FUSED_ATTENTION, _BACKWARD):
        return None
    function = _forward if call.cost.kind == FUSED_ATTENTION else _backward

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        results = function(*args, **kwargs)
        return [
            result if spec is None or spec.layout is None else _fitted(result, spec)
            for result, spec in zip(results, outputs, strict=True)
        ]

    return run


def _fitted(result: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A result with the recorded shape and strides; accelerators round some shapes up."""
    assert spec.layout is not None
    missing = spec.layout.shape[-1] - result.shape[-1] if result.dim() else 0
    if missing > 0:
        result = torch.nn.functional.pad(result, (0, missing))
    return conformed(result.to(spec.layout.dtype), spec.layout)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    seed = torch.randint(2**62, (), dtype=torch.int64)
    offset = torch.zeros((), dtype=torch.int64)
    if not dropout_p:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return output, log_sum, seed, offset
    scores = _scores(query, key, bias, is_causal, scale)
    log_sum = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)) * _mask(scores.shape, seed, dropout_p)
    return weights @ value, log_sum, seed, offset


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    log_sum = log_sum[..., : query.shape[2]]
    if not dropout_p and not wanted[3]:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, log_sum.contiguous(), 0.0, is_causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
        return (*found, None)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.exp(_scores(query, key, bias, is_causal, scale) - log_sum.unsqueeze(-1))
    mask = _mask(weights.shape, seed, dropout_p)
    of_value = (weights * mask).transpose(-2, -1) @ gradient
    of_weights = (gradient @ value.transpose(-2, -1)) * mask
    share = (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - share)
    of_query, of_key = of_scores @ key * factor, of_scores.transpose(-2, -1) @ query * factor
    of_bias = of_scores if wanted[3] else None
    return of_query, of_key, of_value, of_bias


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if bias is not None:
        scores = scores + bias
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _mask(shape: torch.Size, seed: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """What dropout multiplies with, from a seed alone."""
    if not dropout_p:
        return torch.ones(())
    generator = torch.Generator().manual_seed(int(seed))
    return torch.rand(shape, generator=generator).ge(dropout_p) / (1.0 - dropout_p)
