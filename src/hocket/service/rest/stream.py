"""Server-sent events of the fleet.

A reader is a cursor into the stored events, not a queue: a slow reader costs nothing and delays
nobody, and one that reconnects with ``Last-Event-ID`` continues there. One thread waits for the
daemon, however many read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hocket.service.daemon.daemon import Daemon
from hocket.service.records import EventRecord
from hocket.service.rest.bodies import EventBody
from hocket.service.rest.problems import RefusedError

# Interval of comments that keep an idle connection open.
HEARTBEAT_S = 15.0
SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long is disconnected."""
MAX_STREAMS = 64
# Events that are read from the store at once.
_PAGE = 200
# Interval at which the wait for the daemon is interrupted to see whether the service closes.
_LOOK_S = 0.5


class EventNotifier:
    """Wakes all streams at new events, and ends them with the service."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._changed = asyncio.Event()
        self._num_streams = 0
        self.is_closed = False

    async def watch(self) -> None:
        """Wake streams whenever there are new events, until this or the daemon is closed."""
        last = self._daemon.last_event()
        while not (self.is_closed or self._daemon.is_closing):
            newest = await asyncio.to_thread(self._daemon.wait_for_events, last, _LOOK_S)
            if newest > last:
                last = newest
                self._ring()
        self.close()
        self._ring()

    async def events_after(self, last: int) -> tuple[int, bytes]:
        """Number of the last of some events after ``last``, and their bytes; empty if there are
        none."""
        events = await run_in_threadpool(self._daemon.store.events, last, _PAGE)
        if not events:
            return last, b""
        num_gone = events[0].sequence - last - 1
        gone = f"event: dropped\ndata: {num_gone}\n\n".encode() if num_gone else b""
        return events[-1].sequence, gone + b"".join(map(encoded, events))

    def close(self) -> None:
        """Let streams end; may be called from a signal handler."""
        self.is_closed = True

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next event; take it before reading events, so that none is missed."""
        return self._changed

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a stream; raises `RefusedError` if there are too many."""
        if self._num_streams >= MAX_STREAMS:
            raise RefusedError(503, f"{MAX_STREAMS} streams are open already")
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _ring(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class TimedStream(StreamingResponse):
    """A stream that ends when its reader is gone or has stopped reading; with ``event_notifier`` it
    counts as one of the open streams."""

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        media_type: str,
        *,
        event_notifier: EventNotifier | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._content = content
        self._place = nullcontext() if event_notifier is None else event_notifier.place()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and close it at its end."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._place:
            try:
                await super().__call__(scope, receive, send_in_time)
            except (TimeoutError, ClientDisconnect):
                return
            finally:
                # Otherwise the generator would be closed at some later time, perhaps after the
                # event loop.
                await self._content.aclose()


async def events_from(
    daemon: Daemon, event_notifier: EventNotifier, after: int | None
) -> AsyncGenerator[bytes, None]:
    """Events after a sequence number (from now on where None), in the form of the stream."""
    yield b"retry: 1000\n\n"
    if after is None or after > daemon.last_event():
        # A number behind the last event is from an earlier fleet on the same address.
        after = daemon.last_event()
    while not event_notifier.is_closed:
        changed = event_notifier.next_change
        after, events = await event_notifier.events_after(after)
        if events:
            yield events
            continue
        try:
            await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield b": nothing new\n\n"


def encoded(event: EventRecord) -> bytes:
    """One event; its data is one line of JSON, in which line breaks are escaped."""
    data = EventBody.model_validate(event).model_dump_json()
    kind = "".join(char for char in event.kind if char.isalnum() or char == "-")
    return f"id: {event.sequence}\nevent: {kind}\ndata: {data}\n\n".encode()
