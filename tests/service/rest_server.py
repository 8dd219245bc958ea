"""A whole service behind a real socket, for tests of what only a server and its clients do."""

from __future__ import annotations

import http.client
import threading
import time

from service.rest_service import TOKEN, Service, tokens_of

from hocket.service.rest.app import make_app
from hocket.service.serve import _Server, listening_socket, server_config

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


class Served:
    """A service behind a socket."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = make_app(service.daemon, tokens_of(TOKEN))
        self.listener = listening_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        ready = threading.Event()
        self.server = _Server(server_config(self.app), self.app.state.event_notifier, ready.set)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True
        )
        self.thread.start()
        self.connections: list[http.client.HTTPConnection] = []
        assert ready.wait(120)

    def open(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self.connections.append(connection)
        connection.request("GET", path, headers={**AUTHORIZED, **headers})
        return connection.getresponse()

    def close(self) -> float:
        """Seconds that it took."""
        start_s = time.monotonic()
        self.server.handle_exit(15, None)
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.listener.close()
        return time.monotonic() - start_s
