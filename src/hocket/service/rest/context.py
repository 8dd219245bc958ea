"""What routes are given beside the request: the daemon, and the bell of the streams."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from hocket.service.daemon.daemon import Daemon
from hocket.service.rest.stream import Bell

# The guard has checked the token before a route is asked; these only tell OpenAPI of it.
_user = HTTPBearer(auto_error=False, scheme_name="user", description="Token of the state folder")
_attempt = HTTPBearer(
    auto_error=False, scheme_name="attempt", description="HOCKET_TOKEN of a running attempt"
)
FOR_USERS = [Security(_user)]


def _daemon(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


def _bell(request: Request) -> Bell:
    bell: Bell = request.app.state.bell
    return bell


def _token(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_attempt)],
) -> str:
    return credentials.credentials if credentials else ""


TheDaemon = Annotated[Daemon, Depends(_daemon)]
TheBell = Annotated[Bell, Depends(_bell)]
AttemptToken = Annotated[str, Depends(_token)]
