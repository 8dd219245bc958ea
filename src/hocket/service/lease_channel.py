"""Channel from a training to the daemon: two requests over HTTP, with the token of its attempt.

A daemon that restarts may listen elsewhere, so its address is read from its file every time.
Another program may listen at the old address, so only answers in the daemon's format count. A
refused attempt raises `StaleLeaseError`, a refused request `RunError`. All other failures raise
`AwayError`: they are temporary, and the caller retries.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hocket.base.errors import RunError
from hocket.service.pinned_tls import connection_to

# Time limit of each request.
TIMEOUT_S = 5.0
# Responses to an attempt that has lost its job: it must stop.
_STALE = frozenset((401, 403, 404, 409, 410))
# Responses of a daemon that is busy: the request is repeated later.
_BUSY = frozenset((408, 425, 429))
_MAX_ANSWER_BYTES = 1 << 20


class StaleLeaseError(RunError):
    """The attempt was given up: another one has the job now, and nothing of this one counts."""

    code = "stale-lease"


class AwayError(Exception):
    """The daemon cannot be reached, or cannot answer, at the moment."""


class LeaseChannel(NamedTuple):
    """Address and credentials of one attempt."""

    url: str
    endpoint_file: str
    job: str
    attempt: str
    token: str
    fingerprint: str = ""
    """Fingerprint of the service's certificate, if it is reached by TLS."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> LeaseChannel | None:
        """The channel described by environment variables; None outside a fleet."""
        names = ("HOCKET_URL", "HOCKET_ENDPOINT", "HOCKET_JOB", "HOCKET_ATTEMPT", "HOCKET_TOKEN")
        url, endpoint, job, attempt, token = (variables.get(name, "") for name in names)
        if not (url or endpoint) or not job:
            return None
        return cls(url, endpoint, job, attempt, token, variables.get("HOCKET_FINGERPRINT", ""))

    def report(
        self, done_steps: float, *, is_finished: bool, can_save: bool = False
    ) -> dict[str, Any]:
        """Report progress; ``may_run`` of the response says whether the attempt may continue."""
        body = {"done_steps": done_steps, "is_finished": is_finished}
        if can_save:
            body["can_save"] = True
        return self._post("report", body, expected="may_run")

    def commit(self, step: float, path: str) -> dict[str, Any]:
        """Commit a checkpoint as the newest of the job."""
        return self._post("checkpoints", {"step": step, "path": path}, expected="step")

    def _post(self, what: str, body: dict[str, Any], *, expected: str) -> dict[str, Any]:
        address = urlsplit(self._address())
        prefix = address.path.rstrip("/")
        path = f"{prefix}/v1/jobs/{self.job}/attempts/{self.attempt}/{what}"
        try:
            connection = connection_to(address.scheme, address.netloc, self.fingerprint, TIMEOUT_S)
            status, content = _exchange(connection, path, self.token, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AwayError(f"no answer from {address.netloc}: {error}") from None
        if 200 <= status < 300 and expected in content:
            return content
        # Problem details, in which the daemon always sets status and code.
        is_refusal = content.get("status") == status and "code" in content
        if not (400 <= status < 500 and is_refusal) or status in _BUSY:
            raise AwayError(f"{address.netloc} answered {status}")
        if status in _STALE:
            raise StaleLeaseError(
                f"attempt {self.attempt} of job {self.job} no longer counts (answer {status})",
                hint="nothing has to be done: the job goes on from its last committed checkpoint",
            )
        reason = str(content.get("detail", ""))[:500]
        raise RunError(f"{what} was refused (answer {status}): {reason}", where=path)

    def _address(self) -> str:
        try:
            with open(self.endpoint_file) as file:
                return str(json.load(file)["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return self.url


def _exchange(
    connection: http.client.HTTPConnection, path: str, token: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    # Not urllib: it would send what is meant for this machine through a proxy of the environment.
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        # Closed by itself: a connection that its server ends does not know of it any more.
        with connection.getresponse() as answer:
            content = answer.read(_MAX_ANSWER_BYTES)
        value = json.loads(content) if content else {}
        return answer.status, value if isinstance(value, dict) else {}
    finally:
        connection.close()
