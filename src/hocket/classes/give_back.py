"""Which parts get channels back when the combined answer has lost too much.

An input that the whole net has right and the parts have wrong is held against the parts of its
class and of the class that won; the parts with most of these get a larger budget and are trained
again, the others stay as they are. O(inputs · parts).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.classes.combine import Combiner

_MORE = 1.4
"""Times the work of a part that gets channels back."""


def blame(
    combiner: Combiner, scores: FloatArray, whole_scores: FloatArray, labels: LongArray
) -> FloatArray:
    """How many newly wrong answers each part has a share in."""
    said = scores.argmax(axis=1)
    is_new = (said != labels) & (whole_scores.argmax(axis=1) == labels)
    counts = np.zeros(len(combiner.classes))
    for part, classes in enumerate(combiner.classes):
        mine = np.isin(labels[is_new], classes).astype(float) + np.isin(said[is_new], classes)
        counts[part] = mine.sum()
    return counts


def larger_budgets(
    budgets: Sequence[float], blamed: FloatArray, whole_macs: float
) -> tuple[float, ...] | None:
    """Budgets for the next round; None where no blamed part can grow."""
    can_grow = np.array([budget < whole_macs for budget in budgets])
    held = np.where(can_grow, blamed, 0.0)
    if held.max(initial=0.0) <= 0:
        return None
    grows = held >= max(1.0, held.max() / 2)
    return tuple(
        min(budget * _MORE, whole_macs) if grow else budget
        for budget, grow in zip(budgets, grows, strict=True)
    )
