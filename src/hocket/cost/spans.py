"""Make a profile from the spans of a step that was run.

Ops with one signature do the same work, so the median of their times is used for each. The profile
is of one device type: the one on which most time was spent. O(ops log ops).
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from hocket.cost.host import HostOverhead
from hocket.cost.profile import Profile, ProfileEntry
from hocket.graph.graph import DTYPES, Graph
from hocket.hardware.cluster import Cluster

if TYPE_CHECKING:
    from hocket.base.arrays import FloatArray, IntArray


def profile_of_spans(
    graph: Graph,
    cluster: Cluster,
    op_device: IntArray,
    op_s: FloatArray,
) -> Profile:
    """Measured seconds of each signature, from the device and time of each op."""
    kinds = np.array([cluster.kinds.index(device.kind) for device in cluster.devices])
    row = kinds[op_device]
    spent = np.bincount(row, weights=op_s, minlength=len(cluster.kinds))
    chosen = int(np.argmax(spent))
    # A profile is of one device type, so ops of other types are left out.
    ops: dict[int, list[int]] = {}
    for op in np.flatnonzero(row == chosen).tolist():
        ops.setdefault(int(graph.op_signature[op]), []).append(op)
    entries = [
        ProfileEntry(
            signature=graph.signatures[signature],
            kind=graph.kind_of(members[0]),
            dtype=DTYPES[int(graph.op_dtype[members[0]])],
            flops=float(graph.flops[members[0]]),
            bytes_touched=int(graph.bytes_touched[members[0]]),
            count=len(members),
            seconds=statistics.median(float(op_s[op]) for op in members),
        )
        for signature, members in ops.items()
        if signature >= 0
    ]
    kind = cluster.kinds[chosen]
    return Profile(
        device_kind=kind.name,
        device=kind.name,
        versions={},
        host=HostOverhead(overlaps=not kind.is_cpu),
        entries=tuple(sorted(entries, key=lambda entry: entry.signature)),
    )
