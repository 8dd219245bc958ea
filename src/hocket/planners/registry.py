"""Registry of planners that do not call others, and chaining of planners."""

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
from hocket.planners.placement.coarse import coarsely, forward_coarsely
from hocket.planners.placement.exhaustive import optimal
from hocket.planners.placement.forms import better_form
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.m_etf import m_etf
from hocket.planners.placement.m_sct import m_sct
from hocket.planners.placement.m_topo import m_topo
from hocket.planners.placement.memory import memory_split, spread_memory
from hocket.planners.placement.pardnn import pardnn
from hocket.planners.placement.structural import by_structure
from hocket.planners.shared import Planner

PLACERS: dict[str, Planner] = {
    # splits that people get without a planner
    ONE_DEVICE: one_device,
    "layer-blocks": layer_blocks,
    "device-map-auto": device_map_auto,
    # which op on which device
    "m-topo": by_structure(coarsely(m_topo)),
    "m-etf": by_structure(better_form(m_etf)),
    "m-sct": by_structure(better_form(m_sct)),
    "pardnn": by_structure(coarsely(pardnn)),
    # the same on the whole step, the forward pass or single ops alone
    "m-etf-step": by_structure(coarsely(m_etf)),
    "m-sct-step": by_structure(coarsely(m_sct)),
    "m-etf-fine": by_structure(m_etf),
    "m-sct-fine": by_structure(m_sct),
    "pardnn-forward": by_structure(forward_coarsely(pardnn)),
    "pardnn-fine": by_structure(pardnn),
    "memory-split": by_structure(memory_split),
    "optimal": optimal,
    # the load of the busiest device
    "throughput": throughput,
    "dpl": dpl,
    "pipedream": pipedream,
}
"""Planners that start from nothing."""

REFINERS: dict[str, Planner] = {
    "spread-memory": by_structure(spread_memory),
    "memory-order": order_for_memory,
    "local-search": by_structure(local_search),
    **{f"order-{name}": order for name, order in ORDERS.items()},
}
"""Planners that go on from a placement."""

BASE: dict[str, Planner] = {**PLACERS, **REFINERS}

LATENCY_PORTFOLIO = (
    "one-device", "layer-blocks", "device-map-auto", "m-topo", "m-etf", "m-sct", "pardnn",
)  # fmt: skip
"""Planners that ``auto`` always tries for a short step."""

FINE = ("m-etf-fine", "m-sct-fine")
"""Planners that ``auto`` also tries on graphs of any size."""

FURTHER = ("m-etf-step", "m-sct-step", *FINE, "pardnn-forward", "pardnn-fine")
"""Planners that ``auto`` also tries on graphs that are not large."""

CUTS = ("dpl", "pipedream")
"""Planners that ``auto`` also tries on small graphs."""

SLOW = ("throughput",)
"""Planners that ``auto`` also tries on graphs so small that a search takes few seconds.

``optimal`` is not included, because ``auto`` itself tries all plans of tiny graphs.
"""

BY_POSITION = (
    "one-device", "layer-blocks", "device-map-auto", "dpl", "pipedream", "throughput",
)  # fmt: skip
"""Planners whose placement or order depends on the order of ops in the file."""

MENDED = ("m-topo", "m-etf", "m-sct", "pardnn", *FURTHER)
"""Planners whose placements are mended where they lack memory; what baselines and experts lack is
shown as it is."""

RELIEF = "memory-order"
"""First repair where a placement lacks memory: the same devices, ops in another order."""

LAST_RESORT = "memory-split"
"""Planner for problems where almost nothing else fits."""

THROUGHPUT_PORTFOLIO = ("layer-blocks", "pipedream", "dpl", "throughput")
"""Planners that ``auto`` tries for a small load of the busiest device."""


def chain(*planners: Planner) -> Planner:
    """One planner that runs the given ones in order and verifies each result."""

    def chained(problem: Problem, plan: Plan) -> Plan:
        for planner in planners:
            plan = planner(problem, plan)
            require_structure(plan, problem)
        return plan

    return chained
