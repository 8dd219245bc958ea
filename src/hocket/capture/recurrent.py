"""Fake-tensor implementations of cuDNN's and oneDNN's recurrent layers.

PyTorch's fake implementation of cuDNN's forward op lacks the weight buffer and the reserve that the
backward op reads, and there is none of the backward op, so a step with an LSTM could not be
recorded on a GPU. PyTorch's implementations for oneDNN (CPUs) return an empty reserve, and one
tensor for two gradients. The size of a reserve is known to the library only, so it is measured once
by running the layer with the same shapes. Without cuDNN, or without enough memory, it is estimated
from the activations that each time step of each layer saves. cuDNN layers with dropout cannot be
recorded, because they return random state that fake tensors cannot represent.
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

_SAVED = {2: 6, 3: 7}
"""Values saved per unit and step by an LSTM (mode 2) and a GRU (mode 3); other modes save two.

5.5, 6.5 and 1.5 were measured on an H200.
"""
_CUDNN_SETTINGS = (
    "mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout", "train",
    "bidirectional", "batch_sizes",
)  # fmt: skip
"""Arguments of cuDNN's op between its tensors, in order."""
_NUM_ONEDNN_TENSORS = 7
"""Number of tensors that come first among the arguments of oneDNN's ops."""

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
    know(aten.mkldnn_rnn_layer.default, _onednn_forward)
    know(aten.mkldnn_rnn_layer_backward.default, _onednn_backward)
    know(aten._cudnn_rnn.default, _cudnn_forward)
    know(aten._cudnn_rnn_backward.default, _cudnn_backward)


def accept_weights_apart() -> None:
    """Silence PyTorch's warning about recurrent weights that are not contiguous.

    Streamed weights are fetched separately. The memory plan includes the buffer into which cuDNN
    packs them.
    """
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated")


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of an op by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _estimated_bytes(inputs: Any, num_rows: int, hidden: int, mode: int) -> int:
    """Bytes that one direction of one layer saves for its backward pass."""
    size: int = num_rows * hidden * _SAVED.get(mode, 2) * inputs.element_size()
    return size


# ── cuDNN ────────────────────────────────────────────────────────────────────────────────────────


def _cudnn_forward(_: Any, func: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Output, last states, reserve, and the weights in one buffer."""
    given = _by_name(func, args, kwargs)
    inputs, weight, buffer = given["input"], given["weight"], given["weight_buf"]
    hx, cx, hidden, batch_sizes = (given[k] for k in ("hx", "cx", "hidden_size", "batch_sizes"))
    directions, width = 2 if given["bidirectional"] else 1, given["proj_size"] or hidden
    output = inputs.new_empty([*inputs.shape[:-1], width * directions])
    if len(batch_sizes):
        rows, num_rows = batch_sizes[0], len(batch_sizes) * batch_sizes[0]
    else:
        rows = inputs.shape[0 if given["batch_first"] else 1]
        num_rows = inputs.shape[0] * inputs.shape[1]
        output = _steps_first(output) if given["batch_first"] else output
    num_states = given["num_layers"] * directions
    hy = hx.new_empty([num_states, rows, width])
    cy = inputs.new_empty([0]) if cx is None else cx.new_empty([num_states, rows, hidden])
    num_bytes = 0
    if given["train"]:
        num_bytes = num_states * _estimated_bytes(inputs, num_rows, hidden, given["mode"])
        if given["dropout_state"] is None:
            settings = _hashable([given[name] for name in _CUDNN_SETTINGS])
            tensors, stride = _kinds((inputs, *weight, hx, cx)), given["weight_stride0"]
            measured = _cudnn_reserve_bytes(tensors, stride, settings, str(inputs.device))
            num_bytes = num_bytes if measured is None else measured
    if buffer is None:
        buffer = inputs.new_empty([sum(each.numel() for each in weight)])
    return output, hy, cy, inputs.new_empty([num_bytes], dtype=torch.uint8), buffer


def _cudnn_backward(_: Any, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Requested gradients of input, states and weights."""
    given = _by_name(func, args, kwargs)
    hx, cx, wanted = given["hx"], given["cx"], given["output_mask"]
    gradient = torch.empty_like(given["input"], memory_format=torch.contiguous_format)
    if given["batch_first"] and not len(given["batch_sizes"]):
        gradient = _steps_first(gradient)
    return (
        gradient if wanted[0] else None,
        torch.empty_like(hx) if wanted[1] else None,
        torch.empty_like(cx) if cx is not None and wanted[2] else None,
        [torch.empty_like(each) for each in given["weight"]] if wanted[3] else [],
    )


def _steps_first(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty batch-first tensor in cuDNN's layout, with time steps outermost."""
    rows, steps, width = tensor.shape
    return tensor.new_empty([steps, rows, width]).transpose(0, 1)


@cache
def _cudnn_reserve_bytes(
    tensors: tuple[TensorKind | None, ...], stride: int, settings: tuple[Any, ...], device: str
) -> int | None:
    """Measured size of cuDNN's reserve for tensors of these shapes and dtypes; None if it cannot be
    run."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    *how, batch_sizes = settings
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        # Streamed weights are not contiguous either.
        warnings.simplefilter("ignore")
        try:
            inputs, *weights, hx, cx = _zeros(tensors, device)
            reserve: torch.Tensor = torch.ops.aten._cudnn_rnn.default(
                inputs, weights, stride, None, hx, cx, *how, list(batch_sizes), None
            )[3]
        except RuntimeError:
            return None
    return reserve.untyped_storage().nbytes()


# ── oneDNN ───────────────────────────────────────────────────────────────────────────────────────


def _onednn_forward(_: Any, func: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Output, last states, and the reserve of one direction of one layer."""
    given = _by_name(func, args, {})
    inputs, hx, cx, hidden = (given[name] for name in ("input", "hx_", "cx_", "hidden_size"))
    steps, rows = inputs.shape[:2]
    num_bytes = 0
    if given["train"] and _stands_in.get():
        num_bytes = _estimated_bytes(inputs, steps * rows, hidden, given["mode"])
    elif given["train"]:
        tensors, settings = args[:_NUM_ONEDNN_TENSORS], args[_NUM_ONEDNN_TENSORS:]
        num_bytes = _onednn_reserve_bytes(_kinds(tensors), _hashable(settings))
    output = inputs.new_empty([steps, rows, hidden])
    last = (hx.new_empty(hx.shape), cx.new_empty(cx.shape))
    return output, *last, inputs.new_empty([num_bytes], dtype=torch.uint8)


def _onednn_backward(_: Any, __: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of input, weights and states, each a tensor of its own."""
    return tuple(given.new_empty(given.shape) for given in args[:_NUM_ONEDNN_TENSORS])


@cache
def _onednn_reserve_bytes(tensors: tuple[TensorKind | None, ...], settings: tuple[Any, ...]) -> int:
    """Size of oneDNN's reserve for tensors of these shapes and dtypes."""
    with _disable_current_modes(), torch.enable_grad():
        how = [list(each) if isinstance(each, tuple) else each for each in settings]
        reserve: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(
            *_zeros(tensors, "cpu"), *how
        )[-1]
    return reserve.untyped_storage().nbytes()


def _kinds(tensors: tuple[Any, ...]) -> tuple[TensorKind | None, ...]:
    return tuple(None if t is None else (tuple(t.shape), t.dtype) for t in tensors)


def _hashable(settings: Any) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in settings)


def _zeros(tensors: tuple[TensorKind | None, ...], device: str) -> list[Any]:
    return [kind and torch.zeros(kind[0], dtype=kind[1], device=device) for kind in tensors]
