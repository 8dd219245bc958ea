"""Units of ops that a local search moves, and the devices on which each of them can run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import runnable
from hocket.planners.shared import OpGroups, groups_of


@dataclass(frozen=True, eq=False)
class SearchUnits:
    """Ops that move together, and where they can go."""

    groups: OpGroups
    can_run: BoolArray
    """[device, unit]"""

    @property
    def unit_of(self) -> LongArray:
        """The unit of each op."""
        return self.groups.of

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.groups.ptr) - 1

    def ops_of(self, unit: int) -> LongArray:
        """Ops of a unit."""
        return self.groups.ops[self.groups.ptr[unit] : self.groups.ptr[unit + 1]]

    def ops_of_all(self, units: IntArray | LongArray) -> tuple[LongArray, LongArray]:
        """Ops of several units, and for each of them its position in ``units``."""
        ptr = self.groups.ptr
        sizes = ptr[units + 1] - ptr[units]
        position = np.repeat(np.arange(len(units)), sizes)
        within = np.arange(len(position)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.groups.ops[ptr[units][position] + within], position


def units_of(problem: Problem, unit_of: IntArray) -> SearchUnits:
    """Units given as the unit of each op, numbered densely."""
    return SearchUnits(groups_of(unit_of), runnable(problem, unit_of))
