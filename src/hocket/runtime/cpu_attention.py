"""Attention for CPUs in graphs that were captured for an accelerator.

Such a graph contains a fused attention kernel that CPUs lack. `stand_in` replaces it by the kernel
that the model itself would run on a CPU, so that results are equal bit for bit: the CPU's fused
kernel, or with dropout the composite of products and a softmax. The backward pass recomputes the
composite with the random numbers of the forward pass. To this end the generator state is saved in
place of the fused kernel's seed. If forward and backward are on different devices, the generator is
seeded anew before the forward pass, and this seed is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hocket.capture.program import Call, TensorSpec
from hocket.runtime.tensor_bytes import conformed

FUSED_ATTENTION = "aten._scaled_dot_product_efficient_attention"
_BACKWARD = "aten._scaled_dot_product_efficient_attention_backward"
_SEED = 2
"""Position of the seed among the results of the fused kernel."""


def stand_in(
    call: Call,
    outputs: Sequence[TensorSpec | None],
    device: torch.device,
    sent: Container[int] = (),
) -> Callable[..., Any] | None:
    """Return the function that replaces a traced one on ``device``, or None for no replacement.

    ``sent`` holds the tensors that are sent to another device.
    """
    if device.type != "cpu" or call.cost.kind not in (FUSED_ATTENTION, _BACKWARD):
        return None
    function: Callable[..., tuple[Any, ...]] = _backward
    if call.cost.kind == FUSED_ATTENTION:
        function = partial(_forward, stays=call.outputs[_SEED] not in sent)

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        results = function(*args, **kwargs)
        return [
            result
            if spec is None or spec.layout is None or _is_state(result)
            else _fitted(result, spec)
            for result, spec in zip(results, outputs, strict=True)
        ]

    return run


def _fitted(result: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a result with the traced shape and strides; accelerators round some shapes up."""
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
    stays: bool = True,
) -> tuple[torch.Tensor, ...]:
    nothing = torch.zeros((), dtype=torch.int64)
    if not dropout_p:
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return output, log_sum, nothing, nothing
    attend = partial(_composite, query, key, value, bias, dropout_p, is_causal, scale)
    # The backward pass recomputes the softmax, and does not read these sums.
    log_sum = torch.zeros(query.shape[:-1], dtype=torch.float32)
    seed = torch.default_generator.get_state() if stays else _reseeded()
    return attend(), log_sum, seed, nothing


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
    if not dropout_p and not wanted[3]:
        log_sum = log_sum[..., : query.shape[2]].contiguous()
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, log_sum, 0.0, is_causal,
            attn_mask=bias, scale=scale,
        )  # fmt: skip
        return (*found, None)
    query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
    bias = None if bias is None else bias.detach().requires_grad_()
    with torch.enable_grad(), _drawn_from(seed):
        again = _composite(query, key, value, bias, dropout_p, is_causal, scale)
    leaves = [
        leaf
        for leaf, is_wanted in zip((query, key, value, bias), wanted, strict=True)
        if is_wanted and leaf is not None
    ]
    made = iter(torch.autograd.grad(again, leaves, gradient))
    return tuple(next(made) if is_wanted else None for is_wanted in wanted)


def _composite(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention with a matrix of scores, as PyTorch does on a CPU."""
    if bias is not None and is_causal:
        # PyTorch's function takes a bias or a causal mask, not both.
        bias, is_causal = bias + torch.full(bias.shape[-2:], float("-inf")).triu(1), False
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _is_state(tensor: torch.Tensor | None) -> bool:
    """True for the state of a generator: the only byte tensor here."""
    return tensor is not None and tensor.dtype == torch.uint8


def _reseeded() -> torch.Tensor:
    """Return the generator's seed if it has drawn nothing since; else seed it with a new one."""
    generator = torch.default_generator
    seed = generator.initial_seed()
    anew = torch.Generator().manual_seed(seed).get_state()
    # The seed is sent as int64, so a larger one cannot be used.
    if seed >= 2**63 or not torch.equal(generator.get_state(), anew):
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        generator.manual_seed(seed)
    return torch.tensor(seed, dtype=torch.int64)


@contextmanager
def _drawn_from(seed: torch.Tensor) -> Iterator[None]:
    """Make the generator draw the numbers of the forward pass; restore it afterwards."""
    generator = torch.default_generator
    now = generator.get_state()
    try:
        if _is_state(seed):
            generator.set_state(seed)
        else:
            generator.manual_seed(int(seed))
        yield
    finally:
        generator.set_state(now)
