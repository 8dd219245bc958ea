"""Plans that move nothing: some blocks save their activations, the others recompute them.

Blocks save activations in descending order of the seconds that this saves per byte; of equals the
last block comes first, because its backward pass ends before the others recompute. The k-th plan
does this for the first k blocks, so it is faster and has no lower peak than the plans before it.
For a budget, bisection finds the last plan that fits. As in a greedy knapsack, the result is less
than one block away from the best of all such plans. Only requested plans are simulated: O(log
blocks) per budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property

import numpy as np

from hocket.base.arrays import BoolArray, IntArray
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.numbers import KEPT, RECOMPUTED, BlockNumbers

Judge = Callable[[str, BoolArray], Fitted]
"""Simulates the plan with this name that keeps the marked blocks."""


class KeepingPlans:
    """Plans that save activations and move nothing; ``plans[k]`` saves those of k blocks."""

    def __init__(self, numbers: BlockNumbers, judge: Judge) -> None:
        self._numbers, self._judge = numbers, judge
        self._judged: dict[int, Fitted] = {}

    @cached_property
    def order(self) -> IntArray:
        """Blocks that can be recomputed, in the order in which they save activations instead."""
        numbers = self._numbers
        freed = numbers.stay[:, KEPT] - numbers.stay[:, RECOMPUTED]
        seconds = numbers.recompute_s[:, RECOMPUTED]
        # The backward pass of the last block follows at once, so recomputing it would gain nothing.
        can_run_again = (seconds > 0) & (freed > 0) & (np.arange(len(freed)) < len(freed) - 1)
        blocks = np.flatnonzero(can_run_again)
        by_gain = np.lexsort((-blocks, -seconds[blocks] / freed[blocks]))
        return blocks[by_gain].astype(np.int32)

    def __len__(self) -> int:
        return len(self.order) + 1

    def __getitem__(self, num_kept: int) -> Fitted:
        if num_kept not in self._judged:
            is_kept = np.ones(self._numbers.num_blocks, dtype=np.bool_)
            is_kept[self.order[num_kept:]] = False
            name = f"{num_kept} of {len(self.order)} kept"
            self._judged[num_kept] = self._judge(name, is_kept)
        return self._judged[num_kept]

    def best(self, budget_bytes: float) -> Fitted | None:
        """The fastest plan within a budget; None if no plan fits."""
        # One simulation of the smallest plan settles budgets that are too small.
        if self[0].peak_bytes > budget_bytes:
            return None
        found = bisect_right(range(len(self)), budget_bytes, key=lambda k: self[k].peak_bytes)
        return self[found - 1] if found else None
