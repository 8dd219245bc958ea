"""The report of a split: one HTML file in the frame of the other reports, without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import format_percent, format_seconds
from hocket.classes.artefact import REPORT
from hocket.classes.table import PartTable
from hocket.view.drawing import svg_rect, svg_text
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, page_html, section, stats_html, table

_WIDTH_PX, _HEIGHT_PX, _MARGIN_PX, _DOT_PX = 720, 260, 60, 9


def split_report_html(parts: PartTable, validation: Mapping[str, Any]) -> str:
    """The report as one HTML text."""
    verdict = validation["verdict"]
    return page_html(
        title=f"{len(parts.class_names)} classes in {len(parts.parts)} parts",
        lead=f"{str(verdict['why']).capitalize()}.",
        stats=_stats(parts, validation),
        body=(
            _stages(validation),
            _parts(parts),
            _losses(validation),
            _confusion(parts, validation),
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
        ("Slowest part", format_seconds(slowest_s), f"whole {format_seconds(whole.latency_s)}"),
        ("Answer", format_seconds(validation["predicted_s"]), f"on {validation['cores']} cores"),
        ("Test accuracy", f"{100 * validation['test_parts']:.2f} %", f"{lost:+.2f} points lost"),
        ("Work of all parts", f"{validation['verdict']['total_work']:.2f}x", "of the whole net"),
    ]
    return stats_html(entries)


def _stages(validation: Mapping[str, Any]) -> str:
    heads = [
        ColumnHead("Stage"),
        ColumnHead("Accuracy (validation)", "number"),
        ColumnHead("Slowest", "number"),
    ]
    rows: list[list[Cell]] = [
        [stage["name"], f"{100 * stage['accuracy']:.2f} %", format_seconds(stage["slowest_s"])]
        for stage in validation["stages"]
    ]
    return section("stages", "Accuracy against latency", _dots(validation), table(heads, rows))


def _dots(validation: Mapping[str, Any]) -> str:
    """Stages as points: time to the right, accuracy upwards."""
    stages = validation["stages"]
    longest_s = max(stage["slowest_s"] for stage in stages)
    low = min(stage["accuracy"] for stage in stages)
    high = max(stage["accuracy"] for stage in stages)
    spread = max(high - low, 1e-3)
    marks = []
    for number, stage in enumerate(stages):
        x = _MARGIN_PX + (_WIDTH_PX - 4 * _MARGIN_PX) * stage["slowest_s"] / longest_s
        share = (stage["accuracy"] - low) / spread
        y = _HEIGHT_PX - _MARGIN_PX - (_HEIGHT_PX - 2 * _MARGIN_PX) * share
        colour = "forward" if number else "backward"
        marks.append(svg_rect(colour, x - _DOT_PX / 2, y - _DOT_PX / 2, _DOT_PX, _DOT_PX))
        told = f"{stage['name']}: {100 * stage['accuracy']:.2f} %"
        marks.append(svg_text(x + _DOT_PX, y + 4, told, "label"))
    marks.append(
        svg_text(_MARGIN_PX, _HEIGHT_PX - 16, f"0 to {format_seconds(longest_s)} →", "label")
    )
    label = "accuracy of every stage over the time of its slowest part"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" '
        f'viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}"><title>{label}</title>'
        f'<rect class="paper" width="{_WIDTH_PX}" height="{_HEIGHT_PX}"/>'
        + "".join(marks)
        + "</svg>\n"
    )


def _parts(parts: PartTable) -> str:
    heads = [ColumnHead("Part", "number"), ColumnHead("Classes"), ColumnHead("Work", "number"),
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
    return section("parts", "Parts", table(heads, rows))


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


def _confusion(parts: PartTable, validation: Mapping[str, Any]) -> str:
    names = [", ".join(inert(parts.class_names[each]) for each in group) for group in parts.groups]
    heads = [
        ColumnHead("Group"),
        *(ColumnHead(str(index), "number") for index in range(len(names))),
    ]
    rows: list[list[Cell]] = [
        [f"{index}: {name}", *map(str, counts)]
        for index, (name, counts) in enumerate(zip(names, validation["confusion"], strict=True))
    ]
    return section("confusion", "Test inputs by true and answered group", table(heads, rows))
