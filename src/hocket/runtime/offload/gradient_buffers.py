"""Pinned host buffers, one per block, in which gradients arrive and are accumulated.

`GradientBuffers` starts the copies from the device. The host thread adds gradients of further
batches to the first ones, and buffers go back to a pool after the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hocket.runtime.offload.copy_streams import CopyStreams, HeldUntil, HostPool
from hocket.runtime.offload.host_optimizer import HostOptimizerThread
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.parameter_blocks import Block, BufferLayout

Gradients = dict[nn.Parameter, torch.Tensor]


class GradientBuffers:
    """Copies gradients to the host and adds them up there."""

    def __init__(
        self, streams: CopyStreams, pool: HostPool, host_optimizer: HostOptimizerThread
    ) -> None:
        self._streams, self._pool, self._host_optimizer = streams, pool, host_optimizer
        self.in_flight = HeldUntil()
        """Gradients whose copies to the host are running."""

    def offload(
        self, block: Block, found: Gradients, *, is_used: bool
    ) -> tuple[torch.Tensor, Gradients]:
        """Start to copy the gradients of a block to the host.

        Returns the pinned buffer and the gradients in it, which are valid once the copy is
        complete. If an update follows at once (``is_used``), gradients keep the dtype in which they
        were computed; otherwise they are cast to the dtype of their parameters, as autograd
        would.
        """
        # A dtype that differs from the upload's layout would not fit into the upload's positions.
        types = {place.parameter: place.dtype for place in block.upload_layout.places}
        is_used = is_used and all(gradient.dtype == types[p] for p, gradient in found.items())
        layout = block.upload_layout if is_used else block.master_layout
        buffer = self._buffer(block, layout)
        with on_host():
            places = {p.parameter: p.of(buffer) for p in layout.places}
        sources = [gradient.to(places[p].dtype) for p, gradient in found.items()]
        event = self._streams.offload(list(zip([places[p] for p in found], sources, strict=True)))
        self.in_flight.hold(sources, event)
        block.gradients_sent = event
        return buffer, {p: places[p] for p in found}

    def accumulate(self, block: Block, buffer: torch.Tensor, gradients: Gradients) -> None:
        """Add arrived gradients to the block's gradients on the host; runs on the host thread."""
        if not block.host_gradients:
            block.gradient_buffer, block.host_gradients = buffer, gradients
            return
        for parameter, gradient in gradients.items():
            if parameter in block.host_gradients:
                block.host_gradients[parameter].add_(gradient)
            else:
                # Cloned, because the buffer is returned to the pool below.
                block.host_gradients[parameter] = gradient.clone()
        self._pool.give_back(buffer)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Drop all gradients of a failed backward pass."""
        for block in blocks:
            self._host_optimizer.wait(block)
            self._release(block)
            for parameter in block.parameters:
                parameter.grad = None

    @contextmanager
    def used(self, block: Block) -> Iterator[None]:
        """Release a block's gradients after an update, even if it fails."""
        try:
            yield
        finally:
            self._release(block)

    def _release(self, block: Block) -> None:
        block.host_gradients = {}
        if block.gradient_buffer is not None:
            self._pool.give_back(block.gradient_buffer)
            block.gradient_buffer = None

    def _buffer(self, block: Block, layout: BufferLayout) -> torch.Tensor:
        # Reuse is safe only when no gradients wait in the buffer.
        if block.gradient_buffer is not None and not block.host_gradients:
            if block.gradient_buffer.numel() == layout.num_bytes:
                return block.gradient_buffer
            self._pool.give_back(block.gradient_buffer)
            block.gradient_buffer = None
        return self._pool.take(layout.num_bytes)


def set_aside_host_gradients(blocks: Iterable[Block]) -> None:
    """Move gradients of host-resident parameters from ``parameter.grad`` to their blocks.

    The next backward pass computes gradients on the device and cannot add to tensors on the
    host.
    """
    for block in blocks:
        for parameter in block.parameters if block.master is not None else ():
            if parameter.grad is not None:
                block.host_gradients[parameter] = parameter.grad
                parameter.grad = None
