"""Clients and shards of one process: messages are handed over."""

from __future__ import annotations

import secrets
import threading
from collections import deque


class InsidePort:
    """A queue, and the queues of the peers."""

    address = ""

    def __init__(self, number: int) -> None:
        self.number, self.process = number, secrets.randbits(62) + 1
        self.peers: list[InsidePort] = []
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._something = threading.Event()

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Hand a message over."""
        other = self.peers[peer]
        other._inbox.append((self.number, data))
        other._something.set()

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its sender."""
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> None:
        """Until a message is there."""
        self._something.wait(timeout_s)
        self._something.clear()

    def wake(self) -> None:
        """End a wait."""
        self._something.set()

    def lose(self) -> None:
        """What has not been received is gone, as when a process dies."""
        self._inbox.clear()

    def close(self) -> None:
        """Nothing to give back."""


def inside_ports(num_shards: int, num_clients: int) -> tuple[list[InsidePort], list[InsidePort]]:
    """Ports of shards and of clients that know each other."""
    shards = [InsidePort(number) for number in range(num_shards)]
    clients = [InsidePort(number) for number in range(num_clients)]
    for port in shards:
        port.peers = clients
    for port in clients:
        port.peers = shards
    return shards, clients
