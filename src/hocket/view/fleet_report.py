"""Simulated fleets as one HTML file that needs nothing else: tables, curves and who ran where.

All pictures are SVG in the page; there is no script and no request to anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import words_for_seconds
from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.view.fleet_charts import colour_of, completion_chart, device_chart, use_chart
from hocket.view.fleet_text import TIMES, USE, label, remarks, times, use
from hocket.view.names import inert
from hocket.view.page import page_html


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
td:not(:first-child),th:not(:first-child){text-align:right;white-space:nowrap}
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
    + f":root{{{_variables(_COLOURS)}}}"
    + f"@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)


def fleet_report_html(runs: Sequence[FleetRun], title: str) -> str:
    """The report of one or more runs of one trace."""
    parts = [
        _table(TIMES, times(runs)),
        _table(USE, use(runs)),
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
        parts.append(_table(_JOB_HEADINGS, _longest_jobs(run)))
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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return _scrolled(f"<table><tr>{head}</tr>{body}</table>")


def _scrolled(content: str) -> str:
    """Wider than a telephone: it moves, and the page does not."""
    return f"<div class=scroll>{content}</div>"


_JOB_HEADINGS = ("job", "came after", "waited", "held devices", "took")


def _longest_jobs(run: FleetRun) -> list[list[str]]:
    """Those with the longest times from arrival to end; jobs that had not ended come first."""
    end_s = np.where(np.isnan(run.end_s), np.inf, run.end_s)
    order = np.argsort(-(end_s - run.arrival_s), kind="stable")[:_MAX_JOBS]
    return [
        [
            inert(run.names[at], 40),
            _moment(run.arrival_s[at]),
            _moment(run.start_s[at] - run.arrival_s[at]),
            _moment(run.held_s[at]),
            _moment(run.end_s[at] - run.arrival_s[at]),
        ]
        for at in order.tolist()
    ]


def _moment(time_s: float) -> str:
    return words_for_seconds(time_s) if np.isfinite(time_s) else "–"


def _key(names: Sequence[str]) -> str:
    marks = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="f{colour_of(at)}" width="10" height="10"/>'
        f"</svg> {escape(name)}</span>"
        for at, name in enumerate(names)
    )
    return f"<p class=key>{marks}</p>" if len(names) > 1 else ""
