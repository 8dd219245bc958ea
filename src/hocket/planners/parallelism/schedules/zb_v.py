"""ZB-V: two chunks per device laid as a V, so that the device that starts also ends.

Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), section 6. The first device has the first
and the last stage; it can begin the backward of a microbatch at once, and with equal times of F, B
and W nobody waits between its first and last action while p microbatches are held. Each step of
the rhythm does one of the two chunks forward and the other one backward. O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallelism.schedules.rows import Row, code, folded, from_rows

_F, _I, _W = StageWork.FORWARD, StageWork.INPUT_GRADIENT, StageWork.WEIGHT_GRADIENT
_FIRST = [code(work, 0) for work in (_F, _I, _W)]
_SECOND = [code(work, 1) for work in (_F, _I, _W)]


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of two stages per device, as a V."""
    # The rhythm needs this many microbatches; those that do not exist are left out afterwards.
    count = max(num_microbatches, 2 * num_devices - 1)
    rows = [_row(device, num_devices, count) for device in range(num_devices)]
    return from_rows("zb-v", num_microbatches, folded(num_devices), rows)


def _row(device: int, num_devices: int, count: int) -> Row:
    behind = num_devices - device
    forward, back, weight = _FIRST
    turn_forward, turn_back, _ = _SECOND
    with_forward = count - (2 * num_devices - 1 - device)
    parts = [
        np.tile([forward], 2 * behind - 1),
        np.tile([turn_forward, forward], device),
        np.tile(_SECOND, behind),
        np.tile([*_FIRST, *_SECOND], with_forward),
        np.tile([back, weight, *_SECOND], behind - 1),
        np.tile([back, turn_back], device),
        np.tile([back, weight], behind),
        np.tile([_SECOND[2]], device),
        np.tile([weight], device),
    ]
    return np.concatenate(parts).astype(np.int64)
