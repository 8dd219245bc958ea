"""ZB-H2: twice the warm-up of ZB-H1, so that no device waits between its first and last action.

Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024). Device i starts with 2(p-1-i) forwards
and keeps 2i gradients of weights back; all hold 2p-1 microbatches. Devices then stop as staggered
as they start, which saves time only where the next step need not wait for the slowest. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.rows import rounds


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of one stage per device."""
    device = np.arange(num_devices)
    return rounds(
        "zb-h2",
        num_devices,
        num_microbatches,
        [num_microbatches],
        chunks=1,
        warm_up=np.minimum(2 * device[::-1], num_microbatches),
        weight_lag=2 * device,
    )
