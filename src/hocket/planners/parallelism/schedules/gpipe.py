"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe" (NeurIPS 2019). The simplest order: a device works off every microbatch
forward, then every one backward. The bubble is (p-1)/m of the work and every microbatch's
activations are held at once. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.rows import rounds


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of one stage per device."""
    warm_up = np.full(num_devices, num_microbatches)
    groups = [num_microbatches]
    return rounds("gpipe", num_devices, num_microbatches, groups, chunks=1, warm_up=warm_up)
