"""Access rights: the tokens of users, cookies in browsers, the token of an attempt.

* Users send ``Authorization: Bearer <token>``; what that opens depends on the role of the token
  (`hocket.service.tokens`). A route that changes something is for admins unless it is listed here.
* A browser gets a cookie for a token (``POST /login``, form field ``token``) or for a link that
  logs in once (``GET /login?code=...``). It is a secret of its own, HttpOnly and SameSite=Strict; a
  request that changes something must also have the header `PAGE_HEADER`, which no form and no
  foreign page can add.
* The page's own forms, which work without scripts, send the field `FORM_FIELD` instead. Its value
  is derived from the cookie, and is only in pages that no foreign page can read.
* The processes of an attempt send the token of the attempt as bearer; the daemon checks it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Literal

from hocket.service.tokens import ROLES, Holder, Role, Tokens

PAGE_HEADER = "x-hocket-page"
FORM_FIELD = "form-token"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/login", "/logout"})
OPEN_PREFIX = "/static/"
"""CSS and script of the page, which hold no data of the fleet."""
_ATTEMPT_PATH = re.compile(r"/v1/jobs/[^/]+/attempts/[^/]+/(report|checkpoints)")
_FORM_PATH = re.compile(r"/jobs/[^/]+/(cancel|pause|resume)")
_FORM_TYPE = "application/x-www-form-urlencoded"

_ASKING_PATHS = frozenset({"/v1/simulate"})
"""Sent with a body, though they change nothing."""
_SAFE = ("GET", "HEAD", "OPTIONS")

_USER_PATH = re.compile(r"/v1/jobs(/[^/:]+(:pause|:resume)?)?|/v1/login-links")
"""Changes that users may ask for; the daemon checks whose job it is."""

_AGENT_PATH = re.compile(r"/v1/agents/")

Access = Literal["open", "attempt", "form", "user"]


def needed_role(method: str, path: str) -> Role:
    """The least role that a request needs; what changes something and is not listed is for
    admins."""
    if _AGENT_PATH.match(path):
        return "agent"
    if method in _SAFE or path in _ASKING_PATHS:
        return "read-only"
    if _USER_PATH.fullmatch(path) or _FORM_PATH.fullmatch(path):
        return "user"
    return "admin"


def has_role(holder: Holder, needed: Role) -> bool:
    """True if the role of a caller is the needed one or a higher one; that of agents is apart."""
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
    """The token of an ``Authorization`` header; empty where there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True)
class Credentials:
    """Rights of tokens and cookies; ``identity`` is that of the fleet."""

    tokens: Tokens = field(repr=False)
    identity: str = ""

    @property
    def cookie_name(self) -> str:
        """Browsers send cookies to all ports of a host: each fleet has a name of its own."""
        return f"hocket-{hashlib.sha256(self.identity.encode()).hexdigest()[:12]}"

    def cookie_in(self, cookie_headers: Iterable[str]) -> str:
        """The cookie of this fleet in ``Cookie`` headers; empty where there is none."""
        for header in cookie_headers:
            try:
                cookie = SimpleCookie(header).get(self.cookie_name)
            except CookieError:
                continue
            if cookie is not None:
                return cookie.value
        return ""


def form_token(cookie: str) -> str:
    """Secret in the forms of the page, for the browser with this cookie."""
    return hmac.new(cookie.encode(), b"hocket fleet page form", hashlib.sha256).hexdigest()


def is_own_form(cookie: str, content_type: str, body: bytes) -> bool:
    """True if a body was sent by a form of the page that was made for this browser."""
    if not cookie or content_type.partition(";")[0].strip().lower() != _FORM_TYPE:
        return False
    try:
        text = body.decode("ascii")
        fields = urllib.parse.parse_qs(text, strict_parsing=True, max_num_fields=10)
    except ValueError:
        return False
    given = fields.get(FORM_FIELD, [])
    right = form_token(cookie).encode()
    return len(given) == 1 and hmac.compare_digest(given[0].encode("utf-8", "replace"), right)
