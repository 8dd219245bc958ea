"""What a local search moves: units of ops, and the devices on which each of them can run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray, LongArray, pointers
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import runnable


@dataclass(frozen=True, eq=False)
class SearchUnits:
    """Ops that move together."""

    unit_of: IntArray
    ptr: LongArray
    """Unit u has ops ``ops[ptr[u]:ptr[u + 1]]``, ascending."""
    ops: LongArray
    can_run: NDArray[np.bool_]
    """[device, unit]"""

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.ptr) - 1

    def ops_of(self, unit: int) -> LongArray:
        """Ops of a unit."""
        return self.ops[self.ptr[unit] : self.ptr[unit + 1]]

    def ops_of_all(self, units: IntArray | LongArray) -> tuple[LongArray, LongArray]:
        """Ops of several units, and for each of them its position in ``units``."""
        sizes = self.ptr[units + 1] - self.ptr[units]
        position = np.repeat(np.arange(len(units)), sizes)
        within = np.arange(len(position)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self.ops[self.ptr[units][position] + within], position


def units_of(problem: Problem, unit_of: IntArray) -> SearchUnits:
    """Units given as the unit of each op, numbered densely."""
    sizes = np.bincount(unit_of)
    return SearchUnits(
        unit_of=unit_of,
        ptr=pointers(sizes),
        ops=np.argsort(unit_of, kind="stable"),
        can_run=runnable(problem, unit_of),
    )
