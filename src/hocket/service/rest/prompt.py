"""Connections that must come to the point: the head of a request has a time limit.

The server itself limits the size of a head, idle connections after an answer, and the number of
connections, but lets one that never finishes its first request stay for ever.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0


class PromptProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn with that limit."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection came: its first request must come soon."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Part of a request came; only one whose head is whole may take its time."""
        super().data_received(data)
        has_part_of_head = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if not has_part_of_head:
            self._let_go()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._let_go()
        super().connection_lost(exc)

    def _let_go(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
