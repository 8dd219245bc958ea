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

CHUNK_BYTES = 8 * 1024
"""Of one message: a small part of a second on the slowest link."""
_PROBE = 1.08
_SAMPLE_S = 0.08
_NUM_SAMPLES = 6


class Budget:
    """What one sender may send to one receiver now."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.sent_bytes = 0
        self.returned_bytes = 0
        self.goodput_bps: float | None = None
        """Bytes per second; None before the first measurement."""
        self._rates: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._tokens = 2.0 * chunk_bytes
        self._filled_s: float | None = None
        self._since: tuple[float, int] | None = None
        self._was_full = False
        """Whether more would have been sent since the last measurement began."""

    @property
    def under_way_bytes(self) -> int:
        """Sent, and not returned as seen."""
        return self.sent_bytes - self.returned_bytes

    def sent(self, num_bytes: int, now_s: float) -> int:
        """Count a message; the stamp that it carries."""
        if self.under_way_bytes <= 0 or self._since is None:
            self._since = (now_s, self.returned_bytes)
        self.sent_bytes += num_bytes
        self._tokens = max(self._tokens - num_bytes, -2.0 * self.chunk_bytes)
        return self.sent_bytes

    def returned(self, stamp: int, now_s: float) -> None:
        """The receiver has seen everything up to ``stamp``."""
        self.returned_bytes = max(self.returned_bytes, min(stamp, self.sent_bytes))
        if self._since is None:
            return
        start_s, start = self._since
        if now_s - start_s >= _SAMPLE_S and self.returned_bytes > start:
            rate = (self.returned_bytes - start) / (now_s - start_s)
            if self._was_full or rate > (self.goodput_bps or 0.0):
                self._rates.append(rate)
                self.goodput_bps = max(self._rates)
            self._since = (now_s, self.returned_bytes) if self.under_way_bytes > 0 else None
            self._was_full = False

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
        most = max(2.0 * self.chunk_bytes, _SAMPLE_S * self.goodput_bps)
        self._tokens = min(most, self._tokens + elapsed_s * self.goodput_bps * _PROBE)
        return self._tokens > 0 and self.under_way_bytes < 2 * most
