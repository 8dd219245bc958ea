"""Groups of experts on their way: parameters whose first dimension is that of experts come from the
host a few matrices at a time, and take turns in a ring of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hocket.runtime.memory.blocks import Block, Place
from hocket.runtime.memory.copies import CopyEngines, Ticket
from hocket.simulate.rewriting.homes import NUM_TURNS

Deliver = Callable[[Block, nn.Parameter, slice, torch.Tensor], None]
"""Sends the gradient of some experts to the host."""


class GroupRing:
    """Room on the device that groups take turns in."""

    def __init__(self, engines: CopyEngines, num_bytes: int) -> None:
        self._engines, self._turn = engines, 0
        self.buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=engines.device)
            for _ in range(NUM_TURNS if num_bytes else 0)
        ]
        # The computation may still be at work in memory that it has given back.
        self._left: list[Ticket] = [engines.mark()] * len(self.buffers)

    def bring(self, sources: Sequence[torch.Tensor], after: Ticket) -> Iterator[torch.Tensor]:
        """Bytes of the host one after the other; each is there until the next one is asked for,
        which comes meanwhile."""
        coming = self._fetch(sources[0], after)
        for number, source in enumerate(sources):
            turn, ticket = coming
            if number + 1 < len(sources):
                coming = self._fetch(sources[number + 1], after)
            ticket.wait()
            yield self.buffers[turn][: source.numel()]
            self._left[turn] = self._engines.mark()

    def _fetch(self, source: torch.Tensor, after: Ticket) -> tuple[int, Ticket]:
        turn = self._turn
        self._turn = (turn + 1) % len(self.buffers)
        pairs = [(self.buffers[turn][: source.numel()], source)]
        return turn, self._engines.fetch(pairs, self._left[turn], after)


@dataclass(frozen=True, eq=False)
class GroupedParameter:
    """A parameter whose first dimension is that of experts, and how its groups come and go."""

    block: Block
    place: Place
    """Where it lies in what is copied of the block."""
    num_groups: int
    ring: GroupRing
    deliver: Deliver

    @property
    def parameter(self) -> nn.Parameter:
        """The person's own."""
        return self.place.parameter

    @property
    def groups(self) -> list[slice]:
        """The experts of each group."""
        count, size = self.place.shape[0], _group_size(self.place, self.num_groups)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def send(self, group: slice, gradient: torch.Tensor) -> None:
        """The gradient of a group, home."""
        self.deliver(self.block, self.parameter, group, gradient)

    def bring(self, groups: Sequence[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Matrices of groups on the device, each until the next one is asked for."""
        assert self.block.copied is not None
        each = self.place.num_bytes // self.place.shape[0]
        start, home = self.place.start, self.block.copied
        sources = [home[start + g.start * each : start + g.stop * each] for g in groups]
        here = self.ring.bring(sources, self.block.returned)
        for group, buffer in zip(groups, here, strict=True):
            shape = (group.stop - group.start, *self.place.shape[1:])
            yield group, buffer.view(self.place.dtype).view(shape)


def sources_of(
    block: Block, ring: GroupRing, deliver: Deliver
) -> dict[nn.Parameter, GroupedParameter]:
    """The parameters of a block that come in groups."""
    return {
        place.parameter: GroupedParameter(
            block, place, block.grouped[place.parameter], ring, deliver
        )
        for place in block.copied_layout.places
        if place.parameter in block.grouped
    }


def ring_of(blocks: Sequence[Block], engines: CopyEngines) -> GroupRing:
    """Room for the largest group of all blocks."""
    sizes = [
        group_bytes(place, block.grouped[place.parameter])
        for block in blocks
        for place in block.copied_layout.places
        if place.parameter in block.grouped
    ]
    return GroupRing(engines, max(sizes, default=0))


def group_bytes(place: Place, num_groups: int) -> int:
    """What the largest group takes."""
    return place.num_bytes // place.shape[0] * _group_size(place, num_groups)


def _group_size(place: Place, num_groups: int) -> int:
    return -(-place.shape[0] // num_groups)


def can_be_grouped(parameter: nn.Parameter) -> bool:
    """True if experts lie one behind the other, matrix by matrix."""
    return parameter.dim() == 3 and parameter.is_contiguous()
