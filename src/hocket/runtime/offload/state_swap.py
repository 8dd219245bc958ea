"""Updates on the device of blocks that are at home on the host: their state comes and goes.

The host's cores update as fast as its memory lets them, while the way to the device has time to
spare. A block with streamed parameters and its update on the device sends no gradients: from the
beginning of its backward pass on, its parameters in full and its optimizer's state come in pieces,
are changed when the gradients are whole, and go home with their rounded twin. Pieces take turns in
a few berths of the device, so what is held does not depend on the bus. All of it runs beside the
computation, which waits for nothing but the gradients that it wants to drop. The host updates in
its place where there is no state yet, or where gradients wait for others at home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.hardware.allocation import ALIGNMENT_BYTES, aligned
from hocket.runtime.offload.copy_streams import (
    DONE,
    CopyEngines,
    Pair,
    Ticket,
    host_buffer,
    looking,
)
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.optimizer_parts import has_fused_kernels, part_of
from hocket.runtime.offload.parameter_blocks import Block, Look, Place
from hocket.simulate.rewriting.homes import NUM_BERTHS, PIECE_BYTES, runs_within

# What travels of a block for its update on the device: pieces of parameters and of their state.
#
# A piece is a run of neighbouring parameters, or a part of a large one where the optimizer changes
# each number by itself, with the same part of every tensor of its state. Neighbours at home that
# are neighbours on the device are copied at once.


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One tensor of the state of one parameter, and where it lies in the buffer of its block."""

    parameter: nn.Parameter
    key: str
    value: torch.Tensor
    """As it lies in the host's buffer."""
    start: int


@dataclass(frozen=True, eq=False)
class Strip:
    """Bytes of the host, and where they lie in a buffer of the device."""

    base: torch.Tensor
    start: int
    stop: int
    offset: int
    returns: bool = True
    """True if it goes home after the update."""

    @property
    def home(self) -> torch.Tensor:
        """The bytes of the host."""
        return self.base[self.start : self.stop]

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Their place on the device."""
        return buffer[self.offset : self.offset + self.stop - self.start]

    def goes_on_with(self, other: Strip) -> bool:
        """True if one copy brings both."""
        is_near = 0 <= other.start - self.stop < ALIGNMENT_BYTES
        is_alike = other.start - self.start == other.offset - self.offset
        is_same = self.base is other.base and self.returns == other.returns
        return is_same and is_near and is_alike


@dataclass(frozen=True, eq=False)
class TravelPart:
    """A parameter in a piece, or some of its elements."""

    parameter: nn.Parameter
    whole: Look
    """In a berth."""
    state: Mapping[str, Look]
    rounding: Look
    """Its gradient in full, beside the berths."""
    twin: Look
    """It as it is copied, in the same place."""
    place: Place
    elements: slice | None
    """In the order of memory; None for all."""

    @property
    def is_last(self) -> bool:
        """True if the parameter is changed with it."""
        return self.elements is None or self.elements.stop == self.parameter.numel()

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of these elements."""
        if self.elements is None:
            return gradient
        if gradient.stride() != self.place.stride:
            laid = torch.empty_strided(
                self.place.shape, self.place.stride, dtype=gradient.dtype, device=gradient.device
            )
            gradient = laid.copy_(gradient)
        size = self.elements.stop - self.elements.start
        return gradient.as_strided((size,), (1,), gradient.storage_offset() + self.elements.start)


@dataclass(eq=False)
class TravelPiece:
    """What comes and goes together."""

    parts: list[TravelPart] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    twins: list[Strip] = field(default_factory=list)
    """Of what is copied, where that is not the home itself."""
    num_bytes: int = 0
    rounding_bytes: int = 0

    def coming(self, berth: torch.Tensor) -> list[Pair]:
        """Copies to a berth."""
        return [(strip.of(berth), strip.home) for strip in self.strips]

    def leaving(self, berth: torch.Tensor, rounding: torch.Tensor) -> list[Pair]:
        """Copies home."""
        back = [(strip.home, strip.of(berth)) for strip in self.strips if strip.returns]
        return back + [(strip.home, strip.of(rounding)) for strip in self.twins]


def cut_pieces(
    block: Block, buffer: torch.Tensor, entries: Sequence[StateEntry], *, is_split: bool
) -> list[TravelPiece]:
    """The pieces of a block whose state lies in a buffer of the host."""
    by_parameter: dict[nn.Parameter, list[StateEntry]] = {}
    for entry in entries:
        by_parameter.setdefault(entry.parameter, []).append(entry)
    cuts = []
    for place, copied in zip(block.home_layout.places, block.copied_layout.places, strict=True):
        states = by_parameter.get(place.parameter)
        if states:
            likes = all(_is_like(entry.value, place) for entry in states if entry.value.dim())
            cuts += [(place, copied, states, elements)
                     for elements in _elements(place, is_split=is_split and likes)]  # fmt: skip
    sizes = [_num_bytes(place, elements) for place, _, _, elements in cuts]
    return [
        _piece(block, buffer, cuts[start:stop]) for start, stop in runs_within(sizes, PIECE_BYTES)
    ]


def _is_like(value: torch.Tensor, place: Place) -> bool:
    return value.shape == place.shape and value.stride() == place.stride


def _elements(place: Place, *, is_split: bool) -> list[slice | None]:
    if not is_split or place.num_bytes <= PIECE_BYTES:
        return [None]
    # Even parts, which begin where every type has its alignment.
    count = -(-place.num_bytes // PIECE_BYTES)
    total = place.num_bytes // place.dtype.itemsize
    step = aligned(-(-total // count))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _num_bytes(place: Place, elements: slice | None) -> int:
    if elements is None:
        return place.num_bytes
    num_elements: int = elements.stop - elements.start
    return num_elements * place.dtype.itemsize


def _piece(
    block: Block,
    buffer: torch.Tensor,
    cuts: Sequence[tuple[Place, Place, list[StateEntry], slice | None]],
) -> TravelPiece:
    assert block.home is not None
    assert block.copied is not None
    piece, is_rounded = TravelPiece(), block.copied is not block.home
    states: list[dict[str, Look]] = []
    wholes: list[Look] = []
    at = 0
    for place, _, _, elements in cuts:
        wholes.append(_look(place.dtype, place.shape, place.stride, at, elements))
        at = _add(piece.strips, block.home, place.start, wholes[-1], elements)
    for place, _, entries, elements in cuts:
        looks = {}
        own_size = place.parameter.numel()
        for entry in entries:
            own, span = entry.value, elements if entry.value.dim() else None
            looks[entry.key] = _look(own.dtype, own.shape, own.stride(), at, span)
            at = _add(piece.strips, buffer, entry.start, looks[entry.key], span)
            # A counter is counted up once, by the last part.
            if elements is not None and span is None and elements.stop < own_size:
                piece.strips[-1] = replace(piece.strips[-1], returns=False)
        states.append(looks)
    piece.num_bytes = at
    at = twins_at = 0
    for (place, copied, _, elements), whole, looks in zip(cuts, wholes, states, strict=True):
        full = _look(place.dtype, place.shape, place.stride, at, elements)
        twin = _look(copied.dtype, copied.shape, copied.stride, twins_at, elements)
        at = full.stop
        if is_rounded:
            twins_at = _add(piece.twins, block.copied, copied.start, twin, elements)
        piece.parts.append(TravelPart(place.parameter, whole, looks, full, twin, place, elements))
    piece.rounding_bytes = at if is_rounded else 0
    piece.strips, piece.twins = _joined(piece.strips), _joined(piece.twins)
    return piece


def _look(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    start: int,
    elements: slice | None,
) -> Look:
    if elements is not None:
        return Look(dtype, (elements.stop - elements.start,), (1,), start)
    return Look(dtype, tuple(shape), tuple(stride), start)


def _add(
    strips: list[Strip], base: torch.Tensor, start: int, look: Look, elements: slice | None
) -> int:
    """Note where a tensor is at home; returns where the next one begins on the device."""
    begin = start + (0 if elements is None else elements.start * look.dtype.itemsize)
    strips.append(Strip(base, begin, begin + look.num_bytes, look.start))
    return look.stop


def _joined(strips: Sequence[Strip]) -> list[Strip]:
    """Neighbours as one."""
    joined: list[Strip] = list(strips[:1])
    for before, after in pairwise(strips):
        if before.goes_on_with(after):
            first = joined.pop()
            joined.append(replace(first, stop=after.stop))
        else:
            joined.append(after)
    return joined


# Updates on the device of blocks that are at home on the host: their state comes and goes.
#
# The host's cores update as fast as its memory lets them, while the way to the device has time to
# spare. A block with streamed parameters and its update on the device sends no gradients: from the
# beginning of its backward pass on, its parameters in full and its optimizer's state come in
# pieces, are changed when the gradients are whole, and go home with their rounded twin. Pieces
# take turns in a few berths of the device, so what is held does not depend on the bus. All of it
# runs beside the computation, which waits for nothing but the gradients that it wants to drop. The
# host updates in its place where there is no state yet, or where gradients wait for others at
# home.


@dataclass(frozen=True, eq=False)
class _BlockState:
    """The optimizer's state of a block, side by side."""

    buffer: torch.Tensor
    entries: tuple[StateEntry, ...]

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer still has these tensors; a loaded checkpoint brings others."""
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
        self._pieces: dict[Block, list[TravelPiece]] = {}
        self._berths: list[_Berth] = []
        self._turn = 0
        self._rounding = self._room(0)
        """Gradients of a piece in full, and after its update the rounded twin of its parameters."""
        self._invited: dict[Block, list[_Berth]] = {}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Room on the device."""
        return [*(berth.buffer for berth in self._berths), self._rounding]

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
                self._change(optimizer, piece, berth, gradients)
                changed = self._engines.mark()
                self._send(piece, berth)
        return ChangedBlock(changed, berth.left)

    # ── one piece ────────────────────────────────────────────────────────────────────────────

    def _fetch(self, block: Block, piece: TravelPiece) -> _Berth:
        """Bring a piece, when its berth is free and what the last update sent is at home."""
        berth = self._berths[self._turn]
        self._turn = (self._turn + 1) % len(self._berths)
        berth.came = self._engines.fetch(piece.coming(berth.buffer), berth.left, block.returned)
        return berth

    def _change(
        self,
        optimizer: torch.optim.Optimizer,
        piece: TravelPiece,
        berth: _Berth,
        gradients: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """One step of the person's optimizer on what is here."""
        here: dict[nn.Parameter, nn.Parameter] = {}
        visiting: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for part in piece.parts:
            gradient = gradients.get(part.parameter)
            if gradient is None:
                continue
            twin = nn.Parameter(part.whole.of(berth.buffer), requires_grad=False)
            gradient = part.of_gradient(gradient)
            if gradient.dtype != twin.dtype:
                gradient = part.rounding.of(self._rounding).copy_(gradient)
            twin.grad = gradient
            here[part.parameter] = twin
            visiting[part.parameter] = {k: v.of(berth.buffer) for k, v in part.state.items()}
        own = part_of(optimizer, here, fused=self._engines.is_real)
        homes = {part.parameter: _home_state(optimizer, part) for part in piece.parts}
        for parameter, twin in here.items():
            own.state[twin] = {**homes[parameter], **visiting[parameter]}
        self._step(own)
        for parameter, twin in here.items():
            _take_over(own.state[twin], visiting[parameter], homes[parameter])

    def _send(self, piece: TravelPiece, berth: _Berth) -> None:
        """Everything home, as the last thing that is done with a berth."""
        if piece.twins:
            rounded = [part.twin.of(self._rounding) for part in piece.parts]
            torch._foreach_copy_(rounded, [part.whole.of(berth.buffer) for part in piece.parts])
        for target, source in piece.leaving(berth.buffer, self._rounding):
            target.copy_(source, non_blocking=True)
        berth.left = self._engines.mark()

    # ── state at home ────────────────────────────────────────────────────────────────────────

    def _find_pieces(self, block: Block, optimizer: torch.optim.Optimizer) -> list[TravelPiece]:
        """The block's pieces, with berths that have room for them; none where state is missing."""
        state = self._state(block, optimizer)
        if state is None:
            return []
        if block not in self._pieces:
            # What changes each number by itself can be done in any parts.
            is_split = has_fused_kernels(optimizer)
            self._pieces[block] = cut_pieces(block, state.buffer, state.entries, is_split=is_split)
            self._have_berths(self._pieces[block])
        return self._pieces[block]

    def _have_berths(self, pieces: Sequence[TravelPiece]) -> None:
        """Make room where the berths that there are have too little."""
        num_bytes = max(piece.num_bytes for piece in pieces)
        if not self._berths or self._berths[0].buffer.numel() < num_bytes:
            self._settle()
            self._berths = []
            rooms = [self._room(num_bytes) for _ in range(NUM_BERTHS)]
            # The computation may still be at work in memory that it has given back.
            free = self._engines.mark()
            self._berths = [_Berth(room, left=free) for room in rooms]
            self._turn = 0
        rounding_bytes = max(piece.rounding_bytes for piece in pieces)
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
                entries.append(StateEntry(parameter, key, own, start))
                start += size
        return _BlockState(buffer, tuple(entries))

    def _has_state(self, block: Block, gradients: Mapping[nn.Parameter, torch.Tensor]) -> bool:
        having = {entry.parameter for entry in self._states[block].entries}
        return all(parameter in having for parameter in gradients)


def _home_state(optimizer: torch.optim.Optimizer, part: TravelPart) -> dict[str, Any]:
    """The state at home, or, for a part that others follow, one that changes nothing there."""
    state: dict[str, Any] = optimizer.state[part.parameter]
    if part.is_last:
        return state
    # Counters of steps are real in a rehearsal, too.
    with on_host(), unset_fake_temporarily():
        return {k: v.clone() if isinstance(v, torch.Tensor) and not v.dim() else v
                for k, v in state.items()}  # fmt: skip


def _take_over(
    after: Mapping[str, Any], visiting: Mapping[str, torch.Tensor], home: dict[str, Any]
) -> None:
    """What an optimizer replaced instead of changing it in place."""
    for key, value in after.items():
        if key not in visiting:
            home[key] = value
        elif value is not visiting[key]:
            visiting[key].copy_(value)
