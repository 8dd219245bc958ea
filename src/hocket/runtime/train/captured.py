"""Parts that every captured step needs: key of the model, static batch, side stream.

A CUDA graph fixes memory addresses and choices of kernels at its capture. `model_key` returns those
that depend on the model, so that a changed model is captured again; `StaticBatch` copies each batch
into the memory that the graph reads; `on_stream` runs warm-up steps on a side stream, so that
autograd and libraries allocate their workspaces for it before the capture. O(parameters + modules)
per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hocket.runtime.autocast import autocast_dtype


def model_key(model: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return everything about a model on which the kernels and addresses of a step depend.

    These are the training modes of modules, the addresses of parameters and buffers, which
    parameters are frozen, and the dtype of autocast, if it is enabled.
    """
    return (
        autocast_dtype(device.type),
        tuple(module.training for module in model.modules()),
        tuple(buffer.data_ptr() for buffer in model.buffers()),
        tuple((each.data_ptr(), each.requires_grad) for each in model.parameters()),
    )


def cloned(tree: Any) -> Any:
    """Clone the outputs of a graph, because the next replay overwrites its memory."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


class StaticBatch:
    """A batch in the memory that a CUDA graph reads; later batches are copied into it."""

    def __init__(self, batch: Any) -> None:
        self.batch = cloned(batch)

    def refill(self, batch: Any) -> None:
        """Copy the tensors of another batch with the same structure."""
        for own, given in zip(tree_leaves(self.batch), tree_leaves(batch), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Launch kernels on a side stream, ordered after earlier work and before later work.

    Without a ``stream`` they are launched on the current stream.
    """
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)
