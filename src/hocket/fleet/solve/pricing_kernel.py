"""The compiled part of the search for partners: all pairs of classes are looked at, few are kept.

A pair gains what its progress is worth above the rent of both jobs and the price of the devices.
At good duals most jobs gain nearly the same with very many partners, and the best of them are the
same for all: a list of the best would pair everybody with the same few. So gains are shaken, each
pair by its own fixed number, before the best are taken. Pairs are processed in square tiles,
because the table is read by rows and by columns. O(classes^2 x columns).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.pair_tables import ClassPairTable, Partners
from hocket.kernels import kernel

_TILE = 32


@kernel
def _shake(a: int, b: int) -> float:
    """A number from 0 to 1 that looks random and is always the same for a pair."""
    mixed = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(b) * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
    return float((mixed ^ mixed >> np.uint64(29)) >> np.uint64(11)) * 2.0**-53


@kernel
def _note(partners: Partners, a: int, b: int, column: int, gain: float) -> None:
    """Put a partner where it belongs in the list; the last one leaves."""
    place = partners.gain.shape[1] - 1
    while place > 0 and gain > partners.gain[a, place - 1]:
        partners.gain[a, place] = partners.gain[a, place - 1]
        partners.other[a, place] = partners.other[a, place - 1]
        partners.column[a, place] = partners.column[a, place - 1]
        place -= 1
    partners.gain[a, place] = gain
    partners.other[a, place] = b
    partners.column[a, place] = column


@kernel
def _list(partners: Partners, a: int, b: int, column: int, gain: float) -> None:
    """Take a pair into the lists of both of its jobs, if it is good enough."""
    last = partners.gain.shape[1] - 1
    if gain > partners.gain[a, last]:
        _note(partners, a, b, column, gain)
    if gain > partners.gain[b, last] and a != b:
        _note(partners, b, a, column, gain)


@kernel
def look_at_pairs(
    table: ClassPairTable, value: FloatArray, spent: FloatArray, margin: float, partners: Partners
) -> None:
    """Find the gain of the best pair of every class, and some that lose less than ``margin``.

    ``value[class]`` is what a step of a class is worth, ``spent[class, column]`` its rent and half
    of what the devices cost, infinite where it cannot run.
    """
    num_classes, num_columns = spent.shape
    last = partners.gain.shape[1] - 1
    for top in range(0, num_classes, _TILE):
        for left in range(top, num_classes, _TILE):
            for a in range(top, min(top + _TILE, num_classes)):
                mine, value_a, gang = table.profile_of[a], value[a], table.gang[a]
                for b in range(max(a, left), min(left + _TILE, num_classes)):
                    theirs, value_b = table.profile_of[b], value[b]
                    most = -np.inf
                    for j in range(num_columns):
                        ours = table.steps_per_s[mine, theirs, j]
                        other = table.steps_per_s[theirs, mine, j]
                        if ours > 0.0 and other > 0.0:
                            earned = value_a * ours + value_b * other
                            most = max(most, earned - spent[a, j] - spent[b, j])
                    if gang != table.gang[b] or (a == b and table.num_jobs[a] < 2.0):
                        continue
                    partners.most[a] = max(partners.most[a], most)
                    partners.most[b] = max(partners.most[b], most)
                    least = min(partners.gain[a, last], partners.gain[b, last])
                    if most <= -margin or most + margin <= least:
                        continue
                    shaken = margin * _shake(a, b)
                    if most + shaken <= least:
                        continue
                    for j in range(num_columns):
                        ours = table.steps_per_s[mine, theirs, j]
                        other = table.steps_per_s[theirs, mine, j]
                        gain = value_a * ours + value_b * other - spent[a, j] - spent[b, j]
                        if ours > 0.0 and other > 0.0 and gain > -margin:
                            _list(partners, a, b, j, gain + shaken)
