"""What every request passes before a route sees it: whose it is, from where, and how large.

The checks stand before the routes and not in them, so that a new route is closed until it is listed
in `credentials`. A page of another site that a person has open can send requests to a loopback
port; it is stopped by the name it was reached under (``Host``, against DNS rebinding), by
``Origin``, and by knowing no token.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.base.config import debug
from hocket.service.credentials import (
    PAGE_HEADER,
    Credentials,
    access_of,
    bearer,
    changes_something,
    is_own_form,
)
from hocket.service.rest.problems import problem
from hocket.service.tokens import Holder

MAX_BODY_BYTES = 1_000_000
BODY_TIMEOUT_S = 20.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SINGLE = ("host", "origin", "authorization", "content-length")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_ALWAYS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": _POLICY,
    # Not no-referrer: browsers would then send "Origin: null" with the page's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_log = logging.getLogger("hocket.service")


class Guard:
    """ASGI middleware; ``hosts`` are names beside the loopback ones that it is reached under."""

    def __init__(self, app: ASGIApp, credentials: Credentials, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._credentials = credentials
        self._hosts = frozenset(host.lower().strip("[]") for host in (*LOOPBACK, *hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on with its body read."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        answer = GuardedSend(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, answer.send)
            return
        try:
            body = await whole_body(scope, receive)
            if not isinstance(body, Response) and self._is_forged(scope, body):
                body = problem(403, "this form is not one of this service", hint="load it again")
            if isinstance(body, Response):
                await body(scope, receive, answer.send)
            else:
                await self._app(scope, again(body, receive), answer.send)
        except Exception as error:
            await unexpected(error, scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hint = "use 127.0.0.1 or localhost, or start the service with --name"
        refusal = misleading(headers, self._hosts, hint)
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
            if not changes_something(method, path):
                return None
            if not holder.may_change:
                return problem(403, f"the token of {holder.name!r} may look, not change anything")
            if given or PAGE_HEADER in headers or access == "form":
                return None
            return problem(403, f"changes by cookie need the header {PAGE_HEADER}")
        if method == "GET" and not path.startswith("/v1/") and _wants_page(headers):
            return RedirectResponse("/login", 303)
        hint = "send Authorization: Bearer with a token of hocket fleet token add"
        challenge = {"www-authenticate": 'Bearer realm="hocket fleet"'}
        return problem(401, "this needs the token", hint=hint, headers=challenge)

    def _is_forged(self, scope: Scope, body: bytes) -> bool:
        """Whether a change was sent by a form of somebody else, who has made a browser do it."""
        if access_of(scope["method"], scope["path"]) != "form":
            return False
        headers = Headers(scope=scope)
        if bearer(headers.get("authorization", "")):
            # No page of somebody else can send that.
            return False
        cookie = self._credentials.cookie_in(headers.getlist("cookie"))
        return not is_own_form(cookie, headers.get("content-type", ""), body)

    def _holder(self, token: str, headers: Headers) -> Holder | None:
        """Whose request it is; a wrong token is not made good by a cookie."""
        tokens = self._credentials.tokens
        if token:
            return tokens.holder_of(token)
        cookie = self._credentials.cookie_in(headers.getlist("cookie"))
        return tokens.holder_of_cookie(cookie) if cookie else None


def misleading(headers: Headers, hosts: Collection[str], hint: str) -> Response | None:
    """The refusal of headers that say a thing twice, another host's name or another site's page.

    ``hint`` says under which name the service is reached.
    """
    if any(len(headers.getlist(name)) > 1 for name in _SINGLE):
        return problem(400, "a header is there twice")
    if "transfer-encoding" in headers and "content-length" in headers:
        return problem(400, "the length of the body is told in two ways")
    if host_name(headers.get("host", "")) not in hosts:
        return problem(421, "this service does not go by that name", hint=hint)
    if "origin" in headers and not is_own(headers["origin"], headers["host"]):
        return problem(403, "pages of other sites may not use this service")
    return None


def host_name(host: str) -> str:
    """``name`` of ``name:port``, ``[::1]:port`` or ``name``; empty where it is none of these."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = parts.netloc == host and "@" not in host
    return (parts.hostname or "") if is_plain else ""


def is_own(origin: str, host: str) -> bool:
    """Whether a page that a request comes from is one of the service that it goes to."""
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


def _wants_page(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "")


async def whole_body(
    scope: Scope, receive: Receive, max_bytes: int = MAX_BODY_BYTES
) -> bytes | Response:
    """The whole body, or why it is not taken."""
    too_large = problem(413, f"the body has more than {max_bytes} bytes")
    length = Headers(scope=scope).get("content-length", "0")
    if not length.isdecimal() or len(length) > 12:
        return problem(400, "the length of the body is no number")
    if int(length) > max_bytes:
        return too_large
    parts: list[bytes] = []
    size_bytes = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return problem(400, "the body was not sent whole")
                parts.append(message.get("body", b""))
                size_bytes += len(parts[-1])
                if size_bytes > max_bytes:
                    return too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        return problem(408, "the body did not come in time", headers={"connection": "close"})


def again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body which was read already, then what comes after it."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


class GuardedSend:
    """``send`` that adds the headers of every answer and knows whether one has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Hand on a part of the answer."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            for name, value in _ALWAYS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await self._send(message)


async def unexpected(error: Exception, scope: Scope, receive: Receive, answer: GuardedSend) -> None:
    """Log an error that nobody foresaw, and answer where no answer has begun."""
    _log.error("%s %r: %s: %r", scope["method"], scope["path"], type(error).__name__, error)
    if debug():
        _log.error("%s", "".join(traceback.format_exception(error)))
    if not answer.has_begun:
        detail = "this is a bug in hocket; the log of the service says more"
        await problem(500, detail)(scope, receive, answer.send)
