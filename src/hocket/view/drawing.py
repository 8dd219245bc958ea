"""SVG parts that all pictures over time share: scale, axis, legend, text, frame of a memory
curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from hocket.base.units import format_seconds

MARGIN_PX, AXIS_PX, LEGEND_PX = 14, 30, 26
_LAST_LABEL_PX = 40
"""Minimum distance of a labelled tick from the right margin; a label closer would be cut off."""


@dataclass(frozen=True)
class Scale:
    """Map from times to horizontal positions in pixels."""

    width: float
    makespan_s: float
    label_px: int
    """Width of the row names on the left."""

    @property
    def left_px(self) -> float:
        """Horizontal position of time zero."""
        return float(MARGIN_PX + self.label_px)

    @property
    def px_per_s(self) -> float:
        """Pixels per second; zero if the step has no duration."""
        span = self.width - self.label_px - 2 * MARGIN_PX
        return span / self.makespan_s if self.makespan_s > 0 else 0.0

    def x(self, time_s: float) -> float:
        """Horizontal position of a time."""
        return self.left_px + time_s * self.px_per_s


def time_axis(scale: Scale, bottom: float) -> Iterator[str]:
    """Vertical grid lines at round times down to ``bottom``, with labels above."""
    if not scale.px_per_s:
        return
    step_s = tick_step(scale.makespan_s, max(int(scale.width // 120), 2))
    # The small term keeps the last tick when rounding makes the quotient slightly too small.
    for tick in range(int(scale.makespan_s / step_s + 1e-9) + 1):
        x = scale.x(tick * step_s)
        yield f'<path class="grid" d="M{x:.1f} {MARGIN_PX + AXIS_PX - 10}V{bottom:.1f}"/>'
        if x < scale.width - MARGIN_PX - _LAST_LABEL_PX or tick == 0:
            yield svg_text(x + 3, MARGIN_PX + 12, format_seconds(tick * step_s), "muted")


def bound_line(scale: Scale, bound_s: float, bottom: float) -> Iterator[str]:
    """Dashed vertical line at the lower bound of all strategies."""
    x = scale.x(bound_s)
    yield f'<path class="capacity" d="M{x:.1f} {MARGIN_PX + AXIS_PX - 12}V{bottom:.1f}"/>'
    yield svg_text(x - 3, MARGIN_PX + 24, "lower bound", "muted", anchor="end")


def tick_step(length: float, num_ticks: int) -> float:
    """Smallest step of 1, 2 or 5 times a power of ten that gives at most ``num_ticks`` ticks."""
    rough = length / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * (1 - 1e-9))


def svg_rect(name: str, x: float, y: float, width: float, height: float) -> str:
    """Rectangle with the CSS class ``name``."""
    return (
        f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )


def svg_text(x: float, y: float, content: str, name: str, anchor: str = "start") -> str:
    """Text at a position."""
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(content)}</text>'


def picture_svg(
    width: float, height: float, label: str, body: Iterable[str], *, styled: bool
) -> str:
    """Complete SVG picture; ``styled`` embeds `picture_css`, which a page otherwise provides."""
    style = f"<style>{picture_css()}</style>" if styled else ""
    size, label = f'width="{width}" height="{height:.0f}"', escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" {size} viewBox="0 0 {width} {height:.0f}"><title>{label}</title>'
        f'{style}<rect class="paper" {size}/>{"".join(body)}</svg>\n'
    )


def svg_legend(
    x: float, y: float, entries: Iterable[tuple[str, str]], last: str = ""
) -> Iterator[str]:
    """Legend in one line from pairs of (CSS class, label), followed by a remark."""
    for name, label in entries:
        yield svg_rect(name, x, y - 9, 10, 10)
        yield svg_text(x + 15, y, label, "muted")
        # SVG cannot measure text here: 6.2 px is the mean width of a letter at the legend's font
        # size.
        x += 15 + 6.2 * len(label) + 18
    if last:
        yield svg_text(x, y, last, "muted")


def memory_card(
    name: str, peak_text: str, curve: str, *, fits: bool = True, under: str = ""
) -> str:
    """Card with a memory curve of 400 x 100, a name, and the peak; ``under`` is placed below the
    curve.
    """
    peak = f"<span>{peak_text}</span>" if fits else f'<span class="over">{peak_text} ✗</span>'
    return (
        f"<article><header><h3>{escape(name)}</h3>{peak}</header><figure>"
        f'<svg class="curve hocket-svg" viewBox="0 0 400 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(f"memory, {name}: peak {peak_text}")}">{curve}</svg>'
        f"{under}</figure></article>"
    )


def picture_css() -> str:
    """Style sheet of all pictures, for light and dark mode."""
    return (files("hocket.view") / "templates" / "picture.css").read_text("utf-8")
