"""Draw which job held which device over time, as SVG: one row per device, one bar per attempt.

The picture contains CSS classes and no style. A job gets one of twelve colour classes by its
number, so its colour never changes. The numbers of rows and bars are limited; the latest bars are
drawn, and the result states how many are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from hocket.view.drawing import MARGIN_PX, Scale, svg_text
from hocket.view.names import inert, shorten

NUM_COLOURS = 12
MAX_DEVICES = 64
MAX_BARS = 3000
_WIDTH_PX, _LABEL_PX, _ROW_PX, _AXIS_PX = 1080, 130, 22, 24
_PX_PER_LETTER = 6.6
# Round intervals of the time axis, from a second to a day.
_STEPS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """Row of the picture for one device."""

    name: str
    device_type: str
    is_up: bool = True


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bar for the time in which a job held a device."""

    device: int
    """Index of the device's row."""
    job: int
    label: str
    start_s: float
    end_s: float | None
    """End of the bar; None while the job still holds the device."""
    note: str
    """Text of the tooltip."""
    is_bad: bool = False
    """True if the attempt failed or was lost."""
    is_second: bool = False
    """True for the second of two jobs that share the device; its bar is half as high."""


@dataclass(frozen=True, kw_only=True)
class DevicePicture:
    """The picture, with the numbers of omitted devices and bars."""

    svg: str
    num_hidden_devices: int
    num_hidden_bars: int


def colour_of(job: int) -> int:
    """Colour class of a job."""
    return job % NUM_COLOURS


def draw_devices(
    devices: Sequence[DeviceRow],
    bars: Sequence[Bar],
    from_s: float,
    now_s: float,
    ticks: Iterable[tuple[float, str]] | None = None,
) -> DevicePicture:
    """Draw which job held each device between ``from_s`` and ``now_s``.

    ``ticks`` are pairs of seconds after ``from_s`` and labels; the default is round times before
    now.
    """
    shown = devices[:MAX_DEVICES]
    seen = [
        bar for bar in bars
        if bar.device < len(shown) and bar.start_s < now_s and _end_s(bar, now_s) > from_s
    ]  # fmt: skip
    newest = sorted(seen, key=lambda bar: bar.start_s)[-MAX_BARS:]
    scale = Scale(_WIDTH_PX, max(now_s - from_s, 1e-9), _LABEL_PX)
    height = _AXIS_PX + len(shown) * _ROW_PX + 4
    parts = [
        f'<svg class="hocket-svg fleet" viewBox="0 0 {_WIDTH_PX} {height}" role="img" '
        'aria-labelledby="devices-title"><title id="devices-title">'
        f"{escape(_title(len(shown), len(newest)))}</title>",
        *_axis(scale, height, _before_now(scale.makespan_s) if ticks is None else ticks),
        *_rows(shown),
        *(_bar(bar, scale, from_s, now_s) for bar in newest),
        "</svg>",
    ]
    return DevicePicture(
        svg="".join(parts),
        num_hidden_devices=len(devices) - len(shown),
        num_hidden_bars=len(seen) - len(newest),
    )


def _end_s(bar: Bar, now_s: float) -> float:
    return now_s if bar.end_s is None else min(bar.end_s, now_s)


def _title(num_devices: int, num_bars: int) -> str:
    return f"Attempts on {num_devices} devices over time: {num_bars} bars"


def _axis(scale: Scale, height: float, ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
    for at_s, label in ticks:
        x = scale.x(at_s)
        yield f'<path class="grid" d="M{x:.1f} {_AXIS_PX - 6}V{height}"/>'
        is_last = at_s >= scale.makespan_s
        yield svg_text(x, _AXIS_PX - 10, label, "muted", "end" if is_last else "middle")


def _before_now(span_s: float) -> Iterator[tuple[float, str]]:
    most = int(_WIDTH_PX // 130)
    step_s = next((s for s in _STEPS_S if span_s / s <= most), span_s / most)
    for tick in range(int(span_s / step_s + 1e-9) + 1):
        yield span_s - tick * step_s, f"−{_short(tick * step_s)}" if tick else "now"


def _short(duration_s: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if duration_s >= unit_s:
            return f"{duration_s / unit_s:.3g} {unit}"
    return f"{duration_s:.3g} s"


def _rows(devices: Sequence[DeviceRow]) -> Iterator[str]:
    left, width = MARGIN_PX + _LABEL_PX, _WIDTH_PX - _LABEL_PX - 2 * MARGIN_PX
    for at, device in enumerate(devices):
        y = _AXIS_PX + at * _ROW_PX
        state = "" if device.is_up else " down"
        yield (
            f'<rect class="track{state}" x="{left}" y="{y}" width="{width}" '
            f'height="{_ROW_PX - 4}"/>'
        )
        name = shorten(inert(device.name), 18)
        note = f"{inert(device.device_type, 40)}{'' if device.is_up else ', not there'}"
        yield (
            f'<text x="{MARGIN_PX}" y="{y + 13}" class="small{state}">'
            f"{escape(name)}<title>{escape(inert(device.name))}, {escape(note)}</title></text>"
        )


def _bar(bar: Bar, scale: Scale, from_s: float, now_s: float) -> str:
    start_s, end_s = max(bar.start_s, from_s), _end_s(bar, now_s)
    x = scale.x(start_s - from_s)
    # Bars narrower than a pixel would vanish; 0.7 px separate neighbours.
    width = max((end_s - start_s) * scale.px_per_s - 0.7, 1.0)
    full_px = _ROW_PX - 4
    height = full_px // 2 if bar.is_second else full_px
    y = _AXIS_PX + bar.device * _ROW_PX + full_px - height
    kind = f"job-{colour_of(bar.job)}{' open' if bar.end_s is None else ''}"
    rect = f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'
    label = shorten(inert(bar.label), int((width - 8.0) / _PX_PER_LETTER))
    words = f'<text x="{x + 4:.1f}" y="{y + min(13, height)}" class="on">{escape(label)}</text>'
    end = f'<rect class="bad" x="{x + width - 2:.1f}" y="{y}" width="2" height="{height}"/>'
    return (
        f"<g>{rect}{end if bar.is_bad else ''}{words if len(label) > 2 else ''}"
        f"<title>{escape(inert(bar.note, 400))}</title></g>"
    )
