"""Policies that maximise a sum: one linear program over classes, with a bound from its duals."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.levels import LevelProblem, level_demand
from hocket.fleet.solve.linear import LinearProgram, maximise
from hocket.fleet.solve.setup import SolveSetup, set_up, trim
from hocket.fleet.solve.sharing import (
    all_columns,
    pair_rates,
    pair_time,
    paired_time,
    rates_beside,
    shared_time,
)
from hocket.fleet.solve.water_filling import search_in


def best_sum(
    name: str, snapshot: ClusterSnapshot, step_value: FloatArray, needs: FloatArray | None = None
) -> Allocation:
    """Maximise the summed value of steps per second ``[job, type]``, while each job makes
    ``needs``."""
    needed = np.zeros(snapshot.num_jobs) if needs is None else needs
    setup = _classes(snapshot, step_value, needed)
    first = setup.classes.first
    program = LinearProgram(job_classes=setup.job_classes)
    if snapshot.pairs is not None:
        rates_of = rates_beside(snapshot, setup, snapshot.usable_steps_per_s)
        pairs = pair_rates(snapshot, setup, rates_of)
        program = LinearProgram(
            job_classes=setup.job_classes, pairs=pairs.rates, columns=all_columns(pairs)
        )
    # A margin for rounding: meeting a deadline exactly would fail.
    rounding = 1e-12 if snapshot.pairs is None else 1e-8
    solved = maximise(program, step_value[first], needed[first] * (1.0 - rounding))
    # The solution is summed over the jobs of a class.
    shares = trim(setup.expand(solved.alone / setup.job_classes.num_jobs[:, None]))
    objective = float((step_value * snapshot.steps_per_s * shares).sum())
    shared = paired = None
    if snapshot.pairs is not None and program.columns is not None:
        time = pair_time(setup.job_classes, pairs, program.columns, solved)
        profile_of = snapshot.pairs.profile_of[first]
        shared, paired = shared_time(time, profile_of), paired_time(time, setup, profile_of)
        objective += solved.pair_value
    return Allocation(
        policy=name,
        shares=shares,
        shared=shared,
        paired=paired,
        objective=objective,
        bound=solved.bound * (1.0 + 2.0 * setup.snapping),
        notes={"classes": str(len(first))},
    )


def can_serve(snapshot: ClusterSnapshot, needs: FloatArray) -> bool:
    """True if every job can make ``needs`` steps per second."""
    setup = _classes(snapshot, np.zeros((snapshot.num_jobs, 0)), needs)
    demand = needs[setup.classes.first]
    level_problem = LevelProblem(rates=snapshot.usable_steps_per_s, marks=needs[:, None])
    search = search_in(snapshot, setup, level_problem)
    level_answer = search(level_demand(demand, pace=demand), demand, None)
    return level_answer.level >= 1.0 - 1e-9


def _classes(snapshot: ClusterSnapshot, step_value: FloatArray, needs: FloatArray) -> SolveSetup:
    """Group jobs of equal throughput, value and need. Device types differ in value, so they are not
    pooled."""
    marks = np.hstack([step_value, needs[:, None]])
    level_problem = LevelProblem(rates=snapshot.usable_steps_per_s, marks=marks)
    return set_up(snapshot, level_problem, pools_types=False)
