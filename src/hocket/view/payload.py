"""Data from which the report's script draws: integer columns, and each name once.

Times are counted in ticks, a power of ten of seconds chosen so that the step has at most nine
digits. Above `MAX_MARKS` marks the rows are thinned, so that the file stays small for any graph.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.units import format_percent
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view.facts import Facts, passes_of, step_name
from hocket.view.names import inert
from hocket.view.spans import SpanRow, device_rows, link_rows, memory_envelope, part, thinned_to
from hocket.view.story import reason_text
from hocket.view.wording import of_capacity

MAX_MARKS = 100_000
MAX_LINK_ROWS = 24
MAX_PATH_STEPS = 400
MEMORY_BINS = 2000


def report_data(
    problem: Problem, timeline: Timeline, facts: Facts, bound_s: float | None = None
) -> dict[str, Any]:
    """Rows of marks, their ops and transfers, memory curves and the critical path, as JSON data."""
    tick_s = _tick_s(timeline.makespan_s)
    channels = np.array([link.channel for link in facts.links[:MAX_LINK_ROWS]], dtype=np.int32)
    whole = (*device_rows(timeline), *link_rows(problem, timeline, channels))
    rows = thinned_to(whole, timeline.makespan_s, MAX_MARKS)
    ops = _used(row for row in rows if not row.is_link)
    transfers = _used(row for row in rows if row.is_link)
    return {
        "step_s": timeline.makespan_s,
        "tick_s": tick_s,
        "end": int(_ticks(np.array([timeline.makespan_s]), tick_s)[0]),
        "devices": [
            {
                "name": device.name,
                "peak_bytes": device.peak_bytes,
                "capacity_bytes": device.capacity_bytes,
                "memory": _memory(timeline, index, tick_s),
            }
            for index, device in enumerate(facts.devices)
        ],
        "rows": [
            _row(facts, row, _critical(facts, full, timeline.makespan_s), tick_s,
                 transfers if row.is_link else ops)
            for row, full in zip(rows, whole, strict=True)
        ],
        "kinds": [inert(kind) for kind in problem.graph.kinds],
        "modules": [inert(module) for module in problem.graph.modules],
        "ops": _op_columns(problem, ops),
        "transfers": _transfer_columns(problem, timeline, transfers),
        "path": _path(problem, timeline, facts, whole, tick_s),
        "is_thinned": rows is not whole,
        "bound": None if bound_s is None else int(_ticks(np.array([bound_s]), tick_s)[0]),
        "passes": [
            [[round(each.start_s / tick_s), round(each.end_s / tick_s), each.label]
             for each in row]
            for row in passes_of(problem, timeline)
        ],
    }  # fmt: skip


def _tick_s(makespan_s: float) -> float:
    """One nanosecond, or the smallest power of ten that keeps the step below 10**9 ticks."""
    if not 0 < makespan_s < math.inf:
        return 1e-9
    return float(10.0 ** max(math.ceil(math.log10(makespan_s)) - 9, -9))


def _ticks(time_s: FloatArray, tick_s: float) -> NDArray[np.int64]:
    return np.rint(time_s / tick_s).astype(np.int64)


def _used(rows: Any) -> IntArray:
    spans = [row.span for row in rows]
    return np.unique(np.concatenate(spans)) if spans else np.empty(0, dtype=np.int32)


def _row(
    facts: Facts, row: SpanRow, critical: SpanRow, tick_s: float, table: IntArray
) -> dict[str, Any]:
    start = _ticks(row.start_s, tick_s)
    length = _ticks(row.end_s, tick_s) - start
    marked = _ticks(critical.start_s, tick_s)
    content: dict[str, Any] = {
        "link": row.is_link,
        "index": row.index,
        "tracks": row.num_tracks,
        "start": start.tolist(),
        "length": length.tolist(),
        "span": np.searchsorted(table, row.span).tolist(),
        "critical": {
            "start": marked.tolist(),
            "length": (_ticks(critical.end_s, tick_s) - marked).tolist(),
            "track": critical.track.tolist(),
        },
    }
    if row.num_tracks > 1:
        content["track"] = row.track.tolist()
    if np.any(row.count > 1):
        content["count"] = row.count.tolist()
        # Guards the division for marks without duration.
        share = row.busy_s / np.maximum(row.end_s - row.start_s, 1e-30)
        content["busy"] = np.round(np.minimum(share, 1.0), 3).tolist()
    return content | _labels(facts, row)


def _labels(facts: Facts, row: SpanRow) -> dict[str, Any]:
    if row.is_link:
        link = next(link for link in facts.links if link.channel == row.index)
        return {"label": link.name, "note": format_percent(link.busy_share)}
    device = facts.devices[row.index]
    return {
        "label": device.name,
        "note": format_percent(device.busy_share),
        "memory_note": of_capacity(device.peak_bytes, device.capacity_bytes),
        "over": not device.fits,
    }


def _critical(facts: Facts, row: SpanRow, makespan_s: float) -> SpanRow:
    members = facts.path.transfers if row.is_link else facts.path.ops
    found = part(row, np.flatnonzero(np.isin(row.span, members)))
    return thinned_to((found,), makespan_s, MAX_MARKS // 10)[0]


def _memory(timeline: Timeline, device: int, tick_s: float) -> dict[str, list[int]]:
    time_s, held = memory_envelope(timeline, device, MEMORY_BINS)
    return {"time": _ticks(time_s, tick_s).tolist(), "held": held.tolist()}


def _op_columns(problem: Problem, ops: IntArray) -> dict[str, Any]:
    graph = problem.graph
    return {
        "name": [inert(graph.op_names[op]) for op in ops.tolist()],
        "kind": graph.op_kind[ops].tolist(),
        "module": graph.op_module[ops].tolist(),
        "phase": graph.op_phase[ops].tolist(),
    }


def _transfer_columns(problem: Problem, timeline: Timeline, transfers: IntArray) -> dict[str, Any]:
    tensors = timeline.transfer_tensor[transfers]
    return {
        "tensor": [inert(problem.graph.tensor_names[t]) for t in tensors.tolist()],
        "src": timeline.transfer_src[transfers].tolist(),
        "dst": timeline.transfer_dst[transfers].tolist(),
        "bytes": problem.costs.tensor_bytes[tensors].tolist(),
    }


def _path(
    problem: Problem, timeline: Timeline, facts: Facts, rows: tuple[SpanRow, ...], tick_s: float
) -> list[dict[str, Any]]:
    row_of: dict[int, int] = {}
    for index, row in enumerate(rows):
        if row.is_link:
            for transfer in row.span.tolist():
                row_of.setdefault(transfer, index)
    content = []
    for number in facts.path.longest(MAX_PATH_STEPS):
        step = facts.path.steps[number]
        is_op = step.kind == "op"
        start, end = _ticks(np.array([step.start_s, step.end_s]), tick_s).tolist()
        content.append(
            {
                "row": int(timeline.op_device[step.index]) if is_op else row_of.get(step.index, -1),
                "kind": step.kind,
                "name": step_name(problem, timeline, step),
                "start": start,
                "length": end - start,
                "reason": f"started after {reason_text(step)}",
            }
        )
    return content
