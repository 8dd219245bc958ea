"""Pictures of simulated fleets, as SVG: how many jobs had ended, devices in use, who ran where.

Long runs are thinned: curves to a few hundred points, the picture of devices to the longest spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.simulator.fleet_run import FleetRun, HoldSpans
from hocket.view.drawing import svg_text, tick_step
from hocket.view.fleet_text import unit_of
from hocket.view.names import inert, shorten

NUM_COLOURS = 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 260, 110, 40, 12, 28
_ACROSS = _WIDTH - _LEFT - _RIGHT
_MAX_POINTS = 400
_MAX_SPANS = 5000
_MAX_DEVICES = 200
_LABEL_PX = 12.0
_LETTER_PX = 6.5
_MIN_LETTERS = 3
"""A bar with room for fewer has no name, only what appears over it."""

Curve = tuple[FloatArray, FloatArray]
Ticks = Sequence[tuple[float, str]]


def colour_of(at: int) -> int:
    """The class of colour of a run or a job."""
    return at % NUM_COLOURS


def completion_chart(runs: Sequence[FleetRun]) -> str:
    """Part of the jobs that had ended so long after they came; times on a logarithmic scale."""
    ends_s = [np.sort(run.jct_s) for run in runs]
    longest_s = max((float(ends[-1]) for ends in ends_s if len(ends)), default=1.0)
    shortest_s = min((float(ends[0]) for ends in ends_s if len(ends)), default=longest_s)
    low_s = max(min(shortest_s, longest_s / 3.0), longest_s / 1e4, 1e-9)

    def place(value_s: FloatArray) -> FloatArray:
        return np.asarray(np.log(np.maximum(value_s, low_s) / low_s) / np.log(longest_s / low_s))

    curves = [_stairs(place(ends), np.arange(len(ends) + 1) / max(len(ends), 1)) for ends in ends_s]
    ticks = _log_ticks(low_s, longest_s)
    places = place(np.array([tick_s for tick_s, _ in ticks]))
    labels = [(float(at), text) for at, (_, text) in zip(places, ticks, strict=True)]
    return _chart(curves, labels, "Part of the jobs that had ended")


def use_chart(runs: Sequence[FleetRun]) -> str:
    """Part of the devices in use over time."""
    end_s = max(max((run.simulated_s for run in runs), default=1.0), 1e-9)
    curves = [
        _steps(
            run.sample_time_s / end_s, run.sample_busy.sum(axis=1) / max(run.num_devices.sum(), 1)
        )
        for run in runs
    ]
    return _chart(curves, _time_ticks(end_s), "Part of the devices in use over time")


def device_chart(run: FleetRun, spans: HoldSpans) -> str:
    """A row per device, a bar per span; the second of two jobs on a device below the first."""
    shown = np.flatnonzero(spans.device < _MAX_DEVICES)
    length_s = (spans.end_s - spans.start_s)[shown]
    longest = shown[np.argsort(-length_s, kind="stable")[:_MAX_SPANS]]
    longest = longest[np.argsort(spans.is_second[longest], kind="stable")]
    num_devices = min(len(spans.device_names), _MAX_DEVICES)
    row_px = max(4.0, min(16.0, 900.0 / max(num_devices, 1)))
    bottom, total_s = num_devices * row_px, max(run.simulated_s, 1e-9)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 24:.0f}" role="img" '
        'aria-label="Jobs on devices over time">',
        *_marks(_time_ticks(total_s), 0.0, bottom),
        *_device_names(spans.device_names[:num_devices], row_px),
        *(_bar(run, spans, int(at), row_px, total_s) for at in longest),
    ]
    return "".join(parts) + "</svg>" + _left_out(spans, len(longest), num_devices)


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


def _stairs(x: FloatArray, level: FloatArray) -> Curve:
    """A level that rises at each x; from few hundred steps on, only some of its points."""
    if len(x) > _MAX_POINTS:
        keep = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS).astype(int))
        x, level = x[keep], np.append(0.0, level[1:][keep])
    return np.append(np.repeat(x, 2), 1.0), np.append(np.repeat(level, 2)[1:-1], level[-1])


def _steps(edges: FloatArray, level: FloatArray) -> Curve:
    """A level from each edge to the next; of many, the means of some at a time."""
    if len(level) > _MAX_POINTS:
        first = np.linspace(0, len(level), _MAX_POINTS + 1).astype(int)
        total = np.append(0.0, np.cumsum(level * np.diff(edges)))
        edges = edges[first]
        level = np.diff(total[first]) / np.diff(edges)
    return np.repeat(edges, 2)[1:-1], np.repeat(level, 2)


def _chart(curves: Sequence[Curve], ticks: Ticks, meaning: str) -> str:
    """Curves in the unit square with marks along the bottom."""
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(meaning)}">']
    for level, text in ((0.0, "none"), (0.5, "half"), (1.0, "all")):
        height = bottom - level * (bottom - _TOP)
        parts.append(f'<path class="grid" d="M{_LEFT} {height:.1f}H{_LEFT + _ACROSS}"/>')
        parts.append(svg_text(_LEFT - 8, height + 4, text, "", "end"))
    parts += _marks(ticks, _TOP, bottom)
    for at, (x, y) in enumerate(curves):
        across, up = _LEFT + x * _ACROSS, bottom - y * (bottom - _TOP)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))
        parts.append(f'<polyline class="curve c{colour_of(at)}" points="{points}"/>')
    return "".join(parts) + "</svg>"


def _marks(ticks: Ticks, top: float, bottom: float) -> Iterator[str]:
    for where, text in ticks:
        x = _LEFT + where * _ACROSS
        yield f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
        yield svg_text(x, bottom + 18, text, "", "middle")


def _time_ticks(end_s: float) -> list[tuple[float, str]]:
    unit_s, unit = unit_of(end_s)
    step = tick_step(end_s / unit_s, 8)
    count = int(end_s / unit_s / step + 1e-9) + 1
    return [(at * step * unit_s / end_s, f"{at * step:.6g} {unit}") for at in range(count)]


def _log_ticks(low_s: float, high_s: float) -> list[tuple[float, str]]:
    """Round times between two, from seconds to years: more of them where they are near."""
    digits = (1, 10) if high_s > 100.0 * low_s else (1, 2, 5, 10, 20)
    ticks = [
        (unit_s * n, f"{n} {unit}") for unit_s, unit in ((1, "s"), (60, "min")) for n in digits
    ]
    hours = [n * 10**power for power in range(5) for n in digits if n < 10]
    ticks += [(3600.0 * n, f"{n:,} h") for n in hours]
    return [tick for tick in ticks if low_s <= tick[0] <= high_s]


# ── devices over time ────────────────────────────────────────────────────────────────────────────


def _device_names(names: Sequence[str], row_px: float) -> Iterator[str]:
    """As many names as there is room for."""
    every = int(np.ceil(_LABEL_PX / row_px))
    for device in range(0, len(names), every):
        y = device * row_px + min(row_px, _LABEL_PX) * 0.8
        yield svg_text(2.0, max(y, 9.0), shorten(inert(names[device]), 16), "")


def _bar(run: FleetRun, spans: HoldSpans, at: int, row_px: float, total_s: float) -> str:
    number, scale = int(spans.number[at]), _ACROSS / total_s
    start_s, end_s = float(spans.start_s[at]), float(spans.end_s[at])
    y, height = spans.device[at] * row_px, row_px - 1.0
    if spans.is_second[at]:
        y, height = y + height / 2.0, height / 2.0
    unit_s, unit = unit_of(total_s)
    when = f"{start_s / unit_s:.2f} to {end_s / unit_s:.2f} {unit}"
    x, width = _LEFT + start_s * scale, max((end_s - start_s) * scale, 0.2)
    bar = (
        f'<rect class="f{colour_of(number)}" x="{x:.2f}" y="{y:.1f}" '
        f'width="{width:.2f}" height="{height:.1f}">'
        f"<title>{escape(inert(run.names[number], 60))}, {when}</title></rect>"
    )
    room = int((width - 6.0) / _LETTER_PX)
    if height < _LABEL_PX - 1.0 or room < _MIN_LETTERS:
        return bar
    return bar + svg_text(x + 3.0, y + height - 3.0, shorten(inert(run.names[number]), room), "on")


def _left_out(spans: HoldSpans, num_drawn: int, num_devices: int) -> str:
    """What the picture does not show."""
    notes = []
    if num_devices < len(spans.device_names):
        notes.append(f"The first {num_devices:,} of {len(spans.device_names):,} devices are drawn.")
    if num_drawn < len(spans.device):
        notes.append(f"The {num_drawn:,} longest of {len(spans.device):,} spans are drawn.")
    return f"<p>{' '.join(notes)}</p>" if notes else ""
