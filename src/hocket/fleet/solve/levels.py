"""A max-min policy: what every job is due at each level that all of them may reach together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.price_tables import LevelDemand
from hocket.kernels.containers import table

DemandAt = Callable[[float], FloatArray] | LevelDemand
"""The progress that every class must make at a level; rising with it, 0 at level 0."""

Demands = Callable[[FloatArray, FloatArray, FloatArray], DemandAt]
"""Of (marks, number of jobs, cap), one row per class."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelProblem:
    """The level of LAS is a normalised throughput, of finish-time fairness one over a ratio."""

    rates: FloatArray
    """``[job, column]``: progress in the unit of the demand."""
    marks: FloatArray
    """``[job, mark]``: all else that the demand of a job depends on."""
    demands: Demands = field(default_factory=lambda: equal_demands)
    """No demand may exceed its cap: a job that cannot rise any further stays there while the level
    goes on rising."""
    score: Callable[[FloatArray], float] | None = None
    """The objective for the progress of each job, where it is not the level itself."""
    is_cost: bool = False
    """True if lower is better."""


def equal_demands(marks: FloatArray, num_jobs: FloatArray, cap: FloatArray) -> DemandAt:
    """Every job is due the level itself."""
    return level_demand(cap)


def level_demand(
    cap: FloatArray,
    pace: FloatArray | None = None,
    start: FloatArray | None = None,
    drag: FloatArray | None = None,
) -> LevelDemand:
    """Demands in closed form; by default the level itself, up to the cap."""
    return LevelDemand(
        pace=table(np.ones(len(cap)) if pace is None else pace, np.float64),
        start=table(np.zeros(len(cap)) if start is None else start, np.float64),
        drag=table(np.zeros(len(cap)) if drag is None else drag, np.float64),
        cap=table(cap, np.float64),
    )


def reached_level(demand_at: DemandAt, progress: FloatArray, top: float) -> float:
    """The highest level up to ``top`` whose demands are all met, to 12 digits."""

    def is_met(level: float) -> bool:
        return bool(np.all(demand_at(level) <= progress * (1.0 + 1e-13)))

    if is_met(top):
        return top
    low, high = 0.0, top
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
