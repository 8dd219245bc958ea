"""How fast two processes of this machine talk to each other: bytes per second, cost of a message.

A child sends back what it gets over a loopback connection, as gloo's ranks do. The shortest round
trip of one byte gives the cost of a message, the shortest of a large one the bandwidth; other
programs only lengthen them. Gloo hands every message to a thread of its own and back.
"""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass

from hocket.processes.start import start_module

GLOO_MESSAGE_S = 50e-6
"""What gloo adds to a message: 66 us against 16 us of a plain connection, measured beside each
other with PyTorch 2.13 on two cores."""
LARGE_BYTES = 8 * 10**6
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loopback:
    """One way between two processes."""

    bandwidth_bps: float
    message_s: float


def measure_loopback() -> Loopback | None:
    """The connection between two processes here; None where they cannot be joined."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT_S)
            port = server.getsockname()[1]
            arguments = (str(port), str(LARGE_BYTES))
            with start_module(
                "hocket.processes.echo", arguments, output=subprocess.DEVNULL
            ) as child:
                try:
                    return _measured(server)
                finally:
                    child.kill()
    except OSError:
        return None


def _measured(server: socket.socket) -> Loopback:
    link, _ = server.accept()
    with link:
        link.settimeout(TIMEOUT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytearray(LARGE_BYTES))
        message_s = _one_way_s(link, data[:1], 100)
        large_s = _one_way_s(link, data, 8)
    bandwidth_bps = LARGE_BYTES / max(large_s - message_s, 1e-9)
    return Loopback(float(f"{bandwidth_bps:.2g}"), float(f"{message_s + GLOO_MESSAGE_S:.2g}"))


def _one_way_s(link: socket.socket, data: memoryview, count: int) -> float:
    best_s = float("inf")
    for _ in range(count):
        start = time.perf_counter()
        link.sendall(len(data).to_bytes(8, "big"))
        link.sendall(data)
        got = 0
        while got < len(data):
            taken = link.recv_into(data[got:])
            if not taken:
                raise ConnectionError("the other process has ended")
            got += taken
        best_s = min(best_s, time.perf_counter() - start)
    return best_s / 2
