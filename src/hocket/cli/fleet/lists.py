"""``hocket fleet jobs``, ``devices`` and ``usage``: print tables of a service's state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import words_for_seconds
from hocket.cli.declare import declare, option
from hocket.cli.fleet.connection import Service, Watch, show
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import count_of

if TYPE_CHECKING:
    pass

# Jobs per request: the largest page that the service returns.
_PAGE = 1000
_MAX_FAILED = 20
_FAILED = ("failed", "timed out")
_WITH_DEVICES = ("starting", "running", "stopping")
# Failures older than a day are hidden unless --all is given.
_RECENT_S = 24 * 3600.0
_MAX_REASONS = 5
_MAX_ROWS = 200
_STYLES = {
    "running": "green",
    "starting": "green",
    "failed": "red",
    "timed out": "red",
    "paused": "yellow",
}
Rows = Sequence[Mapping[str, Any]]


@declare("jobs")
def jobs(
    *,
    service: Service,
    is_all: Annotated[bool, option("Also jobs that have ended.", "--all")] = False,
    watch: Watch = False,
    as_json: bool,
) -> None:
    """List jobs that run or wait, and those that failed or timed out within a day."""
    client = service.connect()

    def look() -> dict[str, Any]:
        if is_all:
            return {"jobs": list(client.pages("/v1/jobs", "jobs", limit=_PAGE))}
        found = [
            job
            for status in _FAILED
            for job in client.get("/v1/jobs", status=status, newest=True, limit=_MAX_FAILED)["jobs"]
        ]
        failed = {job["id"]: job for job in found if job["ended_s"] > time.time() - _RECENT_S}
        live = {job["id"]: job for job in client.pages("/v1/jobs", "jobs", limit=_PAGE, live=True)}
        return {"jobs": [job for _, job in sorted((live | failed).items())]}

    show(
        look,
        lambda found: jobs_table(found["jobs"], time.time(), is_all),
        as_json=as_json,
        is_watched=watch,
    )


@declare("devices")
def devices(
    *,
    service: Service,
    watch: Watch = False,
    as_json: bool,
) -> None:
    """List the devices of the service and the jobs on them."""
    client = service.connect()
    show(
        lambda: client.get("/v1/devices"),
        lambda found: devices_table(found["devices"]),
        as_json=as_json,
        is_watched=watch,
    )


@declare("usage")
def usage(
    *,
    service: Service,
    weeks: Annotated[int, option("This week and as many before.", type=click.IntRange(1, 520))] = 4,
    as_json: bool,
) -> None:
    """List device hours by week, user, team and device type."""
    client = service.connect()
    show(
        lambda: client.get("/v1/usage", weeks=weeks),
        lambda found: usage_table(found["usage"]),
        as_json=as_json,
    )


def jobs_table(jobs: Rows, now_s: float, is_all: bool) -> RenderableType:
    """One row per job and a line for each of the last failures.

    Jobs that hold devices come first, then the others with the newest last. Rows beyond `_MAX_ROWS`
    are counted, not shown.
    """
    if not jobs:
        return Text("no jobs" if is_all else "no jobs wait or run; --all shows those that ended")
    hidden = max(len(jobs) - _MAX_ROWS, 0)
    first = [job for job in jobs if job["status"] in _WITH_DEVICES][:_MAX_ROWS]
    others = [job for job in jobs if job["status"] not in _WITH_DEVICES]
    rows = [*first, *others[max(len(others) + len(first) - _MAX_ROWS, 0) :]]
    columns = (
        number("id"), name("name"), Column(title="status"), name("on", 1), number("gang", 4),
        number("steps", 3), number("attempt", 5), number("age", 2), name("team", 7), name("by", 6),
    )  # fmt: skip
    table = FittedTable(columns=columns, rows=[_job_row(job, now_s) for job in rows])
    older = f"  {count_of(hidden, 'other job')} not shown (--json has all)"
    failed = [job for job in jobs if job["status"] in _FAILED][-_MAX_REASONS:]
    reasons = [
        Text(f"  job {job['id']}: {inert(job['message'])}; see hocket fleet logs {job['id']}")
        for job in failed
    ]
    return Group(*([Text(older)] if hidden else []), table, *reasons)


def _job_row(job: Mapping[str, Any], now_s: float) -> list[str | Text]:
    spec, total = job["spec"], job["spec"]["total_steps"]
    return [
        str(job["id"]),
        inert(spec["name"]),
        Text(job["status"], style=_STYLES.get(job["status"], "")),
        inert(", ".join(job["devices"])),
        str(spec["gang"]),
        f"{job['done_steps']:,.0f}" + ("" if total is None else f" of {total:,.0f}"),
        str(job["attempt"]),
        words_for_seconds(max(now_s - job["submitted_s"], 0.0)),
        inert(spec["team"]),
        inert(job.get("owner", "")),
    ]


def devices_table(devices: Rows) -> RenderableType:
    """One row per device with the jobs on it."""
    if not devices:
        return Text("no devices")
    rows: list[list[str | Text]] = [
        [*(inert(device[key]) for key in ("name", "device_type", "server")), _use(device)]
        for device in devices[:_MAX_ROWS]
    ]
    columns = (name("device"), name("device type"), name("server", 1), Column(title="use"))
    hidden = len(devices) - len(rows)
    more = [Text(f"  {count_of(hidden, 'more device')} not shown (--json has all)")]
    return Group(FittedTable(columns=columns, rows=rows), *(more if hidden else []))


def _use(device: Mapping[str, Any]) -> Text:
    if not device["is_up"]:
        return Text("lost", style="red")
    drained = ", drained" if device["is_drained"] else ""
    if not device["jobs"]:
        return Text(f"free{drained}", style="dim")
    numbers = ", ".join(str(number) for number in device["jobs"])
    return Text(f"job {numbers}{drained}", style="green")


def usage_table(rows: Rows) -> RenderableType:
    """One row per week, user, team and device type, with the device hours."""
    if not rows:
        return Text("no device was used")
    cells = [
        [*(inert(row[key]) for key in ("week", "user", "team", "device_type")),
         f"{row['device_hours']:,.2f}"]
        for row in rows
    ]  # fmt: skip
    columns = (
        Column(title="week"), name("user"), name("team", 1), name("device type"),
        number("device hours"),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=cells)
