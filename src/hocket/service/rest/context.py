"""Dependencies of routes: the daemon, and the notifier that wakes event streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from hocket.base.errors import did_you_mean
from hocket.base.fields import shown
from hocket.service.daemon.daemon import Daemon
from hocket.service.forecasts.forecaster import FleetForecaster
from hocket.service.rest.problems import RefusedError
from hocket.service.rest.stream import EventNotifier
from hocket.service.tokens import Holder, Tokens

# Dependencies are coroutines, though they wait for nothing: each plain function would be run in a
# thread, and every change of threads can cost milliseconds while the daemon decides.

# The middleware has checked the token before; these only declare it in OpenAPI.
_user = HTTPBearer(auto_error=False, scheme_name="user", description="Token of a user")
_attempt = HTTPBearer(
    auto_error=False, scheme_name="attempt", description="HOCKET_TOKEN of a running attempt"
)


async def _known_query(request: Request) -> None:
    """Refuse parameters that a route does not have: a typo must not quietly mean nothing."""
    route: APIRoute = request.scope["route"]
    known = [field.alias for field in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RefusedError(422, f"unknown parameter {shown(name)}", code="usage", hint=hint)


KNOWN_QUERY = Depends(_known_query)
FOR_USERS = [Security(_user), KNOWN_QUERY]


def _of_app(name: str) -> Any:
    """A dependency: the attribute of the application's state with this name."""

    async def get(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(get)


Answer = TypeVar("Answer")

MAX_DECISIONS = 64
"""Threads that wait for decisions; as many commands as go into one batch."""


class Decisions:
    """Thread pool for commands to the daemon: submissions and reports do not wait for threads that
    render pages."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_DECISIONS, "fleet-asks")

    async def of(self, ask: Callable[..., Answer], *values: Any, **named: Any) -> Answer:
        """Result of a method of the daemon."""
        call = partial(ask, *values, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


async def _holder(request: Request) -> Holder:
    """User of a request, as the middleware found."""
    holder: Holder = request.scope["hocket.holder"]
    return holder


async def _token(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_attempt)],
) -> str:
    return credentials.credentials if credentials else ""


TheDaemon = Annotated[Daemon, _of_app("daemon")]
TheDecisions = Annotated[Decisions, _of_app("decisions")]
TheForecaster = Annotated[FleetForecaster, _of_app("forecaster")]
TheNotifier = Annotated[EventNotifier, _of_app("event_notifier")]
TheTokens = Annotated[Tokens, _of_app("tokens")]
TheHolder = Annotated[Holder, Depends(_holder)]
AttemptToken = Annotated[str, Depends(_token)]
