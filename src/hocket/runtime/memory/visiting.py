"""Updates on the device of blocks that are at home on the host: their state comes and goes.

The host's cores update as fast as its memory lets them, while the way to the device has time to
spare. A block with streamed parameters and its update on the device sends no gradients: from the
beginning of its backward pass on, its parameters in full and its optimizer's state come in pieces,
are changed when the gradients are whole, and go home with their rounded twin. Pieces take turns in
a few berths of the device that are as large as the largest of them, so what is held does not depend
on the bus. All of it runs beside the computation, which waits for nothing but the gradients that it
wants to drop. The host updates in its place where there is no state yet, or where gradients wait
for others at home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.runtime.memory.blocks import Block, Place, span_of
from hocket.runtime.memory.copies import (
    DONE,
    CopyEngines,
    Pair,
    Ticket,
    aligned,
    host_buffer,
    looking,
)
from hocket.runtime.memory.ledger import on_host
from hocket.runtime.memory.updates import has_fused_kernels, part_of
from hocket.simulate.rewriting.homes import NUM_BERTHS, runs_within


@dataclass(frozen=True, eq=False)
class _Entry:
    """One tensor of the state of one parameter, and where it lies in the buffer."""

    parameter: nn.Parameter
    key: str
    value: torch.Tensor
    """As it lies in the host's buffer."""
    start: int

    @property
    def stop(self) -> int:
        """Where the next one may begin."""
        return self.start + aligned(self.value.numel() * self.value.dtype.itemsize)

    def of(self, buffer: torch.Tensor, origin: int) -> torch.Tensor:
        """The tensor as it lies in another buffer that begins with what is at ``origin`` here."""
        own = self.value
        offset = (self.start - origin) // own.dtype.itemsize
        return looking(buffer, own.dtype, own.shape, own.stride(), offset)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Neighbouring parameters of a block and their state, which come and go together."""

    places: tuple[Place, ...]
    """In the block's home."""
    copied: tuple[Place, ...]
    """In what is copied of it."""
    entries: tuple[_Entry, ...]
    """In the buffer of its state."""

    @property
    def home(self) -> slice:
        """Its bytes of the block's home."""
        return span_of(self.places)

    @property
    def state(self) -> slice:
        """Its bytes of the block's state."""
        return slice(self.entries[0].start, self.entries[-1].stop)

    @property
    def state_start(self) -> int:
        """Where its state lies in a berth: behind the parameters."""
        return aligned(self.home.stop - self.home.start)

    @property
    def num_bytes(self) -> int:
        """That come and go."""
        return self.state_start + self.entries[-1].stop - self.entries[0].start


@dataclass(frozen=True, eq=False)
class _BlockState:
    """The optimizer's state of a block, side by side."""

    buffer: torch.Tensor
    entries: tuple[_Entry, ...]

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still has these tensors; a loaded checkpoint brings others."""
        return all(optimizer.state[e.parameter].get(e.key) is e.value for e in self.entries)


@dataclass(eq=False)
class _Berth:
    """Room on the device for one piece."""

    buffer: torch.Tensor
    came: Ticket = DONE
    left: Ticket = DONE


@dataclass(frozen=True)
class ChangedBlock:
    """An update under way: when it has used the gradients, and when all is at home."""

    changed: Ticket
    returned: Ticket


class Visitors:
    """Brings state to the device, updates there, and sends it home."""

    def __init__(
        self,
        blocks: Sequence[Block],
        engines: CopyEngines,
        step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        """``engines`` are for nobody else; ``step`` does a step of an optimizer on the device."""
        self._blocks = [block for block in blocks if block.is_updated_here]
        self._engines, self._step = engines, step
        self._states: dict[Block, _BlockState] = {}
        self._pieces: dict[Block, list[_Piece]] = {}
        self._berths: list[_Berth] = []
        self._turn = 0
        self._rounding = self._room(0)
        """Gradients of a piece in full, and after its update the rounded twin of its parameters."""
        self._invited: dict[Block, list[_Berth]] = {}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Have room for whatever has state by now."""
        for block in self._blocks:
            self._find_pieces(block, optimizer)

    def invite(self, block: Block, optimizer: torch.optim.Optimizer | None) -> None:
        """Start to bring what an update of a block needs; nothing where the host will do it."""
        if not block.is_updated_here or optimizer is None or block.pending:
            return
        self.forget()
        pieces = self._find_pieces(block, optimizer)
        if pieces:
            coming = pieces[: len(self._berths)]
            self._invited[block] = [self._fetch(block, piece) for piece in coming]

    def forget(self) -> None:
        """What was fetched for updates that never came is dropped."""
        for berths in self._invited.values():
            for berth in berths:
                berth.left = berth.came
        self._invited.clear()

    def update(
        self,
        block: Block,
        optimizer: torch.optim.Optimizer | None,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> ChangedBlock | None:
        """Update a block by gradients that are on the device; None where the host has to."""
        berths = self._invited.get(block)
        if berths is None or optimizer is None or not self._has_state(block, gradients):
            self.forget()
            return None
        del self._invited[block]
        whole, changed = self._engines.mark(), DONE
        with torch.no_grad(), self._engines.leaving():
            whole.wait()
            for number, piece in enumerate(self._pieces[block]):
                is_here = number < len(berths)
                berth = berths[number] if is_here else self._fetch(block, piece)
                berth.came.wait()
                self._change(block, optimizer, piece, berth, gradients)
                changed = self._engines.mark()
                self._send(block, piece, berth)
        return ChangedBlock(changed, berth.left)

    # ── one piece ────────────────────────────────────────────────────────────────────────────

    def _fetch(self, block: Block, piece: _Piece) -> _Berth:
        berth = self._berths[self._turn]
        self._turn = (self._turn + 1) % len(self._berths)
        berth.came = self._engines.fetch(self._pairs(block, piece, berth), berth.left)
        return berth

    def _pairs(self, block: Block, piece: _Piece, berth: _Berth) -> list[Pair]:
        """Bytes of a berth and where they are at home."""
        assert block.home is not None
        split, state = piece.state_start, self._states[block].buffer[piece.state]
        home = block.home[piece.home]
        return [
            (berth.buffer[: home.numel()], home),
            (berth.buffer[split : split + state.numel()], state),
        ]

    def _change(
        self,
        block: Block,
        optimizer: torch.optim.Optimizer,
        piece: _Piece,
        berth: _Berth,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """One step of the person's optimizer on what is here."""
        here: dict[nn.Parameter, nn.Parameter] = {}
        for place in piece.places:
            gradient = gradients.get(place.parameter)
            if gradient is None:
                continue
            twin = nn.Parameter(place.of(berth.buffer, piece.home.start), requires_grad=False)
            if gradient.dtype != place.dtype:
                gradient = place.of(self._rounding, piece.home.start).copy_(gradient)
            twin.grad = gradient
            here[place.parameter] = twin
        part = part_of(optimizer, here, fused=self._engines.is_real)
        visiting: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for p in here}
        origin = piece.state.start - piece.state_start
        for entry in piece.entries:
            if entry.parameter in visiting:
                visiting[entry.parameter][entry.key] = entry.of(berth.buffer, origin)
        for parameter, twin in here.items():
            part.state[twin] = {**optimizer.state[parameter], **visiting[parameter]}
        self._step(part)
        for parameter, twin in here.items():
            _take_over(part.state[twin], visiting[parameter], optimizer.state[parameter])

    def _send(self, block: Block, piece: _Piece, berth: _Berth) -> None:
        """Everything home, as the last thing that is done with a berth."""
        assert block.copied is not None
        pairs = [(home, here) for here, home in self._pairs(block, piece, berth)]
        if block.copied is not block.home:
            copied = span_of(piece.copied)
            rounded = [place.of(self._rounding, copied.start) for place in piece.copied]
            changed = [place.of(berth.buffer, piece.home.start) for place in piece.places]
            torch._foreach_copy_(rounded, changed)
            pairs.append((block.copied[copied], self._rounding[: copied.stop - copied.start]))
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        berth.left = self._engines.mark()

    # ── state at home ────────────────────────────────────────────────────────────────────────

    def _find_pieces(self, block: Block, optimizer: torch.optim.Optimizer) -> list[_Piece]:
        """The block's pieces, with berths that have room for them; none where state is missing."""
        state = self._state(block, optimizer)
        if state is None:
            return []
        if block not in self._pieces:
            self._pieces[block] = self._cut(block, state)
            self._have_berths(self._pieces[block], are_rounded=block.copied is not block.home)
        return self._pieces[block]

    def _cut(self, block: Block, state: _BlockState) -> list[_Piece]:
        """Neighbours together, up to the largest parameter of any block."""
        largest = max(place.num_bytes for b in self._blocks for place in b.home_layout.places)
        places, copied = block.home_layout.places, block.copied_layout.places
        pieces = []
        for start, stop in runs_within([place.num_bytes for place in places], largest):
            mine = {place.parameter for place in places[start:stop]}
            entries = tuple(entry for entry in state.entries if entry.parameter in mine)
            if entries:
                pieces.append(_Piece(places[start:stop], copied[start:stop], entries))
        return pieces

    def _have_berths(self, pieces: Sequence[_Piece], *, are_rounded: bool) -> None:
        """Make room where the berths that there are have too little."""
        num_bytes = max(piece.num_bytes for piece in pieces)
        if not self._berths or self._berths[0].buffer.numel() < num_bytes:
            self._settle()
            self._berths = []
            self._berths = [_Berth(self._room(num_bytes)) for _ in range(NUM_BERTHS)]
            self._turn = 0
        rounding_bytes = max(piece.state_start for piece in pieces) if are_rounded else 0
        if self._rounding.numel() < rounding_bytes:
            self._settle()
            self._rounding = self._room(rounding_bytes)

    def _settle(self) -> None:
        """Wait until nothing is under way."""
        for berth in self._berths:
            berth.left.synchronize()

    def _room(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._engines.device)

    def _state(self, block: Block, optimizer: torch.optim.Optimizer) -> _BlockState | None:
        """The block's state in one buffer; None where a parameter that is trained has none yet."""
        found = self._states.get(block)
        if found is not None and found.is_of(optimizer):
            return found
        self._pieces.pop(block, None)
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

    def _has_state(self, block: Block, gradients: Mapping[nn.Parameter, torch.Tensor]) -> bool:
        having = {entry.parameter for entry in self._states[block].entries}
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
