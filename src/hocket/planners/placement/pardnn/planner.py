"""ParDNN: cut the graph into paths, map them by the work in their spans, refine, fit memory.

Heavy paths keep the most expensive transfers on one device; the other paths are laid beside them
where there is room at the time when they run. Refinement moves paths and single ops by the same
measure, then along the simulated critical path; at last ops move away from devices that overflow.
O(K · (ops log ops + reads)) and a limited number of simulations.

Qararyah et al., "A computational-graph partitioning method for training memory-constrained DNNs",
Parallel Computing 2021.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.arrays import IntArray
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import workers
from hocket.planners.placement.pardnn.memory import fit_memory
from hocket.planners.placement.pardnn.trial import Trial, Trials, better
from hocket.planners.placement.pardnn.work import devices_of, work_of

_SIMULATED_OPS = 600_000
"""Rounds along the critical path end when they have simulated this many ops."""


def pardnn(problem: Problem, plan: Plan) -> Plan:
    """Place every op by ParDNN, and order the ops by bottom level where that is better."""
    num_ops = problem.graph.num_ops
    if num_ops == 0:
        return replace(plan, device_of=np.zeros(0, dtype=np.int32))
    from hocket.planners.placement.pardnn.critical import improve
    from hocket.planners.placement.pardnn.mapping import map_paths
    from hocket.planners.placement.pardnn.refinement import refine
    from hocket.planners.placement.pardnn.slices import slice_paths

    devices = devices_of(problem)
    work = work_of(problem, devices)
    slices = slice_paths(work, len(workers(problem)))
    mapping = map_paths(problem, work, devices, slices)
    trials, mapped = _better_order(
        Trials(problem, work, devices), mapping.ledger.device.astype(np.int32)
    )
    refined = refine(work, slices, mapping, trials, mapped)
    num_rounds = min(problem.cluster.num_devices + 1, _SIMULATED_OPS // num_ops)
    improved = improve(work, mapping.facts, trials, refined, num_rounds)
    best = _finished(problem, trials, improved)
    notes = {
        "primary": slices.num_primary,
        "paths": slices.num_paths,
        "merged": mapping.num_merged,
    }
    return replace(
        plan,
        device_of=best.device_of,
        order=None,
        priority=best.priority,
        notes={**plan.notes, **notes},
    )


def _better_order(trials: Trials, device_of: IntArray) -> tuple[Trials, Trial]:
    """The order in which a placement has the shorter step, and its trial."""
    by_position, by_level = trials(device_of), trials.in_other_order()(device_of)
    if better(by_position, by_level) is by_level:
        return trials.in_other_order(), by_level
    return trials, by_position


def _finished(problem: Problem, trials: Trials, trial: Trial) -> Trial:
    """The trial in its better order, or on one device if splitting gains nothing, in memory."""
    best = better(trial, trials.in_other_order()(trial.device_of))
    best = better(best, _one_device(trials, best))
    if best.overflow_bytes == 0:
        return best
    device_of = fit_memory(problem, best.device_of, best.priority)
    return best._replace(device_of=device_of)


def _one_device(trials: Trials, trial: Trial) -> Trial:
    """All ops on the fastest device, if that is shorter; else the trial itself."""
    total_s = trials.devices.op_s.sum(axis=1)
    fastest = int(np.argmin(total_s))
    if not total_s[fastest] < trial.step_s:
        return trial
    return trials(np.full_like(trial.device_of, fastest))
