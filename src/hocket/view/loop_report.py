"""The report of a function's loops: dependences, the schedule, tiles over workers and time.

One HTML file that needs nothing else and runs no script, in the frame of the other reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import format_bytes, format_seconds
from hocket.loops.choice import TiledOption
from hocket.loops.explain import FunctionExplanation, LoopExplanation
from hocket.view.drawing import AXIS_PX, MARGIN_PX, Scale, svg_rect, svg_text, time_axis
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.page import ColumnHead, page_html, section, table

_LABEL_PX, _BAR_PX, _GAP_PX, _WIDTH_PX = 90, 26, 6, 960
_COLOURS = ("forward", "backward", "optimizer")
MAX_TILES = 5000


def loop_report_html(explanation: FunctionExplanation) -> str:
    """The report as one HTML text."""
    title = inert(f"{explanation.name} in {Path(explanation.place).name}")
    parallel = [loop for loop in explanation.loops if loop.option is not None]
    lead = f"{len(parallel)} of {len(explanation.loops)} loops run in parallel."
    return page_html(
        title=title,
        lead=lead,
        body=(*map(_loop, explanation.loops),),
        footer=f"Predicted with hocket {__version__}; nothing was run.",
    )


def write_loop_report(path: str | Path, explanation: FunctionExplanation) -> None:
    """Write the report to a file."""
    write_atomically(path, loop_report_html(explanation).encode())


def _loop(loop: LoopExplanation) -> str:
    lines = [escape(inert(line.strip(), LONGEST_SENTENCE)) for line in loop.lines()]
    paragraphs = "".join(f"<p>{line}</p>" for line in lines[1:])
    parts = [paragraphs, _vectors(loop)]
    if loop.candidate is not None:
        parts.append(tiles_svg(loop.candidate))
    return section(f"loop-{loop.line}", f"Loop at line {loop.line}", *parts)


def _vectors(loop: LoopExplanation) -> str:
    found = loop.as_dict()["vectors"]
    if not found:
        return ""
    heads = [
        ColumnHead("Array"),
        ColumnHead("Vector"),
        ColumnHead("Dimensions"),
        ColumnHead("Between"),
        ColumnHead("And"),
    ]
    rows = [
        [
            inert(each["array"]),
            each["vector"],
            inert(", ".join(each["dimensions"])),
            *map(inert, each["accesses"]),
        ]
        for each in found
    ]
    return table(heads, rows)


def tiles_svg(candidate: TiledOption) -> str:
    """Tiles over workers and time, as predicted, coloured by their part of the time dimension."""
    tiling = candidate.tiling
    scale = Scale(_WIDTH_PX, candidate.predicted_s, _LABEL_PX)
    bottom = MARGIN_PX + AXIS_PX + tiling.num_workers * (_BAR_PX + _GAP_PX)
    height = bottom + MARGIN_PX
    label = escape(
        f"{len(tiling.tiles)} tiles on {tiling.num_workers} workers: "
        f"{format_seconds(candidate.predicted_s)} per pass, "
        f"{format_bytes(candidate.moved_bytes)} moved"
    )
    body = [*time_axis(scale, bottom), *_marks(candidate, scale)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" width="{_WIDTH_PX}" height="{height}" '
        f'viewBox="0 0 {_WIDTH_PX} {height}"><title>{label}</title>'
        f'<rect class="paper" width="{_WIDTH_PX}" height="{height}"/>' + "".join(body) + "</svg>\n"
    )


def _marks(candidate: TiledOption, scale: Scale) -> Iterator[str]:
    tiling = candidate.tiling

    def top(worker: int) -> float:
        return float(MARGIN_PX + AXIS_PX + worker * (_BAR_PX + _GAP_PX))

    for worker in range(tiling.num_workers):
        yield svg_text(MARGIN_PX, top(worker) + _BAR_PX - 8, f"worker {worker}", "label")
    shown = list(zip(tiling.tiles, candidate.spans_s, strict=True))[:MAX_TILES]
    for tile, (start_s, end_s) in shown:
        left, right = scale.x(start_s), scale.x(end_s)
        colour = _COLOURS[tile.place[1] % len(_COLOURS)]
        width = max(right - left - 1, 0.5)
        yield svg_rect(colour, left, top(tile.worker), width, _BAR_PX)
        if width > 44:
            text = f"{tile.place[0]},{tile.place[1]}"
            yield svg_text(left + 4, top(tile.worker) + _BAR_PX - 8, text, "mark")
