"""Exchange messages with one peer over a port: byte counts, acknowledgements, measured throughput.

Every message contains the number of bytes of changes or rows sent up to its end. If fewer bytes
have arrived, a connection has broken and messages were lost. The bytes in flight are bounded by the
measured throughput, so that urgent rows do not queue behind others.
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

# Throughput measurement: each side stamps its messages with the bytes that it has sent so far, and
# returns the last stamp that it has received. Goodput is the number of bytes between two returned
# stamps divided by the time between them. An interval in which the sender ran out of data counts
# only if it shows a higher rate. Rows cannot overtake those in a socket's buffer, so few bytes are
# put there.

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2 * 1024, 64 * 1024
_CHUNK_S = 0.03
"""Maximum seconds for which one message may occupy a link while a more important one waits."""
_SAMPLE_S = 0.08
_NUM_SAMPLES = 6


class SendBudget:
    """Bytes that one sender may have in flight to one receiver."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.returned_bytes = 0
        self.goodput_bps: float | None = None
        """Measured throughput in bytes per second; None before the first measurement."""
        self._rates: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._busy = self._since = (0.0, 0)
        self._was_full = False
        """True if the window has blocked a message since the last measurement began."""

    @property
    def chunk_bytes(self) -> int:
        """Preferred length of a message."""
        measured = int(_CHUNK_S * (self.goodput_bps or 0.0))
        return min(max(measured, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self.sent_bytes - self.returned_bytes

    def sent(self, num_bytes: int, now_s: float) -> int:
        """Count a message; returns its stamp, the bytes sent so far."""
        if self.in_flight_bytes <= 0:
            self._busy = self._since = (now_s, self.returned_bytes)
        self.sent_bytes += num_bytes
        return self.sent_bytes

    def returned(self, stamp: int, now_s: float) -> None:
        """Count the bytes up to ``stamp`` as received by the peer."""
        if stamp <= self.returned_bytes or self.in_flight_bytes <= 0:
            return
        self.returned_bytes = min(stamp, self.sent_bytes)
        if now_s - self._since[0] >= _SAMPLE_S:
            self._measured(self._since, now_s, is_full=self._was_full)
            self._since, self._was_full = (now_s, self.returned_bytes), False
        elif self.in_flight_bytes == 0:
            # Everything has arrived before the interval ended. The rate is counted from when the
            # link was last empty, because answers arrive in bunches and the time between two of
            # them is meaningless.
            self._measured(self._busy, now_s, is_full=False)

    def _measured(self, since: tuple[float, int], now_s: float, *, is_full: bool) -> None:
        rate = (self.returned_bytes - since[1]) / max(now_s - since[0], 1e-3)
        if is_full or rate > (self.goodput_bps or 0.0):
            self._rates.append(rate)
            self.goodput_bps = max(self._rates)

    @property
    def window_bytes(self) -> int:
        """Maximum number of bytes that should be in flight."""
        return max(2 * self.chunk_bytes, int(2 * _CHUNK_S * (self.goodput_bps or 0.0)))

    def allows(self) -> bool:
        """True if a message may be sent now."""
        allowed = self.in_flight_bytes < self.window_bytes
        self._was_full = self._was_full or not allowed
        return allowed


_MAX_BUSY_SHARE = 0.5
_SHORT_CLOCK_S = 8 * _CHUNK_S
_LATENCY_S = 0.005
"""In shorter clocks, workers wait for processes and not for the link, so holding rows back only
delays them.
"""


class LinkUse:
    """Decides from the last clock's link load if rows may be sent ahead of time.

    Rows sent ahead delay rows that become urgent meanwhile by a message in every clock. Fresher
    rows are worth this small delay in long clocks, but not in short clocks that keep the link
    busy.
    """

    def __init__(self) -> None:
        self.is_starved = False
        """True if clocks are short and keep the link busy, so that several clocks should share a
        message.
        """
        self._is_filled = False
        self._clock, self._busy_s, self._was_busy = -1, 0.0, False
        self._started_s = self._seen_s = time.monotonic()

    def has_spare_time(self, clock: int, *, is_busy: bool) -> bool:
        """Record the link's state at a clock; True if rows may be sent ahead."""
        now_s = time.monotonic()
        self._busy_s += self._was_busy * (now_s - self._seen_s)
        self._seen_s, self._was_busy = now_s, is_busy
        if clock != self._clock:
            clock_s = now_s - self._started_s
            is_busy_clock = self._clock >= 0 and self._busy_s >= _MAX_BUSY_SHARE * clock_s
            self._is_filled = is_busy_clock and clock_s < _SHORT_CLOCK_S
            self.is_starved = self._is_filled and clock_s >= _LATENCY_S
            self._clock, self._started_s, self._busy_s = clock, now_s, 0.0
        return not is_busy and not self._is_filled


_ANSWER_S = 0.02
MAX_IN_FLIGHT_BYTES = 64 * 2**20
"""Maximum number of unacknowledged bytes; beyond it no messages are made."""


class Route:
    """Messages to and from one peer."""

    def __init__(self, port: Port, peer: int, tables: int) -> None:
        """``tables`` is the layout's digest."""
        self.port, self.peer, self.tables = port, peer, tables
        self.process = 0
        """Process number of the client to which the shard answers."""
        self.budget = SendBudget()
        self.sent_s = time.monotonic()
        """Time of the last message sent."""
        self.seen_bytes = 0
        self.needs_ack = False
        """True if a received message is not acknowledged yet."""
        self._unacked_s = 0.0

    def send(self, table: int, message: Message) -> None:
        """Send a message of a table."""
        head = message.head
        head[TABLE], head[RECEIVED] = table, self.seen_bytes
        head[TABLES], head[SENDER] = self.tables, self.port.process
        # Only rows and changes are acknowledged at once, so only they measure the link.
        is_measured = head[KIND] in (UPDATES, ROWS)
        data = encode(message, self.budget.sent_bytes, is_counted=is_measured)
        self.sent_s = time.monotonic()
        if is_measured:
            self.budget.sent(len(data), self.sent_s)
        self.needs_ack = False
        self.port.send(self.peer, data, self.process)

    def arrived(self, message: Message, num_bytes: int) -> bool:
        """Record a message's byte counts; True if no message before it was lost."""
        values = message.head
        own_bytes = num_bytes if values[KIND] in (UPDATES, ROWS) else 0
        is_next = self.seen_bytes + own_bytes == int(values[SENT_BYTES])
        self.seen_bytes = int(values[SENT_BYTES])
        self.budget.returned(int(values[RECEIVED]), time.monotonic())
        if not self.needs_ack and values[KIND] != PING:
            self.needs_ack, self._unacked_s = True, time.monotonic()
        return is_next

    def must_ack(self, *, is_waiting: bool) -> bool:
        """True if an acknowledgement is due and no other message will soon include it."""
        is_late = is_waiting or time.monotonic() - self._unacked_s > _ANSWER_S
        return self.needs_ack and is_late

    def allows(self, use: LinkUse) -> bool:
        """True if a message may be sent now; one at a time over a starved link."""
        return self.budget.allows() and not (use.is_starved and self.budget.in_flight_bytes > 0)

    @property
    def is_clogged(self) -> bool:
        """True if too many bytes are unacknowledged, so that a stalled peer does not fill our
        memory.
        """
        return self.budget.in_flight_bytes > MAX_IN_FLIGHT_BYTES
