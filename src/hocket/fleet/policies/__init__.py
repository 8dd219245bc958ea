"""Allocation policies by name; each is a function from a snapshot to shares of time."""

from __future__ import annotations

from typing import Protocol

from hocket.base.errors import unknown_name
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.agnostic import ftf_agnostic, las_agnostic, makespan_agnostic
from hocket.fleet.policies.finish_time_fairness import finish_time_fairness
from hocket.fleet.policies.hierarchical import hierarchical, hierarchical_fifo
from hocket.fleet.policies.las import las
from hocket.fleet.policies.lists import fifo, fifo_agnostic, fifo_strict, shortest_job_first
from hocket.fleet.policies.makespan import makespan
from hocket.fleet.policies.min_cost_slo import min_cost_slo
from hocket.fleet.policies.total_throughput import max_throughput, min_cost

__all__ = ["POLICIES", "Policy", "find_policy"]


class Policy(Protocol):
    """Computes shares of time for the jobs of a snapshot; ``warm`` holds start values of an earlier
    answer."""

    def __call__(self, snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
        """Compute the allocation."""


POLICIES: dict[str, Policy] = {
    "las": las,
    "las-agnostic": las_agnostic,
    "finish-time-fairness": finish_time_fairness,
    "ftf-agnostic": ftf_agnostic,
    "makespan": makespan,
    "makespan-agnostic": makespan_agnostic,
    "hierarchical": hierarchical,
    "hierarchical-fifo": hierarchical_fifo,
    "max-throughput": max_throughput,
    "min-cost": min_cost,
    "min-cost-slo": min_cost_slo,
    "fifo": fifo,
    "fifo-strict": fifo_strict,
    "fifo-agnostic": fifo_agnostic,
    "shortest-job-first": shortest_job_first,
}


def find_policy(name: str) -> Policy:
    """Look up a policy by name; raises `UsageError` for an unknown one."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    return POLICIES[name]
