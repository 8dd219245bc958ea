"""Python client of the web service: standard library and numpy, one open connection."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hocket.base.errors import HocketError, RunError, UsageError

TIMEOUT_S = 30.0


class ClassesClient:
    """Client of one service: ``ClassesClient(url, token).predict(image)["label"]``."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a service", hint="such as http://host:port")
        self._token = token
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=TIMEOUT_S
        )
        self._dtype = ""

    def model(self) -> dict[str, Any]:
        """Description of the model served: classes, shape of an input, parts."""
        return self._call("GET", "/v1/model")

    def metrics(self) -> dict[str, Any]:
        """Times of answers, and counts of late and dead workers."""
        return self._call("GET", "/v1/metrics")

    def predict(self, inputs: Any, *, top: int = 5) -> dict[str, Any]:
        """Return the answer to one input."""
        if not self._dtype:
            self._dtype = str(self.model()["input_dtype"])
        # Raw bytes, because writing and parsing JSON would take longer than the answer.
        raw = np.ascontiguousarray(inputs, dtype=np.dtype(self._dtype).newbyteorder("<")).tobytes()
        return self._call("POST", f"/v1/predict?top={top}", raw)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._token}"}
        if body is not None:
            headers["content-type"] = "application/octet-stream"
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            body = answer.read()
            # A service with too many connections refuses before it reads the request, and not in
            # JSON.
            reply = json.loads(body) if answer.status != 503 or body[:1] == b"{" else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise RunError(f"the service does not answer: {error}") from error
        if answer.status != 200:
            kind: type[HocketError] = RunError if answer.status >= 500 else UsageError
            raise kind(str(reply.get("detail", answer.reason)), hint=str(reply.get("hint", "")))
        result: dict[str, Any] = reply
        return result
