"""Small and large fleets, their records and the elements of a page, for tests of the live page."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np

from hocket.fleet.explain import explain
from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, new_state, step
from hocket.fleet.rounds.events import Submit, Tick
from hocket.service.page.recent import Lately
from hocket.service.page.rendering import live_page
from hocket.service.page.router import job_page
from hocket.service.page.templating import render
from hocket.service.page.what_if import what_if_form
from hocket.service.records import (
    AttemptRecord,
    CheckpointRecord,
    JobRecord,
)
from hocket.service.spec import JobSpec

HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\u202eevil\u2066\u200f",
    "\x1b[31mred\x07\r\n\tend",
    "{{ 7 * 7 }}{% include 'login.html' %}",
    "</title></svg></textarea><!--",
    "🙂" * 3,
    "x" * 200,
    "javascript:alert(1)",
    "&lt;b&gt; &amp;",
)


def fleet(
    names: tuple[str, ...] = ("first", "second", "third"), num_devices: int = 2, **rules
) -> FleetState:
    """A fleet of one device type that was given these jobs."""
    devices = tuple(FleetDevice(name=f"v100-{at}", device_type="v100") for at in range(num_devices))
    state = new_state(("v100",), devices, Rules(**rules), time_s=1e9)
    jobs = tuple(
        Job(number=at + 1, name=name, steps_per_s=(2.0,), total_steps=1000.0)
        for at, name in enumerate(names)
    )
    return step(state, Submit(time_s=1e9, jobs=jobs))[0]


def large_fleet(num_jobs: int = 2048, num_devices: int = 300) -> FleetState:
    random = np.random.default_rng(0)
    device_types = ("v100", "p100", "k80")
    devices = tuple(
        FleetDevice(name=f"{device_types[at % 3]}-{at}", device_type=device_types[at % 3])
        for at in range(num_devices)
    )
    speeds = random.uniform(1.0, 10.0, (num_jobs, 3))
    jobs = tuple(
        Job(number=at + 1, name=f"job {at}", steps_per_s=tuple(speeds[at]), total_steps=1e5)
        for at in range(num_jobs)
    )
    state = step(new_state(device_types, devices, time_s=1e9), Submit(time_s=1e9, jobs=jobs))[0]
    return step(state, Tick(time_s=state.next_tick_s))[0]


def attempt_of(state: FleetState, number: int, start_s: float, **more) -> AttemptRecord:
    devices = state.devices_of(number) or state.device_names[:1]
    return AttemptRecord(
        job=number, attempt=1, devices=devices, device_type="v100", token="", decided_s=start_s,
        **{"started_s": start_s, **more},
    )  # fmt: skip


def record_of(number: int = 1, name: str = "first", **more) -> JobRecord:
    spec = JobSpec(name=name, command=("python", name), team=name, folder=f"/{name[:100]}")
    return JobRecord(
        number=number, spec=spec, submitted_s=1e9, **{"status": "failed", "ended_s": 1e9, **more}
    )


class Elements(HTMLParser):
    """All elements and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def whole_page(state: FleetState, **parts) -> str:
    form = what_if_form(state, {}, None)
    return render("fleet.html", page=live_page(state, **parts), form=form)


def lately_of(
    *attempts: AttemptRecord, ended: tuple[JobRecord, ...] = (), name: str = ""
) -> Lately:
    names = {attempt.job: name for attempt in attempts}
    return Lately(attempts=attempts, ended=ended, names=names)


def job_with(text: str):
    record = record_of(1, text, message=text, attempt=1)
    state = fleet((text,))
    return job_page(
        record,
        1e9 + 10,
        explanation=explain(state, 1),
        attempts=[attempt_of(state, 1, 1e9, outcome=text, ended_s=1e9 + 1, exit_code=3)],
        checkpoints=[
            CheckpointRecord(job=1, attempt=1, step=5.0, path=text, committed_s=1e9)
        ],
        log=text.encode(),
    )  # fmt: skip
