"""A whole service in one process for tests: real store and daemon, fake devices, no sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import wait_until
from service.fake_executor import FakeExecutor, fleet_devices
from starlette.testclient import TestClient

from hocket.fleet.rounds.state import Rules
from hocket.service.credentials import Credentials
from hocket.service.daemon import Daemon
from hocket.service.daemon.assignment import log_file
from hocket.service.rest.app import make_app
from hocket.service.store import Store
from hocket.service.tokens import Holder, Tokens

TOKEN = "the-token-of-this-fleet-0123456789"
COOKIE = "the-cookie-of-a-browser-0123456789"
URL = "http://127.0.0.1:8080"


def tokens_of(token: str) -> Tokens:
    """Somebody who may do everything."""
    tokens = Tokens()
    tokens._put(Holder(name="tester", role="admin"), "token", token)
    tokens._put(Holder(name="tester", role="admin"), "cookie", COOKIE)
    return tokens


@dataclass
class Service:
    """What a test may touch."""

    client: TestClient
    """With the token."""
    daemon: Daemon
    executor: FakeExecutor
    folder: Path

    def bare(self, **headers: str) -> TestClient:
        """A client of the same app without the token."""
        return TestClient(self.client.app, base_url=URL, headers=headers, follow_redirects=False)

    @property
    def credentials(self) -> Credentials:
        return self.client.app.state.credentials  # type: ignore[attr-defined]

    def submit(self, **spec: Any) -> dict[str, Any]:
        answer = self.client.post("/v1/jobs", json={"name": "job", "command": ["true"], **spec})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def log_path(self, number: int, attempt: int = 1) -> Path:
        """Where the output of an attempt is, for tests to write."""
        path = log_file(self.folder, number, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def job(self, number: int) -> dict[str, Any]:
        return self.client.get(f"/v1/jobs/{number}").json()

    def wait_for(self, number: int, status: str) -> dict[str, Any]:
        return wait_until(lambda: job if (job := self.job(number))["status"] == status else None)

    def cancel_all(self) -> None:
        """Leave no job behind."""
        for job in self.client.get("/v1/jobs?live=true&limit=1000").json()["jobs"]:
            self.client.delete(f"/v1/jobs/{job['id']}")
        wait_until(lambda: not self.client.get("/v1/jobs?live=true").json()["jobs"])


def is_problem(answer: Any, status: int) -> dict[str, Any]:
    """The body of an answer that says no."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    return body


@contextmanager
def serving(
    folder: Path, rules: Rules | None = None, poll_s: float = 0.01, **num_of_kind: int
) -> Iterator[Service]:
    """A service on fake devices."""
    executor = FakeExecutor(fleet_devices(**(num_of_kind or {"v100": 2, "k80": 1})))
    device_types = tuple(dict.fromkeys(device.device_type for device in executor.devices))
    store = Store.open(folder)
    daemon = Daemon(
        store, executor, rules or Rules(), device_types, poll_s=poll_s, endpoint_url=URL
    )
    daemon.start()
    try:
        wait_until(lambda: len(daemon.state.device_names))
        app = make_app(daemon, tokens_of(TOKEN), hosts=("fleet.example",))
        headers = {"authorization": f"Bearer {TOKEN}"}
        with TestClient(
            app, base_url=URL, headers=headers, raise_server_exceptions=False,
            follow_redirects=False,
        ) as client:  # fmt: skip
            yield Service(client, daemon, executor, folder)
    finally:
        daemon.close()
        store.close()
