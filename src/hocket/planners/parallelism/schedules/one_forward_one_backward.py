"""1F1B: a backward as soon as there is one, so that few microbatches are in flight.

Narayanan et al., "PipeDream" (SOSP 2019) and its flushed form in DAPPLE (PPoPP 2021). Device i
of p does p-1-i forwards, then a forward and a backward by turns, then the remaining backwards. The
bubble is that of GPipe, with at most p instead of m microbatches held. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.rows import rounds


def one_forward_one_backward(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of one stage per device."""
    warm_up = np.minimum(np.arange(num_devices)[::-1], num_microbatches)
    groups = [num_microbatches]
    return rounds("1f1b", num_devices, num_microbatches, groups, chunks=1, warm_up=warm_up)
