"""Checks of every request to a service: its host name, origin and size; and headers of every
response.

A page of another site in a user's browser can send requests to a loopback port. They are refused
because of their ``Host`` header (against DNS rebinding) or their ``Origin``. Permissions are left
to the classes derived from this one (`AuthMiddleware` of the fleet, `Door` of classes).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.base.config import debug
from hocket.service.rest.problems import problem

MAX_BODY_BYTES = 1_000_000
BODY_TIMEOUT_S = 20.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Headers that must not occur twice.
_SINGLE = ("host", "origin", "authorization", "content-length")
# Pages load scripts, styles and images from the service alone.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Headers of every response.
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


class RequestMiddleware(ABC):
    """ASGI middleware; ``hosts`` are further host names than the loopback ones."""

    max_bytes = MAX_BODY_BYTES
    """Of a body."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self.hosts = frozenset(host.lower().strip("[]") for host in (*LOOPBACK, *hosts))

    @abstractmethod
    def refusal(self, scope: Scope) -> Response | None:
        """Refuse a request by its head; None to accept it."""

    def refused_body(self, scope: Scope, body: bytes) -> Response | None:
        """Refuse a request by its body; None to accept it."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on with its body read."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        answer = GuardedSend(send)
        refusal = self.refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, answer.send)
            return
        try:
            body = await whole_body(scope, receive, self.max_bytes)
            if not isinstance(body, Response):
                body = self.refused_body(scope, body) or body
            if isinstance(body, Response):
                await body(scope, receive, answer.send)
            else:
                await self._app(scope, again(body, receive), answer.send)
        except Exception as error:
            await unexpected(error, scope, receive, answer)


def misleading(headers: Headers, hosts: Collection[str], hint: str) -> Response | None:
    """Refuse doubled headers, names of other hosts and pages of other sites; None to accept.

    ``hint`` states the names under which the service is reached.
    """
    if any(len(headers.getlist(name)) > 1 for name in _SINGLE):
        return problem(400, "a header is there twice")
    if "transfer-encoding" in headers and "content-length" in headers:
        return problem(400, "the length of the body is stated twice")
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
    """True if a page that a request comes from is one of the service that it goes to."""
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


async def whole_body(
    scope: Scope, receive: Receive, max_bytes: int = MAX_BODY_BYTES
) -> bytes | Response:
    """Read the whole body; returns a response if it is refused."""
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
    """A ``receive`` that returns a body which was read already, then later messages."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


class GuardedSend:
    """``send`` that adds the headers of every response and records that one has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            for name, value in _ALWAYS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await self._send(message)


async def unexpected(error: Exception, scope: Scope, receive: Receive, answer: GuardedSend) -> None:
    """Log an unexpected error, and respond with 500 unless a response has begun."""
    _log.error("%s %r: %s: %r", scope["method"], scope["path"], type(error).__name__, error)
    if debug():
        _log.error("%s", "".join(traceback.format_exception(error)))
    if not answer.has_begun:
        detail = "this is a bug in hocket; the log of the service says more"
        await problem(500, detail)(scope, receive, answer.send)
