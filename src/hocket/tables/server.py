"""A shard that serves: messages in, rows out, checkpoints in between."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import RunError, UsageError
from hocket.tables.checkpoint import read_checkpoint, write_checkpoint
from hocket.tables.codec import decode, head_of
from hocket.tables.core.message import (
    ASK,
    CLIENT,
    COUNT,
    HEAD,
    KIND,
    NEED,
    PING,
    RESTORED,
    TABLE,
    Message,
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
from hocket.tables.route import Route
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.transports.port import Port

_IDLE_S = 0.005
_MAX_ROWS = 32_768
"""Of one message that nobody measures."""
_MAX_LOG_BYTES = 256 * 2**20
"""Changes since a checkpoint, which clients hold until the next one."""


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
        self.layout, self.shard, self.port = layout, shard, port
        self.path, self.checkpoint_s = checkpoint, checkpoint_s
        epoch = secrets.randbits(62) + 1
        self.states = [self._new(table, epoch) for table in layout.tables]
        self.routes = [Route(port, client) for client in range(layout.num_clients)]
        self.num_refused_messages = 0
        self._random = np.random.default_rng((seed, shard))
        self._saved_s = time.monotonic()
        self._log_bytes = 0
        if checkpoint is not None and checkpoint.exists():
            read_checkpoint(checkpoint, layout, shard, self.states)
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
        """Serve until told to stop."""
        while not stop.is_set():
            self.turn(_IDLE_S)

    def turn(self, timeout_s: float) -> None:
        """Take what has arrived, send what is ready; wait if there was nothing."""
        before = [int(state.facts[NOW]) for state in self.states]
        asked: list[tuple[int, int, LongArray]] = []
        num = 0
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
            if has_advanced or spec.mode == "managed" or (num and spec.is_asynchronous):
                self._push(table)
            if has_advanced:
                for route in self.routes:
                    route.owes_answer = True
        for client, route in enumerate(self.routes):
            if route.owes_answer:
                self._tell(0, client, PING)
        if not num:
            self.port.wait(timeout_s)

    def _take(self, client: int, data: bytes, asked: list[tuple[int, int, LongArray]]) -> None:
        head = head_of(data)
        table = int(head[TABLE])
        if table >= len(self.states) or not 0 <= client < len(self.routes):
            raise RunError("a message is from nobody or of no table")
        spec, state = self.layout.tables[table], self.states[table]
        is_ask = head[KIND] in (ASK, PING)
        width = 0 if is_ask else change_width(spec.rule, spec.width)
        message = decode(data, len(state.cells), width)
        if head[CLIENT] != client or head[COUNT] != len(message.rows):
            raise RunError("a message is not from whom it says")
        if not is_ask and len(message.cells) != len(message.rows):
            raise RunError("a message has rows without cells")
        self.routes[client].arrived(message)
        if not shard_take(state, message):
            self._tell(table, client, RESTORED)
        elif head[KIND] == ASK and spec.mode != "managed" and head[NEED] <= state.facts[NOW]:
            asked.append((table, client, message.rows))
        elif head[KIND] == PING:
            self.routes[client].owes_answer = True
        self._log_bytes += len(data)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def _push(self, table: int) -> None:
        spec, state = self.layout.tables[table], self.states[table]
        for client, route in enumerate(self.routes):
            if spec.mode == "managed":
                limit = max(1, route.budget.chunk_bytes // (4 * state.cells.shape[1] + 4))
                while route.allows():
                    rows = next_rows(state, client, limit, spec.order, self._random)
                    if not len(rows):
                        break
                    self._send(table, client, rows)
            else:
                rows = ready_rows(state, client, at_once=spec.is_asynchronous)
                self._send(table, client, rows)

    def _send(self, table: int, client: int, rows: LongArray) -> None:
        state = self.states[table]
        for start in range(0, len(rows), _MAX_ROWS):
            part = rows[start : start + _MAX_ROWS]
            message = Message(
                np.zeros(HEAD, np.int64),
                np.empty(len(part), np.int64),
                np.empty((len(part), state.cells.shape[1]), np.float32),
            )
            shard_send(state, client, part, message)
            self.routes[client].send(table, message)

    def _tell(self, table: int, client: int, kind: int) -> None:
        """A head of every table: how far this shard is."""
        tables = [table] if kind == RESTORED else range(len(self.states))
        for each in tables:
            head = np.zeros(HEAD, np.int64)
            shard_head(self.states[each], client, kind, head)
            self.routes[client].send(
                each, Message(head, np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
            )

    # ── what outlives this process ──────────────────────────────────────────────────────────────

    def _make_durable(self) -> None:
        if self.path is None:
            for state in self.states:
                state.durable[:] = state.applied
            return
        late = time.monotonic() - self._saved_s > self.checkpoint_s
        if self._log_bytes and (late or self._log_bytes > _MAX_LOG_BYTES):
            self.save()

    def save(self) -> None:
        """Write a checkpoint; from then on clients need not keep what is in it."""
        if self.path is None:
            raise UsageError("this shard has no checkpoint", hint="give it a file")
        write_checkpoint(self.path, self.layout, self.shard, self.states)
        for state in self.states:
            state.durable[:] = state.applied
        self._saved_s, self._log_bytes = time.monotonic(), 0
        for route in self.routes:
            route.owes_answer = True

    @property
    def num_refused(self) -> int:
        """Changes of rows that were not finite and were left out."""
        return sum(int(state.facts[NUM_REFUSED]) for state in self.states)

    def cells(self, table: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """The values of a table's rows here."""
        spec, state = self.layout.tables[table], self.states[table]
        assert state.cells.shape[1] == cell_width(spec.rule, spec.width)
        return state.cells[:, : spec.width]
