"""Max-min policies as level problems: the demand of every job at each level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hocket.base.arrays import FloatArray

DemandAt = Callable[[float], FloatArray]
"""The progress that every class must make at a level; rising with it, 0 at level 0."""

Demands = Callable[[FloatArray, FloatArray, FloatArray], DemandAt]
"""Of (marks, number of jobs, cap), one row per class."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelProblem:
    """A max-min policy: rates and demands of jobs. The level of LAS is a normalised throughput,
    that of finish-time fairness one over the ratio of finish times."""

    rates: FloatArray
    """``[job, column]``: progress in the unit of the demand."""
    marks: FloatArray
    """``[job, mark]``: all else that the demand of a job depends on."""
    demands: Demands = field(default_factory=lambda: equal_demands)
    """Demands of a class are limited by its cap: a job that cannot rise further stays there while
    the level rises.
    """
    score: Callable[[FloatArray], float] | None = None
    """The objective for the progress of each job, where it is not the level itself."""
    is_cost: bool = False
    """True if lower is better."""


def equal_demands(marks: FloatArray, num_jobs: FloatArray, cap: FloatArray) -> DemandAt:
    """The demand of every job is the level itself."""
    # The same as `level_demand(cap)` in a fifth of its time: LAS calls this ten times per solve.
    return lambda level: np.minimum(cap, level)


def level_demand(
    cap: FloatArray,
    pace: FloatArray | float = 1.0,
    start: FloatArray | float = 0.0,
    drag: FloatArray | float = 0.0,
) -> DemandAt:
    """Demands in the closed form that most policies have: from ``start`` on
    ``pace (level - start) / (1 - drag level)``, at most ``cap``."""

    def demand_at(level: float) -> FloatArray:
        ahead = np.maximum(level - start, 0.0) * pace
        left = 1.0 - drag * level
        # Nothing is left if the class is too late for this level; it then runs as fast as it can.
        is_below = ahead < cap * left
        return np.where(is_below, ahead / np.where(is_below, left, 1.0), cap)

    return demand_at


def reached_level(demand_at: DemandAt, progress: FloatArray, top: float) -> float:
    """The highest level up to ``top`` whose demands are all met, to 12 digits (bisection)."""

    def is_met(level: float) -> bool:
        return bool(np.all(demand_at(level) <= progress * (1.0 + 1e-13)))

    if is_met(top):
        return top
    low, high = 0.0, top
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
