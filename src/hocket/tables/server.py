"""A running shard: it receives messages, sends rows and writes checkpoints.

A client with another layout or for another shard is refused and changes nothing. So is a client
whose number another process has taken. A checkpoint that cannot be written is logged and retried;
until it is written, clients keep the changes that it lacks.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, RunError, UsageError
from hocket.base.locks import try_lock
from hocket.base.npz import read_npz
from hocket.base.units import format_bytes
from hocket.hardware.detect import available_bytes
from hocket.tables.codec import decode, encode, head_of
from hocket.tables.core.message import (
    ASK,
    CLAIM,
    CLIENT,
    HEAD,
    KEEP,
    KIND,
    NEED,
    OTHER_TABLES,
    PING,
    REPLACED,
    RESTORED,
    SENDER,
    SILENT_MS,
    SLOWEST,
    STRANGER,
    TABLE,
    TABLES,
    UPDATES,
    Message,
    plain,
)
from hocket.tables.core.rule import cell_width, change_width
from hocket.tables.core.shard import (
    NOW,
    NUM_REFUSED,
    ShardState,
    new_shard,
    shard_head,
    shard_restore,
    shard_send,
    shard_take,
)
from hocket.tables.priority import next_rows, ready_rows
from hocket.tables.route import LinkUse, Route
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.transports.port import Port

# A checkpoint is one .npz file of arrays and a JSON text, which is replaced as a whole and read
# without executing code. It contains the rows, the last change of each client in them, and the
# clocks of the clients. Clients resend everything later.

FORMAT = "hocket.table-shard/1"
_ARRAYS = ("cells", "hidden", "applied", "clocks")


class CheckpointFile:
    """The checkpoint file of a running shard; a second shard that opens it is refused.

    The lock is a separate file, which the kernel unlocks when the process ends.
    """

    def __init__(self, path: Path, layout: Layout, shard: int) -> None:
        self.path, self._facts = path, _facts(layout, shard)
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._lock = self._locked()

    def _locked(self) -> BinaryIO:
        while True:
            try:
                lock = open(self._lock_path, "ab")  # noqa: SIM115
            except OSError as error:
                raise UsageError(
                    f"no checkpoint can be written here: {error.strerror}",
                    hint="name a file in an existing folder that you may write to",
                    where=str(self.path),
                ) from None
            # Two shards that write one file would overwrite each other's changes.
            if not try_lock(lock.fileno()):
                lock.close()
                raise UsageError(
                    "another shard that runs writes its checkpoint here",
                    hint="end it, or name another file",
                    where=str(self.path),
                )
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._lock_path)):
                    return lock
            lock.close()  # who held it has removed it in this moment

    def close(self) -> None:
        """Release the lock, so that another shard may use the file."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
            self._lock.close()

    def write(self, states: Sequence[ShardState]) -> None:
        """Replace the file's contents; raises `UsageError` if that is impossible."""
        # As bytes in the same file, so that facts and arrays are replaced together.
        text = json.dumps(self._facts).encode()
        arrays: dict[str, Any] = {"facts": np.frombuffer(text, np.uint8)}
        for number, state in enumerate(states):
            for name in _ARRAYS:
                arrays[f"{name}_{number}"] = getattr(state, name)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(self.path, buffer.getvalue())

    def read(self, states: Sequence[ShardState]) -> None:
        """Load the checkpoint, if there is one, into the shard's states.

        Raises `InputFileError` if it belongs to other tables.
        """
        if not self.path.exists():
            return
        what, hint = (
            "is no checkpoint of a shard",
            "give one that a shard has written, or a new name",
        )
        found = read_npz(self.path, what=what, hint=hint)
        try:
            facts = json.loads(found["facts"].tobytes())
        except (KeyError, ValueError) as error:
            raise InputFileError(what, hint=hint, where=str(self.path)) from error
        expected = self._facts
        if facts != expected:
            keys = set(facts) | set(expected) if isinstance(facts, dict) else {"format"}
            differ = ", ".join(key for key in sorted(keys) if not isinstance(facts, dict)
                               or facts.get(key) != expected.get(key))  # fmt: skip
            raise InputFileError(
                f"is a checkpoint of another shard or other tables (differs in {differ})",
                hint="name another file, or start with the tables that wrote this one",
                where=str(self.path),
            )
        for number, state in enumerate(states):
            for name in _ARRAYS:
                target, source = getattr(state, name), found.get(f"{name}_{number}")
                if source is None or source.shape != target.shape or source.dtype != target.dtype:
                    where = str(self.path)
                    raise InputFileError(f"has no fitting {name!r} of table {number}", where=where)
                target[...] = source


def _facts(layout: Layout, shard: int) -> dict[str, Any]:
    tables = [
        [table.name, table.num_rows, table.width, table.is_adaptive] for table in layout.tables
    ]
    return {
        "format": FORMAT, "shard": shard, "shards": layout.num_shards,
        "clients": layout.num_clients, "tables": tables,
    }  # fmt: skip


_MAX_ROWS = 32_768
"""Maximum number of rows in one message."""
_MAX_LOG_BYTES = 256 * 2**20
"""Bytes of changes since the last checkpoint, held by clients, that trigger a new checkpoint."""
_AGAIN_S = 5.0
"""Seconds until a checkpoint that could not be written is retried."""
_log = logging.getLogger("hocket.tables")


class ShardServer:
    """One shard of all tables of a layout."""

    def __init__(
        self,
        layout: Layout,
        shard: int,
        port: Port,
        *,
        checkpoint: Path | None = None,
        checkpoint_s: float = 30.0,
        seed: int = 0,
    ) -> None:
        _check_memory(layout, shard)
        self.layout, self.shard, self.port = layout, shard, port
        self.checkpoint_s = checkpoint_s
        epoch, self._digest = secrets.randbits(62) + 1, layout.digest(shard)
        self.states = [self._new(table, epoch) for table in layout.tables]
        self.routes = [Route(port, client, self._digest) for client in range(layout.num_clients)]
        pairs = len(layout.tables), layout.num_clients
        self._claimed = np.full(pairs, -1, np.int64)
        """[table, client] last clock claimed to a client."""
        self._needed = np.zeros(pairs, np.int64)
        """[table, client] latest clock for which a worker has waited."""
        self._urgent_bytes = np.zeros(pairs, np.int64)
        """[table, client] bytes sent on the route up to the last row for which a clock waited."""
        self._use = [LinkUse() for _ in layout.tables]
        self.num_refused_messages = 0
        self._random = np.random.default_rng((seed, shard))
        now_s = time.monotonic()
        self._heard_s = [now_s] * layout.num_clients
        self._replaced: list[set[int]] = [set() for _ in self.routes]
        """Former processes of each client, whose number another process has taken."""
        self._saved_s = self._tried_s = now_s
        self._log_bytes = 0
        self._is_save_wanted = False
        self._file = None if checkpoint is None else CheckpointFile(checkpoint, layout, shard)
        if self._file is not None:
            try:
                self._file.read(self.states)
                # Written at the start, so that an unwritable place is an error at once and not
                # after hours of service.
                self._file.write(self.states)
            except BaseException:
                self._file.close()
                raise
        for state in self.states:
            shard_restore(state, epoch)

    def _new(self, table: TableSpec, epoch: int) -> ShardState:
        return new_shard(
            self.layout.num_clients, self.layout.rows_of(table, self.shard), table.width,
            rule=table.rule, pushes=table.pushes, rate=table.rate, curvature=table.curvature,
            epoch=epoch,
        )  # fmt: skip

    # ── one turn ────────────────────────────────────────────────────────────────────────────────

    def run(self, stop: threading.Event) -> None:
        """Serve until stopped."""
        while not stop.is_set():
            self.turn(self.layout.idle_s)

    def turn(self, timeout_s: float) -> None:
        """Process arrived messages and send ready rows; wait if there were none."""
        before = [int(state.facts[NOW]) for state in self.states]
        asked: list[tuple[int, int, LongArray]] = []
        num = 0
        # Bounded, so that rows are sent while messages keep arriving.
        while num < 256 and (found := self.port.receive()) is not None:
            num += 1
            try:
                self._take(*found, asked)
            except RunError:
                self.num_refused_messages += 1
        self._make_durable()
        for table, client, rows in asked:
            self._send(table, client, rows)
        for table, state in enumerate(self.states):
            has_advanced = state.facts[NOW] != before[table]
            spec = self.layout.tables[table]
            # A managed table also sends between clocks; an asynchronous table has no clocks.
            if has_advanced or spec.mode == "managed" or (num and spec.is_asynchronous):
                self._push(table)
            if has_advanced:
                for route in self.routes:
                    route.needs_ack = True
        for client, route in enumerate(self.routes):
            if route.needs_ack:
                self._tell(0, client, PING)
        if not num:
            self.port.wait(timeout_s)

    def _take(self, client: int, data: bytes, asked: list[tuple[int, int, LongArray]]) -> None:
        head = head_of(data)
        if not self._serves(client, head):
            return
        table = int(head[TABLE])
        if table >= len(self.states):
            raise RunError("a message is of no table")
        spec, state = self.layout.tables[table], self.states[table]
        has_changes = head[KIND] == UPDATES
        width = change_width(spec.rule, spec.width) if has_changes else 0
        message = decode(data, len(state.cells), width)
        if head[CLIENT] != client or head[NEED] < 0:
            raise RunError("a message is not from whom it says")
        if has_changes and len(message.cells) != len(message.rows):
            raise RunError("a message has rows without cells")
        self.routes[client].arrived(message, len(data))
        self._heard_s[client] = time.monotonic()
        if not shard_take(state, message):
            self._tell(table, client, RESTORED)
        elif head[KIND] == ASK and spec.mode != "managed" and head[NEED] <= state.facts[NOW]:
            asked.append((table, client, message.rows))
        elif head[KIND] in (PING, KEEP):
            self._needed[table, client] = max(self._needed[table, client], head[NEED])
            self.routes[client].needs_ack = True
        self._is_save_wanted |= bool(head[KIND] == KEEP)
        self._log_bytes += len(data) * has_changes

    def _serves(self, client: int, head: LongArray) -> bool:
        """True if the sender of a message is a client of this shard; others are refused."""
        if head[TABLES] != self._digest:
            self._refuse(client, head, OTHER_TABLES)
            return False
        if not 0 <= client < len(self.routes):
            raise RunError("a message is from nobody")
        sender = int(head[SENDER])
        if sender in self._replaced[client]:
            # Changes of a former process would be counted under the numbers of the process that
            # replaced it.
            self._refuse(client, head, REPLACED)
            return False
        if sender != self.routes[client].process:
            self._replaced[client].add(self.routes[client].process)
            self.routes[client].process = sender
        return True

    def _refuse(self, client: int, head: LongArray, reason: int) -> None:
        answer = plain(STRANGER, client)
        answer.head[NEED], answer.head[SENDER] = reason, head[SENDER]
        self.port.send(client, encode(answer, is_counted=False), int(head[SENDER]))
        self.num_refused_messages += 1

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def _push(self, table: int) -> None:
        spec, state = self.layout.tables[table], self.states[table]
        if spec.mode == "managed":
            self._push_managed(table)
            return
        for client, route in enumerate(self.routes):
            if not (spec.is_asynchronous and route.is_clogged):
                rows = ready_rows(state, client, at_once=spec.is_asynchronous)
                self._send(table, client, rows)

    def _push_managed(self, table: int) -> None:
        """Send rows that clocks wait for; when all clients have theirs, send other changed rows.

        Clients may share the shard's link, so rows sent early to one would delay due rows of
        another.
        """
        spec, state = self.layout.tables[table], self.states[table]
        is_busy = False
        for client, route in enumerate(self.routes):
            # Rows at a client's claim serve it for `staleness` clocks, so newer rows can wait that
            # long.
            need = max(self._needed[table, client], spec.need(int(state.clocks[client]) + 1))
            is_due = self._claimed[table, client] < need
            is_busy |= self._send_next(table, client, is_due=is_due)
            is_busy |= self._urgent_bytes[table, client] > route.budget.returned_bytes
        if self._use[table].has_spare_time(int(state.facts[NOW]), is_busy=is_busy):
            for client in range(len(self.routes)):
                self._send_next(table, client, is_idle=True)

    def _send_next(
        self, table: int, client: int, *, is_due: bool = False, is_idle: bool = False
    ) -> bool:
        """Send rows by priority while the route allows; True if it does not."""
        spec, state, route = self.layout.tables[table], self.states[table], self.routes[client]
        limit_bytes = route.budget.chunk_bytes if is_idle else route.budget.window_bytes
        # Small messages, because a row that becomes urgent waits for the message in front of it.
        limit = max(1, limit_bytes // (4 * state.cells.shape[1] + 4))
        while True:
            rows = next_rows(state, client, limit, spec.order, self._random,
                             is_due=is_due, is_idle=is_idle)  # fmt: skip
            if not len(rows):
                return False
            if not route.allows(self._use[table]) or (is_idle and self._is_full(route)):
                return True
            self._send(table, client, rows)
            if not is_idle:
                self._urgent_bytes[table, client] = route.budget.sent_bytes

    def _is_full(self, route: Route) -> bool:
        """True if all routes together have more than one full message in flight."""
        in_flight = sum(each.budget.in_flight_bytes for each in self.routes)
        return in_flight > route.budget.chunk_bytes

    def _send(self, table: int, client: int, rows: LongArray) -> None:
        state = self.states[table]
        for start in range(0, len(rows), _MAX_ROWS):
            # One message for all rows would keep the others waiting for as long as it takes.
            part = rows[start : start + _MAX_ROWS]
            message = Message(
                np.zeros(HEAD, np.int64),
                np.empty(len(part), np.int64),
                np.empty((len(part), state.cells.shape[1]), np.float32),
            )
            shard_send(state, client, part, message)
            self._claim(table, client, message.head)
            self.routes[client].send(table, message)

    def _claim(self, table: int, client: int, head: LongArray) -> None:
        self._claimed[table, client] = max(self._claimed[table, client], head[CLAIM])

    def _tell(self, table: int, client: int, kind: int) -> None:
        """Send a client the shard's progress as heads of all tables; RESTORED concerns one table
        only.
        """
        tables = [table] if kind == RESTORED else range(len(self.states))
        for each in tables:
            head = np.zeros(HEAD, np.int64)
            shard_head(self.states[each], client, kind, head)
            if kind == PING:
                self._claim(each, client, head)
                clocks = self.states[each].clocks
                slowest = min(np.flatnonzero(clocks == clocks.min()), key=self._heard_s.__getitem__)
                head[SLOWEST] = slowest
                head[SILENT_MS] = 1e3 * (time.monotonic() - self._heard_s[slowest])
            self.routes[client].send(
                each, Message(head, np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
            )

    # ── what outlives this process ──────────────────────────────────────────────────────────────

    def _make_durable(self) -> None:
        if self._file is None:
            for state in self.states:
                state.durable[:] = state.applied
            return
        now_s = time.monotonic()
        late = now_s - self._saved_s > self.checkpoint_s
        is_due = self._is_save_wanted or late or self._log_bytes > _MAX_LOG_BYTES
        # Without new changes the last checkpoint is still complete.
        if not is_due or not self._log_bytes or now_s < self._tried_s:
            return
        try:
            self.save()
        except UsageError as error:
            self._tried_s = now_s + _AGAIN_S
            _log.warning("shard %d: no checkpoint, clients keep what it lacks: %s", self.shard,
                         error.message)  # fmt: skip

    def save(self) -> None:
        """Write a checkpoint; clients then drop the changes that it holds."""
        if self._file is None:
            raise UsageError("this shard has no checkpoint", hint="give it a file")
        self._file.write(self.states)
        for state in self.states:
            state.durable[:] = state.applied
        self._saved_s, self._log_bytes, self._is_save_wanted = time.monotonic(), 0, False
        for route in self.routes:
            route.needs_ack = True

    def close(self) -> None:
        """Write the last checkpoint and release its file."""
        try:
            if self._file is not None and self._log_bytes:
                self.save()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the checkpoint file without writing it."""
        if self._file is not None:
            self._file.close()

    @property
    def num_refused(self) -> int:
        """Number of row changes that were refused because they were not finite."""
        return sum(int(state.facts[NUM_REFUSED]) for state in self.states)

    def cells(self, table: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """The values of a table's rows on this shard."""
        spec, state = self.layout.tables[table], self.states[table]
        assert state.cells.shape[1] == cell_width(spec.rule, spec.width)
        return state.cells[:, : spec.width]


def _check_memory(layout: Layout, shard: int) -> None:
    needed, available = layout.memory_bytes(shard), available_bytes()
    if needed > available:
        raise UsageError(
            f"shard {shard} needs {format_bytes(needed)}, {format_bytes(available)} are free",
            hint="use more shards on more machines, or smaller tables",
        )
