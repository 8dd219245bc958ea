"""A running client: the workers of one process, their row cache, and a thread that exchanges rows.

Workers are threads of this process, each with its own clock. They share the cache, and the node's
clock is that of the slowest worker. The node's thread sends changes (at each clock, or continuously
by priority in managed mode), receives rows, and repeats requests after a shard was restarted. A
worker waits only in `get`, for rows that are too stale to read, and in `clock` while too many bytes
are in flight.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from hocket.base.arrays import LongArray
from hocket.base.errors import RunError, UsageError
from hocket.tables.codec import decode, head_of
from hocket.tables.core.client import MY_CLOCK
from hocket.tables.core.message import (
    COUNT,
    KIND,
    NEED,
    REFUSED,
    REPLACED,
    ROWS,
    SENDER,
    STRANGER,
    TABLE,
)
from hocket.tables.core.rule import cell_width
from hocket.tables.link import ShardLink
from hocket.tables.route import Route
from hocket.tables.spec import Layout
from hocket.tables.transports.port import Port
from hocket.tables.worker import Worker

_PING_S = 0.25
_ALIVE_S = 1.0
"""Seconds between pings of a client that has nothing to send."""
DEFAULT_TIMEOUT_S = 60.0


class Node:
    """The tables as used by the workers of one process; use it in a ``with`` statement."""

    def __init__(
        self,
        layout: Layout,
        client: int,
        port: Port,
        *,
        num_workers: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        seed: int = 0,
    ) -> None:
        if not 0 <= client < layout.num_clients or num_workers < 1 or not timeout_s > 0:
            raise UsageError(
                f"client {client} with {num_workers} workers and {timeout_s!r} s of patience",
                hint=f"clients are 0 to {layout.num_clients - 1}, with a worker and a time above 0",
            )
        self.layout, self.client, self.port, self.timeout_s = layout, client, port, timeout_s
        self.routes = [
            Route(port, shard, layout.digest(shard)) for shard in range(layout.num_shards)
        ]
        self.links = [
            [
                ShardLink(table, number, client, layout.rows_of(table, shard), route, seed)
                for shard, route in enumerate(self.routes)
            ]
            for number, table in enumerate(layout.tables)
        ]
        self.workers = [Worker(self, number) for number in range(num_workers)]
        self.changed = threading.Condition()
        self.blocked_s = 0.0
        """Seconds that workers have waited in `get` and `clock`, summed over workers."""
        self.num_refused = 0
        """Number of row changes that shards refused because they were not finite."""
        self._closing = False
        self._trouble: BaseException | None = None
        self._heard_s = [time.monotonic()] * layout.num_shards
        self._pinged_s = 0.0
        self._num_waiting = self._num_keeping = 0
        self._thread = threading.Thread(target=self._run, name=f"tables {client}", daemon=True)

    def __enter__(self) -> Node:
        self._thread.start()
        try:
            self.wait_for(lambda: all(link.is_connected for link in self._all_links()), "to answer")
        except BaseException:
            self.close()
            raise
        # A restarted client continues at the clock that its earlier process reached.
        start = max(int(link.state.facts[MY_CLOCK]) for link in self._all_links())
        for worker in self.workers:
            worker.ticks = start
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """End the thread; unsent changes are lost, see `flush`."""
        self._closing = True
        self.port.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self.port.close()

    def flush(self) -> None:
        """Send all changes and wait until the shards have them, also in their checkpoints."""
        if self.layout.ticks_per_clock == 2:
            self.wait_for(lambda: all(worker.leaving is None for worker in self.workers),
                          "to end the last step", limit_s=self.timeout_s)  # fmt: skip
        with self.changed:
            for worker in self.workers:
                for table, rows, changes in worker.held:  # of a step that nobody has ended
                    table.change(rows, changes)
                worker.held.clear()
            for link in self._all_links():
                link.is_flushing = True
        self.port.wake()
        self.wait_for(lambda: not any(link.has_unapplied for link in self._all_links()), "to apply")
        sent = [(link, link.last_sent) for link in self._all_links()]
        with self.changed:
            self._num_keeping, self._pinged_s = self._num_keeping + 1, 0.0
        self.port.wake()
        try:
            self.wait_for(lambda: all(link.is_kept(version) for link, version in sent),
                          "to write a checkpoint", limit_s=self.timeout_s)  # fmt: skip
        finally:
            with self.changed:
                self._num_keeping -= 1

    def advance(self) -> None:
        """Set the node's clock to that of the slowest worker; the caller holds the lock."""
        slowest = min(worker.ticks for worker in self.workers)
        for link in self._all_links():
            link.state.facts[MY_CLOCK] = slowest

    def _release(self) -> None:
        """Apply the held changes of a step that all workers have ended."""
        waiting = [worker for worker in self.workers if worker.leaving is not None]
        if not waiting:
            return
        # A step has ended when every shard has received the clocks of all clients.
        reached = min(int(link.shard_clock) for link in self._all_links())
        for worker in waiting:
            if reached >= worker.ticks:
                worker.release()
                self.changed.notify_all()
        self.advance()

    def _all_links(self) -> Iterator[ShardLink]:
        return (link for links in self.links for link in links)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._turn():
                    self.port.wait(self.layout.idle_s)
        except BaseException as error:
            # Waiting workers are woken and raise this error in their own threads.
            self._trouble = error
        with self.changed:
            self.changed.notify_all()

    def _turn(self) -> bool:
        """Process arrived messages and send due ones; True if there were any."""
        busy = False
        # Bounded, so that sending is not delayed while messages keep arriving.
        for _ in range(64):
            found = self.port.receive()
            if found is None:
                break
            busy = True
            with self.changed:
                self._take(*found)
                self.changed.notify_all()
        with self.changed:
            self._release()
            is_waiting = self._num_waiting >= len(self.workers)
            for link in self._all_links():
                busy |= link.send_due(is_waiting=is_waiting)
            for shard, route in enumerate(self.routes):
                if route.must_ack(is_waiting=is_waiting):
                    self.links[0][shard].ping()
            self._ping_if_silent()
        for link in self._all_links():
            link.post()
        return busy

    def _take(self, shard: int, data: bytes) -> None:
        head = head_of(data)
        if head[KIND] == STRANGER:
            self._refused(shard, head)
            return
        if not head[TABLE] < len(self.links):
            raise RunError("a message is of no table", where=f"shard {shard}")
        link = self.links[int(head[TABLE])][shard]
        has_rows = head[KIND] == ROWS
        width = cell_width(link.spec.rule, link.spec.width) if has_rows else 0
        message = decode(data, len(link.state.cells), width)
        if has_rows and len(message.cells) != head[COUNT]:
            raise RunError("a message has rows without cells", where=f"shard {shard}")
        if not self.routes[shard].arrived(message, len(data)):
            for links in self.links:
                links[shard].has_lost(message)
        self._heard_s[shard] = time.monotonic()
        self.num_refused = max(self.num_refused, int(head[REFUSED]))
        link.take(message)

    def _refused(self, shard: int, head: LongArray) -> None:
        if head[SENDER] != self.port.process:
            return  # of a process that had this number before
        if head[NEED] == REPLACED:
            raise RunError(
                f"another process has taken the place of client {self.client}",
                hint="give every process a number of its own",
                where=f"shard {shard}",
            )
        raise RunError(
            f"the server at this address is not shard {shard} of these tables",
            hint="give shards and clients the same file, and the addresses in the order of shards",
            where=f"shard {shard}",
        )

    def _ping_if_silent(self) -> None:
        """Ping silent shards: a restarted one has forgotten this client and answers with RESTORED.

        A client that only computes also pings, while the thread of its slowest worker is alive.
        """
        now_s = time.monotonic()
        # The loop turns far more often than silence must be detected.
        if now_s - self._pinged_s < _PING_S:
            return
        self._pinged_s = now_s
        for link in self._all_links():
            silent = now_s - self._heard_s[link.route.peer] > _PING_S
            if self._num_keeping and not link.is_kept(link.last_sent):
                link.keep()
            elif not link.is_connected or (silent and (self._num_waiting or link.has_unapplied)):
                link.ping()
        if not self._ended_workers():
            for shard, route in enumerate(self.routes):
                if now_s - route.sent_s > _ALIVE_S:
                    self.links[0][shard].ping()

    def _ended_workers(self) -> list[Worker]:
        """Workers with the lowest clock whose thread has ended, so it cannot advance."""
        now = min(worker.ticks for worker in self.workers)
        return [
            worker for worker in self.workers
            if worker.ticks == now and worker.thread is not None and not worker.thread.is_alive()
        ]  # fmt: skip

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    def wait_for(
        self,
        is_done: Callable[[], bool],
        what: str,
        *,
        need: tuple[ShardLink, int] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Wait until ``is_done`` is true; raises `RunError` if that cannot happen.

        That is the case if a shard stays silent, if a client that has died holds back the clock in
        ``need``, or after ``limit_s``.
        """
        with self.changed:
            self.check_running()
            if is_done():
                return
            started_s = time.monotonic()
            self._num_waiting += 1
            self.port.wake()  # changes that were held for more to come can go
            try:
                while not is_done():
                    self.changed.wait(0.1)
                    self.check_running()
                    self._check_shards(started_s, what, limit_s)
                    if need is not None and time.monotonic() - started_s > self.timeout_s:
                        self._check_clients(*need)
            finally:
                self._num_waiting -= 1
                self.blocked_s += time.monotonic() - started_s

    def check_running(self) -> None:
        """Raise the error that ended the node's thread."""
        trouble = self._trouble
        if isinstance(trouble, RunError):
            raise RunError(trouble.message, hint=trouble.hint, where=trouble.where) from trouble
        if trouble is not None:
            raise RunError(f"the tables' thread ended: {trouble}") from trouble
        if self._closing:
            raise RunError("the tables were closed", hint="use them inside of the `with` statement")

    def _check_shards(self, started_s: float, what: str, limit_s: float) -> None:
        # The shard that is silent for longest is named; on a busy machine others may be slow too.
        shard = min(range(len(self._heard_s)), key=self._heard_s.__getitem__)
        now_s = time.monotonic()
        if now_s - max(self._heard_s[shard], started_s) > self.timeout_s:
            raise self._silence(shard, what)
        if now_s - started_s > limit_s:
            raise RunError(
                f"waited {limit_s:g} s for the shards {what}", hint="read the logs of the shards"
            )

    def check_heard(self) -> None:
        """Raise an error if a shard does not answer, for workers that never wait for one."""
        for shard, heard_s in enumerate(self._heard_s):
            # Shards are pinged all the time while every worker has a live thread, so silence means
            # failure.
            if self._pinged_s - heard_s > self.timeout_s and not self._ended_workers():
                raise self._silence(shard, "to apply changes")

    def _silence(self, shard: int, what: str) -> RunError:
        return RunError(
            f"shard {shard} has sent nothing for {self.timeout_s:g} s "
            f"while a worker waited for it {what}",
            hint="check that it runs and is reachable; after a restart from its checkpoint "
            "clients reconnect by themselves",
            where=f"shard {shard}",
        )

    def _check_clients(self, link: ShardLink, need: int) -> None:
        """Raise an error that names the dead client which holds back an awaited clock."""
        if link.shard_clock >= need:
            return
        ticks = self.layout.ticks_per_clock
        if link.slowest == self.client and (ended := self._ended_workers()):
            raise RunError(
                f"the thread of worker {ended[0].number} has ended at clock {ended[0].now} "
                f"and another waits for its clock {need // ticks}"
            )
        if link.slowest != self.client and link.slowest_silent_s > self.timeout_s:
            raise RunError(
                f"client {link.slowest} has sent nothing for {link.slowest_silent_s:.0f} s, is "
                f"at clock {link.shard_clock // ticks}, and a worker waits for its clock "
                f"{need // ticks}",
                hint="check that it runs; restarted under its number it continues at its clock; "
                f"the layout names {self.layout.num_clients} clients",
                where=f"shard {link.route.peer}",
            )
