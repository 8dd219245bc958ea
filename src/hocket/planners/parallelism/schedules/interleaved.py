"""Interleaved 1F1B: several chunks of the model per device, for a bubble that much smaller.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM"
(SC 2021). Microbatches go in groups of p: a device takes a group through its first chunk, then its
second, so each microbatch waits a chunk's time, not a device's, for the devices before it. The
bubble is (p-1)/(v m); the price is v times the transfers. O(actions).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.parts import even_parts
from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallelism.schedules.rows import rounds


def interleaved(num_devices: int, num_microbatches: int, chunks: int) -> Schedule:
    """The schedule of ``chunks`` looped stages per device; any number of microbatches."""
    groups = microbatch_groups(num_devices, num_microbatches)
    behind = np.arange(num_devices)[::-1]
    warm_up = warm_up_forwards(2 * behind, groups, num_microbatches, chunks)
    return rounds(
        "interleaved", num_devices, num_microbatches, groups, chunks=chunks, warm_up=warm_up
    )


def microbatch_groups(num_devices: int, num_microbatches: int) -> list[int]:
    """Groups that pass a chunk together: as many as have at least one microbatch per device.

    A smaller group would leave devices waiting for its next chunk. Where p does not divide m, some
    groups are larger; where m is less than p, there is one.
    """
    return list(even_parts(num_microbatches, max(1, num_microbatches // num_devices)))


def warm_up_forwards(
    ahead: NDArray[np.int64], groups: list[int], num_microbatches: int, chunks: int
) -> NDArray[np.int64]:
    """Forwards before the first backward: all chunks but one of a group, and ``ahead`` more."""
    forwards: NDArray[np.int64] = ahead + (chunks - 1) * groups[0]
    return np.minimum(forwards, num_microbatches * chunks)
