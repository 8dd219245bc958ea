"""What every request to the web service passes: the name it was sent to, its token, its size.

The same checks as those of the fleet's service, with one token instead of many holders.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hocket.service.credentials import bearer
from hocket.service.rest.guard import (
    LOOPBACK,
    GuardedSend,
    again,
    misleading,
    unexpected,
    whole_body,
)
from hocket.service.rest.problems import problem

_OPEN = ("/healthz",)


class Door:
    """ASGI middleware: refuses a request, or hands it on with its body read."""

    def __init__(self, app: ASGIApp, token: str, max_bytes: int, hosts: tuple[str, ...]) -> None:
        self._app, self._token, self._max_bytes = app, token, max_bytes
        self._hosts = frozenset(host.lower().strip("[]") for host in (*LOOPBACK, *hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        answer = GuardedSend(send)
        refusal = self._refusal(scope)
        try:
            body = refusal or await whole_body(scope, receive, self._max_bytes)
            if isinstance(body, Response):
                await body(scope, receive, answer.send)
            else:
                await self._app(scope, again(body, receive), answer.send)
        except Exception as error:
            await unexpected(error, scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        refusal = misleading(headers, self._hosts, "use 127.0.0.1")
        if refusal is not None:
            return refusal
        given = bearer(headers.get("authorization", ""))
        if scope["path"] in _OPEN or hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        challenge = {"www-authenticate": 'Bearer realm="hocket classes"'}
        return problem(401, "this needs the token", headers=challenge,
                       hint="send Authorization: Bearer with the token of the service")  # fmt: skip
