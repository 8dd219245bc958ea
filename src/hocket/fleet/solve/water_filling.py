"""Lexicographic max-min by water filling: raise all jobs together, fix those that cannot rise,
repeat.

A job is fixed if it already runs all the time on the fastest column left to it, or if more progress
has a cost at the prices at which the others stopped. (For the principle see Bertsekas and Gallager,
Data Networks, section 6.5.2.) A pool with a price stays full, so jobs that rise further use pools
without a price. Hence there are at most as many levels as pools, and the fixed jobs are found
without integer programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.fleet.allocation import Allocation, PairedTime, SharedTime, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.solve.levels import DemandAt, LevelProblem, reached_level
from hocket.fleet.solve.partitioned import highest_level_of_parts
from hocket.fleet.solve.prices import LevelAnswer, highest_level
from hocket.fleet.solve.setup import SolveSetup, set_up, trim
from hocket.fleet.solve.sharing import (
    RatesOf,
    highest_shared_level,
    no_pairs,
    pair_rates,
    paired_time,
    rates_beside,
    shared_time,
)

NOT_HIGHER = 1e-11
"""Relative rise that some job must be able to make for another level to be computed."""
MARGIN = 1e-10
"""Relative reduction of the demands of fixed jobs; otherwise rounding would make full pools look
overfull.
"""
_ROUNDING, _ROUNDING_SHARED = 1e-8, 1e-6
"""Accuracy of met demands: by prices, and by a solver of seven digits."""
MANY = 300
"""Number of classes from which on jobs that share devices are solved in parts, at the first level
only.
"""
MAX_LEVELS = 8
"""Maximum number of levels. Without sharing there are at most as many as device types, mostly one
or two.
"""


def climb(
    name: str, snapshot: ClusterSnapshot, level_problem: LevelProblem, warm: Warm | None = None
) -> Allocation:
    """Lexicographic max-min allocation: raise the lowest job as high as possible, then the next
    lowest, and so on."""
    setup = set_up(snapshot, level_problem)
    level_answers = fill(
        setup, level_problem, search_in(snapshot, setup, level_problem, warm), warm
    )
    shares = trim(setup.expand(level_answers[-1].shares))
    progress = (level_problem.rates * shares).sum(axis=1)
    if level_answers[-1].pairs is not None:
        progress = progress + level_answers[-1].pairs.progress[setup.classes.of]
    rounding = _ROUNDING if snapshot.pairs is None else _ROUNDING_SHARED
    objective, bound = _measure(setup, level_problem, progress, level_answers[0], rounding)
    shared, paired = _together(snapshot, setup, level_answers[-1])
    return Allocation(
        policy=name,
        shares=shares,
        shared=shared,
        paired=paired,
        objective=objective,
        bound=bound,
        notes=_notes(snapshot, setup, level_answers),
        warm=level_answers[0].warm,
    )


def _measure(
    setup: SolveSetup,
    level_problem: LevelProblem,
    progress: FloatArray,
    level_answer: LevelAnswer,
    rounding: float,
) -> tuple[float, float]:
    """Objective of what the jobs get, and its bound, widened by the error of snapping."""
    classes, slack, ceiling = setup.classes, 2.0 * setup.snapping + 1e-11, level_answer.ceiling
    demand_at = _demands(setup, level_problem, _caps(setup))
    if level_problem.score is None:
        met = np.full(len(classes.first), np.inf)
        # A job that is as high as possible except for rounding must not determine the level.
        np.minimum.at(met, classes.of, progress * (1.0 + slack + rounding))
        return reached_level(demand_at, met, ceiling), ceiling * (1.0 + slack)
    # A job that can run nowhere must not decide the objective.
    best = np.where(setup.can_run, demand_at(ceiling)[classes.of], np.inf)
    bound = level_problem.score(best) * (1.0 - slack if level_problem.is_cost else 1.0 + slack)
    return level_problem.score(np.where(setup.can_run, progress, np.inf)), bound


def _demands(setup: SolveSetup, level_problem: LevelProblem, cap: FloatArray) -> DemandAt:
    return level_problem.demands(
        level_problem.marks[setup.classes.first], setup.job_classes.num_jobs, cap
    )


def _caps(setup: SolveSetup) -> FloatArray:
    return np.asarray(setup.job_classes.rates.max(axis=1, initial=0.0))


def fill(
    setup: SolveSetup,
    level_problem: LevelProblem,
    search: Callable[[DemandAt, FloatArray, Warm | None], LevelAnswer],
    warm: Warm | None,
) -> list[LevelAnswer]:
    """Compute levels until no job can rise further."""
    cap = _caps(setup)
    level_answers: list[LevelAnswer] = []
    while True:
        try:
            level_answer = search(_demands(setup, level_problem, cap), cap, warm)
        except NoFeasiblePlanError:
            if not level_answers:
                raise
            # Rounding made the next level infeasible; the levels found so far stay legal.
            return level_answers
        level_answers.append(level_answer)
        can_rise = level_answer.cap > level_answer.demand * (1.0 + NOT_HIGHER)
        if not can_rise.any() or len(level_answers) >= MAX_LEVELS:
            return level_answers
        # Fixed jobs give up a small margin; otherwise rounding would make full pools look overfull.
        cap, warm = np.where(can_rise, level_answer.cap, _held(level_answer)), level_answer.warm


def search_in(
    snapshot: ClusterSnapshot,
    setup: SolveSetup,
    level_problem: LevelProblem,
    warm: Warm | None = None,
) -> Callable[[DemandAt, FloatArray, Warm | None], LevelAnswer]:
    """Choose the search for the highest level: without pairs, with pairs, or in parts."""
    job_classes = setup.job_classes
    if snapshot.pairs is None:
        return lambda demand_at, cap, warm: highest_level(job_classes, demand_at, cap, warm)
    rates_of = rates_beside(snapshot, setup, level_problem.rates)
    if len(job_classes.gang) >= MANY:
        return _search_parts(snapshot, setup, rates_of)
    pairs = pair_rates(snapshot, setup, rates_of)
    return lambda demand_at, cap, warm: highest_shared_level(
        job_classes, pairs, demand_at, cap, warm
    )


def _search_parts(
    snapshot: ClusterSnapshot, setup: SolveSetup, rates_of: RatesOf
) -> Callable[[DemandAt, FloatArray, Warm | None], LevelAnswer]:
    job_classes = setup.job_classes

    def search(demand_at: DemandAt, cap: FloatArray, warm: Warm | None) -> LevelAnswer:
        alone = highest_level(job_classes, demand_at, cap, warm)
        if np.all(alone.demand >= cap * (1.0 - _ROUNDING)):
            return replace(alone, pairs=no_pairs(len(cap)))
        return highest_level_of_parts(
            job_classes,
            lambda part: pair_rates(snapshot, setup, rates_of, part),
            rates_of,
            demand_at,
            cap,
            alone,
            warm,
        )

    return search


def _held(level_answer: LevelAnswer) -> FloatArray:
    return np.minimum(level_answer.demand, level_answer.cap) * (1.0 - MARGIN)


def _together(
    snapshot: ClusterSnapshot, setup: SolveSetup, level_answer: LevelAnswer
) -> tuple[SharedTime | None, PairedTime | None]:
    if snapshot.pairs is None or level_answer.pairs is None:
        return None, None
    profile_of = snapshot.pairs.profile_of[setup.classes.first]
    return shared_time(level_answer.pairs, profile_of), paired_time(
        level_answer.pairs, setup, profile_of
    )


def _notes(
    snapshot: ClusterSnapshot, setup: SolveSetup, level_answers: list[LevelAnswer]
) -> dict[str, str]:
    notes = {"classes": str(len(setup.classes.first)), "levels": str(len(level_answers))}
    left_out = np.flatnonzero(~setup.can_run)
    if len(left_out):
        names = ", ".join(snapshot.ids[job] for job in left_out[:20])
        notes["cannot run"] = names + (", …" if len(left_out) > 20 else "")
    return notes
