"""Lexicographic max-min fairness with a report of the levels at which jobs stop rising.

The allocation is that of `las`, which breaks ties lexicographically already; the answer lists every
level, so that a user sees who could rise above the lowest job and how far.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.policies.las import las
from hocket.fleet.policies.normalise import proportional_steps_per_s
from hocket.fleet.solve.check import throughputs

_MAX_LISTED = 20


def las_lexicographic(snapshot: ClusterSnapshot, warm: Warm | None = None) -> Allocation:
    """`las`, with the distinct normalised throughputs in its notes."""
    answer = las(snapshot, warm)
    due = snapshot.weight * proportional_steps_per_s(snapshot) / snapshot.gang
    reached = throughputs(snapshot, answer) / np.where(due > 0.0, due, np.inf)
    levels, counts = np.unique(np.round(reached, 6), return_counts=True)
    listed = [f"{level:g} ({count})" for level, count in zip(levels, counts, strict=True)]
    more = ", …" if len(listed) > _MAX_LISTED else ""
    notes = {**answer.notes, "reached (jobs)": ", ".join(listed[:_MAX_LISTED]) + more}
    return replace(answer, policy="las-lexicographic", notes=notes)
