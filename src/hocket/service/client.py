"""Client of the service for programs on the same or another machine; standard library only.

Neither redirects nor proxies are followed: the token is sent to the named address only.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hocket.base.config import fleet_fingerprint, fleet_token
from hocket.base.errors import HocketError, RunError, UsageError, system_reason
from hocket.service.endpoint import read_endpoint
from hocket.service.local_socket import ask_local_socket
from hocket.service.pinned_tls import checked_fingerprint, connection_to

TIMEOUT_S = 60.0
PATIENCE_S = 10.0
"""Seconds for which a request that is safe to repeat is retried while the service restarts."""
_PAUSE_S = 0.25
_MAX_ANSWER_BYTES = 256 * 2**20
_BLOCK_BYTES = 65536


class UnreachableError(RunError):
    """The service does not respond, or its response cannot be parsed."""

    code = "unreachable"


class BusyServiceError(UnreachableError):
    """The service responds, but is too busy for this request; a retry after a moment helps."""


class RefusedByServiceError(UsageError):
    """The service refused the request; ``status`` is the HTTP status."""

    status = 400


@dataclass(frozen=True)
class Address:
    """URL of a service and the token for it."""

    url: str
    token: str
    fingerprint: str = ""
    """Fingerprint of the HTTPS certificate; if empty, a public authority must have signed it."""

    def __repr__(self) -> str:
        return f"Address({self.url!r})"


class FleetClient:
    """Sends requests to a service; ``locate`` is called for each, because a restart may move the
    service.
    """

    def __init__(self, locate: Callable[[], Address]) -> None:
        self._locate = locate

    def get(self, path: str, **query: object) -> Any:
        """JSON response to a GET request."""
        return self._call("GET", _with_query(path, query))

    def get_when_free(self, path: str) -> Any:
        """Like `get`, but retries for a while if the service is busy."""
        return patiently(lambda: self.get(path), PATIENCE_S, BusyServiceError)

    def get_patiently(self, path: str, patience_s: float = PATIENCE_S) -> Any:
        """Like `get`, but retries for ``patience_s`` if the service is unreachable."""
        return patiently(lambda: self.get(path), patience_s)

    def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        """JSON response to one POST request."""
        return self._call("POST", path, body, headers)

    def delete(self, path: str) -> Any:
        """JSON response to one DELETE request."""
        return self._call("DELETE", path)

    def submit(self, spec: Mapping[str, Any]) -> Any:
        """Submit a job exactly once, even if the request has to be retried."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        return patiently(lambda: self._call("POST", "/v1/jobs", spec, headers), PATIENCE_S)

    def pages(self, path: str, key: str, **query: object) -> Iterator[Any]:
        """All entries of a paginated list."""
        after: int | None = 0
        while after is not None:
            page = self.get(path, after=after, **query)
            yield from page[key]
            after = page["next_after"]

    def blocks(self, path: str, **query: object) -> Iterator[bytes]:
        """Blocks of a response as they arrive; there is no time limit."""
        with _Exchange(self._locate(), timeout_s=None) as exchange:
            answer = exchange.ask("GET", _with_query(path, query))
            while block := exchange.read(answer):
                yield block

    def _call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        with _Exchange(self._locate(), timeout_s=TIMEOUT_S) as exchange:
            answer = exchange.ask(method, path, body, headers)
            return exchange.content(answer)


def find_service(folder: Path, url: str | None = None) -> FleetClient:
    """Client for the service of a state folder, or for ``url`` with the token of the
    environment."""
    if url is not None:
        token = _token_of_environment()
        if token is None:
            raise UsageError("--url needs a token", hint="put it into HOCKET_FLEET_TOKEN")
        address = Address(_checked_url(url), token, _fingerprint_of_environment())
        return FleetClient(lambda: address)

    def locate() -> Address:
        url = _checked_url(read_endpoint(folder))
        return Address(url, _token_of_environment() or _token_of(folder, url))

    return FleetClient(locate)


def _token_of(folder: Path, url: str) -> str:
    try:
        return ask_local_socket(folder)
    except OSError as error:
        raise _unreachable(url, error) from None


def job_path(number: int, rest: str = "") -> str:
    """Path ``/v1/jobs/NUMBER`` of a job, followed by ``rest``."""
    return f"/v1/jobs/{quote(str(number), safe='')}{rest}"


def _checked_url(url: str) -> str:
    hint = "an address looks like http://127.0.0.1:8080"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise UsageError(f"{url!r} is no address of a service", hint=hint) from None
    is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or not is_plain:
        raise UsageError(f"{url!r} is no address of a service", hint=hint)
    return url.rstrip("/")


def _token_of_environment() -> str | None:
    token = fleet_token()
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        hint = "put what hocket fleet token add printed there"
        raise UsageError("HOCKET_FLEET_TOKEN holds no valid token", hint=hint)
    return token


def _fingerprint_of_environment() -> str:
    text = fleet_fingerprint()
    return checked_fingerprint(text) if text else ""


def _with_query(path: str, query: Mapping[str, object]) -> str:
    given = {key: _text(value) for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def patiently(
    ask: Callable[[], Any],
    patience_s: float,
    what_passes: type[UnreachableError] = UnreachableError,
) -> Any:
    """Result of ``ask``, retried for ``patience_s`` while it raises ``what_passes``."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except what_passes:
            if time.monotonic() > until_s:
                raise
            time.sleep(_PAUSE_S)


class _Exchange:
    """One connection for one request, closed on exit even after an error."""

    def __init__(self, address: Address, timeout_s: float | None) -> None:
        parts = urlsplit(address.url)
        self._address = address
        self._prefix = parts.path
        fingerprint = address.fingerprint
        self._connection = connection_to(parts.scheme, parts.netloc, fingerprint, timeout_s)

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Send the request; raises the error that the answer describes."""
        data = None if body is None else json.dumps(body).encode()
        all_headers = {"Authorization": f"Bearer {self._address.token}", **(headers or {})}
        if data is not None:
            all_headers["Content-Type"] = "application/json"
        try:
            self._connection.request(method, self._prefix + path, data, all_headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        if answer.status >= 300:
            raise _error_of(answer.status, self.content(answer), self._address.url)
        return answer

    def read(self, answer: http.client.HTTPResponse) -> bytes:
        """Next data of the response, at least one byte; empty at the end."""
        try:
            return answer.read1(_BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def content(self, answer: http.client.HTTPResponse) -> Any:
        """The whole response, parsed as JSON."""
        try:
            data = answer.read(_MAX_ANSWER_BYTES)
            return json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError):
            raise UnreachableError(f"{self._address.url} is no hocket fleet service") from None

    def _unreachable(self, error: Exception) -> UnreachableError:
        return _unreachable(self._address.url, error)


def _unreachable(url: str, error: Exception) -> UnreachableError:
    reason = system_reason(error) or type(error).__name__
    hint = "start it with hocket fleet serve; accepted jobs are not lost while it is away"
    return UnreachableError(f"no fleet service answers at {url}: {reason}", hint=hint)


def _error_of(status: int, content: object, url: str) -> HocketError:
    fields = content if isinstance(content, dict) else {}
    detail, hint = str(fields.get("detail", f"status {status}")), str(fields.get("hint", ""))
    if status == 401:
        where = "hocket fleet token add makes one, for whoever runs the service"
        if fleet_token() is not None:
            where = f"HOCKET_FLEET_TOKEN holds another; {where}"
        return _refused(status, f"the service at {url} refuses the token", where)
    if status == 503:
        return BusyServiceError(detail, hint=hint)
    if status >= 500:
        return RunError(f"the service failed: {detail}", hint=hint)
    return _refused(status, detail, hint)


def _refused(status: int, message: str, hint: str) -> RefusedByServiceError:
    error = RefusedByServiceError(message, hint=hint)
    error.status = status
    return error
