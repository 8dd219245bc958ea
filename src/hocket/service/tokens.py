"""Tokens of users of a service: named secrets, of which only hashes are stored.

A token is a random text of 256 bits that is shown only once, when it is created. A cookie is such a
text in a browser. The file ``tokens.json`` in the state folder holds the SHA-256 of each, with name
and role of the user, so that whoever reads the file learns no token.

The user who runs the service has one more token, which exists only in memory; see
`hocket.service.local_socket`.

| role | may | |---|---| | admin | everything: also change jobs of others, manage tokens, drain
machines | | user | see everything, submit jobs, change the user's own jobs | | read-only | see
everything | | agent | run jobs of the service on the machine of that name, nothing else |
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter

from hocket.base.errors import InputFileError, UsageError, system_reason
from hocket.base.jsonfile import parse_json
from hocket.service.errors import NotFoundError
from hocket.service.plain_file import open_plain
from hocket.service.store.folder import check_private

NAME = "tokens.json"
OWNER = "owner"
"""User of the local token if no other is named."""
# Time for which cookies and login links are valid.
COOKIE_AGE_S = 30 * 24 * 3600
LINK_AGE_S = 600.0
# Limits of the file; the oldest cookies are dropped.
MAX_COOKIES = 500
MAX_TOKENS = 1000
_MAX_BYTES = 1_000_000
_MAX_NAME = 60

Kind = Literal["token", "cookie"]
Role = Literal["admin", "user", "read-only", "agent"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A user of the service and the role of the token."""

    name: str
    role: Role = "user"

    @property
    def may_change(self) -> bool:
        """False for a token that only reads."""
        return self.role in ("admin", "user")

    @property
    def limited_to(self) -> str | None:
        """Owner of the jobs that this user may change; None for an admin, who may change all."""
        return None if self.role == "admin" else self.name


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A stored secret: its hash, user and role."""

    name: str
    role: Role
    kind: Kind
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    made_s: float

    @property
    def holder(self) -> Holder:
        """Owner of the secret."""
        return Holder(name=self.name, role=self.role)


class Tokens:
    """All secrets of a service; may be used from any thread. Without a folder nothing is stored."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        local: Holder | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._now_s = now_s
        self._changing = threading.Lock()
        self._links: dict[str, tuple[Holder, float]] = {}
        """User and time of expiry of each one-time login link, by the hash of its code."""
        entries = () if folder is None else _read(folder / NAME)
        self._entries = {entry.sha256: entry for entry in entries}
        self.local = local or Holder(name=OWNER, role="admin")
        self.local_token = secrets.token_urlsafe(32)
        """Token of the user who runs the service; never on disk."""

    # ── who it is ──

    def holder_of(self, token: str) -> Holder | None:
        """Owner of a token; None for an unknown token."""
        # Hashes are compared, so that the time it takes reveals nothing about a token.
        if _hash(token) == _hash(self.local_token):
            return self.local
        return self._found(token, "token")

    def holder_of_cookie(self, cookie: str) -> Holder | None:
        """Owner of a cookie."""
        return self._found(cookie, "cookie")

    def _found(self, secret: str, kind: Kind) -> Holder | None:
        entry = self._entries.get(_hash(secret))
        if entry is None or entry.kind != kind or _is_old_cookie(entry, self._now_s()):
            return None
        return entry.holder

    # ── people ──

    def people(self) -> list[Entry]:
        """All tokens, in order of their names."""
        tokens = [entry for entry in self._entries.values() if entry.kind == "token"]
        return sorted(tokens, key=lambda entry: entry.name)

    def add(self, name: str, *, role: Role = "user") -> str:
        """Create a token; it is returned only here, because only its hash is stored."""
        _check_name(name)
        with self._changing:
            if any(entry.name == name for entry in self.people()) or name == self.local.name:
                hint = f"take another name, or first hocket fleet token remove {name}"
                raise UsageError(f"{name!r} has a token already", hint=hint)
            if len(self.people()) >= MAX_TOKENS:
                raise UsageError(f"there are {MAX_TOKENS} tokens already")
            token = secrets.token_urlsafe(32)
            self._put(Holder(name=name, role=role), "token", token)
        return token

    def remove(self, name: str) -> None:
        """Remove the token of a user and all cookies made with it."""
        with self._changing:
            kept = {key: entry for key, entry in self._entries.items() if entry.name != name}
            if len(kept) == len(self._entries):
                raise NotFoundError(f"there is no token of {name!r}")
            self._store(kept)
            self._links = {k: link for k, link in self._links.items() if link[0].name != name}

    # ── browsers ──

    def make_cookie(self, holder: Holder) -> str:
        """Create a cookie for a browser of a user; the oldest cookies are removed."""
        cookie = secrets.token_urlsafe(32)
        with self._changing:
            self._put(holder, "cookie", cookie)
        return cookie

    def forget_cookie(self, cookie: str) -> None:
        """Invalidate the cookie of a browser."""
        with self._changing:
            kept = {key: one for key, one in self._entries.items() if key != _hash(cookie)}
            if len(kept) < len(self._entries):
                self._store(kept)

    def make_link(self, holder: Holder) -> str:
        """Code for a login link, valid for one login within ten minutes."""
        code = secrets.token_urlsafe(24)
        with self._changing:
            now_s = self._now_s()
            links = {key: link for key, link in self._links.items() if link[1] > now_s}
            self._links = {**links, _hash(code): (holder, now_s + LINK_AGE_S)}
        return code

    def use_link(self, code: str) -> Holder | None:
        """User of a login link; None if it was used before, has expired or is unknown."""
        with self._changing:
            holder, until_s = self._links.pop(_hash(code), (None, 0.0))
        return holder if self._now_s() < until_s else None

    # ── the file ──

    def _put(self, holder: Holder, kind: Kind, secret: str) -> None:
        entry = Entry(
            name=holder.name,
            role=holder.role,
            kind=kind,
            sha256=_hash(secret),
            made_s=self._now_s(),
        )
        self._store({**self._entries, entry.sha256: entry})

    def _store(self, entries: dict[str, Entry]) -> None:
        entries = _without_old_cookies(entries, self._now_s())
        if self._folder is not None:
            _write(self._folder / NAME, list(entries.values()))
        self._entries = entries


def _check_name(name: str) -> None:
    if not (0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip()):
        raise UsageError(f"a name is a short text of at most {_MAX_NAME} characters")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _is_old_cookie(entry: Entry, now_s: float) -> bool:
    return entry.kind == "cookie" and entry.made_s + COOKIE_AGE_S <= now_s


def _without_old_cookies(entries: dict[str, Entry], now_s: float) -> dict[str, Entry]:
    cookies = sorted(
        (entry for entry in entries.values() if entry.kind == "cookie"),
        key=lambda entry: entry.made_s,
    )
    gone = {one.sha256 for one in cookies if _is_old_cookie(one, now_s)}
    gone |= {one.sha256 for one in cookies[: max(len(cookies) - MAX_COOKIES, 0)]}
    return {key: entry for key, entry in entries.items() if key not in gone}


def _read(path: Path) -> list[Entry]:
    check_private(path)
    try:
        with open(open_plain(path), "rb") as file:
            content = parse_json(file.read(_MAX_BYTES), str(path))
        assert isinstance(content, dict)
        return TypeAdapter(list[Entry]).validate_python(content["tokens"])
    except FileNotFoundError:
        return []
    except (OSError, KeyError, ValueError, AssertionError):
        hint = "delete it; people then need new tokens (hocket fleet token add)"
        raise InputFileError("the file holds no valid tokens", hint=hint, where=str(path)) from None


def _write(path: Path, entries: list[Entry]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    data = json.dumps({"tokens": [asdict(entry) for entry in entries]}, indent=1).encode()
    try:
        # The file is private from its creation; changing its mode later would leave time to read
        # it.
        with open(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = system_reason(error)
        raise InputFileError(f"cannot be written: {reason}", where=str(path)) from None
