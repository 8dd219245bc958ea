"""State of the compiled engine: named tuples of arrays, allocated once before the engine runs.

The arrays are allocated here in numpy because compiled allocations take long to compile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels.containers import Heaps, Marks, new_heaps, new_marks, zeros
from hocket.simulate.instructions import Instructions, zeroed


class Spans(NamedTuple):
    """Start and end of ops and transfers; NaN if they could not run."""

    op_start_s: FloatArray
    op_end_s: FloatArray
    transfer_ready_s: FloatArray
    transfer_start_s: FloatArray
    transfer_end_s: FloatArray


class MemoryState(NamedTuple):
    """Bytes held on each device now and at the peak, and a log of their changes."""

    now: LongArray
    peak: LongArray
    last: LongArray
    """Position of each device's newest log entry."""
    log_device: LongArray
    log_time_s: FloatArray
    log_bytes: LongArray
    size: LongArray
    """Number of log entries."""


class Flow(NamedTuple):
    """Active transfers: a heap per route, ordered by the clock value at which each transfer
    ends."""

    heaps: Heaps
    clock: FloatArray
    """Work done per transfer since the route was last empty, as of ``since_s``."""
    rate: FloatArray
    since_s: FloatArray
    num_on: LongArray
    """Number of active transfers on each channel."""
    share: FloatArray
    """Work per second that each channel does for each of its active transfers."""
    active: LongArray
    """Hops of routes with active transfers; those of channel c begin at ``on_ptr[c]``."""
    num_active: LongArray
    """Number of active hops on each channel."""
    position: LongArray
    """Position of each hop in ``active``."""
    changed: Marks
    """Channels whose number of active transfers changed in this round."""
    next_s: FloatArray
    """Tournament tree of the next end on each route: leaf ``num_leaves + r`` is route r, and node i
    is the minimum of nodes 2i and 2i + 1."""
    is_stale: BoolArray
    """True if a transfer of the route started or ended since its next end was set."""


class Agenda(NamedTuple):
    """Pending ops and transfers, their waits, and the next events."""

    user_ptr: LongArray
    users: LongArray
    """Ops that read at place p: ``users[user_ptr[p]:user_ptr[p + 1]]``."""
    events: Heaps
    ready: Heaps
    """Per queue: ready ops by priority."""
    touched: Marks
    """Queues that may have an op to start."""
    is_free: BoolArray
    cursor: LongArray
    """With a strict order: each queue's next position in the line-up."""
    running: LongArray
    """Per queue: the running op; valid only while the queue is not free."""
    due_s: FloatArray
    """Per queue: the end of its running op; end events at other times are obsolete."""
    host_free_s: FloatArray
    """Per queue: when the host has launched its last op; both streams share one host."""
    queue_free_s: FloatArray
    starting: LongArray
    """Events of this round: transfers that start, or whose latency has passed."""
    num_starting: LongArray
    limit_s: FloatArray
    """One value: the simulation stops once the step is certain to take longer."""
    left_s: FloatArray
    """Per queue: seconds of the ops that have not started; only valid if there is a limit."""
    tail_s: FloatArray
    """Per op: the longest path from its start to the end of the step; only valid if there is a
    limit."""


class EngineState(NamedTuple):
    """All state of one simulation."""

    spans: Spans
    memory: MemoryState
    flow: Flow
    schedule: Agenda


def new_state(tables: Instructions) -> EngineState:
    """Return arrays for the state; `hocket.simulate.evaluate` sets them to the start of a step."""
    runs, places, transfers, routes = tables
    num_ops, num_transfers = len(runs.device), len(transfers.place)
    num_devices, num_queues = len(places.start_bytes), len(runs.lineup_ptr) - 1
    num_routes, num_channels = len(routes.size_ptr) - 1, len(routes.capacity)
    log_size = num_devices + 2 * (num_ops + num_transfers)
    log = {"log_device": zeros(log_size), "log_time_s": np.zeros(log_size)}
    # A concurrent kernel of the other stream can delay an op once; the op then has a second end.
    num_delayed = num_ops if runs.other_stream.max(initial=-1) >= 0 else 0
    num_leaves = 1 << max(num_routes - 1, 0).bit_length()
    return EngineState(
        spans=Spans(*np.full((2, num_ops), np.nan), *np.full((3, num_transfers), np.nan)),
        memory=zeroed(MemoryState, num_devices, log_bytes=zeros(log_size), size=zeros(1), **log),
        flow=zeroed(
            Flow, num_routes,
            heaps=_heaps(num_routes, num_transfers),
            num_on=zeros(num_channels),
            share=np.zeros(num_channels),
            active=zeros(len(routes.path)),
            num_active=zeros(num_channels),
            position=zeros(len(routes.path)),
            changed=new_marks(num_channels),
            next_s=np.zeros(2 * num_leaves),
        ),
        schedule=zeroed(
            Agenda, num_queues,
            user_ptr=zeros(len(places.device) + 2),
            users=zeros(len(places.reader)),
            events=new_heaps(np.array([0, num_queues + num_transfers + num_delayed])),
            ready=_heaps(num_queues, num_ops),
            touched=new_marks(num_queues),
            queue_free_s=np.zeros(2 * num_devices),
            starting=zeros(num_transfers),
            num_starting=zeros(1),
            limit_s=np.full(1, np.inf),
            tail_s=np.zeros(num_ops),
        ),
    )  # fmt: skip


def _heaps(count: int, num_items: int) -> Heaps:
    """Return heaps for ``num_items`` entries in total; each lowering sets their borders."""
    return Heaps(np.zeros(num_items + 1), zeros(num_items + 1), zeros(count + 1), zeros(count))
