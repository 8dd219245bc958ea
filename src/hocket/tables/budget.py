"""How fast one link may be used: a token bucket that is filled at the rate that was measured.

Each side stamps its messages with the bytes that it has sent so far and returns the last stamp
that it has seen. The bytes between two returned stamps over the time between them, while something
was under way all the time, is the goodput; a time in which the sender had nothing more to send
counts only if it shows a higher one. The bucket is filled at a little more than the highest of the
last few, so that a link which became faster is found out. Bytes under way are bounded too: what
waits in a socket's buffer can no longer be overtaken by what has become more important.
"""

from __future__ import annotations

from collections import deque

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
