"""Routes of the whole fleet: devices, usage, shares, scenarios, events."""

from __future__ import annotations

import socket
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Header, Query
from numpy.typing import NDArray
from starlette.responses import Response

from hocket.base.errors import did_you_mean
from hocket.base.fields import shown
from hocket.base.jsonfile import finite_or_none
from hocket.fleet.rounds.state import RUNNING, WAITING, FleetState
from hocket.service.daemon.daemon import Daemon
from hocket.service.errors import NotFoundError
from hocket.service.rest.bodies import (
    MAX_NUMBER,
    AllocationBody,
    DeviceBody,
    DeviceList,
    DrainBody,
    DrainRequest,
    ForecastBody,
    ShareBody,
    UsageBody,
    UsageList,
    WhatIf,
)
from hocket.service.rest.context import (
    FOR_USERS,
    TheDaemon,
    TheDecisions,
    TheForecaster,
    TheNotifier,
)
from hocket.service.rest.problems import answers
from hocket.service.rest.stream import TimedStream, events_from

router = APIRouter(prefix="/v1", tags=["fleet"], dependencies=FOR_USERS)

_STREAM = "text/event-stream"
_EVENTS = {"description": "Events", "content": {_STREAM: {"schema": {"type": "string"}}}}


@router.get("/devices", responses=answers())
def list_devices(daemon: TheDaemon) -> DeviceList:
    """All devices and the jobs on them."""
    return DeviceList(devices=[DeviceBody.model_validate(one) for one in daemon.devices()])


@router.post("/devices:drain", responses=answers(404, 415))
async def drain(body: DrainRequest, daemon: TheDaemon, decisions: TheDecisions) -> DrainBody:
    """Drain a machine or one device: it takes no new jobs, and preemptible jobs leave it."""
    names = _devices_of(daemon, body.name)
    await decisions.of(daemon.drain, names)
    return DrainBody(devices=list(names))


@router.post("/devices:reopen", responses=answers(404, 415))
async def reopen(body: DrainRequest, daemon: TheDaemon, decisions: TheDecisions) -> DrainBody:
    """Let a drained machine or device take jobs again."""
    names = _devices_of(daemon, body.name)
    await decisions.of(daemon.reopen, names)
    return DrainBody(devices=list(names))


def _devices_of(daemon: Daemon, name: str) -> tuple[str, ...]:
    """Devices of a machine, or the device of that name.

    All devices of a local fleet are on this machine, whatever servers ``--devices`` put them on.
    """
    found = daemon.devices()
    if daemon.is_local and name in ("local", "localhost", socket.gethostname()):
        name = ""
    names = tuple(one.name for one in found if name in ("", one.server, one.name))
    if not names:
        known = sorted({one.server for one in found} | {one.name for one in found})
        hint = did_you_mean(name, known) or "hocket fleet devices lists them"
        raise NotFoundError(f"there is no machine or device {shown(name)}", hint=hint)
    return names


@router.get("/usage", responses=answers())
def get_usage(daemon: TheDaemon, weeks: Annotated[int, Query(ge=1, le=520)] = 4) -> UsageList:
    """Device hours by week, user, team and device type; weeks begin on Monday, UTC."""
    return UsageList(usage=[UsageBody.model_validate(row) for row in daemon.usage(weeks)])


@router.get("/allocation", responses=answers())
def get_allocation(daemon: TheDaemon) -> AllocationBody:
    """Share of each job by the policy, and what each has received."""
    state = daemon.state
    live = np.flatnonzero(np.isin(state.jobs.rows["phase"], (RUNNING, WAITING)))
    return AllocationBody(
        policy=state.rules.policy,
        round=state.round_number,
        time_s=state.time_s,
        solved_s=finite_or_none(state.solved_s),
        next_round_s=finite_or_none(state.next_tick_s),
        remarks=dict(state.notes),
        jobs=_shares(state, live),
    )


def _held(state: FleetState) -> dict[int, list[str]]:
    """Devices of each job that has some."""
    held: dict[int, list[str]] = {}
    for device, numbers in zip(state.device_names, state.holders.tolist(), strict=True):
        for number in numbers:
            held.setdefault(number, []).append(device)
    return held


def _shares(state: FleetState, live: NDArray[np.intp]) -> list[ShareBody]:
    """Shares of these rows, by whole columns, because there may be thousands."""
    jobs, held = state.jobs, _held(state)
    some = jobs.rows[live]
    columns = zip(
        *(some[name].tolist() for name in ("number", "target_s", "held_s")),
        jobs.shares[live].tolist(),
        jobs.credit_s[live].tolist(),
        strict=True,
    )
    return [
        ShareBody(
            job=number,
            name=state.names[number],
            target=dict(zip(state.device_types, shares, strict=True)),
            deficit_s=dict(zip(state.device_types, deficit_s, strict=True)),
            target_s=target_s,
            held_s=held_s,
            devices=held.get(number, []),
        )
        for number, target_s, held_s, shares, deficit_s in columns
    ]


@router.post("/simulate", responses=answers(415))
def simulate(body: WhatIf, daemon: TheDaemon, forecaster: TheForecaster) -> ForecastBody:
    """Forecast of the jobs under another policy or with other devices."""
    found = forecaster.forecast(daemon.state, daemon.now_s(), body.policy, body.devices)
    return ForecastBody.model_validate(found.to_data())


@router.get("/events", response_class=Response, responses={**answers(), 200: _EVENTS})
async def stream_events(
    daemon: TheDaemon,
    event_notifier: TheNotifier,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_NUMBER, description="From now on where left out")
    ] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_NUMBER)] = None,
) -> Response:
    """Events as server-sent events that end only with the connection."""
    start = after if last_event_id is None else last_event_id
    return TimedStream(
        events_from(daemon, event_notifier, start), _STREAM, event_notifier=event_notifier
    )
