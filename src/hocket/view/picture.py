"""Draw a timeline as one static SVG: rows of ops and transfers over time, memory below.

Spans of a row are merged to the visible resolution and drawn as one path per colour, so the size of
the picture does not grow with the number of ops. O(spans log spans).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray
from hocket.base.units import format_percent, format_seconds
from hocket.graph.graph import Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view.drawing import (
    AXIS_PX,
    LEGEND_PX,
    MARGIN_PX,
    Scale,
    bound_line,
    picture_svg,
    svg_legend,
    svg_rect,
    svg_text,
    time_axis,
)
from hocket.view.facts import Facts, Pass, facts_of, passes_of
from hocket.view.names import shorten, shorten_middle
from hocket.view.spans import (
    SpanRow,
    device_rows,
    joined,
    link_rows,
    memory_envelope,
    part,
    thinned,
)
from hocket.view.wording import of_capacity

LABEL_PX = 180
BAR_PX, MEMORY_PX, LINK_PX, GAP_PX = 22, 24, 12, 12
MAX_LINK_ROWS = 12
_PASS_PX = 18
"""Minimum width of a labelled pass."""
PHASES = tuple(phase.name.lower() for phase in Phase)


def timeline_svg(
    problem: Problem, plan: Plan, timeline: Timeline, *, width: int = 960, styled: bool = True
) -> str:
    """Picture of a timeline; ``styled`` embeds `picture_css`, which a page otherwise provides."""
    facts = facts_of(problem, plan, timeline)
    return draw_timeline(problem, timeline, facts, width=width, styled=styled)


def draw_timeline(
    problem: Problem,
    timeline: Timeline,
    facts: Facts,
    *,
    width: int,
    styled: bool,
    bound_s: float | None = None,
) -> str:
    """Same as `timeline_svg`, for facts that are already computed."""
    scale = Scale(width, timeline.makespan_s, LABEL_PX)
    channels = np.array([link.channel for link in facts.links[:MAX_LINK_ROWS]], dtype=np.int32)
    body: list[str] = []
    top = float(MARGIN_PX + AXIS_PX)
    passes = passes_of(problem, timeline)
    for row in device_rows(timeline):
        body += _device(problem, timeline, facts, row, scale, top)
        body += _pass_labels(passes[row.index], scale, top)
        top += BAR_PX + MEMORY_PX + GAP_PX
    for row, link in zip(link_rows(problem, timeline, channels), facts.links, strict=False):
        label, note = link.name, format_percent(link.busy_share)
        body += _bar(problem, row, facts.path.transfers, scale, top, LINK_PX)
        body.append(svg_text(MARGIN_PX, top + LINK_PX - 2, shorten_middle(label, 21), "small"))
        body.append(_note(note, top + LINK_PX - 2))
        top += LINK_PX + GAP_PX / 2
    hidden = len(facts.links) - len(channels)
    if hidden > 0:
        body.append(svg_text(MARGIN_PX, top + 10, f"and {hidden} less used links", "muted"))
        top += 16
    if bound_s is not None:
        body += bound_line(scale, bound_s, top)
    label = f"Timeline of {facts.title}: one step takes {format_seconds(facts.step_s)}"
    names = [*PHASES, *(["transfer"] if len(timeline.transfer_tensor) else []), "critical"]
    entries = [(name, "critical path" if name == "critical" else name) for name in names]
    legend = svg_legend(MARGIN_PX + LABEL_PX, top + LEGEND_PX - 8, entries)
    parts = [*time_axis(scale, top), *body, *legend]
    return picture_svg(width, top + LEGEND_PX, label, parts, styled=styled)


def _device(
    problem: Problem, timeline: Timeline, facts: Facts, row: SpanRow, scale: Scale, top: float
) -> Iterator[str]:
    device = facts.devices[row.index]
    yield from _bar(problem, row, facts.path.ops, scale, top, BAR_PX)
    yield svg_text(MARGIN_PX, top + 15, shorten(device.name, 18), "")
    yield _note(format_percent(device.busy_share), top + 15)
    memory_top = top + BAR_PX + 4
    time_s, held = memory_envelope(timeline, row.index, int(scale.width) // 2)
    yield memory_paths(
        scale.x(0), scale.x(timeline.makespan_s), memory_top, MEMORY_PX - 4,
        time_s, held, timeline.makespan_s, device.capacity_bytes, device.peak_bytes,
    )  # fmt: skip
    kind = "muted" if device.fits else "over"
    text = of_capacity(device.peak_bytes, device.capacity_bytes)
    yield svg_text(MARGIN_PX, memory_top + 13, text if device.fits else f"{text} ✗", kind)


def _pass_labels(passes: Sequence[Pass], scale: Scale, top: float) -> Iterator[str]:
    """Labels such as ``F0`` and ``B0`` on passes of microbatches that are wide enough."""
    for each in passes:
        if (each.end_s - each.start_s) * scale.px_per_s >= _PASS_PX:
            yield svg_text(scale.x(each.start_s) + 3, top + 15, each.label, "mark-label")


def memory_paths(
    left: float,
    right: float,
    top: float,
    height: float,
    time_s: FloatArray,
    held: NDArray[np.int64],
    makespan_s: float,
    capacity_bytes: int,
    peak_bytes: int,
) -> str:
    """SVG paths of a memory curve in a box, with a line at the capacity."""
    # The scale ends at the peak if the plan does not fit, so that the excess is visible.
    limit = max(capacity_bytes, peak_bytes, 1)
    px_per_s = (right - left) / makespan_s if makespan_s > 0 else 0.0
    bottom = top + height
    xs = left + np.append(time_s, makespan_s) * px_per_s
    ys = bottom - height * (held / limit)
    steps = "".join(f"V{y:.1f}H{x:.1f}" for y, x in zip(ys.tolist(), xs[1:].tolist(), strict=True))
    line_y = bottom - height * (capacity_bytes / limit)
    over = " over" if peak_bytes > capacity_bytes else ""
    start = f"M{left:.1f} {bottom:.1f}"
    return (
        f'<path class="memory" d="{start}{steps}V{bottom:.1f}Z"/>'
        f'<path class="memory-line" d="M{left:.1f} {ys[0]:.1f}{steps}"/>'
        f'<path class="capacity{over}" d="M{left:.1f} {line_y:.1f}H{right:.1f}"/>'
    )


def _bar(
    problem: Problem,
    row: SpanRow,
    critical: NDArray[np.int32],
    scale: Scale,
    top: float,
    height: int,
) -> Iterator[str]:
    left, right = scale.x(0), scale.width - MARGIN_PX
    yield svg_rect("track", left, top, right - left, height)
    if not scale.px_per_s or not row.num_marks:
        return
    pixel_s = 1 / scale.px_per_s
    shown = thinned(row, pixel_s)
    track_px = height / row.num_tracks
    is_critical = np.isin(row.span, critical)
    phase = problem.graph.op_phase[shown.span] if not row.is_link else None
    for colour, name in enumerate(PHASES if phase is not None else ("transfer",)):
        coloured = shown if phase is None else part(shown, np.flatnonzero(phase == colour))
        yield marks(name, coloured, scale, top, track_px)
    starts, ends = joined(part(row, np.flatnonzero(is_critical)), 2 * pixel_s)
    wides = np.maximum((ends - starts) * scale.px_per_s, 0.5)
    line = "".join(
        f"M{scale.x(start_s):.1f} {top + height + 0.5:.1f}h{wide:.1f}v2h-{wide:.1f}z"
        for start_s, wide in zip(starts.tolist(), wides.tolist(), strict=True)
    )
    yield f'<path class="critical" d="{line}"/>'


def marks(
    name: str, row: SpanRow, scale: Scale, top: float, track_px: float, opacity: float = 1.0
) -> str:
    """All marks of one colour as one path; the height of a merged mark is its filled fraction."""
    if not row.num_marks:
        return ""
    x = scale.left_px + row.start_s * scale.px_per_s
    length_s = row.end_s - row.start_s
    wide = np.maximum(length_s * scale.px_per_s, 0.4)
    # A thin gap separates neighbouring long spans. Short spans get none, because they would vanish.
    wide = np.where(wide > 4, wide - 0.6, wide)
    fill = np.clip(row.busy_s / np.maximum(length_s, 1e-30), 0.1, 1.0)
    high = np.where(row.count > 1, fill, 1.0) * max(track_px - (track_px > 6), 0.5)
    bottom = top + (row.track + 1) * track_px
    columns = (column.tolist() for column in (x, bottom, wide, high))
    path = "".join(
        f"M{a:.1f} {b:.1f}h{w:.1f}v-{h:.1f}h-{w:.1f}z" for a, b, w, h in zip(*columns, strict=True)
    )
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return f'<path class="{name}"{pale} d="{path}"/>'


def _note(note: str, y: float) -> str:
    return svg_text(MARGIN_PX + LABEL_PX - 10, y, note, "muted", anchor="end")
