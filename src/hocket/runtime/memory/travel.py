"""What travels of a block for its update on the device: pieces of parameters and of their state.

A piece is a run of neighbouring parameters, or a part of a large one where the optimizer changes
each number by itself, with the same part of every tensor of its state. Neighbours at home that are
neighbours on the device are copied at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn

from hocket.hardware.allocation import ALIGNMENT_BYTES, aligned
from hocket.runtime.memory.blocks import Block, Look, Place
from hocket.runtime.memory.copies import Pair
from hocket.simulate.rewriting.homes import PIECE_BYTES, runs_within


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
