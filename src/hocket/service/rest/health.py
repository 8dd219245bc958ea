"""Routes for machines that watch the service: is it there, does it work, how much does it do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from fastapi import APIRouter, Response

from hocket.fleet.rounds.state import PHASES, FleetState
from hocket.service.rest.bodies import HealthBody
from hocket.service.rest.context import FOR_USERS, TheDaemon
from hocket.service.rest.problems import RefusedError, answers

router = APIRouter(tags=["health"])

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = {"description": "Metrics", "content": {_METRICS: {"schema": {"type": "string"}}}}
Samples = Iterable[tuple[Mapping[str, str], float]]


@router.get("/healthz", responses=answers())
async def is_alive() -> HealthBody:
    """The service answers; open to all."""
    return HealthBody(status="ok")


@router.get("/readyz", responses=answers())
def is_ready(daemon: TheDaemon) -> HealthBody:
    """The service takes jobs; 503 where it does not. Open to all."""
    if not daemon.is_running:
        raise RefusedError(503, "the service takes no jobs now")
    return HealthBody(status="ok")


@router.get(
    "/metrics",
    dependencies=FOR_USERS,
    response_class=Response,
    responses={**answers(), 200: _TEXT},
)
def metrics(daemon: TheDaemon) -> Response:
    """Numbers in the text form of Prometheus."""
    return Response(metrics_text(daemon.state, daemon.last_event()), media_type=_METRICS)


def metrics_text(state: FleetState, last_event: int) -> str:
    """What the state says, as Prometheus reads it."""
    parts = [
        _metric("jobs", "Jobs that have not ended, by phase.", "gauge", _phases(state)),
        _metric("devices", "Devices by kind and use.", "gauge", _devices(state)),
        _metric("team_devices", "Devices that a team holds.", "gauge", _teams(state)),
        _metric("rounds_total", "Rounds begun.", "counter", [({}, state.round_number)]),
        _metric("events_total", "Events stored.", "counter", [({}, last_event)]),
        _metric("state_time_seconds", "Moment of the last change.", "gauge", [({}, state.time_s)]),
    ]
    return "".join(parts)


def _metric(name: str, help_text: str, kind: str, samples: Samples) -> str:
    lines = [f"# HELP hocket_{name} {help_text}", f"# TYPE hocket_{name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"hocket_{name}{{{inside}}} {value}" if inside else f"hocket_{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """A label's value: any text on one line, its quotes and backslashes escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _phases(state: FleetState) -> Samples:
    phases = state.jobs.rows["phase"]
    for index, name in enumerate(PHASES[:3]):
        yield {"phase": name}, int((phases == index).sum())


def _devices(state: FleetState) -> Samples:
    is_held = state.holders[:, 0] >= 0
    for index, kind in enumerate(state.kinds):
        mine = state.device_kind == index
        yield {"kind": kind, "use": "busy"}, int((mine & state.is_up & is_held).sum())
        yield {"kind": kind, "use": "free"}, int((mine & state.is_up & ~is_held).sum())
        yield {"kind": kind, "use": "lost"}, int((mine & ~state.is_up).sum())


def _teams(state: FleetState) -> Samples:
    rows = state.jobs.rows
    for index, team in enumerate(state.teams):
        mine = rows["number"][rows["team"] == index]
        yield {"team": team}, int(np.isin(state.holders, mine).any(axis=1).sum())
