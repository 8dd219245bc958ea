"""ZB-H1: 1F1B whose gradients of weights wait, so that gradients of inputs reach others sooner.

Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024). Device i keeps i gradients of weights
back and does them where 1F1B would wait at the end, which makes up for holding p-i microbatches
less in flight: every device holds p. The bubble is (p-1)(tF+tB-tW) of one stage; with looped
chunks, divided by their number. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.interleaved import microbatch_groups, warm_up_forwards
from hocket.planners.parallelism.schedules.rows import rounds


def zb_h1(num_devices: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of ``chunks`` looped stages per device."""
    groups = microbatch_groups(num_devices, num_microbatches)
    device = np.arange(num_devices)
    warm_up = warm_up_forwards(device[::-1], groups, num_microbatches, chunks)
    return rounds(
        "zb-h1",
        num_devices,
        num_microbatches,
        groups,
        chunks=chunks,
        warm_up=warm_up,
        weight_lag=device,
    )
