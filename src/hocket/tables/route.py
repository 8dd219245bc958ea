"""One peer over a port: stamps, what is owed to it, and how fast it takes what is sent.

Every message says how many bytes of changes or rows were sent before its end. Where that is more
than has arrived, a connection has broken and something was lost.
"""

from __future__ import annotations

import time
from collections import deque

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

# How fast one link may be used: a token bucket that is filled at the rate that was measured.
#
# Each side stamps its messages with the bytes that it has sent so far and returns the last stamp
# that it has seen. The bytes between two returned stamps over the time between them, while
# something was under way all the time, is the goodput; a time in which the sender had nothing more
# to send counts only if it shows a higher one. The bucket is filled at a little more than the
# highest of the last few, so that a link which became faster is found out. Bytes under way are
# bounded too: what waits in a socket's buffer can no longer be overtaken by what has become more
# important.

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2 * 1024, 64 * 1024
_CHUNK_S = 0.03
"""How long one message may keep a link busy: so long a more important one waits."""
_PROBE = 1.08
_SAMPLE_S = 0.08
_NUM_SAMPLES = 6


class SendBudget:
    """What one sender may send to one receiver now."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.returned_bytes = 0
        self.goodput_bps: float | None = None
        """Bytes per second; None before the first measurement."""
        self._rates: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._tokens = 2.0 * MIN_CHUNK_BYTES
        self._filled_s: float | None = None
        self._busy = self._since = (0.0, 0)
        self._was_full = False
        """Whether more would have been sent since the last measurement began."""

    @property
    def chunk_bytes(self) -> int:
        """How long a message should be."""
        measured = int(_CHUNK_S * (self.goodput_bps or 0.0))
        return min(max(measured, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)

    @property
    def under_way_bytes(self) -> int:
        """Sent, and not returned as seen."""
        return self.sent_bytes - self.returned_bytes

    def sent(self, num_bytes: int, now_s: float) -> int:
        """Count a message; the stamp that it carries."""
        if self.under_way_bytes <= 0:
            self._busy = self._since = (now_s, self.returned_bytes)
        self.sent_bytes += num_bytes
        self._tokens = max(self._tokens - num_bytes, -2.0 * self.chunk_bytes)
        return self.sent_bytes

    def returned(self, stamp: int, now_s: float) -> None:
        """The receiver has seen everything up to ``stamp``."""
        if stamp <= self.returned_bytes or self.under_way_bytes <= 0:
            return
        self.returned_bytes = min(stamp, self.sent_bytes)
        if now_s - self._since[0] >= _SAMPLE_S:
            self._measured(self._since, now_s, is_full=self._was_full)
            self._since, self._was_full = (now_s, self.returned_bytes), False
        elif self.under_way_bytes == 0:
            # All has arrived before the time was up. Counted from when the link was last empty:
            # answers come in bunches, and the time between two of them says nothing.
            self._measured(self._busy, now_s, is_full=False)

    def _measured(self, since: tuple[float, int], now_s: float, *, is_full: bool) -> None:
        rate = (self.returned_bytes - since[1]) / max(now_s - since[0], 1e-3)
        if is_full or rate > (self.goodput_bps or 0.0):
            self._rates.append(rate)
            self.goodput_bps = max(self._rates)

    def allows(self, now_s: float) -> bool:
        """Whether a message may be sent now."""
        allowed = self._allowed(now_s)
        self._was_full = self._was_full or not allowed
        return allowed

    def _allowed(self, now_s: float) -> bool:
        if self.goodput_bps is None:
            return self.under_way_bytes < 2 * self.chunk_bytes
        elapsed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        most = max(2.0 * self.chunk_bytes, 2 * _CHUNK_S * self.goodput_bps)
        self._tokens = min(most, self._tokens + elapsed_s * self.goodput_bps * _PROBE)
        return self._tokens > 0 and self.under_way_bytes < most


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
