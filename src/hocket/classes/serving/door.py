"""What every request to the web service passes: the name it was sent to, its token, its size.

The same checks as those of the fleet's service, with one token instead of many holders.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from hocket.service.credentials import bearer
from hocket.service.rest.gate import Gate, misleading
from hocket.service.rest.problems import problem

_OPEN = ("/healthz",)


class Door(Gate):
    """ASGI middleware: refuses a request, or hands it on with its body read."""

    def __init__(self, app: ASGIApp, token: str, max_bytes: int, hosts: tuple[str, ...]) -> None:
        super().__init__(app, hosts)
        self._token, self.max_bytes = token, max_bytes

    def refusal(self, scope: Scope) -> Response | None:
        """A name that is not ours, or no token."""
        headers = Headers(scope=scope)
        refusal = misleading(headers, self.hosts, "use 127.0.0.1")
        if refusal is not None:
            return refusal
        given = bearer(headers.get("authorization", ""))
        if scope["path"] in _OPEN or hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        challenge = {"www-authenticate": 'Bearer realm="hocket classes"'}
        return problem(401, "this needs the token", headers=challenge,
                       hint="send Authorization: Bearer with the token of the service")  # fmt: skip
