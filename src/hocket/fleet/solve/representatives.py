"""A few classes that stand for all: one of each cell of a k-d tree over what classes do.

Bentley, "Multidimensional binary search trees used for associative searching" (1975). Cells are
halved where they are widest until there are as many as wanted, so all hold equally many classes,
and prices in a market of representatives are nearly those of all; the class nearest to the middle
of its cell stands for it. O(classes x features x log cells).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.fleet.solve.pair_tables import ClassPairTable

_BESIDE = 16
"""Classes beside which all are looked at."""
_PAIRS_COUNT = 0.5
"""What differences beside others count against those alone."""
_APART = 100.0
"""What gangs count: jobs of different gangs never meet."""


def representatives(
    table: ClassPairTable, unit: FloatArray, count: int
) -> tuple[LongArray, LongArray]:
    """Some classes, and the cell of every class: the representative of cell i is number i.

    ``unit[class]`` is the size of what a class is owed.
    """
    features = _features(table, unit)
    cells = _halved(features, np.arange(len(unit)), count)
    cell_of = np.empty(len(unit), dtype=np.int64)
    for number, cell in enumerate(cells):
        cell_of[cell] = number
    return np.array([_middle(features, cell) for cell in cells], dtype=np.int64), cell_of


def _features(table: ClassPairTable, unit: FloatArray) -> FloatArray:
    """``[class, feature]``: its progress alone, its and the others' beside some others."""
    num_classes = len(unit)
    others = np.arange(0, num_classes, max(num_classes // _BESIDE, 1))
    profile, scale = table.profile_of, table.unit / unit
    ours = table.steps_per_s[np.ix_(profile, profile[others])] * scale[:, None, None]
    theirs = table.steps_per_s[np.ix_(profile[others], profile)] * scale[others][:, None, None]
    beside = [ours, theirs.transpose(1, 0, 2)]
    return np.hstack(
        [
            _APART * np.log(table.gang)[:, None],
            table.alone / unit[:, None],
            *(_PAIRS_COUNT * rates.reshape(num_classes, -1) for rates in beside),
        ]
    )


def _halved(features: FloatArray, cell: LongArray, count: int) -> list[LongArray]:
    if count <= 1:
        return [cell]
    widest = features[cell].std(axis=0).argmax()
    ascending = cell[np.argsort(features[cell, widest], kind="stable")]
    half = count // 2
    cut = len(cell) * half // count
    return _halved(features, ascending[:cut], half) + _halved(
        features, ascending[cut:], count - half
    )


def _middle(features: FloatArray, cell: LongArray) -> int:
    away = features[cell] - features[cell].mean(axis=0)
    return int(cell[np.square(away).sum(axis=1).argmin()])
