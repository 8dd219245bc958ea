"""Throughputs of jobs that run the best parallel plan for each gang.

The batch of a step is the same for each gang, so a step counts once, however many devices do it.
For each device type and gang size the joint search is run (`hocket.planners.parallel`): a gang may
use data, tensor or pipeline parallelism, recompute, or keep state on the host. So a model that fits
on no single device may still fit on two; the throughput is 0 if nothing fits. Gangs are on as few
servers as possible.

O(types x gangs) searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.errors import UsageError
from hocket.cost.calibrate import Calibration
from hocket.cost.roofline import estimate_costs
from hocket.fleet.throughputs.servers import Servers
from hocket.fleet.throughputs.table import JobProfile, Throughputs
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.hardware.kinds import preset_kinds
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.problem import Problem
from hocket.planners.candidates import Comparison
from hocket.planners.parallel.compare import can_split_batch, compare_parallel


@dataclass(frozen=True, eq=False, kw_only=True)
class GangPlan:
    """The best plan for a gang of one device type."""

    servers: Servers
    gang: int
    comparison: Comparison

    @property
    def steps_per_s(self) -> float:
        """Steps of the whole batch per second; 0 if nothing fits."""
        winner = self.comparison.winner
        return 0.0 if winner is None or not winner.step_s else 1.0 / winner.step_s


def plan_gangs(
    graph: Graph,
    device_types: Sequence[Servers],
    gangs: Sequence[int] = (1,),
    *,
    calibration: Calibration | None = None,
) -> list[GangPlan]:
    """Find the best plan per device type and gang size; raises `UsageError` for a batch that cannot
    be split."""
    found = []
    for servers in device_types:
        is_known = calibration is not None and servers.kind.name in calibration.kinds
        # A server of unequal devices is planned as a whole, and never two of them together.
        for gang in sorted({1} & set(gangs) if servers.is_unequal else set(gangs)):
            cluster = _gang(servers, gang)
            costs = estimate_costs(graph, cluster, calibration=calibration if is_known else None)
            problem = Problem(work=graph, cluster=cluster, op_costs=costs)
            if not can_split_batch(problem):
                raise UsageError(
                    f"the batch of {graph.name} cannot be shared between devices",
                    hint="name a model with a batch of two or more, or give throughputs",
                )
            found.append(GangPlan(servers=servers, gang=gang, comparison=compare_parallel(problem)))
    return found


def planned_throughputs(plans: Sequence[GangPlan], job_type: str) -> Throughputs:
    """Gavel's table of the planned gangs: steps of the whole batch per second."""
    names = list(dict.fromkeys(plan.servers.name for plan in plans))
    gangs = sorted({plan.gang for plan in plans})
    alone = np.zeros((len(gangs), len(names)))
    for plan in plans:
        alone[gangs.index(plan.gang), names.index(plan.servers.name)] = plan.steps_per_s
    return Throughputs(
        device_types=tuple(names),
        profiles=tuple(JobProfile(job_type, gang) for gang in gangs),
        alone=alone,
        beside=np.zeros((len(gangs), len(gangs), len(names))),
    )


def _gang(servers: Servers, gang: int) -> Cluster:
    """A cluster of one gang on as few servers as possible; unequal devices of a server count as
    one."""
    server = servers.server
    if servers.is_unequal:
        return server
    if gang <= server.num_devices:
        return server.only(server.device_names[:gang])
    is_kind = servers.hardware in preset_kinds()
    count = gang if is_kind else -(-gang // server.num_devices)
    joined = cluster_from_text(f"{count}x{servers.hardware}")
    return joined.only(joined.device_names[:gang])
