"""Interface of a transport for tables.

A port belongs to one client or one shard and is used by one thread, except for `wake`. Messages to
one peer arrive complete and in order; when a connection breaks, messages in flight are lost, which
receivers detect from byte counts (`hocket.tables.route`). Sending never blocks.
"""

from __future__ import annotations

from typing import Protocol


class Port(Protocol):
    """One end of all channels of a client (peers: shards) or of a shard (peers: clients)."""

    address: str
    """Address at which a shard listens; empty for a client."""
    process: int
    """Random number of a client's process, to which a shard addresses its answers."""

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Send a message to a peer (a client's process); it is lost if there is none."""

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its sender; None if none has arrived."""

    def wait(self, timeout_s: float) -> None:
        """Return when a message may have arrived, `wake` is called, or the time is over."""

    def wake(self) -> None:
        """End a `wait` of another thread."""

    def close(self) -> None:
        """Release all resources."""
