"""The compiled part of the search for partners: all pairs of classes are looked at, none is kept.

A pair gains what its progress is worth above the rent of both jobs and the price of the devices.
Pairs are visited in square tiles, because the table is read both ways. O(classes^2 x columns).
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import ByteArray, FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.fleet.solve.pair_tables import PairTable, Partners

_TABLES = "hocket.fleet.solve.pair_tables"
_TILE = 32


@compiled
def note(partners: Partners, a: int, b: int, gain: float) -> None:
    """Put a partner where it belongs in the list; the last one leaves."""
    place = partners.gain.shape[1] - 1
    while place > 0 and gain > partners.gain[a, place - 1]:
        partners.gain[a, place] = partners.gain[a, place - 1]
        partners.other[a, place] = partners.other[a, place - 1]
        place -= 1
    partners.gain[a, place] = gain
    partners.other[a, place] = b


@compiled_entry(_TABLES)
def best_partners(
    table: PairTable,
    value: FloatArray,
    spent: FloatArray,
    stride: int,
    turn: int,
    partners: Partners,
) -> None:
    """The partners of every class that gain most.

    ``value[class]`` is what a step of a class is worth, ``spent[class, column]`` its rent and half
    of what the devices cost, infinite where it cannot run. With a ``stride`` only so large a part
    of the pairs is looked at, everybody's the same number.
    """
    num_classes, num_columns = spent.shape
    last = partners.gain.shape[1] - 1
    for top in range(0, num_classes, _TILE):
        for left in range(top, num_classes, _TILE):
            for a in range(top, min(top + _TILE, num_classes)):
                mine, value_a, gang = table.profile_of[a], value[a], table.gang[a]
                start = max(a, left)
                start += (stride - (a + start + turn) % stride) % stride
                for b in range(start, min(left + _TILE, num_classes), stride):
                    theirs, value_b = table.profile_of[b], value[b]
                    gain = -np.inf
                    for j in range(num_columns):
                        ours = table.steps_per_s[mine, theirs, j]
                        other = table.steps_per_s[theirs, mine, j]
                        if ours > 0.0 and other > 0.0:
                            earned = value_a * ours + value_b * other
                            gain = max(gain, earned - spent[a, j] - spent[b, j])
                    if gang != table.gang[b] or (a == b and table.num_jobs[a] < 2.0):
                        continue
                    if gain > partners.gain[a, last]:
                        note(partners, a, b, gain)
                    if gain > partners.gain[b, last] and a != b:
                        note(partners, b, a, gain)


@compiled_entry(_TABLES)
def settle_rents(
    table: PairTable,
    value: FloatArray,
    spent: FloatArray,
    order: ByteArray,
    least: FloatArray,
    rent: FloatArray,
) -> None:
    """Rents of the classes in ``order``, one after the other, to where no pair of theirs gains.

    ``spent`` holds the rents, as for `best_partners`, and moves with them; ``least`` is what the
    class earns alone.
    """
    num_classes, num_columns = spent.shape
    for place in range(order.shape[0]):
        a = order[place]
        mine, value_a = table.profile_of[a], value[a]
        gain = least[a] - rent[a]
        for b in range(num_classes):
            if table.gang[a] != table.gang[b] or (a == b and table.num_jobs[a] < 2.0):
                continue
            theirs, value_b = table.profile_of[b], value[b]
            for j in range(num_columns):
                ours, other = table.steps_per_s[mine, theirs, j], table.steps_per_s[theirs, mine, j]
                if ours > 0.0 and other > 0.0:
                    surplus = value_a * ours + value_b * other - spent[a, j] - spent[b, j]
                    # Of a pair within a class both pay.
                    gain = max(gain, surplus if a != b else 0.5 * surplus)
        rent[a] += gain
        for j in range(num_columns):
            spent[a, j] += gain
