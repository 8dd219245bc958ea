"""Write the report of a split: one HTML file without scripts, laid out like other reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import format_percent, format_seconds
from hocket.classes.artefact import REPORT
from hocket.classes.table import PartTable
from hocket.view.drawing import svg_rect, svg_text, tick_step
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, page_html, section, stats_html, table

_WIDTH_PX, _HEIGHT_PX, _MARGIN_PX, _DOT_PX = 860, 260, 60, 9
_NAME_PX = 240
"""Space for the name to the right of the last point."""
_LINE_PX = 15
_TICKS = 5
_MOST_OVERLAP_CLASSES = 24
"""Overlap tables of more classes are only in validation.json."""

_Point = tuple[str, float, float]
"""A stage: its name, accuracy and seconds."""


def split_report_html(parts: PartTable, validation: Mapping[str, Any]) -> str:
    """Return the report as one HTML text."""
    verdict = validation["verdict"]
    return page_html(
        title=f"{len(parts.class_names)} classes in {len(parts.parts)} sub-models",
        lead=f"{str(verdict['why']).capitalize()}.",
        stats=_stats(parts, validation),
        body=(
            _stages(parts, validation),
            _parts(parts),
            _losses(validation),
            _overlap(parts, validation),
        ),
        footer=f"Measured with hocket {__version__}; decisions were made on validation data, the "
        "test split was looked at once, at the end.",
    )


def write_split_report(folder: Path, parts: PartTable, validation: Mapping[str, Any]) -> None:
    """Write the report into the folder of the split."""
    write_atomically(folder / REPORT, split_report_html(parts, validation).encode())


def _stats(parts: PartTable, validation: Mapping[str, Any]) -> str:
    whole, slowest_s = parts.whole, validation["slowest_s"]
    lost = 100 * (validation["test_whole"] - validation["test_parts"])
    entries = [
        ("Slowest of them", format_seconds(slowest_s), f"whole {format_seconds(whole.latency_s)}"),
        ("Answer", format_seconds(validation["predicted_s"]), f"on {validation['cores']} cores"),
        ("Test accuracy", f"{100 * validation['test_parts']:.2f} %",
         f"whole {100 * validation['test_whole']:.2f} %: {abs(lost):.2f} points "
         + ("lost" if lost >= 0 else "gained")),
    ]  # fmt: skip
    return stats_html(entries)


def _stages(parts: PartTable, validation: Mapping[str, Any]) -> str:
    heads = [
        ColumnHead("Stage"),
        ColumnHead("Accuracy (validation)", "number"),
        ColumnHead("Slowest", "number"),
    ]
    points = _points(parts, validation)
    rows: list[list[Cell]] = [
        [name, f"{100 * share:.2f} %", format_seconds(took_s)] for name, share, took_s in points
    ]
    return section("stages", "Accuracy against latency", _dots(points), table(heads, rows))


def _points(parts: PartTable, validation: Mapping[str, Any]) -> list[_Point]:
    """Points of all stages, by their slowest part, and of the served answer, which takes longer."""
    stages = [(each["name"], each["accuracy"], each["slowest_s"]) for each in validation["stages"]]
    best = max(share for _, share, _ in stages[1:])
    label = f"answer of {len(parts.parts)} workers on {validation['cores']} cores"
    return [*stages, (label, best, validation["predicted_s"])]


def _dots(points: Sequence[_Point]) -> str:
    """Plot the stages as points: time to the right, accuracy upwards."""
    longest_s = max(took_s for _, _, took_s in points)
    low, high = (choose(share for _, share, _ in points) for choose in (min, max))
    spread = max(high - low, 1e-3)
    bottom = _HEIGHT_PX - _MARGIN_PX

    def across(took_s: float) -> float:
        return _MARGIN_PX + (_WIDTH_PX - _MARGIN_PX - _NAME_PX) * took_s / longest_s

    def up(share: float) -> float:
        return bottom - _DOT_PX - (bottom - _MARGIN_PX / 2 - _DOT_PX) * (share - low) / spread

    marks = []
    step_s = tick_step(longest_s, _TICKS)
    for tick in range(int(longest_s / step_s + 1e-9) + 1):
        x = across(tick * step_s)
        marks.append(f'<path class="grid" d="M{x:.1f} 0V{bottom}"/>')
        marks.append(svg_text(x, bottom + 16, format_seconds(tick * step_s), "muted", "middle"))
    for share in {low, high}:
        marks.append(
            svg_text(_MARGIN_PX - 8, up(share) + 4, f"{100 * share:.2f} %", "muted", "end")
        )
    names: list[tuple[float, float]] = []
    for number, (name, share, took_s) in enumerate(points):
        colour = "backward" if number == 0 else "forward"
        x, y = across(took_s), up(share)
        marks.append(svg_rect(colour, x - _DOT_PX / 2, y - _DOT_PX / 2, _DOT_PX, _DOT_PX))
        # Names of points that are near each other stand one below the other.
        line = y
        while any(abs(x - far) < _NAME_PX and abs(line - own) < _LINE_PX for far, own in names):
            line += _LINE_PX
        names.append((x, line))
        marks.append(svg_text(x + _DOT_PX, line + 4, name, "label"))
    label = "accuracy of every stage over the time of its slowest sub-model"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" '
        f'viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}"><title>{label}</title>'
        f'<rect class="paper" width="{_WIDTH_PX}" height="{_HEIGHT_PX}"/>'
        + "".join(marks)
        + "</svg>\n"
    )


def _parts(parts: PartTable) -> str:
    heads = [ColumnHead("Sub-model", "number"), ColumnHead("Classes"), ColumnHead("Work", "number"),
             ColumnHead("Size", "number"), ColumnHead("One input", "number")]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            str(index),
            ", ".join(inert(parts.class_names[each]) for each in part.classes),
            format_percent(part.macs / parts.whole.macs),
            format_percent(part.parameters / parts.whole.parameters),
            format_seconds(part.latency_s),
        ]
        for index, part in enumerate(parts.parts)
    ]
    return section("parts", "Sub-models", table(heads, rows))


def _losses(validation: Mapping[str, Any]) -> str:
    heads = [ColumnHead("Workers lost", "number"), ColumnHead("Patterns", "number"),
             ColumnHead("That lose a group", "number"), ColumnHead("Mean accuracy", "number"),
             ColumnHead("Worst accuracy", "number")]  # fmt: skip
    accuracy = {row["lost"]: row for row in validation["lost_workers"]}
    rows: list[list[Cell]] = []
    for row in validation["losses"]:
        known = accuracy.get(row["lost"])
        rows.append([
            str(row["lost"]), str(row["patterns"]), str(row["losing"]),
            f"{100 * known['mean']:.2f} %" if known else "",
            f"{100 * known['worst']:.2f} %" if known else "",
        ])  # fmt: skip
    return section("losses", "When workers are lost", table(heads, rows))


def _overlap(parts: PartTable, validation: Mapping[str, Any]) -> str:
    rows_of = validation.get("pruned_overlap", ())
    if not rows_of or len(rows_of) > _MOST_OVERLAP_CLASSES:
        return ""
    names = [inert(name) for name in parts.class_names]
    heads = [ColumnHead("Class"), *(ColumnHead(name, "number") for name in names)]
    rows: list[list[Cell]] = [
        [name, *(f"{each:.2f}" for each in row)] for name, row in zip(names, rows_of, strict=True)
    ]
    title = "Channels pruned for each class alone: intersection over union"
    return section("overlap", title, table(heads, rows))
