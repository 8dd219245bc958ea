"""Run the web service in this process until a signal ends it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from hocket.base.errors import UsageError
from hocket.base.regular import read_regular
from hocket.classes.artefact import Folder
from hocket.classes.serving.app import make_app
from hocket.classes.serving.dry_run import LatencyForecast, check_parts, forecast_of
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.service.serve import QuietServer, is_loopback, listening_socket, server_config

_MAX_TOKEN_BYTES = 4096


def serve(
    folder: Folder,
    options: ServeOptions,
    *,
    host: str,
    port: int,
    token: str,
    on_ready: Callable[[str], None],
    on_forecast: Callable[[LatencyForecast], None] = lambda forecast: None,
) -> None:
    """Serve a folder until SIGTERM or SIGINT, with one worker process per part.

    ``on_ready`` is called with the address, ``on_forecast`` with the predicted latency, which is
    measured before the first request.
    """
    if not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from other machines",
            hint="traffic is not encrypted: put a proxy with TLS before a loopback address",
        )
    try:
        listener = listening_socket(host, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            hint="leave out --port for a free one",
        ) from None
    # Checked here, because nobody would see the error of a worker.
    check_parts(folder)
    with listener, FrontEnd(folder, options) as front_end:
        address = listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        on_forecast(forecast_of(front_end))
        app = make_app(front_end, token, (host,))
        server = QuietServer(server_config(app), lambda: on_ready(f"http://{shown}:{address[1]}"))
        server.serve_on(listener)


def token_in(path: Path | None) -> str:
    """Return the token in a file; if the file does not exist, write a new token to it."""
    if path is None or not path.exists():
        token = secrets.token_urlsafe(32)
        if path is not None:
            _write_private(path, token)
        return token
    token = read_regular(path, _MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
    if len(token) < 16:
        raise UsageError("the token has fewer than 16 characters", where=str(path))
    return token


def _write_private(path: Path, token: str) -> None:
    try:
        # Readable only by its owner from the first moment.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write the token: {error.strerror}", where=str(path)) from None
    with open(descriptor, "w") as file:
        file.write(token + "\n")
