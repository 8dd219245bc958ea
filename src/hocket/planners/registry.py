"""Registry of planners that do not call others by name, and chaining of planners.

Wrappers choose the form of the graph that a planner sees: coarse or single ops, renumbered by
longest path. Tuples of names are the portfolios of ``auto``.
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import require_structure
from hocket.planners.max_load import dpl, pipedream, throughput
from hocket.planners.memory.placed import order_for_memory
from hocket.planners.order import ORDERS
from hocket.planners.placement.baselines import (
    ONE_DEVICE,
    device_map_auto,
    layer_blocks,
    one_device,
)
from hocket.planners.placement.coarse import better_form, coarsely
from hocket.planners.placement.exact import optimal
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.longest_path_order import by_longest_path
from hocket.planners.placement.m_etf import m_etf
from hocket.planners.placement.m_sct import m_sct
from hocket.planners.placement.m_topo import m_topo
from hocket.planners.placement.memory_fit import memory_split, spread_memory
from hocket.planners.placement.pardnn import pardnn
from hocket.planners.shared import Planner

PLACERS: dict[str, Planner] = {
    # common splits without a planner
    ONE_DEVICE: one_device,
    "layer-blocks": layer_blocks,
    "device-map-auto": device_map_auto,
    # which op on which device
    "m-topo": by_longest_path(coarsely(m_topo)),
    "m-etf": by_longest_path(better_form(m_etf)),
    "m-sct": by_longest_path(better_form(m_sct)),
    "pardnn": by_longest_path(coarsely(pardnn)),
    # the same on single ops alone
    "m-etf-fine": by_longest_path(m_etf),
    "m-sct-fine": by_longest_path(m_sct),
    "pardnn-fine": by_longest_path(pardnn),
    "memory-split": by_longest_path(memory_split),
    "optimal": optimal,
    # the load of the busiest device
    "throughput": throughput,
    "dpl": dpl,
    "pipedream": pipedream,
}
"""Planners that make a placement from an empty plan."""

REFINERS: dict[str, Planner] = {
    "spread-memory": by_longest_path(spread_memory),
    "memory-order": order_for_memory,
    "local-search": by_longest_path(local_search),
    **{f"order-{name}": order for name, order in ORDERS.items()},
}
"""Planners that improve a given placement or its order."""

BASE: dict[str, Planner] = {**PLACERS, **REFINERS}

LATENCY_PORTFOLIO = (
    "one-device", "layer-blocks", "device-map-auto", "m-topo", "m-etf", "m-sct", "pardnn",
)  # fmt: skip
"""Planners that ``auto`` always tries if the objective is a short step."""

FINE = ("m-etf-fine", "m-sct-fine")
"""Planners that ``auto`` also tries on graphs of any size."""

FURTHER = (*FINE, "pardnn-fine")
"""Planners that ``auto`` also tries on graphs that are not large."""

CUTS = ("dpl", "pipedream")
"""Planners that ``auto`` also tries on small graphs."""

SLOW = ("throughput",)
"""Planners that ``auto`` also tries on graphs so small that a search takes few seconds.

``optimal`` is not included, because ``auto`` itself tries all plans of tiny graphs.
"""

REPAIRED = ("m-topo", "m-etf", "m-sct", "pardnn", *FURTHER)
"""Planners whose placements are repaired if they lack memory.

Baselines and expert files are not repaired.
"""

RELIEF = "memory-order"
"""First repair of a placement that lacks memory: the same devices, ops in another order."""

LAST_RESORT = "memory-split"
"""Planner for problems on which almost nothing else fits."""

THROUGHPUT_PORTFOLIO = ("layer-blocks", "pipedream", "dpl", "throughput")
"""Planners that ``auto`` tries if the objective is a small load of the busiest device."""


def chain(*planners: Planner) -> Planner:
    """Return a planner that runs the given ones in order and verifies each result."""

    def chained(problem: Problem, plan: Plan) -> Plan:
        # Checked after each step, so that an illegal plan is blamed on the planner that made it.
        for planner in planners:
            plan = planner(problem, plan)
            require_structure(plan, problem)
        return plan

    return chained
