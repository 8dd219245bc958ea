"""How many channels each layer of a part keeps: the least harm for each multiplication saved.

A stream is a set of channels that are cut together (a layer's outputs, or all that a residual sum
ties). Starting from the whole net, the block of least valuable channels is taken from the stream
whose value left shrinks least per multiplication saved, until the budget is met; no stream goes
below its floor. Work is the sum over layers of inputs x outputs, so a cut also makes
the neighbours cheaper, which the next choice sees. O(cuts · streams · layers of a stream).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray


@dataclass(frozen=True)
class ChannelStream:
    """Channels that are cut together."""

    name: str
    """Of the layer whose outputs they are, the first of them."""
    units: int
    """How many can be cut one by one; of attention the channels of a head, in all heads at once."""
    consumers: int
    """Layers that read it: each loses what is cut."""


@dataclass(frozen=True)
class WidthLayer:
    """A layer that multiplies: its work is the product of the widths of its streams."""

    name: str
    macs: float
    """Of one input, with all channels."""
    out_stream: int
    """-1 where the outputs are fixed."""
    in_streams: tuple[tuple[int, float], ...]
    """Streams that it reads, each with its share of the inputs."""


@dataclass(frozen=True)
class WidthModel:
    """The streams of a net and what its layers cost by their widths."""

    streams: tuple[ChannelStream, ...]
    layers: tuple[WidthLayer, ...]

    def macs(self, kept: FloatArray) -> float:
        """Multiplications of one input when a share of each stream is kept."""
        return sum(_layer_macs(layer, kept) for layer in self.layers)


def _layer_macs(layer: WidthLayer, kept: FloatArray) -> float:
    out = kept[layer.out_stream] if layer.out_stream >= 0 else 1.0
    fixed = 1.0 - sum(share for _, share in layer.in_streams)
    into = fixed + sum(share * kept[stream] for stream, share in layer.in_streams)
    return float(layer.macs * out * into)


@dataclass(frozen=True)
class Floors:
    """How far streams may be cut."""

    least_units: int = 2
    least_share: float = 0.05
    block_units: int = 0
    """Units cut at once, and of which the width stays a multiple; 0 for a choice by the width."""

    def block(self, stream: ChannelStream) -> int:
        """Units cut at once: vector units want multiples, narrow streams cannot afford them."""
        if self.block_units:
            return self.block_units
        return 8 if stream.units >= 64 else 4 if stream.units >= 32 else 1

    def floor(self, stream: ChannelStream) -> int:
        """Units that stay in any case."""
        least = max(self.least_units, int(np.ceil(self.least_share * stream.units)))
        return min(least, stream.units)


def chosen_widths(
    model: WidthModel, values: Sequence[FloatArray], budget_macs: float, floors: Floors
) -> tuple[int, ...]:
    """Units that each stream keeps within a budget; ``values`` has one number per unit."""
    sorted_values = [np.sort(each)[::-1] for each in values]
    held = [
        np.concatenate([[0.0], np.cumsum(each)]) / max(each.sum(), 1e-30) for each in sorted_values
    ]
    widths = np.array([stream.units for stream in model.streams])
    full = widths.copy()
    touching = _touching(model)
    layer_macs = {layer.name: layer.macs for layer in model.layers}
    total = sum(layer_macs.values())
    while total > budget_macs:
        best: tuple[float, int, int] | None = None
        for index, stream in enumerate(model.streams):
            narrower = _narrower(stream, int(widths[index]), floors)
            if narrower is None:
                continue
            # The logarithm: half of what is left hurts as much as half of the whole.
            left = held[index][widths[index]] / max(held[index][narrower], 1e-12)
            lost = np.log(left) * max(stream.consumers, 1)
            saved = _saved(touching[index], layer_macs, widths, full, index, narrower)
            harm = lost / max(saved, 1e-9)
            if best is None or harm < best[0]:
                best = (harm, index, narrower)
        if best is None:
            break
        _, index, narrower = best
        widths[index] = narrower
        kept = widths / full
        for layer in touching[index]:
            layer_macs[layer.name] = _layer_macs(layer, kept)
        total = sum(layer_macs.values())
    return tuple(int(width) for width in widths)


def _narrower(stream: ChannelStream, width: int, floors: Floors) -> int | None:
    block = floors.block(stream)
    narrower = (width - 1) // block * block
    return narrower if narrower >= floors.floor(stream) else None


def _touching(model: WidthModel) -> list[list[WidthLayer]]:
    return [
        [
            layer
            for layer in model.layers
            if layer.out_stream == index or any(stream == index for stream, _ in layer.in_streams)
        ]
        for index in range(len(model.streams))
    ]


def _saved(
    layers: Sequence[WidthLayer],
    layer_macs: Mapping[str, float],
    widths: FloatArray,
    full: FloatArray,
    index: int,
    narrower: int,
) -> float:
    after = widths.copy()
    after[index] = narrower
    kept = after / full
    return sum(layer_macs[layer.name] - _layer_macs(layer, kept) for layer in layers)


def needed_macs(model: WidthModel, values: Sequence[FloatArray], share: float) -> float:
    """Work of the net that keeps of every stream the fewest units with ``share`` of its value."""
    kept = np.ones(len(model.streams))
    for index, each in enumerate(values):
        held = np.cumsum(np.sort(each)[::-1]) / max(each.sum(), 1e-30)
        kept[index] = (1 + int(np.searchsorted(held, share))) / len(each)
    return model.macs(np.minimum(kept, 1.0))
