"""Simulated fleets as one self-contained HTML file: tables, curves and a chart of devices over
time.

All pictures are inline SVG. There is no script and no network request. Long runs are thinned:
curves to a few hundred points, the chart of devices to the longest spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from hocket import __version__
from hocket.base.arrays import FloatArray
from hocket.base.atomic import write_atomically
from hocket.base.units import words_for_seconds
from hocket.fleet.simulator.fleet_run import FleetRun, HoldSpans
from hocket.view.drawing import svg_text, tick_step
from hocket.view.fleet_live import MAX_BARS, MAX_DEVICES, Bar, DeviceRow, draw_devices
from hocket.view.fleet_live import NUM_COLOURS as NUM_JOB_COLOURS
from hocket.view.fleet_text import label, remarks, run_tables, unit_of
from hocket.view.names import inert
from hocket.view.page import fitted, page_html
from hocket.view.table import FittedTable, name, number

NUM_COLOURS = 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 260, 110, 40, 12, 28
_ACROSS = _WIDTH - _LEFT - _RIGHT
_MAX_POINTS = 400

Curve = tuple[FloatArray, FloatArray]
Ticks = Sequence[tuple[float, str]]


def colour_of(at: int) -> int:
    """Colour class of a run or a job."""
    return at % NUM_COLOURS


def completion_chart(runs: Sequence[FleetRun]) -> str:
    """Chart of the fraction of ended jobs against time since arrival, on a logarithmic time
    axis."""
    ends_s = [np.sort(run.jct_s) for run in runs]
    longest_s = max((float(ends[-1]) for ends in ends_s if len(ends)), default=1.0)
    shortest_s = min((float(ends[0]) for ends in ends_s if len(ends)), default=longest_s)
    # A logarithmic axis needs a positive lower end, and at most four decades stay readable.
    low_s = max(min(shortest_s, longest_s / 3.0), longest_s / 1e4, 1e-9)

    def place(value_s: FloatArray) -> FloatArray:
        return np.asarray(np.log(np.maximum(value_s, low_s) / low_s) / np.log(longest_s / low_s))

    curves = [_stairs(place(ends), np.arange(len(ends) + 1) / max(len(ends), 1)) for ends in ends_s]
    ticks = _log_ticks(low_s, longest_s)
    places = place(np.array([tick_s for tick_s, _ in ticks]))
    labels = [(float(at), text) for at, (_, text) in zip(places, ticks, strict=True)]
    return _chart(curves, labels, "Part of the jobs that had ended")


def use_chart(runs: Sequence[FleetRun]) -> str:
    """Chart of the fraction of devices in use over time."""
    end_s = max(max((run.simulated_s for run in runs), default=1.0), 1e-9)
    curves = [
        _steps(
            run.sample_time_s / end_s, run.sample_busy.sum(axis=1) / max(run.num_devices.sum(), 1)
        )
        for run in runs
    ]
    return _chart(curves, _time_ticks(end_s), "Part of the devices in use over time")


def device_chart(run: FleetRun, spans: HoldSpans) -> str:
    """Chart of jobs on devices over time; only the longest spans if there are many."""
    total_s = max(run.simulated_s, 1e-9)
    unit_s, unit = unit_of(total_s)
    by_length = np.argsort(spans.end_s - spans.start_s, kind="stable")[-MAX_BARS:]
    bars = []
    # Second jobs of shared devices are drawn last, on top of the first ones.
    for at in by_length[np.argsort(spans.is_second[by_length], kind="stable")].tolist():
        start_s, end_s = float(spans.start_s[at]), float(spans.end_s[at])
        job, name = int(spans.number[at]), run.names[spans.number[at]]
        when = f"{start_s / unit_s:.2f} to {end_s / unit_s:.2f} {unit}"
        bars.append(
            Bar(device=int(spans.device[at]), job=job, label=name, start_s=start_s, end_s=end_s,
                note=f"{inert(name, 60)}, {when}", is_second=bool(spans.is_second[at]))
        )  # fmt: skip
    rows = [DeviceRow(name=name, device_type=name) for name in spans.device_names]
    ticks = [(where * total_s, text) for where, text in _time_ticks(total_s)]
    drawn = draw_devices(rows, bars, 0.0, total_s, ticks)
    notes = []
    if drawn.num_hidden_devices:
        notes.append(f"The first {MAX_DEVICES:,} of {len(rows):,} devices are drawn.")
    if len(bars) < len(spans.device):
        notes.append(f"The {len(bars):,} longest of {len(spans.device):,} spans are drawn.")
    return drawn.svg + (f"<p>{' '.join(notes)}</p>" if notes else "")


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


def _stairs(x: FloatArray, level: FloatArray) -> Curve:
    """Staircase that rises at each x; thinned to `_MAX_POINTS` points."""
    if len(x) > _MAX_POINTS:
        keep = np.unique(np.linspace(0, len(x) - 1, _MAX_POINTS).astype(int))
        x, level = x[keep], np.append(0.0, level[1:][keep])
    return np.append(np.repeat(x, 2), 1.0), np.append(np.repeat(level, 2)[1:-1], level[-1])


def _steps(edges: FloatArray, level: FloatArray) -> Curve:
    """Step function with a level between neighbouring edges; long ones are averaged over
    intervals."""
    if len(level) > _MAX_POINTS:
        first = np.linspace(0, len(level), _MAX_POINTS + 1).astype(int)
        total = np.append(0.0, np.cumsum(level * np.diff(edges)))
        edges = edges[first]
        level = np.diff(total[first]) / np.diff(edges)
    return np.repeat(edges, 2)[1:-1], np.repeat(level, 2)


def _chart(curves: Sequence[Curve], ticks: Ticks, meaning: str) -> str:
    """Draw curves of the unit square with tick marks along the bottom."""
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
    """Round times between two limits, from seconds to years; more ticks if the limits are close."""
    digits = (1, 10) if high_s > 100.0 * low_s else (1, 2, 5, 10, 20)
    ticks = [
        (unit_s * n, f"{n} {unit}") for unit_s, unit in ((1, "s"), (60, "min")) for n in digits
    ]
    hours = [n * 10**power for power in range(5) for n in digits if n < 10]
    ticks += [(3600.0 * n, f"{n:,} h") for n in hours]
    return [tick for tick in ticks if low_s <= tick[0] <= high_s]


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--c{at}:{colour};" for at, colour in enumerate(colours))


_COLOURS = ("#3c72b4", "#c8752f", "#3d8f5f", "#a04a7d", "#7a6a2f", "#4c4c8f", "#8f3d3d", "#2f7a7a")
_WORDS = (
    "Times run from the arrival of a job to its end; p99 is what one job in a hundred exceeds. "
    "Used: part of the devices' time. Fair: 1 where all jobs are slowed down alike, towards 0 the "
    "less they are. Of share: time that jobs held devices over the time that the policy promised "
    "(median). Cost: hours of devices at their prices."
)
_DARK = ("#6da2de", "#e0965b", "#72b489", "#cf86ae", "#b8a55e", "#9a9ae0", "#d88484", "#62b3b3")
_MAX_JOBS = 20
_CSS = (
    """
.hocket{--on:#fff}
@media(prefers-color-scheme:dark){.hocket{--on:#14171b}}
h2{margin-top:1.6rem}.scroll{margin-bottom:1rem}
.scroll>svg{width:100%;height:auto;min-width:700px}
.scroll text{font:12px system-ui,sans-serif;fill:var(--muted)}
.scroll text.on{fill:var(--on);font-size:11px;pointer-events:none}
.key svg{width:10px}.key span{margin-right:1.5em}.grid{fill:none;stroke:var(--rule)}
.words{color:var(--muted);max-width:60em}.curve{fill:none;stroke-width:2}
"""
    + "".join(
        f".c{at}{{stroke:var(--c{at})}}.f{at}{{fill:var(--c{at})}}" for at in range(len(_COLOURS))
    )
    + "".join(f".job-{job}{{fill:var(--c{colour_of(job)})}}" for job in range(NUM_JOB_COLOURS))
    + f":root{{{_variables(_COLOURS)}}}"
    + f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)


def fleet_report_html(runs: Sequence[FleetRun], title: str) -> str:
    """Render the report of one or more runs of one trace."""
    parts = [
        *map(fitted, run_tables(runs)),
        "".join(f"<p>{escape(line)}</p>" for line in remarks(runs)),
        f"<p class=words>{escape(_WORDS)}</p>",
        "<h2>Jobs that had ended so long after they came</h2>",
        _key([label(run) for run in runs]),
        _scrolled(completion_chart(runs)),
        "<h2>Devices in use</h2>",
        _key([label(run) for run in runs]),
        _scrolled(use_chart(runs)),
    ]
    for run in runs:
        parts.append(f"<h2>Jobs that took longest: {escape(label(run))}</h2>")
        parts.append(fitted(_longest_jobs(run)))
        if run.spans is not None:
            parts.append(f"<h2>Who ran where: {escape(label(run))}</h2>")
            parts.append(_scrolled(device_chart(run, run.spans)))
    return page_html(
        title=inert(title, 200),
        body=parts,
        footer=f"Simulated with hocket {__version__}.",
        css=_CSS,
    )


def write_fleet_report(path: str | Path, runs: Sequence[FleetRun], title: str) -> None:
    """Write the report to a file."""
    write_atomically(path, fleet_report_html(runs, title).encode())


def _scrolled(content: str) -> str:
    """Wrap content that is wider than a phone, so that it scrolls instead of the page."""
    return f'<div class="scroll">{content}</div>'


def _longest_jobs(run: FleetRun) -> FittedTable:
    """Table of the jobs with the longest times from arrival to end; unfinished jobs come first."""
    # NaN marks a job that has not ended.
    end_s = np.where(np.isnan(run.end_s), np.inf, run.end_s)
    order = np.argsort(-(end_s - run.arrival_s), kind="stable")[:_MAX_JOBS]
    rows = [
        [
            inert(run.names[at], 40),
            _moment(run.arrival_s[at]),
            _moment(run.start_s[at] - run.arrival_s[at]),
            _moment(run.held_s[at]),
            _moment(run.end_s[at] - run.arrival_s[at]),
        ]
        for at in order.tolist()
    ]
    columns = (name("job"), *map(number, ("came after", "waited", "held devices", "took")))
    return FittedTable(columns=columns, rows=rows)


def _moment(time_s: float) -> str:
    return words_for_seconds(time_s) if np.isfinite(time_s) else "–"


def _key(names: Sequence[str]) -> str:
    marks = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="f{colour_of(at)}" width="10" height="10"/>'
        f"</svg> {escape(name)}</span>"
        for at, name in enumerate(names)
    )
    return f"<p class=key>{marks}</p>" if len(names) > 1 else ""
