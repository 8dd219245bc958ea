"""ParDNN: cut the graph into paths, map them by the work in their spans, refine, fit memory.

Heavy paths keep the most expensive transfers on one device; the other paths run concurrently on
devices that are idle at that time. Refinement moves paths and single ops by the same cost, then
along the simulated critical path; finally ops move away from devices that overflow. O(K · (ops log
ops + reads)) for K devices, and a limited number of simulations.

Qararyah et al., "A computational-graph partitioning method for training memory-constrained DNNs",
Parallel Computing 2021.
"""

from __future__ import annotations

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.devices import workers
from hocket.planners.placement.pardnn.memory_moves import fit_memory
from hocket.planners.placement.pardnn.simulated_trials import Trial, Trials, faster, fitter
from hocket.planners.placement.pardnn.unit_work import devices_of, units, work_of
from hocket.simulate.evaluate import Evaluator

_SIMULATED_OPS = 600_000
"""Limit on rounds along the critical path: total number of ops that they may simulate."""


def pardnn(problem: Problem, plan: Plan) -> Plan:
    """Place every op by ParDNN, and order the ops by bottom level where that is better."""
    num_ops = problem.graph.num_ops
    if num_ops == 0:
        return plan.having(Placement(np.zeros(0, dtype=np.int32)))
    from hocket.planners.placement.pardnn.critical_path_moves import improve
    from hocket.planners.placement.pardnn.path_mapping import map_paths
    from hocket.planners.placement.pardnn.path_refinement import refine
    from hocket.planners.placement.pardnn.path_slices import slice_paths

    unit = units(problem)
    devices = devices_of(problem, unit)
    work = work_of(problem, unit, devices)
    slices = slice_paths(work, len(workers(problem)))
    mapping = map_paths(problem, work, devices, slices)
    trials = Trials(problem, work, devices, Evaluator(problem))
    mapped = trials(mapping.ledger.device.astype(np.int32))
    # From here on, large graphs are simulated in the better of the two orders only.
    trials = trials.narrowed(mapped)
    fastest, fittest = refine(work, slices, mapping, trials, mapped)
    num_rounds = min(problem.cluster.num_devices + 1, _SIMULATED_OPS // num_ops)
    fastest = improve(work, mapping.facts, trials, fastest, num_rounds)
    fastest = _or_one_device(trials, trials.in_any_order(fastest))
    best = _in_memory(trials, fastest, fittest)
    counts = {
        "primary": slices.num_primary,
        "paths": slices.num_paths,
        "merged": mapping.num_merged,
    }
    return plan.placing(best.device_of, priority=best.priority).claiming(counts=counts)


def _or_one_device(trials: Trials, trial: Trial) -> Trial:
    """Return a trial with all ops on the fastest device if it fits and is faster.

    Otherwise return ``trial``.
    """
    total_s = trials.devices.op_s.sum(axis=1)
    device = int(np.argmin(total_s))
    if not total_s[device] < trial.score.step_s:
        return trial
    alone = trials(np.full_like(trial.device_of, device))
    return faster(trial, alone) if alone.score.overflow_bytes == 0 else trial


def _in_memory(trials: Trials, fastest: Trial, fittest: Trial) -> Trial:
    """Return the fastest trial if it fits in memory.

    Otherwise both trials are repaired by moving ops off overfull devices, and the one with less
    overflow, then with the shorter step, is returned. If neither fits, a single device is tried
    too.
    """
    if fastest.score.overflow_bytes == 0:
        return fastest
    best = fitter(_fitted(trials, fastest), _fitted(trials, fittest))
    if best.score.overflow_bytes == 0:
        return best
    # Where no split of these paths fits, a single device may still hold the whole step.
    # Priority None is the graph's order: bottom levels do not make a single device faster, and
    # may hold more bytes.
    device = int(np.argmin(trials.devices.op_s.sum(axis=1)))
    alone = np.full_like(best.device_of, device)
    return fitter(best, Trial(alone, None, trials.evaluate(alone, None)))


def _fitted(trials: Trials, trial: Trial) -> Trial:
    if trial.score.overflow_bytes == 0:
        return trial
    device_of = fit_memory(trials.problem, trial.device_of, trial.priority)
    return Trial(device_of, trial.priority, trials.evaluate(device_of, trial.priority))
