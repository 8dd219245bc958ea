"""Authentication and authorization of requests, by token or cookie.

The checks run before the routes and not in them, so that a new route is closed until it is listed
in `credentials`. Checks that all services share are in `middleware`.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Scope

from hocket.service.credentials import (
    PAGE_HEADER,
    Credentials,
    access_of,
    bearer,
    has_role,
    needed_role,
)
from hocket.service.rest.middleware import RequestMiddleware, misleading
from hocket.service.rest.problems import problem
from hocket.service.tokens import Holder


class AuthMiddleware(RequestMiddleware):
    """ASGI middleware; ``hosts`` are host names of the service besides the loopback ones."""

    def __init__(self, app: ASGIApp, credentials: Credentials, hosts: Iterable[str] = ()) -> None:
        super().__init__(app, hosts)
        self._credentials = credentials

    def refusal(self, scope: Scope) -> Response | None:
        """Refuse requests without rights, or from other sites."""
        headers = Headers(scope=scope)
        hint = "use 127.0.0.1 or localhost, or start the service with --name"
        refusal = misleading(headers, self.hosts, hint)
        return refusal if refusal is not None else self._without_right(scope, headers)

    def _without_right(self, scope: Scope, headers: Headers) -> Response | None:
        method, path = scope["method"], scope["path"]
        access = access_of(method, path)
        given = bearer(headers.get("authorization", ""))
        if access == "open" or (access == "attempt" and given):
            return None
        holder = None if access == "attempt" else self._holder(given, headers)
        if holder is not None:
            scope["hocket.holder"] = holder
            needed = needed_role(method, path)
            if not has_role(holder, needed):
                return _forbidden(holder)
            if needed == "read-only":
                return None
            # Changes by cookie need one of two headers that pages of other sites cannot send. That
            # the origin is the service itself was checked before.
            proof = "origin" if access == "form" else PAGE_HEADER
            if given or proof in headers:
                return None
            return problem(403, f"changes by cookie need the header {proof}")
        if method == "GET" and not path.startswith("/v1/") and _wants_page(headers):
            return RedirectResponse("/login", 303)
        hint = "send Authorization: Bearer with a token of hocket fleet token add"
        challenge = {"www-authenticate": 'Bearer realm="hocket fleet"'}
        return problem(401, "this needs the token", hint=hint, headers=challenge)

    def _holder(self, token: str, headers: Headers) -> Holder | None:
        """User of a request; with a wrong token, a valid cookie does not count."""
        tokens = self._credentials.tokens
        if token:
            return tokens.holder_of(token)
        cookie = self._credentials.cookie_in(headers.getlist("cookie"))
        return tokens.holder_of_cookie(cookie) if cookie else None


def _forbidden(holder: Holder) -> Response:
    if holder.role == "agent":
        return problem(403, f"the token of {holder.name!r} is that of an agent")
    if not holder.may_change:
        return problem(403, f"the token of {holder.name!r} may look, not change anything")
    hint = "ask an admin: hocket fleet token list shows who is one"
    return problem(403, f"only admins may do this, and {holder.name!r} is none", hint=hint)


def _wants_page(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "")
