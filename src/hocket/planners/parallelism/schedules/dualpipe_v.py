"""DualPipeV: a V of two chunks whose forwards and backwards go in pairs.

DeepSeek-AI, "DeepSeek-V3 technical report" (2024), in the form with one copy of the weights that
halves DualPipe at its middle. Every forward of one chunk stands beside a backward of the other, so
that a runtime may hide the transfers of either behind the work of its partner; backwards are split
only at the start and the end, where others wait for them. p + 1/2 microbatches are held.
O(actions).
"""

from __future__ import annotations

import numpy as np

from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallelism.schedules.rows import Row, code, folded, from_rows

_F, _B, _I, _W = (
    [code(work, chunk) for chunk in (0, 1)]
    for work in (
        StageWork.FORWARD,
        StageWork.BACKWARD,
        StageWork.INPUT_GRADIENT,
        StageWork.WEIGHT_GRADIENT,
    )
)


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of two stages per device, as a V."""
    # The rhythm needs this many microbatches; those that do not exist are left out afterwards.
    count = max(num_microbatches, 2 * num_devices)
    rows = [_row(device, num_devices, count) for device in range(num_devices)]
    return from_rows("dualpipe-v", num_microbatches, folded(num_devices), rows)


def _row(device: int, num_devices: int, count: int) -> Row:
    behind = num_devices - 1 - device
    ending = _ending(device)
    late = [action + 1 for action in ending if action in _I]
    parts = [
        np.tile([_F[0]], 2 * behind),
        np.tile([_F[0], _F[1]], device + 1),
        np.tile([_I[1], _W[1], _F[1]], behind),
        np.tile([_F[0], _B[1], _F[1], _B[0]], count - 2 * num_devices + device + 1),
        np.tile([_B[1], _F[1], _B[0]], behind),
        np.array(ending),
    ]
    # Each gradient of weights that waits gives its place to the next one, oldest first.
    waiting = [*late, *[_W[0]] * behind]
    last = [action for weight in waiting[:behind] for action in (weight, _I[0])]
    return np.concatenate([*parts, last, waiting[behind:]]).astype(np.int64)


def _ending(device: int) -> list[int]:
    """Backwards of both chunks by turns; the later half are split."""
    turns = [chunk for _ in range(device + 1) for chunk in (1, 0)]
    return [(_B if index < device + 1 else _I)[chunk] for index, chunk in enumerate(turns)]
