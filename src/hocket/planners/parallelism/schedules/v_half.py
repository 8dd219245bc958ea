"""V-Half: a V of two chunks with about half the activations of 1F1B.

Qi et al., "Pipeline parallelism with controllable memory" (NeurIPS 2024). One microbatch's actions
are laid out in unit slots, each pass from device to device at a steady pace, and the next
microbatch follows six slots later; how long a microbatch stays on a device, over six, is what it
holds. Paces that add up to half those of ZB-V halve the memory (floor(p/2) + 1 microbatches are
held), at a bubble of a little more than half that of 1F1B. O(actions).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallelism.schedules.rows import code, folded, from_rows

_PERIOD = 6
_PACES = (2, 1, 2, 1)
"""Slots from a device to the next: forward there and back, backward there and back."""
_EVEN_GAPS, _ODD_GAPS = (4, 1, 5), (2, 1, 1)
"""Slots between these passes, for an even and an odd number of devices: of all gaps with which no
two actions of a device ever meet, those that hold and wait least."""
_CODES = [
    code(work, chunk)
    for work in (StageWork.FORWARD, StageWork.INPUT_GRADIENT, StageWork.WEIGHT_GRADIENT)
    for chunk in (0, 1)
]


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """The schedule of two stages per device, as a V."""
    slot = _with_weights(_passes(num_devices, *(_ODD_GAPS if num_devices % 2 else _EVEN_GAPS)))
    later = _PERIOD * np.arange(num_microbatches)
    codes = np.repeat(_CODES, num_microbatches)
    rows = [
        codes[np.argsort((slot[:, device, None] + later).ravel(), kind="stable")]
        for device in range(num_devices)
    ]
    return from_rows("v-half", num_microbatches, folded(num_devices), rows)


def _passes(num_devices: int, turn: int, loss: int, back_turn: int) -> NDArray[np.int64]:
    """[forward 0 and 1, backward 0 and 1; device]: slots with these gaps where passes meet."""
    there, back = np.arange(num_devices), np.arange(num_devices)[::-1]
    forward = _PACES[0] * there
    forward_back = forward[-1] + turn + _PACES[1] * back
    backward = forward_back[0] + loss + _PACES[2] * there
    backward_back = backward[-1] + back_turn + _PACES[3] * back
    return np.stack([forward, forward_back, backward_back, backward])


def _with_weights(slot: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add the gradients of weights: each in the first free slot after that of the inputs."""
    num_devices = slot.shape[1]
    weights = np.zeros((2, num_devices), dtype=np.int64)
    for device in range(num_devices):
        taken = set((slot[:, device] % _PERIOD).tolist())
        for chunk in (1, 0):
            at = int(slot[2 + chunk, device]) + 1
            while at % _PERIOD in taken:
                at += 1
            taken.add(at % _PERIOD)
            weights[chunk, device] = at
    return np.concatenate([slot, weights])
