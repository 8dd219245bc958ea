"""What ops of two lanes ask of one device and of its host, so that they can run beside each other.

An op that runs alone keeps its device busy for the seconds of its arithmetic or memory traffic at
the attained rate; for the rest of its time (a launch, the wait for the host) the device could do
something else. So it asks for that share of the device, and all of it where it is longer than a
launch: a kernel that fills the device leaves nothing to the other lane. In the same way it asks for
the share of the host's time that issuing it takes; one process issues the ops of both lanes. Ops
run beside each other at their own speed as long as they ask for no more than all of either, and
slow each other down alike where they do. On a processor an op is the work of all its threads.
O(kinds · ops), numpy.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.costs import Costs, TimeSource
from hocket.cost.roofline import work_on
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster, DeviceKind


def demand_of(graph: Graph, cluster: Cluster, costs: Costs) -> FloatArray:
    """[device or host, kind, op]: shares between 0 and 1."""
    shares = [_shares(graph, kind, costs, row) for row, kind in enumerate(cluster.kinds)]
    return np.stack(shares, axis=1)


def _shares(graph: Graph, kind: DeviceKind, costs: Costs, row: int) -> FloatArray:
    takes_s = costs.op_s[row]
    if kind.is_cpu:
        return np.stack((np.ones(graph.num_ops), np.zeros(graph.num_ops)))
    parts = work_on(graph, kind, costs.settings)
    # Of a time that a file states nobody knows what it is spent on.
    parts = parts._replace(
        device_s=np.where(costs.op_source[row] == TimeSource.FILE, takes_s, parts.device_s)
    )
    works = takes_s > 0
    long_s = np.where(works, takes_s, 1.0)
    return np.stack([
        np.where(works, np.minimum(seconds / long_s, 1.0), 0.0)
        for seconds in (parts.device_s, parts.host_s)
    ])  # fmt: skip
