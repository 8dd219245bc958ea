"""What cuDNN's recurrent layers give, for tensors without memory.

PyTorch knows the results of the forward op but neither its buffer of weights nor its reserve, which
the backward op reads, and knows nothing of the backward op: a step with an LSTM could not be
recorded on a GPU. How large the reserve is only cuDNN says; here it is taken to hold what each step
of each layer keeps for its backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl

_KEPT = {2: 6, 3: 5}
"""Values per unit and step that an LSTM (mode 2) and a GRU (3) keep; others keep two."""

_BATCH_FIRST, _BATCH_SIZES = 8, 12
"""Places in what the backward op is given behind ``cx``."""


@cache
def know_recurrent_layers() -> None:
    """Have fake tensors know both ops."""
    aten: Any = torch.ops.aten
    register_op_impl(aten._cudnn_rnn.default)(_forward)
    register_op_impl(aten._cudnn_rnn_backward.default)(_backward)


def _forward(
    mode: Any, func: Any, inputs: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any,
    kind: int, hidden: int, projected: int, layers: int, batch_first: bool, dropout: float,
    train: bool, bidirectional: bool, batch_sizes: Any, dropout_state: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, last states, reserve, and the weights in one buffer."""
    directions, width = 2 if bidirectional else 1, projected or hidden
    if len(batch_sizes):
        steps, rows, shape = len(batch_sizes), batch_sizes[0], [inputs.shape[0]]
    else:
        steps, rows = inputs.shape[:2]
        if batch_first:
            rows, steps = steps, rows
        shape = list(inputs.shape[:2])
    output = inputs.new_empty([*shape, width * directions])
    if batch_first and not len(batch_sizes):
        output = _steps_first(output)
    hy = hx.new_empty([layers * directions, rows, width])
    cy = inputs.new_empty([0])
    if cx is not None:
        cy = cx.new_empty([layers * directions, rows, hidden])
    kept = layers * directions * steps * rows * hidden * _KEPT.get(kind, 2)
    reserve = inputs.new_empty([kept * inputs.element_size() if train else 0], dtype=torch.uint8)
    if buffer is None:
        buffer = inputs.new_empty([sum(each.numel() for each in weight)])
    return output, hy, cy, reserve, buffer


def _backward(
    mode: Any, func: Any, inputs: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any,
    *rest: Any, **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of input, states and weights, as far as they are asked for."""
    wants = named.get("output_mask", rest[-1] if rest else (True,) * 4)
    has_cell = cx is not None and wants[2]
    batch_first, batch_sizes = rest[_BATCH_FIRST], rest[_BATCH_SIZES]
    given = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    if batch_first and not len(batch_sizes):
        given = _steps_first(given)
    return (
        given if wants[0] else None,
        torch.empty_like(hx) if wants[1] else None,
        torch.empty_like(cx) if has_cell else None,
        [torch.empty_like(each) for each in weight] if wants[3] else [],
    )


def _steps_first(tensor: torch.Tensor) -> torch.Tensor:
    """As cuDNN lays out what has samples first: step after step."""
    rows, steps, width = tensor.shape
    return tensor.new_empty([steps, rows, width]).transpose(0, 1)
