"""Ports of this machine that tests give to others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port where nobody listens yet; nobody else is given it."""
    with socket.socket() as held:
        # Who listens sets this option, too, and then the system allows it beside a bound socket.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
