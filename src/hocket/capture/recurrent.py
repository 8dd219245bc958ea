"""Fake-tensor implementations of cuDNN's and oneDNN's recurrent layers.

For cuDNN, PyTorch knows the results of the forward op but not its weight buffer or the reserve that
the backward op reads, and nothing about the backward op, so a step with an LSTM could not be
recorded on a GPU. For oneDNN (CPUs), PyTorch assumes an empty reserve and takes two gradients for
one tensor. Only the library knows the size of its reserve: it is measured once by running the layer
with the same shapes. Without cuDNN, or without memory for this, the reserve is estimated from the
activations that each step of each layer saves. cuDNN layers with dropout cannot be recorded: they
return random state that fake tensors cannot represent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch.utils._python_dispatch import _disable_current_modes

_KEPT = {2: 6, 3: 7}
"""Values saved per unit and step by an LSTM (mode 2) and a GRU (mode 3); other modes save two.

5.5, 6.5 and 1.5 were measured on an H200.
"""

_BATCH_FIRST, _BATCH_SIZES = 8, 12
"""Places in what the backward op is given behind ``cx``."""

TensorKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)


@contextmanager
def stand_in_recurrence() -> Iterator[None]:
    """Make CPU recurrent layers save what an accelerator's layers would save."""
    before = _stands_in.set(True)
    try:
        yield
    finally:
        _stands_in.reset(before)


def know(op: Any, results: Callable[..., Any]) -> None:
    """Register a fake-tensor implementation of an op, unless this version of PyTorch has one."""
    if op not in op_implementations_dict:
        register_op_impl(op)(results)


@cache
def know_recurrent_layers() -> None:
    """Register fake-tensor implementations of recurrent layers."""
    aten: Any = torch.ops.aten
    know(aten.mkldnn_rnn_layer.default, _cpu_forward)
    know(aten.mkldnn_rnn_layer_backward.default, _cpu_backward)
    know(aten._cudnn_rnn.default, _forward)
    know(aten._cudnn_rnn_backward.default, _backward)


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
    kept = 0
    if train:
        how = (kind, hidden, projected, layers, batch_first, dropout, train, bidirectional)
        settings = (*how, tuple(batch_sizes))
        given = _kinds((inputs, *weight, hx, cx))
        tried = None
        if dropout_state is None:
            tried = _tried_reserve_bytes(given, stride, settings, str(inputs.device))
        per_layer = _kept_bytes(inputs, steps * rows, hidden, kind)
        kept = layers * directions * per_layer if tried is None else tried
    reserve = inputs.new_empty([kept], dtype=torch.uint8)
    if buffer is None:
        buffer = inputs.new_empty([sum(each.numel() for each in weight)])
    return output, hy, cy, reserve, buffer


def _kept_bytes(inputs: Any, num_rows: int, hidden: int, kind: int) -> int:
    """Bytes that one direction of one layer saves for its backward pass."""
    size: int = num_rows * hidden * _KEPT.get(kind, 2) * inputs.element_size()
    return size


def _cpu_forward(
    mode: Any, func: Any, inputs: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, last states, and the reserve of one direction of one layer."""
    weights, (hx, cx) = rest[:4], rest[4:6]
    (kind, hidden), train = rest[8:10], rest[-1]
    steps, rows = inputs.shape[:2]
    kept = 0
    if train and _stands_in.get():
        kept = _kept_bytes(inputs, steps * rows, hidden, kind)
    elif train:
        kept = _reserve_bytes(_kinds((inputs, *weights, hx, cx)), _hashable(rest[6:]))
    output = inputs.new_empty([steps, rows, hidden])
    last = (hx.new_empty(hx.shape), cx.new_empty(cx.shape))
    return output, *last, inputs.new_empty([kept], dtype=torch.uint8)


def _cpu_backward(
    mode: Any, func: Any, inputs: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of input, weights and states, each a tensor of its own."""
    return tuple(given.new_empty(given.shape) for given in (inputs, *rest[:6]))


def _kinds(tensors: tuple[Any, ...]) -> tuple[TensorKind | None, ...]:
    return tuple(None if t is None else (tuple(t.shape), t.dtype) for t in tensors)


def _hashable(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in settings)


def _zeros(given: tuple[TensorKind | None, ...], device: str) -> list[Any]:
    return [each and torch.zeros(each[0], dtype=each[1], device=device) for each in given]


@cache
def _tried_reserve_bytes(
    given: tuple[TensorKind | None, ...], stride: int, settings: tuple[Any, ...], device: str
) -> int | None:
    """Measured size of cuDNN's reserve for tensors of these shapes and dtypes; None if it cannot be
    run."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    *how, batch_sizes = settings
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        # Weights that are not in one piece are what is meant.
        warnings.simplefilter("ignore")
        try:
            inputs, *weights, hx, cx = _zeros(given, device)
            reserve: torch.Tensor = torch.ops.aten._cudnn_rnn.default(
                inputs, weights, stride, None, hx, cx, *how, list(batch_sizes), None
            )[3]
        except RuntimeError:
            return None
    return reserve.untyped_storage().nbytes()


def accept_weights_apart() -> None:
    """Silence PyTorch's warning about recurrent weights that are not contiguous.

    Streamed weights are fetched one by one; the buffer that cuDNN packs them into is counted.
    """
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated")


@cache
def _reserve_bytes(given: tuple[TensorKind | None, ...], settings: tuple[Any, ...]) -> int:
    """Size of oneDNN's reserve for tensors of these shapes and dtypes."""
    with _disable_current_modes(), torch.enable_grad():
        tensors = _zeros(given, "cpu")
        how = [list(each) if isinstance(each, tuple) else each for each in settings]
        reserve: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(*tensors, *how)[-1]
    return reserve.untyped_storage().nbytes()


def _backward(
    mode: Any, func: Any, inputs: Any, weight: Any, stride: int, buffer: Any, hx: Any, cx: Any,
    *rest: Any, **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Requested gradients of input, states and weights."""
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
    """Layout that cuDNN gives a batch-first tensor: time steps outermost."""
    rows, steps, width = tensor.shape
    return tensor.new_empty([steps, rows, width]).transpose(0, 1)
