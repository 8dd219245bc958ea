"""Rows of spans of a timeline, track by track, merged to the visible resolution.

A device is a row of ops. A channel is a row of its transfers, on as few tracks as keep simultaneous
transfers apart (greedy interval partitioning). Thinning merges the short spans of a track that
start in the same time bin, so a row has at most two marks per bin and track. O(spans log spans).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.simulate.analysis import crossings
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class SpanRow:
    """Marks of one device or one channel, sorted by (start, track)."""

    is_link: bool
    index: int
    """Index of the device or channel."""
    num_tracks: int
    start_s: FloatArray
    end_s: FloatArray
    track: IntArray
    span: IntArray
    """Op or transfer of a mark; for a merged mark the longest one."""
    count: IntArray
    """Number of spans merged into a mark."""
    busy_s: FloatArray
    """Time inside the mark that is filled by its spans."""

    @property
    def num_marks(self) -> int:
        """Number of marks."""
        return len(self.span)


def tracks(start: NDArray[Any], end: NDArray[Any]) -> IntArray:
    """Assign spans to tracks so that spans of a track do not overlap; ``start`` must be
    ascending."""
    assigned = np.zeros(len(start), dtype=np.int32)
    # Heaps by end time and by track number: the lowest free track is reused, which minimises
    # tracks.
    running: list[tuple[Any, int]] = []
    free: list[int] = []
    num_tracks = 0
    for span, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while running and running[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(running)[1])
        if not free:
            heapq.heappush(free, num_tracks)
            num_tracks += 1
        track = heapq.heappop(free)
        assigned[span] = track
        heapq.heappush(running, (finish, track))
    return assigned


def device_rows(timeline: Timeline) -> tuple[SpanRow, ...]:
    """One row per device with a track per stream; ops without duration have no mark."""
    rows = []
    for device in range(timeline.num_devices):
        lasting = timeline.op_end_s > timeline.op_start_s
        ops = np.flatnonzero((timeline.op_device == device) & lasting)
        ops = ops[np.argsort(timeline.op_start_s[ops], kind="stable")]
        track = np.unique(timeline.op_stream[ops], return_inverse=True)[1].astype(np.int32)
        rows.append(
            span_row(device, ops, timeline.op_start_s, timeline.op_end_s, track, is_link=False)
        )
    return tuple(rows)


def link_rows(problem: Problem, timeline: Timeline, channels: IntArray) -> tuple[SpanRow, ...]:
    """One row per channel in ``channels`` with the transfers that cross it."""
    transfer, crossed = crossings(timeline, problem)
    rows = []
    for channel in channels.tolist():
        chosen = transfer[crossed == channel]
        start, end = timeline.transfer_start_s, timeline.transfer_end_s
        chosen = chosen[end[chosen] > start[chosen]]
        chosen = chosen[np.argsort(start[chosen], kind="stable")]
        track = tracks(start[chosen], end[chosen])
        rows.append(span_row(channel, chosen, start, end, track, is_link=True))
    return tuple(rows)


def span_row(
    index: int,
    span: NDArray[Any],
    start: FloatArray,
    end: FloatArray,
    track: IntArray,
    *,
    is_link: bool,
) -> SpanRow:
    """Row of unmerged spans; ``start`` and ``end`` are the times of all spans."""
    return SpanRow(
        is_link=is_link,
        index=index,
        num_tracks=int(track.max(initial=0)) + 1,
        start_s=start[span],
        end_s=end[span],
        track=track,
        span=span.astype(np.int32),
        count=np.ones(len(span), dtype=np.int32),
        busy_s=end[span] - start[span],
    )


def part(row: SpanRow, marks: NDArray[np.intp]) -> SpanRow:
    """The row reduced to some of its marks."""
    columns = ("start_s", "end_s", "track", "span", "count", "busy_s")
    return replace(row, **{name: getattr(row, name)[marks] for name in columns})


def thinned(row: SpanRow, bin_s: float) -> SpanRow:
    """Merge marks that are shorter than ``bin_s`` and start in the same bin.

    A longer mark reaches beyond its bin, so no merged mark overlaps it.
    """
    is_short = row.end_s - row.start_s < bin_s
    if bin_s <= 0 or np.count_nonzero(is_short) < 2:
        return row
    own = np.arange(row.num_marks, dtype=np.int64)
    bins = np.floor(row.start_s / bin_s).astype(np.int64)
    num_bins = int(bins.max()) + 1
    bucket = row.track.astype(np.int64) * num_bins + bins
    # Keys above all bins are unique, so that long marks form groups of one.
    key = np.where(is_short, bucket, row.num_tracks * num_bins + own)
    order = np.lexsort((row.start_s, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    group = np.cumsum(np.diff(key[order], prepend=-1) != 0) - 1
    by_length = np.lexsort((-row.busy_s[order], group))
    longest = order[by_length[first]]
    start = row.start_s[order][first]
    track = row.track[longest]
    final = np.lexsort((track, start))
    return SpanRow(
        is_link=row.is_link,
        index=row.index,
        num_tracks=row.num_tracks,
        start_s=start[final],
        end_s=np.maximum.reduceat(row.end_s[order], first)[final],
        track=track[final],
        span=row.span[longest][final],
        count=np.add.reduceat(row.count[order], first)[final],
        busy_s=np.add.reduceat(row.busy_s[order], first)[final],
    )


def joined(row: SpanRow, gap_s: float) -> tuple[FloatArray, FloatArray]:
    """Starts and ends of the intervals that the row covers, with gaps up to ``gap_s`` filled."""
    reached = np.maximum.accumulate(row.end_s)
    opens = np.append(True, row.start_s[1:] - reached[:-1] > gap_s)[: row.num_marks]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], row.num_marks)[: len(first)] - 1
    return row.start_s[first], reached[last]


def thinned_to(rows: tuple[SpanRow, ...], horizon_s: float, max_marks: int) -> tuple[SpanRow, ...]:
    """Thin all rows to at most ``max_marks`` marks together, or one per track if that is more."""
    if sum(row.num_marks for row in rows) <= max_marks:
        return rows
    num_tracks = sum(row.num_tracks for row in rows)
    # A bin holds at most two marks per track, a short and a long one.
    bin_s = horizon_s / max(max_marks // (2 * num_tracks), 1)
    return tuple(thinned(row, bin_s) for row in rows)


def memory_envelope(
    timeline: Timeline, device: int, num_bins: int
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Memory curve of a device in at most ``num_bins`` steps, each the maximum of its bin."""
    time_s, held = timeline.memory_curve(device)
    if len(time_s) <= num_bins or timeline.makespan_s <= 0:
        return time_s, held
    edges = np.arange(num_bins, dtype=np.float64) * (timeline.makespan_s / num_bins)
    # The value at the start of a bin was set before it, and counts towards the bin's maximum too.
    before = np.searchsorted(time_s, edges, side="right") - 1
    stop = np.searchsorted(time_s, np.append(edges[1:], np.inf), side="left")
    bounds = np.column_stack((before, np.maximum(stop, before + 1))).ravel()
    padded = np.append(held, held[-1])
    return edges, np.maximum.reduceat(padded, bounds)[::2]
