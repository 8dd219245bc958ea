"""Access rights: the tokens of users, cookies in browsers, the token of an attempt.

* Users send ``Authorization: Bearer <token>``; the role of the token decides what it permits
  (`hocket.service.tokens`). A route that changes something is for admins unless it is listed here.
* A browser gets a cookie for a token (``POST /login``, form field ``token``) or for a link that
  logs in once (``GET /login?code=...``). The cookie is a secret of its own, HttpOnly and
  SameSite=Strict. A request that changes something must also have the header `PAGE_HEADER`, which
  no form and no foreign page can add.
* The page's own forms, which work without scripts, need the header ``Origin`` instead. Browsers
  set it for every form, and it must name this service.
* The processes of an attempt send the token of the attempt as bearer; the daemon checks it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Literal

from hocket.service.tokens import ROLES, Holder, Role, Tokens

PAGE_HEADER = "x-hocket-page"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/login", "/logout"})
OPEN_PREFIX = "/static/"
"""Path prefix of CSS and script, which need no token because they contain no data of the fleet."""
_ATTEMPT_PATH = re.compile(r"/v1/jobs/[^/]+/attempts/[^/]+/(report|checkpoints)")
_FORM_PATH = re.compile(r"/jobs/[^/]+/(cancel|pause|resume)")

_ASKING_PATHS = frozenset({"/v1/simulate"})
"""Paths that are requested by POST although they change nothing."""
_SAFE = ("GET", "HEAD", "OPTIONS")

_USER_PATH = re.compile(r"/v1/jobs(/[^/:]+(:pause|:resume)?)?|/v1/login-links")
"""Paths of changes that role `user` may request; the daemon checks who owns the job."""

_AGENT_PATH = re.compile(r"/v1/agents/")

Access = Literal["open", "attempt", "form", "user"]


def needed_role(method: str, path: str) -> Role:
    """Minimum role for a request; a change that is not listed needs an admin."""
    if _AGENT_PATH.match(path):
        return "agent"
    if method in _SAFE or path in _ASKING_PATHS:
        return "read-only"
    if _USER_PATH.fullmatch(path) or _FORM_PATH.fullmatch(path):
        return "user"
    return "admin"


def has_role(holder: Holder, needed: Role) -> bool:
    """True if the caller's role is the needed one or a higher one; `agent` is outside this
    order."""
    if "agent" in (holder.role, needed):
        return holder.role == needed
    return ROLES.index(holder.role) <= ROLES.index(needed)


def access_of(method: str, path: str) -> Access:
    """Access class of a route; unlisted routes are for users with a token."""
    if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
        return "open"
    if method == "POST" and _ATTEMPT_PATH.fullmatch(path):
        return "attempt"
    if method == "POST" and _FORM_PATH.fullmatch(path):
        return "form"
    return "user"


def bearer(authorization: str) -> str:
    """The token of an ``Authorization`` header; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True)
class Credentials:
    """Maps tokens and cookies to roles; ``identity`` is the identity of the fleet."""

    tokens: Tokens = field(repr=False)
    identity: str = ""

    @property
    def cookie_name(self) -> str:
        """Cookie name of this fleet; unique, because browsers send cookies to all ports of a
        host."""
        return f"hocket-{hashlib.sha256(self.identity.encode()).hexdigest()[:12]}"

    def cookie_in(self, cookie_headers: Iterable[str]) -> str:
        """The cookie of this fleet in ``Cookie`` headers; empty if there is none."""
        for header in cookie_headers:
            try:
                cookie = SimpleCookie(header).get(self.cookie_name)
            except CookieError:
                continue
            if cookie is not None:
                return cookie.value
        return ""
