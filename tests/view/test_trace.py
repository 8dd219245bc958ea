from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view.view_samples import HOSTILE, Sample, hostile_sample, random_sample, sample

from hocket.view.trace import trace_events, write_trace


def events_by_phase(made: Sample) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for event in trace_events(*made.parts)["traceEvents"]:
        found[event["ph"]].append(event)
    return found


def ns(time_us: float) -> int:
    return round(time_us * 1000)


many = settings(max_examples=25, deadline=None, derandomize=True)
samples = st.builds(random_sample, st.integers(1, 60), st.integers(1, 4), st.integers(0, 10**6))


@many
@given(samples)
def test_trace_has_no_overlapping_slices_in_a_row(made):
    rows = defaultdict(list)
    for event in events_by_phase(made)["X"]:
        rows[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["dur"])))
    for slices in rows.values():
        slices.sort()
        for (start, length), (following, _) in itertools.pairwise(slices):
            assert start + length <= following


@many
@given(samples)
def test_trace_times_are_those_of_the_timeline(made):
    timeline = made.timeline
    slices = events_by_phase(made)["X"]
    ops = {e["args"]["op"]: e for e in slices if "op" in e["args"]}
    assert len(ops) == made.problem.graph.num_ops
    for op, event in ops.items():
        assert ns(event["ts"]) == round(timeline.op_start_s[op] * 1e9)
        assert ns(event["ts"]) + ns(event["dur"]) == round(timeline.op_end_s[op] * 1e9)
        assert event["pid"] == timeline.op_device[op] + 1
    end = max(ns(e["ts"]) + ns(e["dur"]) for e in slices)
    assert end == round(timeline.makespan_s * 1e9)


@many
@given(samples)
def test_trace_shows_every_transfer_on_every_channel_of_its_route(made):
    problem, _, timeline = made.parts
    seen = defaultdict(int)
    for event in events_by_phase(made)["X"]:
        if event["cat"] == "transfer":
            seen[event["args"]["transfer"]] += 1
    expected = {
        index: len(problem.costs.routes.path(int(src), int(dst)))
        for index, (src, dst) in enumerate(
            zip(timeline.transfer_src, timeline.transfer_dst, strict=True)
        )
    }
    assert seen == expected


@many
@given(samples)
def test_trace_arrows_are_paired_and_stand_inside_slices(made):
    found = events_by_phase(made)
    rows = defaultdict(list)
    for event in found["X"]:
        start = ns(event["ts"])
        rows[event["pid"], event["tid"]].append((start, start + ns(event["dur"])))
    arrows = defaultdict(list)
    for phase in "stf":
        for event in found[phase]:
            arrows[event["id"]].append(event)
            at = ns(event["ts"])
            assert any(start <= at <= end for start, end in rows[event["pid"], event["tid"]]), event
    assert len(arrows) == len(made.timeline.transfer_tensor)
    for parts in arrows.values():
        kinds = [event["ph"] for event in parts]
        assert kinds.count("s") == 1
        assert kinds.count("f") == 1
        assert parts[0]["ts"] <= parts[-1]["ts"]


@many
@given(samples)
def test_trace_counters_follow_the_memory_curves(made):
    timeline = made.timeline
    counters = defaultdict(dict)
    for event in events_by_phase(made)["C"]:
        counters[event["pid"] - 1][ns(event["ts"])] = event["args"]["bytes"]
    for device in range(timeline.num_devices):
        time_s, held = timeline.memory_curve(device)
        expected = dict(zip(np.rint(time_s * 1e9).astype(int).tolist(), held.tolist(), strict=True))
        expected[round(timeline.makespan_s * 1e9)] = int(held[-1])
        assert counters[device] == expected


def test_trace_separates_simultaneous_transfers_of_one_channel():
    made = random_sample(200, 3, seed=5)
    names = [
        event["args"]["name"]
        for event in trace_events(*made.parts)["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert any(name.endswith(" #2") for name in names)
    assert names.count("compute") == 3


def test_trace_names_processes_after_devices_and_label():
    events = trace_events(*sample().parts, label="measured")["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [
        "gpu0 (rtx-2080) · measured",
        "gpu1 (rtx-2080) · measured",
        "gpu2 (rtx-2080) · measured",
        "links · measured",
    ]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_write_trace_gives_equal_bytes_that_are_json(tmp_path, name):
    made = sample()
    write_trace(tmp_path / name, *made.parts)
    first = (tmp_path / name).read_bytes()
    write_trace(tmp_path / name, *made.parts)
    assert (tmp_path / name).read_bytes() == first
    text = gzip.decompress(first) if name.endswith(".gz") else first
    assert json.loads(text) == trace_events(*made.parts)


def test_trace_names_are_inert():
    text = json.dumps(trace_events(*hostile_sample().parts), ensure_ascii=False)
    assert "\x1b" not in text
    assert "\\u001b" not in text
    text.encode()
    assert HOSTILE[0] in text


def test_trace_of_one_device_has_no_link_process():
    made = random_sample(5, 1, seed=0)
    events = trace_events(*made.parts)["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "gpu0 (rtx-2080) · predicted"
    ]
