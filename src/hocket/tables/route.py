"""One peer over a port: stamps, what is owed to it, and how fast it takes what is sent."""

from __future__ import annotations

import time

from hocket.tables.budget import SendBudget
from hocket.tables.codec import encode
from hocket.tables.core.message import (
    KIND,
    PING,
    RECEIVED,
    ROWS,
    SENT_BYTES,
    TABLE,
    UPDATES,
    Message,
)
from hocket.tables.transports.port import Port


class Route:
    """What goes to and comes from one peer."""

    def __init__(self, port: Port, peer: int) -> None:
        self.port, self.peer = port, peer
        self.budget = SendBudget()
        self.seen_bytes = 0
        self.owes_answer = False
        """Whether the peer has not been told what arrived."""

    def send(self, table: int, message: Message) -> None:
        """Send a message of a table."""
        head = message.head
        head[TABLE], head[RECEIVED] = table, self.seen_bytes
        # Only rows and changes are answered at once, so only they measure the way.
        is_measured = head[KIND] in (UPDATES, ROWS)
        data = encode(message, self.budget.sent_bytes, is_counted=is_measured)
        if is_measured:
            self.budget.sent(len(data), time.monotonic())
        self.owes_answer = False
        self.port.send(self.peer, data)

    def arrived(self, message: Message) -> None:
        """Take note of a message's stamps."""
        values = message.head
        self.seen_bytes = int(values[SENT_BYTES])
        self.budget.returned(int(values[RECEIVED]), time.monotonic())
        self.owes_answer = self.owes_answer or values[KIND] != PING

    def allows(self) -> bool:
        """Whether the measured speed leaves room for a message now."""
        return self.budget.allows(time.monotonic())
