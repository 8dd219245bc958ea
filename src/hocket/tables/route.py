"""One peer over a port: stamps, what is owed to it, and how fast it takes what is sent.

Every message says how many bytes of changes or rows were sent before its end. Where that is more
than has arrived, a connection has broken and something was lost.
"""

from __future__ import annotations

import time

from hocket.tables.budget import SendBudget
from hocket.tables.codec import encode
from hocket.tables.core.message import (
    KIND,
    PING,
    RECEIVED,
    ROWS,
    SENDER,
    SENT_BYTES,
    TABLE,
    TABLES,
    UPDATES,
    Message,
)
from hocket.tables.transports.port import Port

MAX_UNDER_WAY_BYTES = 64 * 2**20
"""Sent and not answered, after which nothing more is made to be sent."""


class Route:
    """What goes to and comes from one peer."""

    def __init__(self, port: Port, peer: int, tables: int) -> None:
        """``tables`` is the layout's digest."""
        self.port, self.peer, self.tables = port, peer, tables
        self.process = 0
        """Of a client: the process of it that is spoken to."""
        self.budget = SendBudget()
        self.sent_s = time.monotonic()
        """When something was last sent."""
        self.seen_bytes = 0
        self.owes_answer = False
        """Whether the peer has not been told what arrived."""

    def send(self, table: int, message: Message) -> None:
        """Send a message of a table."""
        head = message.head
        head[TABLE], head[RECEIVED] = table, self.seen_bytes
        head[TABLES], head[SENDER] = self.tables, self.port.process
        # Only rows and changes are answered at once, so only they measure the way.
        is_measured = head[KIND] in (UPDATES, ROWS)
        data = encode(message, self.budget.sent_bytes, is_counted=is_measured)
        self.sent_s = time.monotonic()
        if is_measured:
            self.budget.sent(len(data), self.sent_s)
        self.owes_answer = False
        self.port.send(self.peer, data, self.process)

    def arrived(self, message: Message, num_bytes: int) -> bool:
        """Take note of a message's stamps; whether none was lost before it."""
        values = message.head
        own_bytes = num_bytes if values[KIND] in (UPDATES, ROWS) else 0
        is_next = self.seen_bytes + own_bytes == int(values[SENT_BYTES])
        self.seen_bytes = int(values[SENT_BYTES])
        self.budget.returned(int(values[RECEIVED]), time.monotonic())
        self.owes_answer = self.owes_answer or values[KIND] != PING
        return is_next

    def allows(self) -> bool:
        """Whether the measured speed leaves room for a message now."""
        return self.budget.allows(time.monotonic())

    @property
    def is_clogged(self) -> bool:
        """Whether the peer takes nothing: one that stands still must not fill our memory."""
        return self.budget.under_way_bytes > MAX_UNDER_WAY_BYTES
