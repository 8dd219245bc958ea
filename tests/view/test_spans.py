from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view.view_samples import random_sample, sample

from hocket.simulate.analysis import crossings
from hocket.view.spans import (
    device_rows,
    joined,
    link_rows,
    memory_envelope,
    thinned,
    thinned_to,
    tracks,
)

many = settings(max_examples=60, deadline=None, derandomize=True)
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30)


@many
@given(intervals)
def test_lanes_never_overlap_and_are_as_few_as_possible(spans):
    spans.sort()
    start = np.array([a for a, _ in spans], dtype=np.int64)
    end = np.array([a + n for a, n in spans], dtype=np.int64)
    track = tracks(start, end)
    for i in range(len(spans)):
        for j in range(i):
            if track[i] == track[j]:
                assert end[j] <= start[i]
    lasting = [(a, a + n) for a, n in spans if n]
    depth = max((sum(a <= t < b for a, b in lasting) for t, _ in lasting), default=0)
    if all(n for _, n in spans):
        assert track.max(initial=-1) + 1 == depth


def all_rows(made):
    channels = np.unique(crossings(made.timeline, made.problem)[1])
    return (*device_rows(made.timeline), *link_rows(made.problem, made.timeline, channels))


@many
@given(st.integers(1, 80), st.integers(1, 4), st.integers(0, 10**6), st.floats(1e-7, 1e-2))
def test_thinned_keeps_time_and_counts_and_bounds_the_marks(num_ops, num_devices, seed, bin_s):
    made = random_sample(num_ops, num_devices, seed)
    for row in all_rows(made):
        thin = thinned(row, bin_s)
        num_bins = np.floor(made.timeline.makespan_s / bin_s) + 1
        assert thin.num_marks <= 2 * num_bins * row.num_tracks
        assert thin.count.sum() == row.num_marks
        assert thin.busy_s.sum() == pytest.approx(row.busy_s.sum())
        assert np.all(np.diff(thin.start_s) >= 0)
        assert np.all(thin.busy_s <= (thin.end_s - thin.start_s) * (1 + 1e-9))
        assert set(thin.span.tolist()) <= set(row.span.tolist())
        long = row.span[row.end_s - row.start_s >= bin_s]
        assert set(long.tolist()) <= set(thin.span[thin.count == 1].tolist())
        for track in range(row.num_tracks):
            mine = thin.track == track
            assert np.all(thin.end_s[mine][:-1] <= thin.start_s[mine][1:] + 1e-15)


def test_thinned_to_keeps_within_the_given_number_of_marks():
    made = random_sample(3000, 4, seed=3)
    rows = thinned_to(all_rows(made), made.timeline.makespan_s, 800)
    assert sum(row.num_marks for row in rows) <= 800
    assert sum(row.num_marks for row in all_rows(made)) > 5000


def test_link_rows_hold_each_crossing_once():
    made = sample(num_layers=6)
    rows = [row for row in all_rows(made) if row.is_link]
    found = sorted((int(s), row.index) for row in rows for s in row.span)
    transfer, channel = crossings(made.timeline, made.problem)
    assert found == sorted(zip(transfer.tolist(), channel.tolist(), strict=True))


@many
@given(st.integers(1, 80), st.integers(0, 10**6), st.integers(1, 40))
def test_memory_envelope_is_the_highest_of_each_bin(num_ops, seed, num_bins):
    made = random_sample(num_ops, 2, seed)
    for device in range(2):
        time_s, held = made.timeline.memory_curve(device)
        edges, high = memory_envelope(made.timeline, device, num_bins)
        assert high.max() == held.max()
        assert len(edges) == len(high) <= max(num_bins, 1)
        if len(time_s) <= num_bins:
            assert np.array_equal(edges, time_s)
            continue
        stops = np.append(edges[1:], np.inf)
        for start, stop, value in zip(edges, stops, high, strict=True):
            inside = held[(time_s > start) & (time_s < stop)]
            current = held[np.flatnonzero(time_s <= start)[-1]]
            assert value == max([current, *inside])


@many
@given(st.integers(1, 60), st.integers(0, 10**6), st.floats(0, 1e-4))
def test_joined_covers_the_same_time_with_gaps_filled(num_ops, seed, gap_s):
    made = random_sample(num_ops, 3, seed)
    for row in all_rows(made):
        starts, ends = joined(row, gap_s)
        assert np.all(starts[1:] - ends[:-1] > gap_s)
        for start, end in zip(row.start_s, row.end_s, strict=True):
            assert np.any((starts <= start) & (end <= ends))
        assert set(starts.tolist()) <= set(row.start_s.tolist())
        assert set(ends.tolist()) <= set(row.end_s.tolist())
