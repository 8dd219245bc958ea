"""Simulated fleets as one HTML file that needs nothing else: tables, curves and who ran where.

All pictures are SVG in the page; there is no script and no request to anywhere. Long runs are
thinned: curves to a few hundred points, the picture of devices to the longest spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from hocket import __version__
from hocket.arrays import FloatArray
from hocket.atomic import write_atomically
from hocket.fleet.simulator.fleet_run import FleetRun, Spans
from hocket.view.fleet_text import TIMES, USE, label, remarks, times, use
from hocket.view.names import inert
from hocket.view.report import LOGO, policy

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1080, 260, 56, 28
_MAX_POINTS = 400
_MAX_SPANS = 5000
_MAX_DEVICES = 200
_COLOURS = ("#3c72b4", "#c8752f", "#3d8f5f", "#a04a7d", "#7a6a2f", "#4c4c8f", "#8f3d3d", "#2f7a7a")
_CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #999}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}h1 svg{width:48px}
.key svg{width:10px}.key span{margin-right:1.5em}.grid{stroke:#ddd}.curve{fill:none;stroke-width:2}
""" + "".join(
    f".c{at}{{stroke:{colour}}}.f{at}{{fill:{colour}}}" for at, colour in enumerate(_COLOURS)
)


def fleet_report_html(runs: Sequence[FleetRun], title: str) -> str:
    """The report of one or more runs of one trace."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy(_CSS, "")}">',
        f'<meta name=generator content="hocket {__version__}">',
        f"<title>{escape(inert(title, 200))}</title><style>{_CSS}</style></head><body>",
        f"<h1>{LOGO} {escape(inert(title, 200))}</h1>",
        _table(TIMES, [times(run) for run in runs]),
        _table(USE, [use(run) for run in runs]),
        "".join(f"<p>{escape(line)}</p>" for line in remarks(runs)),
        "<h2>Jobs that have ended after so many hours</h2>",
        _key([label(run) for run in runs]),
        _completion_curves(runs),
        "<h2>Devices in use</h2>",
        _key([label(run) for run in runs]),
        _use_curves(runs),
    ]
    for run in runs:
        if run.spans is not None:
            parts.append(f"<h2>Who ran where: {escape(label(run))}</h2>{_gantt(run, run.spans)}")
    parts.append(f"<p>Simulated with hocket {__version__}.</p></body></html>")
    return "".join(parts)


def write_fleet_report(path: str | Path, runs: Sequence[FleetRun], title: str) -> None:
    """Write the report to a file."""
    write_atomically(path, fleet_report_html(runs, title).encode())


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _key(names: Sequence[str]) -> str:
    marks = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="f{_colour(at)}" width="10" height="10"/>'
        f"</svg> {escape(name)}</span>"
        for at, name in enumerate(names)
    )
    return f"<p class=key>{marks}</p>" if len(names) > 1 else ""


def _colour(at: int) -> int:
    return at % len(_COLOURS)


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


def _completion_curves(runs: Sequence[FleetRun]) -> str:
    hours = [np.sort(run.jct_s) / 3600.0 for run in runs]
    largest = max((float(values[-1]) for values in hours if len(values)), default=1.0)
    low = max(min((float(v[0]) for v in hours if len(v)), default=0.01), largest / 1e4, 1e-3)

    def place(value: FloatArray) -> FloatArray:
        span = max(np.log(largest / low), 1e-9)
        return np.asarray(np.log(np.maximum(value, low) / low) / span)

    curves = [(place(v), np.arange(1, len(v) + 1) / max(len(v), 1)) for v in hours]
    ticks = [(t, f"{t:g} h") for t in (0.01, 0.1, 1, 10, 100, 1000, 10000) if low <= t <= largest]
    return _chart(curves, [(float(place(np.array([t]))[0]), text) for t, text in ticks], "all")


def _use_curves(runs: Sequence[FleetRun]) -> str:
    end_s = max(max((run.simulated_s for run in runs), default=1.0), 1e-9)
    curves = [
        (run.sample_time_s / end_s, run.sample_busy.sum(axis=1) / max(run.num_devices.sum(), 1))
        for run in runs
    ]
    ticks = [(part, f"{part * end_s / 3600.0:.0f} h") for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _chart([_thin(*curve) for curve in curves], ticks, "all")


def _thin(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means over equal parts of the samples."""
    if len(x) <= _MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(x), _MAX_POINTS + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(x)))
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def _chart(
    curves: Sequence[tuple[FloatArray, FloatArray]],
    ticks: Sequence[tuple[float, str]],
    top: str,
) -> str:
    """Curves in the unit square with marks along the bottom."""
    across: Callable[[float], float] = lambda x: _LEFT + x * (_WIDTH - _LEFT - 10)  # noqa: E731
    up: Callable[[float], float] = lambda y: _HEIGHT - _BOTTOM - y * (_HEIGHT - _BOTTOM - 12)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for level, text in ((0.0, "0"), (0.5, "half"), (1.0, top)):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{up(level):.1f}" '
            f'y2="{up(level):.1f}"/><text x="4" y="{up(level) + 4:.1f}">{text}</text>'
        )
    for where, text in ticks:
        parts.append(f'<text x="{across(where):.1f}" y="{_HEIGHT - 8}">{escape(text)}</text>')
    for at, (x, y) in enumerate(curves):
        if len(x) > _MAX_POINTS:
            keep = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS).astype(int))
            x, y = x[keep], y[keep]
        points = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in zip(x, y, strict=True))
        parts.append(f'<polyline class="curve c{_colour(at)}" points="{points}"/>')
    return "".join(parts) + "</svg>"


# ── devices over time ────────────────────────────────────────────────────────────────────────────


def _gantt(run: FleetRun, spans: Spans) -> str:
    shown = np.flatnonzero(spans.device < _MAX_DEVICES)
    length_s = (spans.end_s - spans.start_s)[shown]
    longest = shown[np.argsort(-length_s, kind="stable")[:_MAX_SPANS]]
    num_devices = min(len(spans.device_names), _MAX_DEVICES)
    height = max(4.0, min(16.0, 900.0 / max(num_devices, 1)))
    total_s = max(run.simulated_s, 1e-9)
    scale = (_WIDTH - 120) / total_s
    parts = [f'<svg viewBox="0 0 {_WIDTH} {num_devices * height + 4:.0f}" role="img">']
    if height >= 12.0:
        for device in range(num_devices):
            name = escape(inert(spans.device_names[device], 16))
            parts.append(f'<text x="2" y="{(device + 0.8) * height:.1f}">{name}</text>')
    for at in longest:
        number = int(spans.number[at])
        name = escape(inert(run.names[number], 60))
        parts.append(
            f'<rect class="f{_colour(number)}" x="{110 + spans.start_s[at] * scale:.2f}" '
            f'y="{spans.device[at] * height:.1f}" height="{height - 1:.1f}" '
            f'width="{max((spans.end_s[at] - spans.start_s[at]) * scale, 0.2):.2f}">'
            f"<title>{name}</title></rect>"
        )
    note = ""
    if len(longest) < len(spans.device):
        note = f"<p>The {len(longest):,} longest of {len(spans.device):,} spans are drawn.</p>"
    return "".join(parts) + "</svg>" + note
