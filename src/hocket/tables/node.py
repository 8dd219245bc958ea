"""A client that runs: the workers of one process, their cache, and a thread that moves rows.

Workers are threads of this process, each with a clock of its own; they share the cache, and the
node's clock is that of the slowest. The thread sends what is due (a clock's changes at once, or in
the managed mode all the time by priority), takes what arrives, and asks again where a shard was
restarted. A worker waits only in `get`, for rows that staleness does not let it read yet, and in
`clock` while too much is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.base.arrays import LongArray
from hocket.base.errors import RunError, UsageError, unknown_name
from hocket.tables.codec import decode, head_of
from hocket.tables.core.client import (
    MY_CLOCK,
    MY_REFUSED,
    change_rows,
    find_missing,
    read_rows,
)
from hocket.tables.core.message import COUNT, KIND, REFUSED, ROWS, TABLE, Cells
from hocket.tables.core.rule import cell_width
from hocket.tables.link import ShardLink
from hocket.tables.route import Route
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.transports.port import Port

_IDLE_S = 0.005
_PING_S = 0.25
DEFAULT_TIMEOUT_S = 60.0


class Node:
    """The tables as the workers of one process see them; use it in a ``with`` statement."""

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
        self.layout, self.port, self.timeout_s = layout, port, timeout_s
        self.routes = [Route(port, shard) for shard in range(layout.num_shards)]
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
        """How long workers have waited in `get` and `clock`, summed."""
        self.num_refused = 0
        """Changes of rows that shards left out because they were not finite."""
        self._closing = False
        self._trouble: BaseException | None = None
        self._heard_s = [time.monotonic()] * layout.num_shards
        self._pinged_s = 0.0
        self._num_waiting = 0
        self._thread = threading.Thread(target=self._run, name=f"tables {client}", daemon=True)

    def __enter__(self) -> Node:
        self._thread.start()
        try:
            self.wait_for(lambda: all(link.is_connected for link in self._all_links()), "to answer")
        except BaseException:
            self.close()
            raise
        start = max(int(link.state.facts[MY_CLOCK]) for link in self._all_links())
        for worker in self.workers:
            worker.now = start
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
        self.close()

    def close(self) -> None:
        """End the thread; what was not sent is lost, see `flush`."""
        self._closing = True
        self.port.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self.port.close()

    def flush(self) -> None:
        """Send all changes and wait until the shards have them."""
        with self.changed:
            for link in self._all_links():
                link.is_flushing = True
        self.port.wake()
        self.wait_for(lambda: not any(link.has_unapplied for link in self._all_links()), "to apply")

    def _all_links(self) -> Iterator[ShardLink]:
        return (link for links in self.links for link in links)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._turn():
                    self.port.wait(_IDLE_S)
        except BaseException as error:
            # A worker that waits must learn of it; it raises this in its own thread.
            self._trouble = error
        with self.changed:
            self.changed.notify_all()

    def _turn(self) -> bool:
        """Take what has arrived and send what is due; whether anything was."""
        busy = False
        for _ in range(64):
            found = self.port.receive()
            if found is None:
                break
            busy = True
            with self.changed:
                self._take(*found)
                self.changed.notify_all()
        with self.changed:
            for link in self._all_links():
                busy |= link.send_due()
            for shard, route in enumerate(self.routes):
                if route.owes_answer:
                    self.links[0][shard].ping()
            self._ping_if_silent()
        for link in self._all_links():
            link.post()
        return busy

    def _take(self, shard: int, data: bytes) -> None:
        head = head_of(data)
        if not head[TABLE] < len(self.links):
            raise RunError("a message is of no table", where=f"shard {shard}")
        link = self.links[int(head[TABLE])][shard]
        has_rows = head[KIND] == ROWS
        width = cell_width(link.spec.rule, link.spec.width) if has_rows else 0
        message = decode(data, len(link.state.cells), width)
        if has_rows and len(message.cells) != head[COUNT]:
            raise RunError("a message has rows without cells", where=f"shard {shard}")
        self.routes[shard].arrived(message)
        self._heard_s[shard] = time.monotonic()
        self.num_refused = max(self.num_refused, int(head[REFUSED]))
        link.take(message)

    def _ping_if_silent(self) -> None:
        """A shard that was restarted knows nobody: it says so when it is spoken to."""
        now_s = time.monotonic()
        if now_s - self._pinged_s < _PING_S:
            return
        self._pinged_s = now_s
        for link in self._all_links():
            silent = now_s - self._heard_s[link.route.peer] > _PING_S
            if not link.is_connected or (silent and (self._num_waiting or link.has_unapplied)):
                link.ping()

    # ── waiting ─────────────────────────────────────────────────────────────────────────────────

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until something is true; raises `RunError` where a shard stays silent."""
        with self.changed:
            if is_done():
                return
            started_s = time.monotonic()
            self._num_waiting += 1
            try:
                while not is_done():
                    self.changed.wait(0.1)
                    self._check_alive(started_s, what)
            finally:
                self._num_waiting -= 1
                self.blocked_s += time.monotonic() - started_s

    def _check_alive(self, started_s: float, what: str) -> None:
        if self._trouble is not None:
            raise RunError(f"the tables' thread ended: {self._trouble}") from self._trouble
        if self._closing:
            raise RunError("the tables were closed while a worker waited")
        # The longest silent one is named: on a busy machine others may be slow to answer, too.
        shard = min(range(len(self._heard_s)), key=self._heard_s.__getitem__)
        if time.monotonic() - max(self._heard_s[shard], started_s) > self.timeout_s:
            raise RunError(
                f"shard {shard} has said nothing for {self.timeout_s:g} s "
                f"while a worker waited for it {what}",
                hint="is it running and reachable? Started again from its checkpoint it is "
                "found by itself",
                where=f"shard {shard}",
            )


class Worker:
    """One thread's tables: ``worker["name"]`` is a `Table`, `clock` ends its step."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number, self.now = node, number, 0
        self._tables = {
            table.name: Table(self, place) for place, table in enumerate(node.layout.tables)
        }

    def __getitem__(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise unknown_name("table", name, self._tables) from None

    def clock(self) -> int:
        """End a step: the changes of this worker so far count to the step's clock. The new one."""
        node = self.node
        with node.changed:
            self.now += 1
            slowest = min(worker.now for worker in node.workers)
            links = [link for links in node.links for link in links]
            for link in links:
                link.state.facts[MY_CLOCK] = slowest
        node.port.wake()
        node.wait_for(lambda: not any(link.is_behind for link in links), "to apply changes")
        return self.now


class Table:
    """Rows of one table for one worker."""

    def __init__(self, worker: Worker, place: int) -> None:
        self.worker, self.node = worker, worker.node
        self.spec: TableSpec = self.node.layout.tables[place]
        self._links = self.node.links[place]
        self._missing = np.zeros(max(len(link.state.cells) for link in self._links), np.int64)

    def get(self, rows: ArrayLike) -> Cells:
        """Rows as this worker may see them: [rows, width], or one row for a single number."""
        wanted = self._checked(rows)
        out = np.empty((wanted.size, self.spec.width), np.float32)
        need = self.spec.need(self.worker.now)
        for link, places, part in self._split(wanted.ravel()):
            if part is None:
                self._read(link, places, need, out)
            else:
                found = np.empty((len(places), self.spec.width), np.float32)
                self._read(link, places, need, found)
                out[part] = found
        return out.reshape(*wanted.shape, self.spec.width)

    def _read(self, link: ShardLink, rows: LongArray, need: int, out: Cells) -> None:
        def is_there() -> bool:
            missing = self._missing if len(rows) <= len(self._missing) else np.zeros_like(rows)
            num = find_missing(link.state, rows, need, missing)
            if num == 0:
                read_rows(link.state, rows, out)
                return True
            if link.ask(missing, num, need):
                self.node.port.wake()
            return False

        self.node.wait_for(is_there, f"to have table {self.spec.name!r} at clock {need}")

    def inc(self, rows: ArrayLike, change: ArrayLike) -> None:
        """Add to rows (of an adaptive table: take gradients); the same row may come several times.

        A change that is not finite is left out: `refused` counts them.
        """
        places = self._checked(rows).ravel()
        given, width = np.ascontiguousarray(change, np.float32), self.spec.width
        if given.size != len(places) * width:
            raise UsageError(
                f"{len(places)} rows but {given.size / width:g} changes",
                hint=f"give numbers of shape {(len(places), width)}, not {given.shape}",
                where=f"table {self.spec.name!r}",
            )
        changes = given.reshape(-1, width)
        with self.node.changed:
            for link, local, part in self._split(places):
                own = changes if part is None else np.ascontiguousarray(changes[part])
                if self.spec.is_adaptive and (link.state.row_clock[local] < 0).any():
                    raise UsageError(
                        "a gradient of a row that was never read",
                        hint="get the row first: the gradient is revised by what has changed since",
                        where=f"table {self.spec.name!r}",
                    )
                change_rows(link.state, self.worker.now, local, own)

    inc_batch = inc

    @property
    def refused(self) -> int:
        """Changes of this process that were not finite and were left out here or by a shard."""
        own = sum(int(link.state.facts[MY_REFUSED]) for link in self._links)
        return own + self.node.num_refused

    def _checked(self, rows: ArrayLike) -> LongArray:
        found = np.asarray(rows)
        if found.dtype.kind not in "iu" and found.size:
            raise UsageError("rows are whole numbers", where=f"table {self.spec.name!r}")
        if found.size and (found.min() < 0 or found.max() >= self.spec.num_rows):
            bad = found[(found < 0) | (found >= self.spec.num_rows)].ravel()[0]
            raise UsageError(
                f"there is no row {bad}",
                hint=f"rows go from 0 to {self.spec.num_rows - 1}",
                where=f"table {self.spec.name!r}",
            )
        return np.asarray(found, np.int64, order="C")

    def _split(
        self, rows: LongArray
    ) -> Iterator[tuple[ShardLink, LongArray, NDArray[np.bool_] | None]]:
        """The rows of each shard, counted there, and where they stand among all."""
        count = len(self._links)
        if count == 1:
            yield self._links[0], rows, None
            return
        for shard, link in enumerate(self._links):
            part = rows % count == shard
            if part.any():
                yield link, rows[part] // count, part
