"""Simulated annealing in compiled code: random numbers and the Metropolis rule.

A change that increases the cost is accepted with a probability that falls with the increase and
with falling temperature (heat). Each planner defines its own changes and costs; if all moves are
drawn in advance, the same rule becomes a tolerance (`placement/local_search.py`). The random
numbers are those of splitmix64, so they are the same on every machine. O(1) per call.

Metropolis et al., "Equation of state calculations by fast computing machines", 1953; Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hocket.kernels import kernel

RandomState = NDArray[np.uint64]
"""Generator state, an array of one number that every draw changes."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_UNIT = 1.0 / (1 << 53)


def seeded(seed: int) -> RandomState:
    """Return the initial generator state for a seed."""
    return np.array([seed], dtype=np.uint64)


@kernel
def draw(state: RandomState) -> float:
    """Return the next random number in [0, 1)."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return float(mixed >> np.uint64(11)) * _UNIT


@kernel
def draw_below(state: RandomState, count: int) -> int:
    """Return the next random integer from 0 to ``count`` - 1."""
    return int(draw(state) * count)


@kernel
def is_taken(rise: float, heat: float, state: RandomState) -> bool:
    """True if a change that increases the cost by ``rise`` is accepted at temperature ``heat``."""
    if rise <= 0.0:
        return True
    return heat > 0.0 and draw(state) < math.exp(-rise / heat)
