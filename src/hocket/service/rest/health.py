"""Routes for monitoring: liveness, readiness, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response

from hocket.service.rest.bodies import HealthBody
from hocket.service.rest.context import FOR_USERS, TheDaemon
from hocket.service.rest.problems import RefusedError, answers

router = APIRouter(tags=["health"])

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = {"description": "Metrics", "content": {_METRICS: {"schema": {"type": "string"}}}}


@router.get("/healthz", responses=answers())
async def is_alive() -> HealthBody:
    """Answer as long as the service lives; open to all."""
    return HealthBody(status="ok")


@router.get("/readyz", responses=answers())
def is_ready(daemon: TheDaemon) -> HealthBody:
    """Answer 200 if the service takes jobs, else 503; open to all."""
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
    """Metrics in the text form of Prometheus."""
    return Response(daemon.metrics.text(), media_type=_METRICS)
