"""Capture a PyTorch model or training step as a Graph.

A step is recorded on fake tensors, linked into a Program and converted to a Graph. A model that
cannot be traced, for example because its control flow depends on data, is run with real tensors
instead and becomes a coarser graph with one op per module.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hocket.base.errors import HocketError, UsageError
from hocket.capture.assemble import graph_of
from hocket.capture.attention import ACCELERATOR
from hocket.capture.fake import all_tensors, batch_tensors, plain_batch
from hocket.capture.given import first_batch, remedy_of_call, supervised, unwrapped
from hocket.capture.held import held_note
from hocket.capture.link import link
from hocket.capture.loss import ChosenLoss, Loss
from hocket.capture.optimizer import (
    Optimizer,
    append_optimizer,
    as_optimizer,
    refuse_sparse_gradients,
)
from hocket.capture.program import Program
from hocket.capture.recording import Recording
from hocket.capture.step import Forward, StepOptions, record_fake_step, record_real_step
from hocket.capture.trouble import UntraceableError, own_code, reason, remedy, user_line
from hocket.graph import Graph
from hocket.graph.coarsen.module_graph import merge_modules


class CaptureWarning(UserWarning):
    """Warning that a model could not be traced op by op, so its graph is coarser."""


def capture(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | str | None = None,
    optimizer: str | torch.optim.Optimizer | Optimizer | None = "adamw",
    name: str = "",
    device: str = ACCELERATOR,
    forward: Forward | None = None,
) -> Graph:
    """Capture one training step, or inference with ``optimizer=None``, as a graph.

    ``batch`` is a tensor, a tuple (positional) or a mapping (by keyword) of tensors. ``loss`` maps
    the output to a scalar or names a loss (see `hocket.capture.loss`). Without it, the loss is the
    output's ``loss``, the output itself if it is a scalar, or the mean of its first floating-point
    tensor; ``graph.meta["loss"]`` names the choice. Model and batch do not change, and no values
    are computed: only shapes are read. ``device`` selects the device type whose kernels are
    recorded, regardless of the model's device: ``accelerator`` (none is needed), ``cuda`` of this
    machine, or ``cpu``. ``forward(model, batch)`` replaces the call ``model(batch)``.

    A model that cannot be traced is run with real tensors, and its graph has one op per module. A
    `CaptureWarning` names the line of the user's code that prevents the trace.
    """
    model, batch = unwrapped(model), first_batch(batch)
    loss, forward = supervised(model, batch, loss, forward)
    try:
        graph, _ = capture_program(model, batch, loss=loss, optimizer=optimizer, name=name,
                                   device=device, forward=forward)  # fmt: skip
        return graph
    except UntraceableError as error:
        update = as_optimizer(optimizer, model)
        step = StepOptions(loss=ChosenLoss(loss), training=update is not None, forward=forward)
        return _capture_modules(model, batch, update, step, name, error)


def capture_program(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | str | None = None,
    optimizer: str | torch.optim.Optimizer | Optimizer | None = "adamw",
    name: str = "",
    **options: Any,
) -> tuple[Graph, Program]:
    """Like `capture`, but also returns the executable Program; refuses models that cannot be
    traced.

    Further ``options`` are those of `StepOptions`.
    """
    batch = plain_batch(batch)
    _require_model(model, batch)
    update, chosen = as_optimizer(optimizer, model), ChosenLoss(loss)
    if update is not None:
        refuse_sparse_gradients(model)
    step = StepOptions(loss=chosen, training=update is not None, **options)
    _require_device(step.device)
    try:
        recording = record_fake_step(model, batch, step)
    except HocketError:
        raise
    except Exception as error:
        raise UntraceableError(
            f"cannot trace {type(model).__name__}: {reason(error)}",
            where=user_line(error),
            hint=remedy(model),
        ) from error
    program = _linked(recording, update)
    name = name or type(model).__name__
    graph = graph_of(program, name, _recurrent_layers(model, step.device))
    notes = {
        "calls": {path: number for path, number in recording.num_calls.items() if number > 1},
        "held": held_note(recording, program, graph),
    }
    meta = _meta(model, batch, update, name, step.device) | {
        "loss": getattr(step.forward, "name", "") or chosen.name or None,
        "level": "op",
        **{key: note for key, note in notes.items() if note},
    }
    return replace(graph, meta=meta), program


def _linked(recording: Recording, optimizer: Optimizer | None) -> Program:
    if optimizer is not None:
        append_optimizer(recording, optimizer)
    return link(recording)


def _capture_modules(
    model: nn.Module, batch: Any, optimizer: Optimizer | None, step: StepOptions, name: str,
    error: UntraceableError,
) -> Graph:  # fmt: skip
    """Module-level graph of a step that is run for real."""
    batch = plain_batch(batch)
    tensors = [tensor for _, _, tensor in all_tensors(model, batch)]
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        raise error
    failure = f"{type(model).__name__} fails on this batch"
    hint = "check that the model runs on the batch outside hocket"
    hint = hint if step.forward is not None else remedy_of_call(model, batch)
    with own_code(failure, hint, reason):
        recording = record_real_step(model, batch, step)
    graph = graph_of(_linked(recording, optimizer), name or type(model).__name__, {})
    classes = {path: type(module).__name__ for path, module in model.named_modules()}
    assert isinstance(step.loss, ChosenLoss)
    meta = _meta(model, batch, optimizer, graph.name, str(tensors[0].device)) | {
        "loss": getattr(step.forward, "name", "") or step.loss.name or None,
        "level": "module",
        "why": f"{error.where}: {error.message}",
        "mend": error.hint,
    }
    merged = merge_modules(graph, classes)
    warnings.warn(
        f"{error.where}: {error.message}; the graph has one op per module and cannot be run; "
        f"hint: {error.hint}",
        CaptureWarning,
        3,
    )
    return replace(merged, meta=meta)


def _require_model(model: nn.Module, batch: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{type(model).__name__!r} is not a torch.nn.Module", hint="pass the model itself"
        )
    if not isinstance(batch, torch.Tensor | tuple | list | dict):
        raise UsageError(
            f"a batch cannot be of type {type(batch).__name__!r}",
            hint="pass a tensor, a tuple of tensors or a dict of tensors",
        )


def _require_device(device: str) -> None:
    if device == ACCELERATOR:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    # The build is checked instead of a trial: fake tensors of a device that the build lacks can be
    # created, but a step on them aborts the process.
    built_for = torch.accelerator.current_accelerator()
    if kind != "cpu" and (built_for is None or kind != built_for.type):
        raise UsageError(
            f"this build of PyTorch has no device {device!r}",
            hint="use device='cpu', or a build of PyTorch for that device",
        )


def _recurrent_layers(model: nn.Module, device: str) -> dict[str, list[str]]:
    """Recurrent layers that are traced step by step but that accelerators run as a few fused
    kernels."""
    found = [path for path, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    return {"recurrent": found} if found and device == ACCELERATOR else {}


def _lists(model: nn.Module) -> list[str]:
    """Paths of module lists, which are containers and are never called."""
    return [
        path
        for path, module in model.named_modules()
        if path and type(module).forward is nn.Module.forward
    ]


def _meta(
    model: nn.Module, batch: Any, optimizer: Optimizer | None, name: str, device: str
) -> dict[str, Any]:
    """Return metadata about the capture of a graph."""
    inputs = dict(batch_tensors(batch))
    floating = [tensor for tensor in model.parameters() if tensor.is_floating_point()]
    tokens = [t for t in inputs.values() if t.dim() > 1 and not t.is_floating_point()]
    first = next(iter(inputs.values()), None)
    return {
        "model": name,
        "batch": int(first.shape[0]) if first is not None and first.dim() else None,
        "seq": int(tokens[0].shape[1]) if tokens else None,
        "dtype": str(floating[0].dtype).removeprefix("torch.") if floating else None,
        **({"optimizer": None} if optimizer is None else optimizer.to_meta()),
        "device": device,
        **_recurrent_layers(model, device),
        "lists": _lists(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": torch.__version__,
    }
