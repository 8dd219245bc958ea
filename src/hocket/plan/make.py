"""Make problems from user input: a graph, a cluster by name or file, profiles and calibrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hocket.base.errors import unknown_name
from hocket.cost.calibrate import Calibration
from hocket.cost.memory import as_profiled
from hocket.cost.profile import Profile
from hocket.cost.roofline import Launches, costs_from_settings, estimate_costs
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.problem import OBJECTIVES, TRANSFER_MODES, Objective, Problem, TransferMode

ON_FILE = "file"
"""``on="file"``: the devices that the graph's own file states."""
ON_THIS_MACHINE = "auto"
"""``on="auto"``: the devices of this machine."""


def make_problem(
    graph: Graph,
    on: str | Path | Cluster,
    *,
    transfers: TransferMode = "shared",
    objective: Objective = "latency",
    contiguous: bool = False,
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    seed: int = 0,
) -> Problem:
    """Make a problem from a graph and a cluster, or from the cluster's name or file.

    ``headroom_bytes`` of each device are left free; by default as many as its device type
    states.
    """
    if transfers not in TRANSFER_MODES:
        raise unknown_name("transfer mode", str(transfers), TRANSFER_MODES)
    if objective not in OBJECTIVES:
        raise unknown_name("objective", str(objective), OBJECTIVES)
    # The file's own devices come with its memory model, which counts only the sizes of nodes.
    if on == ON_FILE:
        from hocket.graph.formats.dnn_partitioning import on_file_terms
        from hocket.hardware.stated import stated_cluster

        cluster = stated_cluster(graph.meta)
        graph = on_file_terms(graph)
    else:
        cluster = find_cluster(on)
    if headroom_bytes is not None:
        cluster = cluster.with_headroom(headroom_bytes)
    # Before the costs, because profiles change workspaces and rounding of sizes.
    graph = as_profiled(graph, cluster, profile)
    costs = estimate_costs(graph, cluster, profile=profile, calibration=calibration)
    return Problem(
        work=graph, cluster=cluster, op_costs=costs, transfers=transfers, objective=objective,
        contiguous=contiguous, seed=seed,
    )  # fmt: skip


def launched(problem: Problem, launches: Launches) -> Problem:
    """Return the problem with op times of eager launches, or of a replayed CUDA graph."""
    settings = {**problem.costs.settings, "launches": launches}
    costs = costs_from_settings(problem.graph, problem.cluster, settings)
    return replace(problem, op_costs=costs)


def find_cluster(on: str | Path | Cluster) -> Cluster:
    """Return a cluster given by itself, by its name or by its file."""
    if isinstance(on, Cluster):
        return on
    if on == ON_THIS_MACHINE:
        from hocket.hardware.detect import detect

        return detect()
    from hocket.hardware.shorthand import cluster_from_text

    return cluster_from_text(str(on))
