"""Where gradients land on the host: a buffer for each block, and sums where they come in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from hocket.runtime.offload.copy_streams import CopyEngines, HostPool, Lent
from hocket.runtime.offload.host_optimizer import HostUpdates
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.parameter_blocks import Block, BufferLayout

Gradients = dict[nn.Parameter, torch.Tensor]


class Landings:
    """Buffers of the host that gradients are sent to."""

    def __init__(self, engines: CopyEngines, pool: HostPool, updates: HostUpdates) -> None:
        self._engines, self._pool, self._updates = engines, pool, updates
        self.sent = Lent()
        """Gradients on their way."""

    def send(
        self, block: Block, found: Gradients, *, is_used: bool
    ) -> tuple[torch.Tensor, Gradients]:
        """Send the gradients of a block, on top of those of its groups of experts; returns the
        buffer that they land in, and what lies there when all that was sent has come. What
        ``is_used`` at once lands in the type that it was made in, other gradients in the
        parameters' own, as autograd would have them after rounding."""
        types = {place.parameter: place.dtype for place in block.made_layout.places}
        is_used = is_used and all(gradient.dtype == types[p] for p, gradient in found.items())
        layout = block.made_layout if is_used else block.home_layout
        landing = self._buffer(block, layout)
        arrived = {parameter for parameter, _ in block.arrived}
        block.arriving, block.arrived = None, set()
        with on_host():
            places = {p.parameter: p.of(landing) for p in layout.places}
        sources = [gradient.to(places[p].dtype) for p, gradient in found.items()]
        ticket = self._engines.send(list(zip([places[p] for p in found], sources, strict=True)))
        self.sent.lend(sources, ticket)
        block.sent = ticket
        return landing, {p: places[p] for p in (*found, *arrived)}

    def send_group(
        self, block: Block, parameter: nn.Parameter, group: slice, gradient: torch.Tensor
    ) -> None:
        """Send the gradient of a group of experts, and add it to another that came before."""
        landing = block.arriving = self._buffer(block, block.home_layout)
        with on_host():
            whole = next(p for p in block.home_layout.places if p.parameter is parameter)
            place = whole.of(landing)[group]
            is_first = (parameter, group.start) not in block.arrived
            target = place if is_first else torch.empty_like(place)
        block.arrived.add((parameter, group.start))
        leaving = gradient.to(place.dtype).contiguous()
        ticket = self._engines.send([(target, leaving)])
        self.sent.lend([leaving], ticket)
        if not is_first:
            self._updates.ask(block, partial(_add, place, target), ticket)

    def add(self, block: Block, landing: torch.Tensor, gradients: Gradients) -> None:
        """On the host: add what has come to what is there."""
        if not block.pending:
            block.landing, block.pending = landing, gradients
            return
        for parameter, gradient in gradients.items():
            if parameter in block.pending:
                block.pending[parameter].add_(gradient)
            else:
                block.pending[parameter] = gradient.clone()
        self._pool.give_back(landing)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Of a backward pass that did not end no gradient is whole: none is left."""
        for block in blocks:
            self._updates.wait(block)
            if block.arriving is not None and block.arriving is not block.landing:
                self._pool.give_back(block.arriving)
            block.arriving, block.arrived = None, set()
            self.leave(block)
            for parameter in block.parameters:
                parameter.grad = None

    @contextmanager
    def used(self, block: Block) -> Iterator[None]:
        """On the host: what has come is used here, also where that fails: it is in no later
        update."""
        try:
            yield
        finally:
            self.leave(block)

    def leave(self, block: Block) -> None:
        """On the host: what has come was used."""
        block.pending = {}
        if block.landing is not None:
            self._pool.give_back(block.landing)
            block.landing = None

    def _buffer(self, block: Block, layout: BufferLayout) -> torch.Tensor:
        if block.arriving is not None:
            return block.arriving
        if block.landing is not None and not block.pending:
            if block.landing.numel() == layout.num_bytes:
                return block.landing
            self._pool.give_back(block.landing)
            block.landing = None
        return self._pool.take(layout.num_bytes)


def _add(place: torch.Tensor, gradient: torch.Tensor) -> None:
    place.add_(gradient)


def put_aside_gradients(blocks: Iterable[Block]) -> None:
    """Gradients at home cannot be added to by a computation on the device. Until a backward pass
    begins a person may drop them."""
    for block in blocks:
        for parameter in block.parameters if block.home is not None else ():
            if parameter.grad is not None:
                block.pending[parameter] = parameter.grad
                parameter.grad = None
