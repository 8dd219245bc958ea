"""Interface of a transport of tables.

A port belongs to one client or one shard and to one thread, but for `wake`. Messages to one peer
arrive in order, each whole; when a connection breaks, those that were in flight are lost, which
the receivers see from their stamps (`hocket.tables.route`). Sending never waits.
"""

from __future__ import annotations

from typing import Protocol


class Port(Protocol):
    """One end of all channels of a client (peers: shards) or of a shard (peers: clients)."""

    address: str
    """Where a shard listens; empty for a client."""
    process: int
    """Of a client: a number that its process drew, and under which a shard answers it."""

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Send a message to a peer, of a client to this process of it; lost if there is none."""

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its sender; None if none has arrived."""

    def wait(self, timeout_s: float) -> None:
        """Return when a message may have arrived, at `wake`, or after some time."""

    def wake(self) -> None:
        """End a `wait` of another thread."""

    def close(self) -> None:
        """Give everything back."""
