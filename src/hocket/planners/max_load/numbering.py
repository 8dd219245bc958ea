"""Which of several equal devices gets which part, where links between them differ.

Starting from the given numbering, the two devices whose exchange lowers the maximum load most are
exchanged until none does. O(rounds · devices² · cut nets).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from hocket.base.arrays import IntArray
from hocket.plan.problem import Problem
from hocket.planners.max_load.classes import DeviceClasses
from hocket.planners.max_load.moves import Heat, annealed
from hocket.planners.max_load.pieces import Pieces, gathered

_MAX_ROUNDS = 8
_NO_MOVES = Heat(num_tries=0)


def renumbered(
    problem: Problem, pieces: Pieces, classes: DeviceClasses, device_of: IntArray
) -> IntArray:
    """The same parts, on devices of the same classes."""
    used, part_of = np.unique(device_of, return_inverse=True)
    parts = gathered(pieces, part_of.astype(np.int32), merge=False)
    limit_bytes = problem.memory_bytes

    def load_s(chosen: IntArray) -> float:
        return annealed(problem, parts, chosen, _NO_MOVES, limit_bytes=limit_bytes).max_load_s

    device_of_part = used.astype(np.int32)
    best_s = load_s(device_of_part)
    for _ in range(_MAX_ROUNDS):
        tried = [(load_s(other), other) for other in _exchanges(classes, device_of_part)]
        if not tried:
            break
        least_s, chosen = min(tried, key=lambda pair: pair[0])
        if least_s >= best_s:
            break
        best_s, device_of_part = least_s, chosen
    return device_of_part[part_of]


def _exchanges(classes: DeviceClasses, device_of_part: IntArray) -> list[IntArray]:
    """All numberings in which two devices of a class have changed places."""
    found = []
    for devices in classes.devices:
        for first, second in combinations(devices.tolist(), 2):
            has_first, has_second = device_of_part == first, device_of_part == second
            if has_first.any() or has_second.any():
                changed = np.where(has_first, second, np.where(has_second, first, device_of_part))
                found.append(changed.astype(np.int32))
    return found
