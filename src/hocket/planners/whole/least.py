"""What a way of sharing takes at least: what its busiest device computes, before and after others.

A device computes one op after the other, so no step is shorter than all that one device does. The
first microbatch must have passed the stages before a stage, and its last one must pass them on the
way back. Exchanges, copies and waiting count nothing. O(replicas x stages) differences of sums.
"""

from __future__ import annotations

from collections import Counter

from hocket.plan.sections import Replica, Shares
from hocket.planners.whole.tables import Tables

_SLACK = 0.995
"""Sizes between those that were priced are interpolated."""


def least_s(tables: Tables, shares: Shares) -> float:
    """Seconds that the way takes at least."""
    num_shards = len(shares.replicas) if shares.sharded else 1
    stages = shares.part_by_part().replicas  # one device of each, whose tables are those of a part
    return _SLACK * max(_replica_s(tables, replica, num_shards) for replica in stages)


def _replica_s(tables: Tables, replica: Replica, num_shards: int) -> float:
    number = {name: i for i, name in enumerate(tables.problem.cluster.device_names)}
    bounds = (0, *replica.cuts, tables.problem.graph.num_ops)
    sizes = Counter(replica.microbatches)
    longest_s = before_s = 0.0
    for stage, name in enumerate(replica.devices):
        device, first, stop = number[name], bounds[stage], bounds[stage + 1]
        passes_s = sum(
            count * _stage_s(tables, device, size, first, stop) for size, count in sizes.items()
        )
        update_s = tables.update_s[tables.row(device)]
        updates_s = float(update_s[stop] - update_s[first]) / num_shards
        longest_s = max(longest_s, passes_s + max(before_s, updates_s))
        before_s += _stage_s(tables, device, min(sizes), first, stop)
    return longest_s


def _stage_s(tables: Tables, device: int, size: int, first: int, stop: int) -> float:
    """Forward and backward of one microbatch."""
    along_s = tables.stage_s(device, size)
    return float(along_s[stop] - along_s[first])
