"""Capture: a PyTorch model or training step as a Graph."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from hocket.capture.assemble import graph_of
from hocket.capture.blocks import NotRepeatable, find_runs
from hocket.capture.fake import batch_tensors, model_tensors
from hocket.capture.repeat import expand
from hocket.capture.link import link
from hocket.capture.optimizer import append_optimizer, require_optimizer
from hocket.capture.program import Program
from hocket.capture.recording import Recording
from hocket.capture.step import Loss, record_fake_step
from hocket.errors import UsageError
from hocket.graph import Graph


def capture(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | None = "adamw",
    name: str = "",
    repeat: bool = True,
    device: str = "cpu",
) -> Graph:
    graph, _ = capture_program(model, batch, loss=loss, optimizer=optimizer, name=name,
                               repeat=repeat, device=device)  # fmt: skip
    return graph


def capture_program(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | None = "adamw",
    name: str = "",
    repeat: bool = True,
    device: str = "cpu",
) -> tuple[Graph, Program]:
    started = time.perf_counter()
    require_optimizer(optimizer)
    training = optimizer is not None
    options = {"loss": loss, "training": training, "device": device}
    recording, num_recorded = _record_step(model, batch, options, repeat)
    if optimizer is not None:
        append_optimizer(recording, optimizer)
    program = link(recording)
    graph = graph_of(program, name, {"capture_seconds": time.perf_counter() - started, "rec": num_recorded})
    return graph, program


def _record_step(
    model: nn.Module, batch: Any, options: dict[str, Any], repeat: bool
) -> tuple[Recording, int]:
    """A recording of the whole step, and how many of its calls were really recorded."""
    runs = find_runs(model) if repeat else []
    if runs:
        left_out = [path for run in runs for path in run.left_out]
        watched = [path for run in runs for path in run.kept]
        try:
            cut = record_fake_step(model, batch, **options, left_out=left_out, watched=watched)
            num_recorded = len(cut.calls)
            sources = [name for name, _, _ in model_tensors(model)]
            sources += [name for name, _ in batch_tensors(batch)]
            for run in runs:
                cut = expand(cut, run, sources)
            return cut, num_recorded
        except Exception as e:
            print("FULL", e)
            if __import__("os").environ.get("TB"): raise
    full = record_fake_step(model, batch, **options)
    return full, len(full.calls)
