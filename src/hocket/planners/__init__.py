"""Planners: pure functions (Problem, Plan) -> Plan, one algorithm per file.

The registry below is the only list of them; `hocket plan --planner NAME` looks here.
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.errors import unknown_name
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import require_structure
from hocket.planners.placement.layer_blocks import layer_blocks
from hocket.planners.placement.m_topo import m_topo
from hocket.planners.placement.one_device import one_device

Planner = Callable[[Problem, Plan], Plan]

PLANNERS: dict[str, Planner] = {
    "one-device": one_device,
    "layer-blocks": layer_blocks,
    "m-topo": m_topo,
}


def find_planner(name: str) -> Planner:
    """The planner of that name; several joined by ``+`` run one after another."""
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in PLANNERS:
            raise unknown_name("planner", part, PLANNERS)
    return chain(*(PLANNERS[part] for part in parts))


def chain(*planners: Planner) -> Planner:
    """One planner that runs the given ones in order and verifies each result."""

    def chained(problem: Problem, plan: Plan) -> Plan:
        for planner in planners:
            plan = planner(problem, plan)
            require_structure(plan, problem)
        return plan

    return chained
