"""What the host adds to op times: the time to dispatch each op, and who waits for whom.

A device with a queue (CUDA) runs behind the host: an op starts when the one before it has ended and
the host has launched it, and in a loop of steps the launches of one step follow those of the last.
The steady state of that queue has a closed form with one running maximum; a device without a queue
(a processor) simply pays dispatch and work one after the other. O(ops), numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """Seconds that the host spends per dispatched op in eager mode, by phase of the step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    overlaps: bool = False
    """Whether the device works while the host goes on (a CUDA stream), or the host does the work
    itself (a processor)."""


def with_host_overhead(
    kernel_s: FloatArray, op_phase: NDArray[np.int8], host: HostOverhead
) -> FloatArray:
    """Op times that include the wait for their launch; views cost nothing but their dispatch.

    Where the device overlaps, the times of one step add up to the larger of all kernel times and
    all dispatch times: a device that is always behind hides the host, a host that is always behind
    leaves gaps, and each gap is added to the op in front of which it lies.
    """
    by_phase = np.array([host.forward_s, host.backward_s, host.optimizer_s])
    host_s: FloatArray = by_phase[op_phase]
    if not host.overlaps:
        return kernel_s + host_s
    if host_s.sum() <= kernel_s.sum():
        return kernel_s
    # Op i ends at max over j <= i of (launch of j + kernels j..i). Two steps in a row reach the
    # steady state when the host is the slower one; the second is the answer.
    kernels, launched = np.tile(kernel_s, 2), np.cumsum(np.tile(host_s, 2))
    work = np.cumsum(kernels)
    ends = work + np.maximum.accumulate(launched - (work - kernels))
    op_s: FloatArray = np.diff(ends[len(kernel_s) - 1 :])
    return op_s
