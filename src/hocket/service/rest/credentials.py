"""Who may do what: the token of people, its cookie in a browser, the token of an attempt.

* People send ``Authorization: Bearer <token>``; that opens everything but the routes of attempts.
* A browser gets a cookie for the token (``POST /login``, form field ``token``). The cookie is
  derived from the token, so that it outlives a restart and does not tell the token. It is HttpOnly
  and SameSite=Strict; a request that changes something must also carry the header `PAGE_HEADER`,
  which no form and no foreign page can add.
* The page's own forms, which work without scripts, carry the field `FORM_FIELD` instead. Its value
  is derived from the token as well, and stands only in pages that nobody else's page can read.
* The processes of an attempt send the token of the attempt as bearer; the daemon checks it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import urllib.parse
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Literal

PAGE_HEADER = "x-hocket-page"
FORM_FIELD = "form-token"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/login", "/logout"})
OPEN_PREFIX = "/static/"
"""Style sheet and script of the page, which hold nothing of the fleet."""
_ATTEMPT_PATH = re.compile(r"/v1/jobs/[^/]+/attempts/[^/]+/(report|checkpoints)")
_FORM_PATH = re.compile(r"/jobs/[^/]+/(cancel|pause|resume)")
_FORM_TYPE = "application/x-www-form-urlencoded"

Access = Literal["open", "attempt", "form", "user"]


def access_of(method: str, path: str) -> Access:
    """Who a route is for; what is not listed is for people with the token."""
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
    """What the token of people opens."""

    token: str = field(repr=False)

    def is_token(self, given: str) -> bool:
        """Whether this is the token, in time that tells nothing about it."""
        return _equal(given, self.token)

    @property
    def cookie_name(self) -> str:
        """Browsers send cookies to all ports of a host: each fleet has a name of its own."""
        return f"hocket-{self._derived('name')[:12]}"

    @property
    def cookie_value(self) -> str:
        """What the cookie of somebody who knew the token holds."""
        return self._derived("value")

    @property
    def form_token(self) -> str:
        """What the forms of the page hold."""
        return self._derived("form")

    def is_own_form(self, content_type: str, body: bytes) -> bool:
        """Whether a body was sent by a form of the page."""
        if content_type.partition(";")[0].strip().lower() != _FORM_TYPE:
            return False
        try:
            text = body.decode("ascii")
            fields = urllib.parse.parse_qs(text, strict_parsing=True, max_num_fields=10)
        except ValueError:
            return False
        given = fields.get(FORM_FIELD, [])
        return len(given) == 1 and _equal(given[0], self.form_token)

    def has_cookie(self, cookie_header: str) -> bool:
        """Whether a ``Cookie`` header holds the right cookie."""
        try:
            cookie = SimpleCookie(cookie_header).get(self.cookie_name)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self.cookie_value)

    def _derived(self, purpose: str) -> str:
        message = f"hocket fleet page {purpose}".encode()
        return hmac.new(self.token.encode(), message, hashlib.sha256).hexdigest()


def _equal(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), right.encode())
