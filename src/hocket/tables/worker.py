"""Tables for one worker thread, which reads rows, changes them and ends its steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hocket.base.arrays import BoolArray, LongArray
from hocket.base.errors import UsageError, unknown_name
from hocket.tables.core.client import (
    MY_REFUSED,
    change_rows,
    find_missing,
    read_rows,
)
from hocket.tables.core.message import Cells
from hocket.tables.link import ShardLink
from hocket.tables.spec import TableSpec

if TYPE_CHECKING:
    from hocket.tables.node import Node


class Worker:
    """The tables of one thread: ``worker["name"]`` is a `Table`, `clock` ends a step."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number
        self.ticks = 0
        """Protocol clocks; see `Layout.ticks_per_clock`."""
        self.held: list[tuple[Table, LongArray, Cells]] = []
        """Changes of bulk-synchronous tables in the current step."""
        self.leaving: list[tuple[Table, LongArray, Cells]] | None = None
        """Changes of the previous step, held until all workers have ended it."""
        self.thread: threading.Thread | None = None
        """Thread that used this worker last."""
        self._tables = {
            table.name: Table(self, place) for place, table in enumerate(node.layout.tables)
        }

    def __getitem__(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise unknown_name("table", name, self._tables) from None

    @property
    def now(self) -> int:
        """Number of ended steps; a restarted client continues from its last number."""
        return self.ticks // self.node.layout.ticks_per_clock + (self.leaving is not None)

    def clock(self) -> int:
        """End a step and return the new clock; the changes so far belong to the ended step."""
        node, self.thread = self.node, threading.current_thread()
        is_synchronous = node.layout.ticks_per_clock == 2
        if is_synchronous:
            # Only one step's changes can be held back at a time.
            node.wait_for(lambda: self.leaving is None, "to end the step before")
        with node.changed:
            node.check_running()
            node.check_heard()
            if is_synchronous and self.held:
                self.leaving, self.held = self.held, []
                # A client that was restarted after it had ended this step must not end it twice.
                self.ticks += 1 - self.ticks % 2
            else:  # nothing to hold back
                self.ticks += node.layout.ticks_per_clock - self.ticks % 2 * is_synchronous
            node.advance()
            links = [link for links in node.links for link in links]
        node.port.wake()
        node.wait_for(lambda: not any(link.is_behind for link in links), "to apply changes")
        return self.now

    def release(self) -> None:
        """Apply the changes of a step that all workers have ended; the caller holds the node's
        lock.
        """
        for table, rows, changes in self.leaving or ():
            table.change(rows, changes)
        if self.leaving is not None:
            self.leaving = None
            self.ticks += 1


class Table:
    """Access of one worker to the rows of one table."""

    def __init__(self, worker: Worker, place: int) -> None:
        self.worker, self.node = worker, worker.node
        self.spec: TableSpec = self.node.layout.tables[place]
        self._links = self.node.links[place]
        self._missing = np.zeros(max(len(link.state.cells) for link in self._links), np.int64)

    def get(self, rows: ArrayLike) -> Cells:
        """Rows visible to this worker, as [rows, width]; one row for a single number."""
        self.worker.thread = threading.current_thread()
        # Compiled code reads without bounds checks, so rows are checked here.
        wanted = self._checked(rows)
        out = np.empty((wanted.size, self.spec.width), np.float32)
        # Staleness is in the worker's clocks, shards count protocol clocks.
        need = self.spec.need(self.worker.now) * self.node.layout.ticks_per_clock
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

        what = f"to have table {self.spec.name!r} at clock {need}"
        self.node.wait_for(is_there, what, need=(link, need))

    def inc(self, rows: ArrayLike, change: ArrayLike) -> None:
        """Add changes (gradients for an adaptive table) to rows; a row may occur several times.

        A change that is not finite is refused and counted in `refused`.
        """
        self.worker.thread = threading.current_thread()
        places = self._checked(rows).ravel()
        changes = self._changes(change, len(places))
        with self.node.changed:
            self.node.check_running()
            for link, local, _ in self._split(places):
                if self.spec.is_adaptive and (link.state.row_clock[local] < 0).any():
                    raise UsageError(
                        "a gradient of a row that was never read",
                        hint="get the row first: the gradient is revised by what has changed since",
                        where=f"table {self.spec.name!r}",
                    )
            if self.spec.is_synchronous:
                self.worker.held.append((self, places.copy(), changes.copy()))
            else:
                self.change(places, changes)

    def change(self, places: LongArray, changes: Cells) -> None:
        """Apply checked changes at the worker's clock; the node's lock is held."""
        for link, local, part in self._split(places):
            # Kernels are compiled for contiguous arrays only.
            own = changes if part is None else np.ascontiguousarray(changes[part])
            change_rows(link.state, self.worker.ticks, local, own)

    def _changes(self, change: ArrayLike, num_rows: int) -> Cells:
        """Changes as [rows, width]; raises `UsageError` if their shape or type does not fit."""
        width, where = self.spec.width, f"table {self.spec.name!r}"
        try:
            found = np.asarray(change)
        except ValueError:
            raise UsageError("rows of different lengths", where=where) from None
        if found.dtype.kind not in "fiub" and found.size:
            raise UsageError(f"changes are numbers, not {found.dtype}", where=where)
        is_line = found.ndim < 2 or width == 1
        if found.size != num_rows * width or not (is_line or found.shape[-1] == width):
            raise UsageError(
                f"{num_rows} rows but {found.size / width:g} changes",
                hint=f"give numbers of shape {(num_rows, width)}, not {found.shape}",
                where=where,
            )
        with np.errstate(over="ignore"):  # what 32 bits cannot hold is refused with what is inf
            return np.ascontiguousarray(found, np.float32).reshape(-1, width)

    @property
    def refused(self) -> int:
        """Number of changes of this process that were not finite and were refused, here or by a
        shard.
        """
        own = sum(int(link.state.facts[MY_REFUSED]) for link in self._links)
        return own + self.node.num_refused

    def _checked(self, rows: ArrayLike) -> LongArray:
        try:
            found = np.asarray(rows)
        except ValueError:
            found = np.asarray("")  # of several lengths
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

    def _split(self, rows: LongArray) -> Iterator[tuple[ShardLink, LongArray, BoolArray | None]]:
        """Yield for each shard: its link, the row numbers there, and a mask of their positions in
        ``rows``.
        """
        count = len(self._links)
        if count == 1:
            yield self._links[0], rows, None
            return
        for shard, link in enumerate(self._links):
            part = rows % count == shard
            if part.any():
                yield link, rows[part] // count, part
