"""Arrays that the compiled parts of a step work on: choices, devices and scratch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class Choice(NamedTuple):
    """Who is to run where in the round that begins."""

    kind: Counts
    """``[job]``: -1 for nobody."""
    partner: Counts
    """``[job]``: row of the job that shares the devices, -1 for none."""


class Floor(NamedTuple):
    """Devices sorted by server, and scratch of the placement."""

    holders: Counts
    """``[device, 2]``: rows, -1 for none."""
    order: Counts
    """Working devices, those of one server together."""
    server_ptr: Counts
    server_kind: Counts
    num_free: Counts
    """``[server]``."""


class Changes(NamedTuple):
    """What the placement changed."""

    stays: NDArray[np.bool_]
    started: Counts
    device_ptr: Counts
    device: Counts
    size: Counts
    """Number of started jobs, and of their devices."""
