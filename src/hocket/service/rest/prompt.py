"""Time limits of requests, and a limit on open connections.

uvicorn itself limits the size of a request head, the time that a connection is idle after a
response, and the number of open requests. It does not limit the time of a request that is never
finished, even if it was already answered (a refusal does not read the body). Nor does it count
connections that have sent nothing. Both would use up file descriptors that jobs need.

If there are too many connections, a new one replaces the one that has kept the service waiting
longest. So nobody can lock others out by opening connections without a token and sending nothing.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0
"""For the whole request; longer than the middleware's own limit for a body."""
MAX_CONNECTIONS = 256
# Response to a connection that finds no place.
_FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class PromptProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn with these limits."""

    _deadline: asyncio.TimerHandle | None = None
    _waits_since_s = 0.0
    _is_head_whole = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request of a new connection."""
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS and not self._drop_oldest():
            transport.write(_FULL)
            transport.close()
        else:
            self._allow(HEAD_TIMEOUT_S)

    def _drop_oldest(self) -> bool:
        """Close the connection without a whole request for longest; False if there is none."""
        others = [one for one in self.connections if one is not self]
        idle = [one for one in others if isinstance(one, PromptProtocol) and one._keeps_waiting()]
        if not idle:
            return False
        # Aborted and not closed: a client that sends nothing may not read either, and closing would
        # wait for it.
        oldest = min(idle, key=lambda one: one._waits_since_s)
        oldest.transport.abort()
        self.connections.discard(oldest)
        return True

    def _keeps_waiting(self) -> bool:
        """True if the service waits for more of a request, except for one of a known user."""
        if self.conn.their_state is h11.SEND_BODY:
            return "hocket.holder" not in self.scope
        # Before the first request there is none, whatever the annotation of uvicorn says.
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Renew or end the time limit; answering a whole request has none."""
        super().data_received(data)
        was_whole, self._is_head_whole = self._is_head_whole, False
        if self.conn.their_state is h11.SEND_BODY:
            self._is_head_whole = True
            if not was_whole:
                self._allow(REQUEST_TIMEOUT_S)
        elif self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self._let_go()
        elif self._deadline is None:
            self._allow(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit of a closed connection."""
        self._let_go()
        super().connection_lost(exc)

    def _allow(self, duration_s: float) -> None:
        self._let_go()
        self._deadline = self.loop.call_later(duration_s, self.transport.close)

    def _let_go(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
