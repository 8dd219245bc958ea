"""The web application: authentication, routes, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from hocket import __version__
from hocket.service.credentials import Credentials
from hocket.service.daemon.daemon import Daemon
from hocket.service.executors.agent_executor import AgentExecutor
from hocket.service.forecasts.forecaster import FleetForecaster
from hocket.service.rest import agents as agent_routes
from hocket.service.rest import attempts, fleet, health, jobs, login, logs
from hocket.service.rest import tokens as token_routes
from hocket.service.rest.auth import AuthMiddleware
from hocket.service.rest.context import Decisions
from hocket.service.rest.problems import ProblemDetails, handle_errors
from hocket.service.rest.stream import EventNotifier
from hocket.service.tokens import Tokens

_DESCRIPTION = (
    "Jobs of many people on a mixed cluster. Errors are problem details (RFC 9457); changes take "
    "If-Match; submitting takes Idempotency-Key; moments are seconds since 1970."
)


def make_app(
    daemon: Daemon,
    tokens: Tokens,
    *,
    hosts: Iterable[str] = (),
    forecaster: FleetForecaster | None = None,
    agents: AgentExecutor | None = None,
) -> FastAPI:
    """Make the application of a started daemon.

    ``hosts`` are host names besides the loopback ones. ``forecaster`` computes forecasts; None for
    this process. ``agents`` is the executor if machines join by agents.
    ``app.state.event_notifier.close()`` ends open streams, for which a server waits.
    """
    app = FastAPI(
        title="hocket fleet",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        lifespan=_lifespan,
    )
    app.state.daemon = daemon
    app.state.credentials = Credentials(tokens, daemon.identity)
    app.state.tokens = tokens
    app.state.event_notifier = EventNotifier(daemon)
    app.state.forecaster = forecaster or FleetForecaster()
    app.state.decisions = Decisions()
    app.state.agents = agents
    for module in (jobs, logs, attempts, fleet, health, token_routes, login, agent_routes):
        app.include_router(module.router)
    _mount_page(app, daemon, app.state.forecaster)
    handle_errors(app)
    app.add_middleware(AuthMiddleware, credentials=app.state.credentials, hosts=tuple(hosts))
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _mount_page(app: FastAPI, daemon: Daemon, forecaster: FleetForecaster) -> None:
    from hocket.service.page.router import page_router

    app.include_router(page_router(daemon, forecaster))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    event_notifier: EventNotifier = app.state.event_notifier
    watching = asyncio.create_task(event_notifier.watch())
    try:
        yield
    finally:
        event_notifier.close()
        await watching


def _operation_id(route: APIRoute) -> str:
    return route.name


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema, with the schema of errors added, which no route declares."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = schema["components"]["schemas"]
        schemas.update(problem.pop("$defs", {}))
        schemas["Problem"] = problem
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
