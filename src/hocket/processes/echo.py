"""``python -m hocket.processes.echo PORT BYTES``: echo messages to measure a connection.

Each message is its length in eight bytes, big-endian, and at most BYTES bytes of data. The process
ends when the connection closes.
"""

from __future__ import annotations

import socket
import sys

TIMEOUT_S = 5.0


def main(port: int, most_bytes: int) -> None:
    """Echo messages until the other side closes the connection."""
    link = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(bytearray(most_bytes))
    while head := link.recv(8, socket.MSG_WAITALL):
        size, got = int.from_bytes(head, "big"), 0
        while got < size:
            got += link.recv_into(data[got:size])
        link.sendall(data[:size])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
