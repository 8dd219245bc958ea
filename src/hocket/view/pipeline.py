"""A pipeline's schedule as the well-known picture: devices over time, and gaps are the bubble.

As static SVG, with the number of the microbatch on each mark that is wide enough and later chunks
paler, and as a few lines of text. Marks are thinned to the pixels that there are, so the picture
of 100,000 actions is as large as that of 5,000. O(actions log actions).
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.pipeline import after_s
from hocket.simulate.timeline import Timeline
from hocket.view.drawing import (
    AXIS_PX,
    LEGEND_PX,
    MARGIN_PX,
    Scale,
    svg_rect,
    svg_text,
    time_axis,
)
from hocket.view.picture import picture_css
from hocket.view.spans import SpanRow, part, thinned

LABEL_PX = 150
BAR_PX, GAP_PX = 20, 4
DIGIT_PX, SPACE_PX = 6, 5
"""Width of a digit of a number, and of the space around the number."""
MAX_NUMBERS = 5000
COLOURS = {
    StageWork.FORWARD: ("forward", "forward"),
    StageWork.BACKWARD: ("backward", "backward"),
    StageWork.INPUT_GRADIENT: ("backward", "gradient of inputs"),
    StageWork.WEIGHT_GRADIENT: ("optimizer", "gradient of weights"),
}
"""Class and legend of each kind of work."""
LETTERS = {
    StageWork.FORWARD: ("F", "blue"),
    StageWork.BACKWARD: ("B", "yellow"),
    StageWork.INPUT_GRADIENT: ("I", "yellow"),
    StageWork.WEIGHT_GRADIENT: ("W", "green"),
}


def pipeline_svg(
    schedule: Schedule, timeline: Timeline, *, width: int = 960, styled: bool = True
) -> str:
    """The picture, ``width`` pixels wide; without ``styled`` the page brings `picture_css`."""
    scale = Scale(width, timeline.makespan_s, LABEL_PX)
    bottom = MARGIN_PX + AXIS_PX + schedule.num_devices * (BAR_PX + GAP_PX)
    height = bottom + LEGEND_PX
    label = escape(
        f"Schedule {schedule.name} of {schedule.num_microbatches} microbatches on "
        f"{schedule.num_devices} devices: {format_seconds(timeline.makespan_s)}"
    )
    body = [*time_axis(scale, bottom)]
    for device in range(schedule.num_devices):
        body += _device(
            schedule, timeline, device, scale, MARGIN_PX + AXIS_PX + device * (BAR_PX + GAP_PX)
        )
    body += _legend(schedule, timeline, height - 10)
    style = f"<style>{picture_css()}</style>" if styled else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{label}</title>{style}'
        f'<rect class="paper" width="{width}" height="{height}"/>' + "".join(body) + "</svg>\n"
    )


def _device(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    left, right = scale.x(0), scale.width - MARGIN_PX
    yield svg_rect("lane", left, top, right - left, BAR_PX)
    yield svg_text(MARGIN_PX, top + 14, f"device {device}", "")
    peak = format_bytes(int(timeline.peak_bytes[device]))
    yield svg_text(left - 10, top + 14, peak, "muted", "end")
    row = _row(schedule, timeline, device)
    if not row.num_marks or not scale.px_per_s:
        return
    shown = thinned(row, 1 / scale.px_per_s)
    work, chunk = _kinds(schedule, shown)
    for kind in StageWork:
        for own in np.unique(chunk[work == kind]).tolist():
            marks = part(shown, np.flatnonzero((work == kind) & (chunk == own)))
            yield _marks(COLOURS[kind][0], _opacity(own), marks, scale, top)
    yield from _numbers(schedule, shown, chunk, scale, top)
    yield from _after(schedule, timeline, device, scale, top)


def _row(schedule: Schedule, timeline: Timeline, device: int) -> SpanRow:
    """A device's actions that take time."""
    start, stop = schedule.start[device : device + 2].tolist()
    own = np.arange(start, stop)
    own = own[timeline.end_s[own] > timeline.start_s[own]]
    return SpanRow(
        is_link=False,
        index=device,
        num_lanes=1,
        start_s=timeline.start_s[own],
        end_s=timeline.end_s[own],
        lane=np.zeros(len(own), dtype=np.int32),
        span=own.astype(np.int32),
        count=np.ones(len(own), dtype=np.int32),
        busy_s=timeline.end_s[own] - timeline.start_s[own],
    )


def _kinds(schedule: Schedule, row: SpanRow) -> tuple[np.ndarray, np.ndarray]:
    """Work and chunk of each mark."""
    own = np.flatnonzero(schedule.device_of_stage == row.index)
    return schedule.work[row.span], np.searchsorted(own, schedule.stage[row.span])


def _opacity(chunk: int) -> float:
    """Later chunks are paler; beyond the fourth the difference would not be seen."""
    return (1.0, 0.62, 0.42, 0.28)[min(chunk, 3)]


def _marks(name: str, opacity: float, row: SpanRow, scale: Scale, top: float) -> str:
    """All marks of one colour as one path; a merged mark is as high as its actions fill it."""
    x = scale.left_px + row.start_s * scale.px_per_s
    length_s = row.end_s - row.start_s
    wide = np.maximum(length_s * scale.px_per_s, 0.4)
    # A hairline between neighbours keeps long marks apart without hiding short ones.
    wide = np.where(wide > 4, wide - 0.8, wide)
    fill = np.clip(row.busy_s / np.maximum(length_s, 1e-30), 0.1, 1.0)
    high = np.where(row.count > 1, fill, 1.0) * BAR_PX
    bottom = top + BAR_PX
    path = "".join(
        f"M{a:.1f} {bottom:.1f}h{w:.1f}v-{h:.1f}h-{w:.1f}z"
        for a, w, h in zip(x.tolist(), wide.tolist(), high.tolist(), strict=True)
    )
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return f'<path class="{name}"{pale} d="{path}"/>'


def _numbers(
    schedule: Schedule,
    row: SpanRow,
    chunk: np.ndarray,
    scale: Scale,
    top: float,
) -> Iterator[str]:
    if len(schedule.work) > MAX_NUMBERS:
        return
    digits = SPACE_PX + DIGIT_PX * len(str(schedule.num_microbatches - 1))
    wide = (row.end_s - row.start_s) * scale.px_per_s
    microbatch = schedule.microbatch[row.span]
    for mark in np.flatnonzero((wide >= digits) & (row.count == 1)).tolist():
        x = scale.x(float(row.start_s[mark] + row.end_s[mark]) / 2)
        # On full colours the number has that of the paper, on pale ones that of ink.
        style = ' style="fill:var(--paper)"' if chunk[mark] == 0 else ""
        yield (
            f'<text class="small" x="{x:.1f}" y="{top + 14:.1f}" text-anchor="middle"{style}>'
            f"{microbatch[mark]}</text>"
        )


def _after(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    """What follows a device's last action."""
    length_s = float(after_s(timeline)[device])
    stop = int(schedule.start[device + 1])
    if length_s > 0:
        end_s = float(timeline.end_s[stop - 1])
        yield svg_rect("memory", scale.x(end_s), top, length_s * scale.px_per_s, BAR_PX)


def _legend(schedule: Schedule, timeline: Timeline, y: float) -> Iterator[str]:
    used = set(schedule.work.tolist())
    entries = [COLOURS[kind] for kind in StageWork if kind in used]
    if after_s(timeline).any():
        entries.append(("memory", "after the last backward"))
    x = float(MARGIN_PX + LABEL_PX)
    for name, label in entries:
        yield svg_rect(name, x, y - 9, 10, 10)
        yield svg_text(x + 15, y, label, "muted")
        x += 15 + 6.2 * len(label) + 18
    bubble = f"devices wait {format_percent(timeline.idle_share)} of the time"
    yield svg_text(x, y, bubble, "muted")


# ── for the terminal ─────────────────────────────────────────────────────────────────────────────


def pipeline_text(
    schedule: Schedule, timeline: Timeline, *, width: int = 72, max_devices: int = 16
) -> Text:
    """A line per device, a letter per moment: F, B, I or W, and a dot where the device waits.

    What follows the last backward is a line.
    """
    digits = len(str(schedule.num_devices - 1))
    text = Text(no_wrap=True)
    for device in range(min(schedule.num_devices, max_devices)):
        text.append(f"{device:>{digits}} ", style="dim")
        for letter, style in _letters(schedule, timeline, device, width - digits - 1):
            text.append(letter, style=style)
        text.append("\n")
    if schedule.num_devices > max_devices:
        text.append(f"and {schedule.num_devices - max_devices} more devices\n", style="dim")
    share = format_percent(timeline.idle_share)
    text.append(f"{format_seconds(timeline.makespan_s)}, devices wait {share} of it", style="dim")
    return text


def _letters(
    schedule: Schedule, timeline: Timeline, device: int, width: int
) -> list[tuple[str, str]]:
    """What the device does in the middle of each moment."""
    start, stop = schedule.start[device : device + 2].tolist()
    moments = (np.arange(width) + 0.5) * timeline.makespan_s / max(width, 1)
    at = np.searchsorted(timeline.start_s[start:stop], moments, side="right") - 1 + start
    letters = []
    for moment_s, action in zip(moments.tolist(), at.tolist(), strict=True):
        late_s = moment_s - float(timeline.end_s[action]) if action >= start else np.inf
        if late_s <= 0:
            letters.append(LETTERS[StageWork(int(schedule.work[action]))])
        elif action == stop - 1 and late_s <= after_s(timeline)[device]:
            letters.append(("─", "dim"))
        else:
            letters.append(("·", "dim"))
    return letters
