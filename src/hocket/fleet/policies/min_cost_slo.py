"""Least cost with deadlines: a job with a deadline must make its remaining steps by then.

OSDI 2020, section 4.2. If not all deadlines can be met, they are accepted by falling weight, then
earliest deadline, and one that does not fit with those accepted before it is dropped and named.
Deadlines of overdue jobs are dropped too: nobody knows what they need. One bisection per dropped
deadline.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.normalise import known_remaining_steps
from hocket.fleet.policies.total_throughput import values_per_step
from hocket.fleet.solve.sums import best_sum, can_serve

# Dropped deadlines that a note names at most.
_MAX_NAMED = 50


def min_cost_slo(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """`min-cost` among the allocations that meet the accepted deadlines."""
    has_deadline = np.isfinite(snapshot.deadline_s)
    can_be_kept = has_deadline & snapshot.keeps_word
    asked = np.flatnonzero(can_be_kept)
    known = replace(snapshot, remaining_steps=np.where(can_be_kept, snapshot.remaining_steps, 0.0))
    needs = known_remaining_steps(known, "min-cost-slo") / np.maximum(snapshot.deadline_s, 1e-300)
    kept = _keep(
        snapshot, asked[np.lexsort((snapshot.deadline_s[asked], -snapshot.weight[asked]))], needs
    )
    answer = best_sum(
        "min-cost-slo", snapshot, values_per_step(snapshot), np.where(kept, needs, 0.0)
    )
    dropped = [snapshot.ids[job] for job in np.flatnonzero(has_deadline & ~kept)]
    named = ", ".join(dropped[:_MAX_NAMED]) + (", …" if len(dropped) > _MAX_NAMED else "")
    notes = {"deadlines kept": str(int(kept.sum())), "deadlines dropped": named or "none"}
    return replace(answer, notes={**answer.notes, **notes})


def _keep(snapshot: ClusterSnapshot, order: NDArray[np.int64], needs: FloatArray) -> BoolArray:
    """``[job]``: has an accepted deadline, each accepted if it fits beside those before it."""
    fastest = snapshot.usable_steps_per_s.max(axis=1, initial=0.0)
    order = order[needs[order] <= fastest[order]]
    kept = np.zeros(snapshot.num_jobs, dtype=bool)
    while len(order):
        fitting = _longest_fitting(snapshot, kept, order, needs)
        kept[order[:fitting]] = True
        # The first deadline that does not fit is dropped.
        order = order[fitting + 1 :]
    return kept


def _longest_fitting(
    snapshot: ClusterSnapshot, kept: BoolArray, order: NDArray[np.int64], needs: FloatArray
) -> int:
    """Number of further deadlines, in order, that fit beside those accepted."""

    def fits(count: int) -> bool:
        tried = kept.copy()
        tried[order[:count]] = True
        return can_serve(snapshot, np.where(tried, needs, 0.0))

    if fits(len(order)):
        return len(order)
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
