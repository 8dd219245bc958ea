"""Choose the widths of a part's layers: the smallest loss of value per multiplication saved.

A stream is a set of channels that are cut together (the outputs of a layer, or of all layers that a
residual sum adds). Greedy algorithm: starting from the unsplit net, repeatedly cut the least
valuable channels of the stream that loses least per multiplication saved, or omit a residual block
if that loses less, until the budget is met. No stream goes below its floor. Finally, budget that
the last cut left over is used to restore the channels that help most. Savings are counted in
vectors of channels, as a CPU computes them, and in weights that need not be read: for one input,
layers with few positions spend more time reading weights than computing (Williams et al.,
"Roofline", 2009). O(cuts · streams · layers of a stream).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray

READING_MACS = 12.0
"""Multiplications on one thread that take as long as reading a weight from outside near caches.

For VGG-19 in ONNX Runtime, layers with at least 64 positions take 24 ps per multiplication and
those with 4 positions 117 ps (EPYC Zen 3); 0.3 ns per weight of 4 bytes are 13 GB/s.
"""

LAYER_MACS = 2e5
"""Multiplications that take as long as calling a layer that computes nothing (5 microseconds)."""


@dataclass(frozen=True)
class ChannelStream:
    """Channels that are cut together."""

    name: str
    """Name of the first layer whose outputs the channels are."""
    units: int
    """Number of separately cut units; a unit of attention is one channel in every head."""
    consumers: int
    """Number of layers that read the stream; each loses the inputs that are cut."""
    producers: int = 1
    """Number of layers that write the stream; each loses the outputs that are cut."""

    @property
    def losers(self) -> int:
        """Number of layers that lose channels in a cut, minus one: 1 in a chain of layers."""
        return max(self.consumers, 1) + self.producers - 1


@dataclass(frozen=True)
class WidthLayer:
    """A layer that multiplies: its work is proportional to the widths of its input and output."""

    name: str
    macs: float
    """Multiplications for one input, with all channels."""
    out_stream: int
    """Index of the stream that the layer writes; -1 if its outputs are fixed."""
    in_streams: tuple[tuple[int, float], ...]
    """Streams that the layer reads, each with its fraction of the inputs."""
    weights: float = 0.0
    """Number of weights read for one input, with all channels."""

    @property
    def time_per_mac(self) -> float:
        """Time per multiplication with weight reads, relative to a layer without weights."""
        return 1.0 + READING_MACS * self.weights / max(self.macs, 1e-30)


@dataclass(frozen=True)
class ResidualBlock:
    """A module that only adds to a stream, and can be omitted."""

    name: str
    stream: int
    inner: tuple[int, ...]
    """Streams that exist only inside the block."""
    layers: tuple[str, ...]


@dataclass(frozen=True)
class WidthModel:
    """The streams of a net and the cost of its layers as a function of their widths."""

    streams: tuple[ChannelStream, ...]
    layers: tuple[WidthLayer, ...]
    blocks: tuple[ResidualBlock, ...] = ()

    def macs(self, kept: FloatArray, omitted: Collection[int] = ()) -> float:
        """Multiplications for one input with fractions of streams kept and blocks omitted."""
        gone = {name for index in omitted for name in self.blocks[index].layers}
        return sum(_layer_macs(layer, kept) for layer in self.layers if layer.name not in gone)


def _layer_macs(layer: WidthLayer, kept: FloatArray) -> float:
    out = kept[layer.out_stream] if layer.out_stream >= 0 else 1.0
    fixed = 1.0 - sum(share for _, share in layer.in_streams)
    into = fixed + sum(share * kept[stream] for stream, share in layer.in_streams)
    return float(layer.macs * out * into)


@dataclass(frozen=True)
class Floors:
    """Minimum widths of streams, and steps in which they are cut."""

    least_units: int = 2
    least_share: float = 0.05
    least_blocks: float = 0.34
    """Minimum fraction of a stream's blocks that is kept."""
    vector_width: int = 8
    """Number of channels that a CPU computes at once."""

    def block(self, stream: ChannelStream) -> int:
        """Number of units cut at once: a vector, or an eighth of a stream narrower than two
        vectors.
        """
        is_wide = stream.units >= 2 * self.vector_width
        return self.vector_width if is_wide else max(1, stream.units // 8)

    def floor(self, stream: ChannelStream) -> int:
        """Minimum number of units that are kept."""
        least = max(self.least_units, int(np.ceil(self.least_share * stream.units)))
        return min(least, stream.units)


@dataclass(frozen=True)
class ChosenWidths:
    """Widths and omitted blocks of a part."""

    units: tuple[int, ...]
    """Width of each stream; 0 inside an omitted block."""
    omitted: tuple[int, ...]
    """Indices of the omitted blocks."""


def chosen_widths(
    model: WidthModel,
    values: Sequence[FloatArray],
    budget_macs: float,
    floors: Floors,
    influence: Sequence[float] | FloatArray = (),
) -> ChosenWidths:
    """Choose the widths within a budget.

    ``values`` has one number per unit of every stream, ``influence`` the fraction that each block
    contributes to the stream it adds to; without ``influence`` all blocks are kept.
    """
    cutting = _Cutting(model, values, influence, floors)
    while cutting.macs > budget_macs:
        offers = [*cutting.narrower(), *cutting.shorter()]
        if not offers:
            break
        cutting.take(min(offers))
    # The last cut may have saved more than needed, so units that fit into the budget are restored.
    while offers := [*cutting.wider(budget_macs)]:
        cutting.take(max(offers))
    units = tuple(int(width) for width in cutting.widths)
    return ChosenWidths(units, tuple(sorted(cutting.omitted)))


_Offer = tuple[float, int, int]
"""Loss per multiplication saved, index of a stream or block, new width; -1 omits the block."""
_OMIT = -1


class _Cutting:
    """State of the greedy algorithm: the current widths and omitted blocks."""

    def __init__(
        self,
        model: WidthModel,
        values: Sequence[FloatArray],
        influence: Sequence[float] | FloatArray,
        floors: Floors,
    ) -> None:
        self._model, self._floors, self._influence = model, floors, influence
        falling = [np.sort(each)[::-1] for each in values]
        self._held = [
            np.concatenate([[0.0], np.cumsum(each)]) / max(each.sum(), 1e-30) for each in falling
        ]
        self._full = np.array([stream.units for stream in model.streams])
        self.widths = self._full.copy()
        self.omitted: set[int] = set()
        self._gone: set[str] = set()
        self._touching = _touching(model)
        self._block_of = {
            stream: index
            for index, _ in enumerate(influence)
            for stream in model.blocks[index].inner
        }
        self.macs = model.macs(np.ones(len(model.streams)))

    def narrower(self) -> Iterator[_Offer]:
        """Offers to cut the least valuable units of each stream."""
        for index, stream in enumerate(self._model.streams):
            width = int(self.widths[index])
            size = self._floors.block(stream)
            # Widths stay multiples of a vector, because a cut within a vector saves no time.
            less = (width - 1) // size * size
            if not width or less < self._floors.floor(stream):
                continue
            after = self.widths.copy()
            after[index] = less
            lost = self._harm(index, less) - self._harm(index, width)
            yield lost / max(self._saved(self._touching[index], after), 1e-9), index, less

    def shorter(self) -> Iterator[_Offer]:
        """Offers to omit one more block."""
        blocks = self._model.blocks
        for index, share in enumerate(self._influence):
            block = blocks[index]
            # Blocks of one stream may substitute for each other, but not all of them can be
            # omitted.
            beside = [each for each, other in enumerate(blocks) if other.stream == block.stream]
            left = len(beside) - sum(each in self.omitted for each in beside)
            if index in self.omitted or left - 1 < self._floors.least_blocks * len(beside):
                continue
            lost = self._missed(block, float(share))
            for inner in block.inner:
                lost -= self._harm(inner, int(self.widths[inner]))
            mine = [layer for layer in self._model.layers if layer.name in block.layers]
            saved = sum(self._vector_time(layer, self.widths) + LAYER_MACS for layer in mine)
            yield max(lost, 0.0) / max(saved, 1e-9), index, _OMIT

    def _harm(self, index: int, width: int) -> float:
        """Loss of a stream of which only ``width`` units are left."""
        held = float(self._held[index][width])
        block = self._block_of.get(index)
        if block is not None:
            # A block with nothing left inside is equivalent to an omitted block.
            return self._missed(self._model.blocks[block], self._influence[block] * (1 - held))
        # Logarithmic, so that cutting half of the remaining value costs as much as cutting half of
        # all.
        return float(-np.log(max(held, 1e-12))) * self._model.streams[index].losers

    def _missed(self, block: ResidualBlock, share: float) -> float:
        """Loss if a block's fraction is not added to its stream, times the stream's readers."""
        readers = max(self._model.streams[block.stream].consumers, 1)
        return float(-np.log(1 - min(share, 0.99))) * readers

    def wider(self, budget_macs: float) -> Iterator[_Offer]:
        """Offers to restore the next units of each stream within the budget."""
        for index, stream in enumerate(self._model.streams):
            width = int(self.widths[index])
            size = self._floors.block(stream)
            more = min((width // size + 1) * size, stream.units)
            if not width or more == width:
                continue
            after = self.widths.copy()
            after[index] = more
            if self._model.macs(after / self._full, self.omitted) <= budget_macs:
                gained = self._harm(index, width) - self._harm(index, more)
                yield gained / max(-self._saved(self._touching[index], after), 1e-9), index, more

    def take(self, offer: _Offer) -> None:
        """Apply an offer."""
        _, index, width = offer
        if width == _OMIT:
            self.omitted.add(index)
            self._gone.update(self._model.blocks[index].layers)
            self.widths[list(self._model.blocks[index].inner)] = 0
        else:
            self.widths[index] = width
        self.macs = self._model.macs(self.widths / self._full, self.omitted)

    def _saved(self, layers: Sequence[WidthLayer], after: FloatArray) -> float:
        return sum(
            self._vector_time(layer, self.widths) - self._vector_time(layer, after)
            for layer in layers
            if layer.name not in self._gone
        )

    def _vector_time(self, layer: WidthLayer, widths: FloatArray) -> float:
        """Time of a layer with widths rounded up to vectors, in multiplications."""
        size = self._floors.vector_width
        # A CPU computes the last vector of channels in full.
        whole = np.minimum(-(-widths // size) * size, self._full)
        return _layer_macs(layer, whole / self._full) * layer.time_per_mac


def _touching(model: WidthModel) -> list[list[WidthLayer]]:
    return [
        [
            layer
            for layer in model.layers
            if layer.out_stream == index or any(stream == index for stream, _ in layer.in_streams)
        ]
        for index in range(len(model.streams))
    ]


def needed_macs(model: WidthModel, values: Sequence[FloatArray], share: float) -> float:
    """Work of a net that keeps, in each stream, the fewest units with ``share`` of its value."""
    kept = np.ones(len(model.streams))
    for index, each in enumerate(values):
        held = np.cumsum(np.sort(each)[::-1]) / max(each.sum(), 1e-30)
        kept[index] = (1 + int(np.searchsorted(held, share))) / len(each)
    return model.macs(np.minimum(kept, 1.0))
