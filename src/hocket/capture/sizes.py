"""Captures of one step at several sizes of its batch, so that planners can split it.

The model is captured with its own batch and with two others; see `hocket.graph.batches` for what
follows from them. Models with one sample, and models whose step is another one at another size,
give the plain graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hocket.capture.apart import samples_apart
from hocket.capture.fake import batch_tensors, map_batch
from hocket.capture.given import first_batch, supervised
from hocket.capture.model import capture
from hocket.graph import Graph, Phase, Role
from hocket.graph.batches import (
    at_batch,
    differing_op,
    has_same_ops,
    unsplit,
    with_other_batch,
)
from hocket.graph.meeting import SAMPLES, reading_samples


def capture_sizes(model: nn.Module, batch: Any, **options: Any) -> Graph:
    """As `capture`, and the graph knows what grows with the batch where that can be known."""
    batch = first_batch(batch)
    graph = capture(model, batch, **options)
    return knowing_sizes(graph, lambda size: capture(model, resized(batch, size), **options))


def trying_samples(graph: Graph, model: nn.Module, batch: Any, **options: Any) -> Graph:
    """The graph with what a try at toy size shows of its samples: they may not be taken apart.

    ``model`` and ``batch`` may be smaller than what was captured; options are `samples_apart`'s.
    """
    if graph.other_batch is None or graph.meta.get("optimizer") is None:
        return graph
    forward = float(graph.flops[graph.op_phase == Phase.FORWARD].sum())
    is_given = (graph.tensor_role == Role.INPUT) & (graph.tensor_producer < 0)
    given_bytes = max(1, int(graph.tensor_bytes[is_given].sum()))
    batch = first_batch(batch)
    options["loss"], options["forward"] = supervised(
        model, batch, options.get("loss"), options.get("forward")
    )
    found = samples_apart(model, batch, flops_per_byte=forward / given_bytes, **options)
    if found.is_apart is None:
        return reading_samples(replace(graph, meta={**graph.meta, SAMPLES: found.told}))
    if not found.is_apart:
        return unsplit(graph, found.told)
    return replace(graph, meta={**graph.meta, SAMPLES: found.told})


def knowing_sizes(graph: Graph, captured: Callable[[int], Graph]) -> Graph:
    """The graph with its columns at another size; ``captured`` captures the step at a size."""
    num_samples = graph.meta.get("batch")
    if not graph.is_recorded or not isinstance(num_samples, int) or num_samples < 2:
        return graph
    size, proof = _other_sizes(num_samples)
    try:
        seen = with_other_batch(graph, num_samples, captured(size), size)
        if seen.other_batch is None:
            return unsplit(graph, "its ops are others at another size")
        other = captured(proof)
    except Exception as error:
        return unsplit(graph, f"it cannot be captured at another size: {error}")
    if not has_same_ops(graph, other):
        return unsplit(graph, "its ops are others at another size")
    op = differing_op(at_batch(seen, proof), other)
    if op is not None:
        return unsplit(graph, f"{op!r} does not grow evenly with the batch")
    return seen


def _other_sizes(num_samples: int) -> tuple[int, int]:
    """Two other sizes above one, at which libraries take short cuts."""
    if num_samples >= 4:
        return num_samples // 2, 2 * num_samples
    return 2 * num_samples, 3 * num_samples


def resized(batch: Any, num_samples: int) -> Any:
    """The batch with another number of samples, without content: shapes are all that is read.

    Tensors whose first extent is that of the batch's first tensor are the samples; one that stands
    twice, as inputs and as labels, does so again.
    """
    tensors = [tensor for _, tensor in batch_tensors(batch)]
    own = -1 if not tensors or not tensors[0].dim() else int(tensors[0].shape[0])
    return map_batch(batch, {
        id(t): torch.empty((num_samples, *t.shape[1:]), dtype=t.dtype, device="meta")
        if t.dim() and t.shape[0] == own else t
        for t in tensors
    })  # fmt: skip
