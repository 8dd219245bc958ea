"""The ring of a gang: the members of a server whose slowest neighbours are as close as can be.

Collective libraries look for rings over the best links of a server before they use any (NCCL does
so when it starts). Here bandwidths are tried from the highest down; for each, depth-first search
looks for a cycle of the wanted length over pairs that have it. The first found is the widest ring.
Exponential in the worst case, so a fixed number of extensions is tried and then the devices are
taken as they are numbered; servers of today need a few dozen.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray

_MAX_EXTENSIONS = 20_000


def widest_ring(bandwidth_bps: FloatArray, length: int) -> tuple[int, ...]:
    """Devices in ring order; ``bandwidth_bps`` is ``[device, device]`` of pairs."""
    both_ways = np.minimum(bandwidth_bps, bandwidth_bps.T)
    np.fill_diagonal(both_ways, 0.0)
    search = _CycleSearch(length)
    for threshold_bps in np.unique(both_ways[both_ways > 0.0])[::-1]:
        ring = search.ring(both_ways >= threshold_bps)
        if ring:
            return ring
    return tuple(range(length))


class _CycleSearch:
    """Depth-first search for cycles, with one budget for all thresholds."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._extensions_left = _MAX_EXTENSIONS

    def ring(self, joined: BoolArray) -> tuple[int, ...]:
        """A cycle over joined pairs; empty where none was found."""
        near = [np.flatnonzero(row).tolist() for row in joined]
        for first in range(len(near) - self._length + 1):
            # A cycle is found from its lowest device: those before were tried.
            path = self._extend([first], near)
            if path:
                return tuple(path)
        return ()

    def _extend(self, path: list[int], near: list[list[int]]) -> list[int]:
        if len(path) == self._length:
            return path if path[0] in near[path[-1]] else []
        for device in near[path[-1]]:
            if device <= path[0] or device in path:
                continue
            if self._extensions_left == 0:
                return []
            self._extensions_left -= 1
            found = self._extend([*path, device], near)
            if found:
                return found
        return []
