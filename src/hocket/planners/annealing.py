"""Simulated annealing in compiled code: random numbers and the Metropolis rule.

A change that makes things worse is taken with a chance that falls with how much worse they become
and with how little heat is left. What is changed and what it costs is each planner's own; where
all moves are drawn beforehand the same rule is a tolerance (`placement/local_search.py`).
Numbers are those of splitmix64, so they are the same on every machine. O(1) each.

Metropolis et al., "Equation of state calculations by fast computing machines", 1953; Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hocket.kernels import kernel

RandomState = NDArray[np.uint64]
"""One number, which every draw changes."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_UNIT = 1.0 / (1 << 53)


def seeded(seed: int) -> RandomState:
    """Initial state of the random sequence for a seed."""
    return np.array([seed], dtype=np.uint64)


@kernel
def draw(state: RandomState) -> float:
    """The next number in [0, 1)."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return float(mixed >> np.uint64(11)) * _UNIT


@kernel
def draw_below(state: RandomState, count: int) -> int:
    """The next whole number from 0 up to ``count`` - 1."""
    return int(draw(state) * count)


@kernel
def is_taken(rise: float, heat: float, state: RandomState) -> bool:
    """True if a change that makes the value worse by ``rise`` is accepted."""
    if rise <= 0.0:
        return True
    return heat > 0.0 and draw(state) < math.exp(-rise / heat)
