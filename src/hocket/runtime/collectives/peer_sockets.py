"""TCP connections between all pairs of ranks, which exchange their addresses through a store.

Every rank listens. The higher rank of each pair connects to the lower one, and authenticates with a
secret from the store. If a pair does not connect in time, it has no link.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from math import inf
from typing import Any

from hocket.base import config

_SECRET_BYTES = 16
_SIOCGIFADDR = 0x8915
_UNSENT_BYTES = 1 << 16
AHEAD_S = 0.003
"""Send buffer of the kernel, in seconds of sending; much larger buffers made trees slower."""
_MIN_AHEAD_BYTES, _MAX_AHEAD_BYTES = 1 << 15, 1 << 19
"""Limits of the kernel's send buffer; for links that need more, the kernel chooses its size."""
_TCP_NOTSENT_LOWAT = 25
"""Socket option; the constant is missing in some builds of Python."""


def connect_all(
    store: Any, rank: int, num_ranks: int, key: str, *, patience_s: float,
    without: Collection[int] = (), ahead_bytes: float = inf,
) -> list[socket.socket | None]:  # fmt: skip
    """Return a non-blocking socket per rank; None for this rank and unreachable ones.

    Ranks in ``without`` have no link to this rank and are skipped. At most ``ahead_bytes`` are
    buffered in the kernel: more would fill the queues of slow links, in which urgent data waits
    behind other data.
    """
    address = own_address()
    family = _family(address)
    with socket.create_server((address, 0), family=family, backlog=num_ranks) as server:
        port = server.getsockname()[1]
        if rank == 0:
            store.set(f"{key}/secret", secrets.token_hex(_SECRET_BYTES))
        store.set(f"{key}/address/{rank}", f"{address} {port}")
        secret = bytes.fromhex(store.get(f"{key}/secret").decode())
        others = [store.get(f"{key}/address/{n}").decode().split() for n in range(num_ranks)]
        connector = _PeerConnector(server, secret, rank, num_ranks, without)
        for peer in connector.wanted:
            if peer < rank:
                connector.connect(peer, others[peer][0], int(others[peer][1]))
        found = connector.wait(time.monotonic() + patience_s)
    for each in found:
        if each is not None:
            each.setblocking(False)
            # Small chunks must not wait for acknowledgements (Nagle's algorithm).
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Data in the kernel's buffer cannot be overtaken by more urgent data.
            each.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            if ahead_bytes < _MAX_AHEAD_BYTES:
                ahead = max(int(ahead_bytes), _MIN_AHEAD_BYTES)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ahead)
    return found


class _PeerConnector:
    """Connects and accepts concurrently, so that a rank that waits for a lost peer still accepts
    others."""

    def __init__(
        self, server: socket.socket, secret: bytes, rank: int, num_ranks: int,
        without: Collection[int],
    ) -> None:  # fmt: skip
        self._server, self._secret, self._rank = server, secret, rank
        self.wanted = set(range(num_ranks)).difference(without, {rank})
        self._found: list[socket.socket | None] = [None] * num_ranks
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def connect(self, peer: int, address: str, port: int) -> None:
        """Begin to connect to a peer; `wait` completes the connection."""
        made = socket.socket(_family(address), socket.SOCK_STREAM)
        made.setblocking(False)
        # Does not block: `wait` sees success or failure.
        made.connect_ex((address, port))
        self._selector.register(made, selectors.EVENT_WRITE, peer)

    def wait(self, until_s: float) -> list[socket.socket | None]:
        """Return the sockets of all peers that connected in time."""
        with self._selector:
            while self.wanted and (rest_s := until_s - time.monotonic()) > 0:
                for key, _ in self._selector.select(rest_s):
                    with contextlib.suppress(OSError):
                        self._handle(key)
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not self._server:
                    key.fileobj.close()  # type: ignore[union-attr]
        return self._found

    def _handle(self, key: selectors.SelectorKey) -> None:
        made: Any = key.fileobj
        if made is self._server:
            answered, _ = self._server.accept()
            answered.setblocking(False)
            self._selector.register(answered, selectors.EVENT_READ)
            return
        self._selector.unregister(made)
        try:
            if key.data is None:
                peer = self._identified(made)
            else:
                peer = key.data
                # Fits into the empty send buffer, so it does not block.
                made.send(self._secret + struct.pack("<i", self._rank))
        except OSError:
            peer = -1
        if peer not in self.wanted:
            made.close()
            return
        self._found[peer] = made
        self.wanted.discard(peer)

    def _identified(self, made: socket.socket) -> int:
        """Return the rank that has connected; -1 if it does not know the secret."""
        said = made.recv(len(self._secret) + 4)
        if len(said) != len(self._secret) + 4:
            return -1
        # Constant time: a comparison that stops at the first difference leaks the secret.
        is_known = secrets.compare_digest(said[:-4], self._secret)
        return int(struct.unpack("<i", said[-4:])[0]) if is_known else -1


def close_all(sockets: list[socket.socket | None], *, at_once: bool = True) -> None:
    """Close all sockets. With ``at_once`` unsent data is dropped, else it is still delivered."""
    for each in sockets:
        if each is not None:
            if at_once:
                with contextlib.suppress(OSError):
                    # A linger time of zero resets the connection, which drops unsent data.
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


def own_address() -> str:
    """Return this rank's address: of the configured interface, or of the one that reaches the
    store."""
    interface, meeting = config.rank_network()
    if interface:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            request = struct.pack("256s", interface.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError):
        host = meeting or socket.gethostname()
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing; it only selects the interface of the route.
            probe.connect(where)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
