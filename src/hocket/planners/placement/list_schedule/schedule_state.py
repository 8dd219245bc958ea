"""Tables of the compiled event loop: ops, tensors, devices and so on, with ops by rank.

A table is an array of structs rather than a tuple of columns: compiled functions then pass a few
arrays on instead of dozens, which is twice as fast, and the fields of one entry are adjacent in
memory.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels.containers import Heaps

Rows = NDArray[np.void]

WAITING, READY, PLACED = 0, 1, 2
"""Status of an op."""
# For plain numbers as arguments the compiler would make a further version of each function.
LATER, ARRIVED, DUE, PARKED = (cast(int, np.int64(heap)) for heap in range(4))
"""The heaps of a device.

LATER: inputs arrive after now; key: arrival time. ARRIVED: they arrived after the device's last op
ended; key: arrival time. DUE: they arrived before; key: rank. PARKED: the op does not fit; key:
bytes that it needs.
"""
NUM_HEAPS = 4
MAX_LISTED = 6
"""Number of readers above which a tensor has a row in the directory of copies."""

OP_ROW = np.dtype(
    [
        ("group", "i8"),  # every op has one; most are alone in theirs
        ("read_start", "i8"),
        ("read_stop", "i8"),
        ("made_start", "i8"),
        ("made_stop", "i8"),
        ("taken_bytes", "i8"),  # workspace, and results that are freed again
        ("workspace_bytes", "i8"),
        ("most_bytes", "i8"),  # taken at most, wherever it runs and whatever came there before
        ("favourite", "i8"),  # the op for which a device stays awake after this one, or -1
        ("spared_s", "f8"),  # how long it waits at most for one that is not yet ready
        ("status", "i8"),
        ("waits", "i8"),  # reads of tensors whose producers have not ended
        ("device", "i8"),  # -1 until placed
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
TENSOR_ROW = np.dtype(
    [
        ("producer", "i8"),  # rank, or -1 if it exists before the step
        ("family", "i8"),  # the owner of the storage that it lives in
        ("owner", "i8"),  # device, -1 while unknown; for tensors from before the step see family
        ("made_s", "f8"),
        ("work", "f8"),
        ("last_copy", "i8"),  # the newest copy, or -1
        ("directory", "i8"),  # its row in the directory, or -1
        ("is_everywhere", "i8"),
        ("num_bytes", "i8"),
        ("alias_of", "i8"),
        ("user_start", "i8"),
        ("user_stop", "i8"),
        ("is_held", "i8"),
        ("storage", "i8"),  # on its owner device; -1 if it is never released
        ("num_left", "i8"),  # readers that have not ended
    ]
)
COPY_ROW = np.dtype(
    [
        ("device", "i8"),
        ("arrival_s", "f8"),
        ("older", "i8"),  # the copy of the same tensor before this one, or -1
    ]
)
ROUTE_ROW = np.dtype(
    [
        ("latency_s", "f8"),
        ("unit_s", "f8"),  # seconds per unit of a tensor's work
        ("least_latency_s", "f8"),  # the smallest from this source to any other device
        ("least_unit_s", "f8"),
        ("send_queue", "i8"),  # -1 where transfers do not wait for each other
        ("receive_queue", "i8"),
    ]
)
DEVICE_ROW = np.dtype(
    [
        ("kind", "i8"),
        ("memory_bytes", "i8"),
        ("used_bytes", "i8"),
        ("peak_bytes", "i8"),
        ("avail_s", "f8"),  # end of the last op
        ("last_op", "i8"),
        ("wake_s", "f8"),  # when to look again at ops whose data was there before
        ("runs_all", "i8"),  # whether every op can run there, memory aside
        ("num_bound", "i8"),  # ready ops that must run there
    ]
)
GROUP_ROW = np.dtype(
    [
        ("member_start", "i8"),
        ("member_stop", "i8"),
        ("family_start", "i8"),
        ("family_stop", "i8"),
        ("reserve_bytes", "i8"),  # results of members that stay until the end
        ("bound", "i8"),  # the device of all members; -1 while none is placed
    ]
)
STORAGE_ROW = np.dtype(
    [
        ("device", "i8"),
        ("num_bytes", "i8"),
        ("num_living", "i8"),  # tensors in it that are still needed
        ("is_kept", "i8"),
    ]
)
ENTRY_ROW = np.dtype([("key", "f8"), ("op", "i8")])
COUNT_ROW = np.dtype(
    [
        ("most_bytes", "i8"),  # maximum that any op allocates
        ("num_copies", "i8"),
        ("stuck_op", "i8"),  # op that fits nowhere, or -1
        ("stuck_bytes", "i8"),  # least bytes it lacks on any device
    ]
)


class Net(NamedTuple):
    """Tables that determine when data arrives on a device."""

    ops: Rows
    reads: LongArray
    tensors: Rows
    copies: Rows
    directory: LongArray
    """[row, device]: copy on the device or -1; only tensors with many readers have a row."""
    routes: Rows
    """[src, dst]: latency, seconds per unit of work, and queues."""
    queue_free_s: FloatArray


class Queues(NamedTuple):
    """Four heaps per device, each large enough for all ops; a device has an op in at most one."""

    entries: Rows
    size: LongArray
    where: IntArray
    """[op, device]: position in the heap times ``NUM_HEAPS`` plus the heap; -1 if in none."""


class ScheduleState(NamedTuple):
    """All tables of the event loop."""

    net: Net
    queues: Queues
    devices: Rows
    kind_s: FloatArray
    """[device type, op]: seconds; infinite if the op or another of its group cannot run there."""
    groups: Rows
    members: LongArray
    families: LongArray
    """Storages that exist before the step and that each group reads, listed group by group."""
    family_ptr: LongArray
    readers: LongArray
    """Groups that read storage f: ``readers[family_ptr[f]:family_ptr[f + 1]]``."""
    users: LongArray
    storages: Rows
    """Entry t: storage of tensor t on its owner device; num_tensors + c: storage of copy c."""
    remote: Heaps
    """Ready ops that so far are only in the heaps of devices that hold a certain input.

    Key: the time before which that input cannot reach any other device.
    """
    running: Heaps
    """Ops that have not ended, keyed by their end."""
    counts: Rows
    """A single row of scalars (``COUNT_ROW``)."""
