"""Looped breadth-first: every microbatch through a device's chunk before its next chunk.

Lamy-Poirier, "Breadth-first pipeline parallelism" (MLSys 2023). As GPipe with looped chunks: the
bubble is (p-1)/(v m), and the gradients of a chunk are complete early, so that summing them over
data-parallel ranks can hide behind the other chunks. All microbatches are held. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.rows import rounds


def looped_bfs(num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    """The schedule of ``chunks`` looped stages per device."""
    warm_up = np.full(num_devices, num_microbatches * chunks)
    groups = [num_microbatches]
    return rounds(
        "looped-bfs", num_devices, num_microbatches, groups, chunks=chunks, warm_up=warm_up
    )
