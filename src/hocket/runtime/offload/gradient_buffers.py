"""Pinned gradient buffers of the host, one per block, in which gradients are accumulated."""

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
        """Gradients that are being copied."""

    def offload(
        self, block: Block, found: Gradients, *, is_used: bool
    ) -> tuple[torch.Tensor, Gradients]:
        """Copy the gradients of a block to the host, beside those of its expert groups.

        Returns the pinned buffer and the gradients in it, valid once the copy is complete. What
        ``is_used`` at once stays in the type in which it was computed; other gradients get the
        type of their parameters, as autograd would cast them.
        """
        types = {place.parameter: place.dtype for place in block.gradient_layout.places}
        is_used = is_used and all(gradient.dtype == types[p] for p, gradient in found.items())
        layout = block.gradient_layout if is_used else block.master_layout
        buffer = self._buffer(block, layout)
        in_groups = {parameter for parameter, _ in block.groups_sent}
        block.group_buffer, block.groups_sent = None, set()
        with on_host():
            places = {p.parameter: p.of(buffer) for p in layout.places}
        sources = [gradient.to(places[p].dtype) for p, gradient in found.items()]
        event = self._streams.offload(list(zip([places[p] for p in found], sources, strict=True)))
        self.in_flight.hold(sources, event)
        block.gradients_sent = event
        return buffer, {p: places[p] for p in (*found, *in_groups)}

    def offload_group(
        self, block: Block, parameter: nn.Parameter, group: slice, gradient: torch.Tensor
    ) -> None:
        """Copy the gradient of an expert group to the host, and add it to an earlier one."""
        buffer = block.group_buffer = self._buffer(block, block.master_layout)
        with on_host():
            view = next(p for p in block.master_layout.places if p.parameter is parameter)
            place = view.of(buffer)[group]
            is_first = (parameter, group.start) not in block.groups_sent
            target = place if is_first else torch.empty_like(place)
        block.groups_sent.add((parameter, group.start))
        source = gradient.to(place.dtype).contiguous()
        event = self._streams.offload([(target, source)])
        self.in_flight.hold([source], event)
        if not is_first:
            self._host_optimizer.submit(block, lambda: _add(place, target), event)

    def accumulate(self, block: Block, buffer: torch.Tensor, gradients: Gradients) -> None:
        """Add gradients that have arrived to those that are there; runs on the host thread."""
        if not block.host_gradients:
            block.gradient_buffer, block.host_gradients = buffer, gradients
            return
        for parameter, gradient in gradients.items():
            if parameter in block.host_gradients:
                block.host_gradients[parameter].add_(gradient)
            else:
                block.host_gradients[parameter] = gradient.clone()
        self._pool.give_back(buffer)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Drop all gradients of a backward pass that failed."""
        for block in blocks:
            self._host_optimizer.wait(block)
            if block.group_buffer is not None and block.group_buffer is not block.gradient_buffer:
                self._pool.give_back(block.group_buffer)
            block.group_buffer, block.groups_sent = None, set()
            self._release(block)
            for parameter in block.parameters:
                parameter.grad = None

    @contextmanager
    def used(self, block: Block) -> Iterator[None]:
        """Release a block's gradients after an update, also where it fails."""
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
        if block.group_buffer is not None:
            return block.group_buffer
        if block.gradient_buffer is not None and not block.host_gradients:
            if block.gradient_buffer.numel() == layout.num_bytes:
                return block.gradient_buffer
            self._pool.give_back(block.gradient_buffer)
            block.gradient_buffer = None
        return self._pool.take(layout.num_bytes)


def _add(place: torch.Tensor, gradient: torch.Tensor) -> None:
    place.add_(gradient)


def set_aside_host_gradients(blocks: Iterable[Block]) -> None:
    """Take gradients of host-resident parameters off ``parameter.grad`` for a backward pass, which
    computes on the device and cannot add to them."""
    for block in blocks:
        for parameter in block.parameters if block.master is not None else ():
            if parameter.grad is not None:
                block.host_gradients[parameter] = parameter.grad
                parameter.grad = None
