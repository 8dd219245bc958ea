"""Every plan of a tiny graph, as the simulator sees it: placements, orders, copies and frees.

Where memory is tight, what fits hangs on the moment at which each copy comes and goes, which a
constraint model cannot say; the simulator can. So every placement is bounded (its longest path, the
load of its devices, the bytes that it holds to the end) and, in the order of these bounds, tried
with every order of its devices' ops. A strict order says all that a plan can say, so what is found
is the shortest step of any plan, and where nothing is found nothing fits.
Devices that are alike are used in turn. An order is extended only as far as no device is too full
and a bound stays below the best known step. Exponential; the work is counted in runs of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import factorial, prod
from typing import TYPE_CHECKING

import numpy as np

from hocket.arrays import ByteArray
from hocket.graph.graph import Graph
from hocket.kernels.containers import zeros
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.units import find_units
from hocket.planners.placement.devices import runnable
from hocket.planners.placement.exact.symmetry import interchangeable
from hocket.planners.tables import task_table
from hocket.simulate.evaluate import Evaluator

if TYPE_CHECKING:  # compiled code is imported where it runs
    from hocket.planners.placement.exact.orders_kernel import Orders
    from hocket.planners.placement.exact.placements_kernel import Placements

MAX_OPS = 20
_MAX_PLACEMENTS = 1 << 17


@dataclass(frozen=True, eq=False)
class Answer:
    """The best plan that was found and what is known of all others."""

    plan: Plan | None
    """None where nothing better than the known step was found."""
    bound_s: float
    """No plan has a shorter step; infinite where no plan fits."""
    is_complete: bool
    """Whether every plan was tried or ruled out."""


def is_tiny(problem: Problem) -> bool:
    """Whether there are few enough placements to look at each."""
    if problem.objective != "latency" or problem.contiguous:
        return False
    # The streams of one device run side by side, which an order per device does not say.
    if not 0 < problem.graph.num_ops <= MAX_OPS or problem.graph.op_stream.any():
        return False
    units = find_units(problem.graph)
    num_able = runnable(problem, units.of_op).sum(axis=0).astype(float)
    alike = prod(factorial(len(found)) for found in _alike(problem))
    return bool(num_able.prod() <= _MAX_PLACEMENTS * alike)


def try_all(problem: Problem, plan: Plan, max_runs: int, known_s: float = np.inf) -> Answer:
    """The plan with the shortest step below ``known_s``, within ``max_runs`` runs of the engine."""
    from hocket.planners.placement.exact.orders_kernel import NOISE, Best
    from hocket.planners.placement.exact.placements_kernel import list_placements, try_placements

    evaluator, num_ops = Evaluator(problem), problem.graph.num_ops
    places, orders = _placements(problem), _orders(problem, evaluator)
    count = list_placements(evaluator.draft, places, orders)
    if count < 0:
        return Answer(None, 0.0, is_complete=False)
    line_up = np.argsort(places.bound_s[:count], kind="stable")
    line_up = line_up[np.isfinite(places.bound_s[line_up])]
    best = Best(
        np.array([known_s]), zeros(num_ops), zeros(num_ops), np.zeros(3), np.array([max_runs])
    )
    tried = try_placements(evaluator.draft, evaluator.state, places, orders, best, line_up)
    is_complete = tried == len(line_up)
    step_s = float(best.step_s[0])
    bound_s = step_s if is_complete else min(step_s, float(places.bound_s[line_up[tried]]))
    bound_s *= 1 - NOISE  # what is shorter by less was not looked for
    found = None
    if step_s < known_s:
        found = _as_plan(problem, plan, best.device, best.lineup)
    return Answer(found, bound_s, is_complete)


def _as_plan(problem: Problem, plan: Plan, device_of: ByteArray, lineup: ByteArray) -> Plan:
    sizes = np.bincount(device_of, minlength=problem.cluster.num_devices)
    order = tuple(part.astype(np.int32) for part in np.split(lineup, np.cumsum(sizes)[:-1]))
    return replace(plan, device_of=device_of.astype(np.int32), order=order, priority=None)


def _alike(problem: Problem) -> list[list[int]]:
    # What no op reads is on the first device, which is then unlike the others.
    fixed = frozenset({0}) if find_units(problem.graph).unread_bytes else frozenset()
    return interchangeable(problem, task_table(problem), fixed)


def _placements(problem: Problem) -> Placements:
    from hocket.planners.placement.exact.placements_kernel import Placements

    units, num_devices = find_units(problem.graph), problem.cluster.num_devices
    twin = np.full(num_devices, -1, dtype=np.int64)
    for devices in _alike(problem):
        twin[devices[1:]] = devices[:-1]
    return Placements(
        unit_of=units.of_op.astype(np.int64),
        can_run=runnable(problem, units.of_op),
        twin=twin,
        digit=zeros(units.count + 1),
        used=zeros(num_devices),
        held_bytes=zeros(num_devices),
        bound_s=np.zeros(_MAX_PLACEMENTS),
        code=zeros(_MAX_PLACEMENTS),
    )


def _orders(problem: Problem, evaluator: Evaluator) -> Orders:
    from hocket.planners.placement.exact.orders_kernel import Orders

    num_ops, num_devices = problem.graph.num_ops, problem.cluster.num_devices
    return Orders(
        ancestors=_ancestors(problem.graph),
        delay_s=np.zeros(len(evaluator.draft.tables.places.device)),
        tail_s=np.zeros(num_ops),
        end_s=np.zeros(num_ops),
        free_s=np.zeros(num_devices),
        left_s=np.zeros(num_devices),
        last_s=np.zeros(num_devices),
        asked=zeros(num_ops + 1),
        chosen=zeros(num_ops + 1),
        num_decided=zeros(num_devices),
    )


def _ancestors(graph: Graph) -> ByteArray:
    above = zeros(graph.num_ops)
    for src, dst in sorted(zip(*(ends.tolist() for ends in graph.edges), strict=True)):
        above[dst] |= above[src] | (1 << src)
    return above
