"""Server-sent events: what happens in the fleet, as it happens.

A reader is a cursor into the stored events, not a queue: one that reads slowly costs nothing and
holds up nobody, and one that comes back with ``Last-Event-ID`` goes on where it was. One thread
waits for the daemon however many read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hocket.service.daemon.daemon import Daemon
from hocket.service.records import EventRecord
from hocket.service.rest.bodies import event_body
from hocket.service.rest.problems import RefusedError

HEARTBEAT_S = 15.0
SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long is gone."""
MAX_STREAMS = 64
_PAGE = 200
_LOOK_S = 0.5


class Bell:
    """Wakes all streams when something happened, and ends them when the service does."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._rung = asyncio.Event()
        self._num_streams = 0
        self.is_closed = False

    async def watch(self) -> None:
        """Ring whenever there are new events, until closed."""
        last = await run_in_threadpool(self._daemon.last_event)
        while not self.is_closed:
            newest = await asyncio.to_thread(self._daemon.wait_for_events, last, _LOOK_S)
            if newest > last:
                last = newest
                self._ring()
        self._ring()

    def close(self) -> None:
        """Let streams end; may be called from a signal handler."""
        self.is_closed = True

    async def wait(self, rung: asyncio.Event, timeout_s: float) -> bool:
        """Whether the bell that was taken earlier rang in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await rung.wait()
        except TimeoutError:
            return False
        return True

    @property
    def next_ring(self) -> asyncio.Event:
        """Set when the bell rings next: take it before looking, and no event is missed."""
        return self._rung

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the streams; raises `RefusedError` where all are taken."""
        if self._num_streams >= MAX_STREAMS:
            raise RefusedError(503, f"{MAX_STREAMS} streams are open already")
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _ring(self) -> None:
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()


class TimedStream(StreamingResponse):
    """A stream that ends when its reader is gone or has stopped reading; one that may last takes a
    place among those of ``bell``."""

    def __init__(
        self,
        content: AsyncIterator[bytes],
        media_type: str,
        *,
        bell: Bell | None = None,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(content, status_code, headers, media_type)
        self._place = nullcontext() if bell is None else bell.place()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._place:
            try:
                await super().__call__(scope, receive, send_in_time)
            except (TimeoutError, ClientDisconnect):
                return


async def events_from(daemon: Daemon, bell: Bell, after: int | None) -> AsyncIterator[bytes]:
    """Events after a sequence number (from now on where None), in the form of the stream."""
    yield b"retry: 1000\n\n"
    if after is None:
        after = await run_in_threadpool(daemon.last_event)
    while not bell.is_closed:
        rung = bell.next_ring
        events = await run_in_threadpool(daemon.events, after, _PAGE)
        if events:
            after = events[-1].sequence
            yield b"".join(map(encoded, events))
        elif not await bell.wait(rung, HEARTBEAT_S):
            yield b": nothing new\n\n"


def encoded(event: EventRecord) -> bytes:
    """One event; its data is one line of JSON in ASCII, so no text in it can end it early."""
    data = json.dumps(event_body(event).model_dump())
    kind = "".join(char for char in event.kind if char.isalnum() or char == "-")
    return f"id: {event.sequence}\nevent: {kind}\ndata: {data}\n\n".encode()
