"""A timeline as a trace for Perfetto and chrome://tracing.

Each device is a process with a row per stream and a counter for its memory. All links are one more
process with a row per channel and track, because slices of one row must not overlap. Arrows lead
from the op that produces a tensor over the channels to the op that first reads it. Times are whole
nanoseconds, written in µs, so that rounding cannot make neighbours overlap. O(spans log spans).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.atomic import write_atomically
from hocket.graph.graph import Phase, Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.analysis import crossings
from hocket.simulate.timeline import Timeline
from hocket.view.names import inert
from hocket.view.spans import tracks

Event = dict[str, Any]
Nanoseconds = NDArray[np.int64]

FIRST_STREAM_ROW = 1
FIRST_LINK_ROW = 1


def trace_events(
    problem: Problem, plan: Plan, timeline: Timeline, *, label: str = "predicted"
) -> dict[str, Any]:
    """The trace as the JSON object of Chrome's trace event format; ``label`` names its rows."""
    slices, rows = _link_slices(problem, timeline)
    events = [
        *_names(problem, timeline, label, rows),
        *_ops(problem, timeline),
        *slices,
        *_flows(problem, timeline, slices),
        *_memory(timeline),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "label": label,
            "graph": inert(problem.graph.name),
            "cluster": inert(problem.cluster.name),
            "planner": inert(plan.planner),
            "step_s": timeline.makespan_s,
            "peak_bytes": {
                inert(name): int(peak)
                for name, peak in zip(
                    problem.cluster.device_names, timeline.peak_bytes, strict=True
                )
            },
        },
        "traceEvents": events,
    }


def write_trace(
    path: str | Path,
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    *,
    label: str = "predicted",
) -> None:
    """Write the trace, compressed if the name ends in ``.gz``."""
    events = trace_events(problem, plan, timeline, label=label)
    write_atomically(path, trace_bytes(path, events))


def write_traces(
    path: str | Path, problem: Problem, plan: Plan, timelines: Mapping[str, Timeline]
) -> None:
    """Write several timelines of one plan into one trace, with adjacent rows per device."""
    traces = {
        label: trace_events(problem, plan, timeline, label=label)
        for label, timeline in timelines.items()
    }
    merged = {
        "displayTimeUnit": "ms",
        "otherData": {label: trace["otherData"] for label, trace in traces.items()},
        "traceEvents": [
            _shifted(event, position, len(traces), problem)
            for position, trace in enumerate(traces.values())
            for event in trace["traceEvents"]
        ],
    }
    write_atomically(path, trace_bytes(path, merged))


def _shifted(event: Event, position: int, num_traces: int, problem: Problem) -> Event:
    """Move an event to the process ids and flow ids of one of several traces."""
    event = event | {"pid": event["pid"] + position * _links_pid(problem)}
    if "id" in event:
        # Interleaved ids stay distinct between traces and keep predicted and measured rows
        # adjacent.
        event["id"] = event["id"] * num_traces + position
    if event["name"] == "process_sort_index":
        index = event["args"]["sort_index"] * num_traces + position
        event["args"] = {"sort_index": index}
    return event


def trace_bytes(path: str | Path, trace: dict[str, Any]) -> bytes:
    """Bytes of a trace file, compressed if the name ends in ``.gz``."""
    data = json.dumps(trace, separators=(",", ":")).encode()
    # A fixed time stamp keeps files of equal traces equal byte for byte.
    return gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data


def _ns(time_s: NDArray[np.float64]) -> Nanoseconds:
    return np.rint(time_s * 1e9).astype(np.int64)


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _pid(device: int) -> int:
    return device + 1


def _links_pid(problem: Problem) -> int:
    return problem.cluster.num_devices + 1


def _names(
    problem: Problem, timeline: Timeline, label: str, link_rows: list[str]
) -> Iterator[Event]:
    streams = [Stream(stream) for stream in np.unique(timeline.op_stream).tolist()]
    processes = [f"{inert(d.name)} ({inert(d.kind.name)})" for d in problem.cluster.devices]
    if link_rows:
        processes.append("links")
    for index, name in enumerate(processes):
        pid = _pid(index)
        yield _metadata("process_name", pid, 0, {"name": f"{name} · {label}"})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": index})
        if index < problem.cluster.num_devices:
            for stream in streams or (Stream.COMPUTE,):
                name = stream.name.lower().replace("_", " ")
                yield _metadata("thread_name", pid, FIRST_STREAM_ROW + stream, {"name": name})
    for index, name in enumerate(link_rows):
        row = FIRST_LINK_ROW + index
        yield _metadata("thread_name", _links_pid(problem), row, {"name": name})
        yield _metadata("thread_sort_index", _links_pid(problem), row, {"sort_index": row})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _ops(problem: Problem, timeline: Timeline) -> Iterator[Event]:
    graph = problem.graph
    start, end = _ns(timeline.op_start_s), _ns(timeline.op_end_s)
    kinds = [inert(kind) for kind in graph.kinds]
    modules = [inert(module) for module in graph.modules]
    phases = [phase.name.lower() for phase in Phase]
    # Of ops that start together, one without duration must come first, because it ends first.
    order = np.lexsort((end, start, timeline.op_device))
    columns = (graph.op_kind, graph.op_module, graph.op_phase, timeline.op_device,
               timeline.op_stream, start, end)  # fmt: skip
    listed = (column[order].tolist() for column in columns)
    for op, kind, module, phase, device, stream, begin, finish in zip(
        order.tolist(), *listed, strict=True
    ):
        args = {"op": op, "kind": kinds[kind]}
        if module >= 0:
            args["module"] = modules[module]
        yield {
            "ph": "X",
            "name": inert(graph.op_names[op]),
            "cat": phases[phase],
            "pid": _pid(device),
            "tid": FIRST_STREAM_ROW + stream,
            "ts": _us(begin),
            "dur": _us(finish - begin),
            "args": args,
        }


def _link_slices(problem: Problem, timeline: Timeline) -> tuple[list[Event], list[str]]:
    """Slices of all channels in order of (channel, start), and the names of their rows."""
    transfer, channel = crossings(timeline, problem)
    start, end = _ns(timeline.transfer_start_s), _ns(timeline.transfer_end_s)
    described = _transfers(problem, timeline)
    slices: list[Event] = []
    rows: list[str] = []
    for crossed in np.unique(channel).tolist():
        chosen = transfer[channel == crossed]
        chosen = chosen[np.lexsort((chosen, start[chosen]))]
        track = tracks(start[chosen], end[chosen])
        first_row = FIRST_LINK_ROW + len(rows)
        name = inert(problem.costs.routes.channel_names[crossed])
        rows += [name if n == 0 else f"{name} #{n + 1}" for n in range(int(track.max()) + 1)]
        slices += [
            described[index] | {"tid": first_row + row}
            for index, row in zip(chosen.tolist(), track.tolist(), strict=True)
        ]
    return slices, rows


def _transfers(problem: Problem, timeline: Timeline) -> list[Event]:
    """One slice per transfer, without its row."""
    names = [inert(name) for name in problem.cluster.device_names]
    columns = zip(
        timeline.transfer_tensor.tolist(),
        timeline.transfer_src.tolist(),
        timeline.transfer_dst.tolist(),
        _ns(timeline.transfer_ready_s).tolist(),
        _ns(timeline.transfer_start_s).tolist(),
        _ns(timeline.transfer_end_s).tolist(),
        strict=True,
    )
    return [
        {
            "ph": "X",
            "name": inert(problem.graph.tensor_names[tensor]),
            "cat": "transfer",
            "pid": _links_pid(problem),
            "ts": _us(start),
            "dur": _us(end - start),
            "args": {
                "transfer": index,
                "from": names[src],
                "to": names[dst],
                "bytes": int(problem.costs.tensor_bytes[tensor]),
                "waited_us": _us(start - ready),
            },
        }
        for index, (tensor, src, dst, ready, start, end) in enumerate(columns)
    ]


def _flows(problem: Problem, timeline: Timeline, slices: list[Event]) -> Iterator[Event]:
    """One arrow per transfer: producer, each channel, first reader on the destination."""
    crossed: dict[int, list[Event]] = {}
    for event in slices:
        crossed.setdefault(event["args"]["transfer"], []).append(event)
    start, end = _ns(timeline.op_start_s), _ns(timeline.op_end_s)
    row = (FIRST_STREAM_ROW + problem.graph.op_stream).tolist()
    for transfer, events in sorted(crossed.items()):
        tensor, dst = timeline.transfer_tensor[transfer], timeline.transfer_dst[transfer]
        producer = int(problem.graph.tensor_producer[tensor])
        readers = problem.graph.users_of(int(tensor))
        readers = readers[timeline.op_device[readers] == dst]
        points = [(event["pid"], event["tid"], event["ts"]) for event in events]
        if producer >= 0:
            # Trace viewers attach an arrow to the slice that is open at its time, hence the op's
            # last nanosecond.
            leaves = max(int(end[producer]) - 1, int(start[producer]))
            pid = _pid(int(timeline.op_device[producer]))
            points.insert(0, (pid, row[producer], _us(leaves)))
        if len(readers):
            reader = int(readers[np.argmin(timeline.op_start_s[readers])])
            points.append((_pid(int(dst)), row[reader], _us(int(start[reader]))))
        if len(points) > 1:
            yield from _arrow(transfer, points)


def _arrow(number: int, points: list[tuple[int, int, float]]) -> Iterator[Event]:
    for index, (pid, tid, ts) in enumerate(points):
        phase = "s" if index == 0 else "f" if index == len(points) - 1 else "t"
        event: Event = {
            "ph": phase,
            "name": "data",
            "cat": "data",
            "id": number,
            "pid": pid,
            "tid": tid,
            "ts": ts,
        }
        yield event if phase == "s" else event | {"bp": "e"}


def _memory(timeline: Timeline) -> Iterator[Event]:
    for device in range(timeline.num_devices):
        time_s, held = timeline.memory_curve(device)
        instants = zip(_ns(time_s).tolist(), held.tolist(), strict=True)
        # Two changes in one nanosecond are one instant of the trace; dict keeps the last value.
        for time_ns, size_bytes in dict(instants).items():
            yield _counter(device, time_ns, size_bytes)
        if len(held) and time_s[-1] < timeline.makespan_s:
            yield _counter(device, int(_ns(np.array(timeline.makespan_s))), int(held[-1]))


def _counter(device: int, time_ns: int, size_bytes: int) -> Event:
    return {
        "ph": "C",
        "name": "memory",
        "pid": _pid(device),
        "tid": 0,
        "ts": _us(time_ns),
        "args": {"bytes": size_bytes},
    }
