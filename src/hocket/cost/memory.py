"""The graph as a profiled device holds it in memory: workspaces and rounding of its allocator."""

from __future__ import annotations

from hocket.cost.allocator import with_allocator_rounding
from hocket.cost.profile import Profile, with_measured_workspace
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster


def as_profiled(graph: Graph, cluster: Cluster, profile: Profile | None) -> Graph:
    """The graph with measured workspaces and allocated sizes, for peaks as they will be measured.

    Unchanged where the profile is of no accelerator of the cluster: on processors no workspace is
    measured, and nothing rounds. Doing it twice changes nothing more.
    """
    if profile is None:
        return graph
    kind = next((kind for kind in cluster.kinds if kind.name == profile.device_kind), None)
    if kind is None or kind.is_cpu:
        return graph
    return with_allocator_rounding(with_measured_workspace(graph, profile))
