"""Answers of the service to an agent: what is tried again, and what is given up."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from hocket.base.errors import RunError, UsageError
from hocket.service.agent import AgentClient


class _Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, data = int(self.path.rpartition("/")[2]), b'{"detail": "no such agent"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def client() -> Iterator[AgentClient]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = AgentClient(f"http://127.0.0.1:{port}", "token", "", "one")
    yield made
    made._connection().close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "error"),
    [(200, None), (299, None), (300, UsageError), (404, UsageError), (499, UsageError),
     (500, RunError), (503, RunError), (599, RunError)],
)  # fmt: skip
def test_failures_of_the_server_are_tried_again_and_refusals_are_not(
    client: AgentClient, status: int, error: type[Exception] | None
) -> None:
    if error is None:
        assert b"no such agent" in client.call("POST", f"/{status}", b"{}", "application/json")
        return
    match = "no such agent" if error is UsageError else f"answered {status}"
    with pytest.raises(error, match=match):
        client.call("POST", f"/{status}", b"{}", "application/json")


def test_a_service_that_does_not_answer_is_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        away = AgentClient(f"http://127.0.0.1:{taken.getsockname()[1]}", "token", "", "one")
        for _ in range(2):
            with pytest.raises(
                RunError, match=r"no answer from 127\.0\.0\.1:\d+: Connection refused"
            ):
                away.call("POST", "/sync", b"{}", "application/json")
