"""Which calls of two lanes may not overtake each other, when all were captured on one stream.

Memory of one CUDA stream is never lent to another, so two lanes on two streams hold what each of
them holds at most, whenever that is. Captured on one stream in the planned order, one lane is given
what the other has dropped, and no more is held than planned. Afterwards the lanes are taken apart
again: a call waits for the one before it in its lane, for what it was told to wait for, and for the
call after which the memory that it was given was free; one wait is for many calls (`waiting`).
O(allocations²), numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.hardware.allocation import aligned
from hocket.planners.waves.waiting import Edge, joined_waits

NEVER = np.iinfo(np.int64).max


class Allocations(NamedTuple):
    """Memory that calls were given, in the order in which they were."""

    start: LongArray
    stop: LongArray
    given_to: LongArray
    """The call that was given it."""
    dropped_by: LongArray
    """The call after which it was free; `NEVER` where it stayed."""


def allocations_of(
    trace: Sequence[Mapping[str, Any]], streams: Collection[int], marks: int, num_calls: int
) -> Allocations:
    """What the allocator's own record says of the calls of some streams.

    Before each call something was allocated on the stream ``marks``; of a longer record the last
    calls count.
    """
    begins = [at for at, entry in enumerate(trace) if _is(entry, "alloc", (marks,))]
    if len(begins) < num_calls:
        raise ValueError(f"{len(begins)} of {num_calls} calls are in the allocator's record")
    call = -1
    rows: list[list[int]] = []
    living: dict[int, int] = {}
    for entry in trace[begins[-num_calls] :]:
        if _is(entry, "alloc", (marks,)):
            call += 1
        elif _is(entry, "alloc", streams):
            living[entry["addr"]] = len(rows)
            stop = entry["addr"] + aligned(max(entry["size"], 1))
            rows.append([entry["addr"], stop, call, NEVER])
        elif _is(entry, "free_completed", streams) and entry["addr"] in living:
            rows[living.pop(entry["addr"])][3] = call
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Allocations(*table.T)


def _is(entry: Mapping[str, Any], action: str, streams: Collection[int]) -> bool:
    return bool(entry["action"] == action and entry["stream"] in streams)


def lane_edges(
    lane: Sequence[int], told: Iterable[Edge], given: Allocations, works: Sequence[bool]
) -> list[Edge]:
    """Waits between lanes, of calls that put something on the device (``works``).

    ``lane`` is that of each call, in the order of the capture.
    """
    lanes = np.asarray(lane)
    need = np.full(len(lanes), -1, dtype=np.int64)
    for awaited, waiting in told:
        if lanes[awaited] != lanes[waiting]:
            need[waiting] = max(need[waiting], awaited)
    dropped_in = lanes[np.minimum(given.dropped_by, len(lanes) - 1)] if len(lanes) else lanes
    for row, call in enumerate(given.given_to.tolist()):
        start, stop, before = given.start[:row], given.stop[:row], given.dropped_by[:row]
        lay_there = (start < given.stop[row]) & (stop > given.start[row]) & (before <= call)
        from_other = lay_there & (dropped_in[:row] != lanes[call])
        need[call] = max(need[call], int(before[from_other].max(initial=-1)))
    return joined_waits(lanes, need, works)
