"""Sets of layers that the last stages of a pipeline can hold, and the stages between two of them.

Such a set contains with each layer all that follow it. A division into stages is a chain of these
sets, each stage the difference of two. Layers that cost nothing at all are left out first: they can
go with any neighbour, and each that is free to move would double the number of sets.
O(sets · layers), then O(sets²) stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.base.errors import UsageError
from hocket.kernels.containers import table

_MAX_SETS = 20_000
_MAX_SLOTS = 16_000_000
"""Layers of all stages together."""


class DownsetStages(NamedTuple):
    """All stages, by the set that they complete; set 0 is empty, the last one holds all layers."""

    stage_ptr: LongArray
    """Set i is completed by the stages from ``stage_ptr[i]`` up to ``stage_ptr[i + 1]``."""
    after: LongArray
    """The set of all that follows each stage."""
    slot_ptr: LongArray
    """The layers of a stage are in the slots from ``slot_ptr[stage]`` on."""
    slot_layer: LongArray

    @property
    def num_sets(self) -> int:
        """Sets, with the empty one."""
        return len(self.stage_ptr) - 1


def find_stages(
    num_layers: int, edges: Iterable[tuple[int, int]]
) -> tuple[DownsetStages, np.ndarray]:
    """All stages of the layers 0, 1, … with given precedence, and the members of each set."""
    members = _members(num_layers, edges)
    inside = members.astype(np.float32)
    sizes = members.sum(axis=1)
    stage_ptr, after, counts, layers, num_slots = [0, 0], [], [], [], 0
    for number in range(1, len(members)):
        # A set lies inside this one if the two share as many layers as it has.
        shared = inside[:number] @ inside[number]
        subsets = np.flatnonzero(shared == sizes[:number])
        rest = members[number] & ~members[subsets]
        after.append(subsets)
        counts.append(rest.sum(axis=1))
        layers.append(np.nonzero(rest)[1])
        num_slots += len(layers[-1])
        stage_ptr.append(stage_ptr[-1] + len(subsets))
        if num_slots > _MAX_SLOTS:
            raise _too_many("stages")
    slot_ptr = pointers(np.concatenate(counts))
    stages = DownsetStages(
        stage_ptr=table(stage_ptr, np.int64),
        after=table(np.concatenate(after), np.int64),
        slot_ptr=table(slot_ptr, np.int64),
        slot_layer=table(np.concatenate(layers), np.int64),
    )
    return stages, members


def _members(num_layers: int, edges: Iterable[tuple[int, int]]) -> np.ndarray:
    """[set, layer]: the sets by size."""
    followers = [0] * num_layers
    for src, dst in edges:
        followers[src] |= 1 << dst
    found, waiting = {0}, [0]
    while waiting:
        members = waiting.pop()
        for layer in range(num_layers):
            if members >> layer & 1 or followers[layer] & ~members:
                continue
            larger = members | 1 << layer
            if larger not in found:
                found.add(larger)
                waiting.append(larger)
        if len(found) > _MAX_SETS:
            raise _too_many("sets of layers")
    ordered = sorted(found, key=lambda members: (members.bit_count(), members))
    num_bytes = -(-num_layers // 8)
    packed = b"".join(members.to_bytes(num_bytes, "little") for members in ordered)
    bits = np.frombuffer(packed, dtype=np.uint8).reshape(len(ordered), num_bytes)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, :num_layers].astype(np.bool_)


def _too_many(what: str) -> UsageError:
    return UsageError(
        f"the layers have too many {what} to try all",
        hint="join layers, so that the model is more nearly a chain",
    )


def bridged(
    edges: Mapping[tuple[int, int], float], dropped: Iterable[int]
) -> dict[tuple[int, int], float]:
    """The edges without some nodes; what came before one still comes before what followed it."""
    left = dict(edges)
    for node in dropped:
        before = [src for src, dst in left if dst == node]
        after = [dst for src, dst in left if src == node]
        left = {ends: cost for ends, cost in left.items() if node not in ends}
        for src in before:
            for dst in after:
                left.setdefault((src, dst), 0.0)
    return left
