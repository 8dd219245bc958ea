"""Updates on the device of blocks that are at home on the host: their state comes and goes.

The host's cores update as fast as its memory lets them, while the way to the device has time to
spare. A block with streamed parameters and its update on the device sends no gradients: when its
backward pass begins, its optimizer's state and its parameters in full are fetched, the device
updates them, and they go home with their rounded twin beside the next block's backward pass. State
lies side by side in one buffer of the host, so that one copy brings it. The host updates in its
place where there is no state yet, or where gradients wait for others at home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.copies import CopyEngines, Pair, Ticket, aligned, host_buffer, looking
from hocket.runtime.memory.ledger import on_host
from hocket.runtime.memory.slots import Slots
from hocket.runtime.memory.updates import has_fused_kernels, part_of


@dataclass(frozen=True, eq=False)
class _Entry:
    """One tensor of the state of one parameter, and where it lies in the buffer."""

    parameter: nn.Parameter
    key: str
    value: torch.Tensor
    """As it lies in the host's buffer."""
    start: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in another buffer of the same layout."""
        own = self.value
        offset = self.start // own.dtype.itemsize
        return looking(buffer, own.dtype, own.shape, own.stride(), offset)


@dataclass(frozen=True, eq=False)
class _BlockState:
    """The optimizer's state of a block, side by side."""

    buffer: torch.Tensor
    entries: tuple[_Entry, ...]

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still has these tensors; a loaded checkpoint brings others."""
        return all(optimizer.state[e.parameter].get(e.key) is e.value for e in self.entries)


@dataclass(eq=False)
class _Guest:
    """What has been fetched for the update of a block."""

    state: _BlockState
    state_here: torch.Tensor
    ticket: Ticket
    parameters_here: torch.Tensor | None
    """None where the block's own buffer on the device has them in full."""


@dataclass(frozen=True)
class ReturnedBlock:
    """Copies on their way home, and what must not be dropped before they have ended."""

    ticket: Ticket
    sources: list[torch.Tensor]


class Visitors:
    """Brings state to the device, updates there, and sends it home."""

    def __init__(
        self, engines: CopyEngines, slots: Slots, step: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """``step`` does a step of an optimizer on the device."""
        self._engines, self._slots, self._step = engines, slots, step
        self._states: dict[Block, _BlockState] = {}
        self._guests: dict[Block, _Guest] = {}

    def invite(self, block: Block, optimizer: torch.optim.Optimizer | None) -> None:
        """Start to bring what an update of a block needs; nothing where the host will do it."""
        if not block.is_updated_here or optimizer is None or block.pending:
            return
        state = self._state(block, optimizer)
        if state is None:
            return
        assert block.home is not None
        state_here = self._room(state.buffer.numel())
        pairs: list[Pair] = [(state_here, state.buffer)]
        parameters_here = None
        if block.copied is not block.home:
            parameters_here = self._room(block.home_layout.num_bytes)
            pairs.append((parameters_here, block.home))
        ticket = self._engines.fetch(pairs)
        self._guests[block] = _Guest(state, state_here, ticket, parameters_here)

    def forget(self) -> None:
        """What was fetched for updates that never came is dropped."""
        for block in list(self._guests):
            self._leave(block)

    def update(
        self,
        block: Block,
        optimizer: torch.optim.Optimizer | None,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> ReturnedBlock | None:
        """Update a block by gradients that are on the device; None where the host has to."""
        guest = self._leave(block)
        if guest is None or optimizer is None or not self._has_state(guest.state, gradients):
            return None
        parameters_here = self._parameters_here(block, guest)
        with torch.no_grad():
            self._change(block, optimizer, guest, parameters_here, gradients)
            pairs = self._home_pairs(block, guest, parameters_here)
        ticket = self._engines.send(pairs)
        if guest.parameters_here is None:
            self._slots.keep_until(block, ticket)
        return ReturnedBlock(ticket, [source for _, source in pairs])

    def _leave(self, block: Block) -> _Guest | None:
        guest = self._guests.pop(block, None)
        if guest is not None:
            guest.ticket.wait()
        return guest

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._engines.device)

    def _parameters_here(self, block: Block, guest: _Guest) -> torch.Tensor:
        if guest.parameters_here is not None:
            return guest.parameters_here
        slot = self._slots.find(block)
        assert slot is not None, "a block has its buffer until its backward pass is over"
        return slot.buffer[: block.home_layout.num_bytes]

    def _change(
        self,
        block: Block,
        optimizer: torch.optim.Optimizer,
        guest: _Guest,
        parameters_here: torch.Tensor,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """One step of the person's optimizer on what is here."""
        places = {place.parameter: place for place in block.home_layout.places}
        here: dict[nn.Parameter, nn.Parameter] = {}
        for parameter, gradient in gradients.items():
            place = places[parameter]
            here[parameter] = nn.Parameter(place.of(parameters_here), requires_grad=False)
            here[parameter].grad = gradient.to(place.dtype)
        part = part_of(optimizer, here, fused=self._engines.is_real)
        visiting: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for p in here}
        for entry in guest.state.entries:
            if entry.parameter in visiting:
                visiting[entry.parameter][entry.key] = entry.of(guest.state_here)
        for parameter, twin in here.items():
            part.state[twin] = {**optimizer.state[parameter], **visiting[parameter]}
        self._step(part)
        for parameter, twin in here.items():
            _take_over(part.state[twin], visiting[parameter], optimizer.state[parameter])

    def _home_pairs(self, block: Block, guest: _Guest, parameters_here: torch.Tensor) -> list[Pair]:
        """Where each buffer goes."""
        assert block.home is not None
        assert block.copied is not None
        pairs: list[Pair] = [
            (block.home, parameters_here), (guest.state.buffer, guest.state_here),
        ]  # fmt: skip
        if block.copied is not block.home:
            rounded_here = self._room(block.copied_layout.num_bytes)
            targets = [place.of(rounded_here) for place in block.copied_layout.places]
            sources = [place.of(parameters_here) for place in block.home_layout.places]
            torch._foreach_copy_(targets, sources)
            pairs.append((block.copied, rounded_here))
        return pairs

    # ── state at home ────────────────────────────────────────────────────────────────────────

    def _state(self, block: Block, optimizer: torch.optim.Optimizer) -> _BlockState | None:
        """The block's state in one buffer; None where a parameter that is trained has none yet."""
        found = self._states.get(block)
        if found is not None and found.is_of(optimizer):
            return found
        # Counters of steps are read by the host, but for kernels that want them where they are.
        travels = self._engines.is_real and has_fused_kernels(optimizer)
        values = [
            (parameter, key, value)
            for parameter in block.parameters
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and (value.dim() or travels)
        ]
        having = {parameter for parameter, _, _ in values}
        if not having or any(p.requires_grad and p not in having for p in block.parameters):
            return None
        self._states[block] = self._side_by_side(values, optimizer)
        return self._states[block]

    @torch.no_grad()
    def _side_by_side(
        self, values: list[tuple[nn.Parameter, str, torch.Tensor]], optimizer: torch.optim.Optimizer
    ) -> _BlockState:
        sizes = [aligned(value.numel() * value.dtype.itemsize) for _, _, value in values]
        buffer = host_buffer(sum(sizes), pinned=self._engines.is_real)
        entries, start = [], 0
        with on_host():
            for (parameter, key, value), size in zip(values, sizes, strict=True):
                dense = torch.empty_like(value, device="meta")
                offset = start // value.dtype.itemsize
                own = looking(buffer, value.dtype, value.shape, dense.stride(), offset)
                own.copy_(value)
                optimizer.state[parameter][key] = own
                entries.append(_Entry(parameter, key, own, start))
                start += size
        return _BlockState(buffer, tuple(entries))

    def _has_state(
        self, state: _BlockState, gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> bool:
        having = {entry.parameter for entry in state.entries}
        return all(parameter in having for parameter in gradients)


def _take_over(
    after: Mapping[str, Any], visiting: Mapping[str, torch.Tensor], home: dict[str, Any]
) -> None:
    """What an optimizer replaced instead of changing it in place."""
    for key, value in after.items():
        if key not in visiting:
            home[key] = value
        elif value is not visiting[key]:
            visiting[key].copy_(value)
