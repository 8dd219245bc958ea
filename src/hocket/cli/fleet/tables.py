"""Jobs and devices of a service as tables on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import words_for_seconds
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable
from hocket.view.wording import count_of

_MAX_REASONS = 5
_MAX_ROWS = 200
_STYLES = {"running": "green", "starting": "green", "failed": "red", "paused": "yellow"}
_JOB_COLUMNS = (
    Column(title="id", align="right"),
    Column(title="name", is_name=True),
    Column(title="status"),
    Column(title="on", is_name=True, rank=1),
    Column(title="gang", align="right", rank=4),
    Column(title="steps", align="right", rank=3),
    Column(title="attempt", align="right", rank=5),
    Column(title="age", align="right", rank=2),
    Column(title="team", is_name=True, rank=7),
    Column(title="by", is_name=True, rank=6),
)
_TOKEN_COLUMNS = (
    Column(title="name", is_name=True),
    Column(title="role"),
    Column(title="made"),
)
_USAGE_COLUMNS = (
    Column(title="week"),
    Column(title="user", is_name=True),
    Column(title="team", is_name=True, rank=1),
    Column(title="device type", is_name=True),
    Column(title="device hours", align="right"),
)
_DEVICE_COLUMNS = (
    Column(title="device", is_name=True),
    Column(title="kind", is_name=True),
    Column(title="server", is_name=True, rank=1),
    Column(title="use"),
)


def jobs_table(jobs: Sequence[Mapping[str, Any]], now_s: float, is_all: bool) -> RenderableType:
    """A row per job, the newest last."""
    if not jobs:
        return Text("no jobs" if is_all else "no jobs wait or run; --all shows those that ended")
    hidden = max(len(jobs) - _MAX_ROWS, 0)
    rows = [_job_row(job, now_s) for job in jobs[hidden:]]
    table = FittedTable(columns=_JOB_COLUMNS, rows=rows)
    older = (
        [Text(f"  {count_of(hidden, 'older job')} not shown (--json has all)")] if hidden else []
    )
    return Group(*older, table, *_failures(jobs))


def _failures(jobs: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Why the last jobs failed, and where their output is."""
    failed = [job for job in jobs if job["status"] == "failed"][-_MAX_REASONS:]
    return [
        Text(f"  job {job['id']}: {inert(job['message'])}; see hocket fleet logs {job['id']}")
        for job in failed
    ]


def _job_row(job: Mapping[str, Any], now_s: float) -> list[Text]:
    spec = job["spec"]
    until_s = now_s if job["ended_s"] is None else job["ended_s"]
    cells = [
        str(job["id"]),
        inert(spec["name"]),
        job["status"],
        inert(", ".join(job["devices"])),
        str(spec["gang"]),
        _steps(job["done_steps"], spec["total_steps"]),
        str(job["attempt"]),
        words_for_seconds(max(until_s - job["submitted_s"], 0.0)),
        inert(spec["team"]),
        inert(job.get("owner", "")),
    ]
    row = [Text(cell) for cell in cells]
    row[2].stylize(_STYLES.get(job["status"], ""))
    return row


def _steps(done: float, total: float | None) -> str:
    return f"{done:,.0f}" if total is None else f"{done:,.0f} of {total:,.0f}"


def tokens_table(tokens: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row per person."""
    if not tokens:
        return Text("nobody has a token but whoever runs the service")
    rows = [
        [
            Text(inert(token["name"])),
            Text(token["role"]),
            Text(time.strftime("%Y-%m-%d %H:%M", time.localtime(token["made_s"]))),
        ]
        for token in tokens
    ]
    return FittedTable(columns=_TOKEN_COLUMNS, rows=rows)


def usage_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row per week, user, team and device type."""
    if not rows:
        return Text("no device was used")
    cells = [
        [Text(row["week"]), *(Text(inert(row[key])) for key in ("user", "team", "kind")),
         Text(f"{row['device_hours']:,.2f}")]
        for row in rows
    ]  # fmt: skip
    return FittedTable(columns=_USAGE_COLUMNS, rows=cells)


def devices_table(devices: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row per device."""
    if not devices:
        return Text("no devices")
    rows = [
        [
            Text(inert(device["name"])),
            Text(inert(device["kind"])),
            Text(inert(device["server"])),
            _use(device),
        ]
        for device in devices[:_MAX_ROWS]
    ]
    table = FittedTable(columns=_DEVICE_COLUMNS, rows=rows)
    hidden = len(devices) - len(rows)
    if not hidden:
        return table
    return Group(table, Text(f"  {count_of(hidden, 'more device')} not shown (--json has all)"))


def _use(device: Mapping[str, Any]) -> Text:
    if not device["is_up"]:
        return Text("lost", style="red")
    drained = ", drained" if device["is_drained"] else ""
    if not device["jobs"]:
        return Text(f"free{drained}", style="dim")
    numbers = ", ".join(str(number) for number in device["jobs"])
    return Text(f"job {numbers}{drained}", style="green")
