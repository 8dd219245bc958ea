"""A client's link to one shard of one table: decides when changes and requests are sent."""

from __future__ import annotations

import math
import time

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import RunError
from hocket.tables.core.client import (
    ANNOUNCED,
    BASE,
    DONE,
    END,
    KEPT,
    ME,
    MY_CLOCK,
    MY_LIFE,
    NEXT,
    NUM_UNSENT,
    TAIL,
    ClientState,
    ask_again,
    batch_head,
    batch_start,
    compact_log,
    forget_pushes,
    mark_asked,
    new_client,
    newest_clock,
    send_changes,
    take_restored,
    take_rows,
)
from hocket.tables.core.message import (
    APPLIED,
    ASK,
    CLOCK,
    COUNT,
    EPOCH,
    HEAD,
    KEEP,
    KIND,
    NEED,
    PING,
    RESTORED,
    SILENT_MS,
    SLOWEST,
    VERSION,
    Message,
    plain,
)
from hocket.tables.priority import next_changes, unsent_rows
from hocket.tables.route import MAX_IN_FLIGHT_BYTES, LinkUse, Route
from hocket.tables.spec import TableSpec

_ASK_AGAIN_S = 1.0


class ShardLink:
    """The client's side of one shard of one table.

    Workers record the rows that they need under the node's lock; only the node's thread sends.
    """

    def __init__(
        self, spec: TableSpec, number: int, client: int, num_rows: int, route: Route, seed: int
    ) -> None:
        self.spec, self.number, self.route = spec, number, route
        self.state: ClientState = new_client(
            client, num_rows, spec.width, rule=spec.rule, pushes=spec.pushes, rate=spec.rate
        )
        self._random = np.random.default_rng((seed, client, number))
        self._scratch = np.zeros(num_rows, np.int64)
        self._asks: list[tuple[LongArray, int]] = []
        self._ready: list[Message] = []
        self._posted = 0
        """Number of the last change that was sent."""
        self._asked_s = 0.0
        self._use = LinkUse()
        self._is_hurried, self._needed = False, 0
        """The latest clock of pushed rows for which a worker waits."""
        self.is_flushing = False
        """True if all changes should be sent now, regardless of clocks."""
        self.shard_clock = 0
        self.slowest, self.slowest_silent_s = 0, 0.0
        """The client that holds the shard's clock back, and the seconds since its last message."""

    @property
    def is_connected(self) -> bool:
        """True if the shard has ever answered."""
        return bool(self.state.facts[MY_LIFE])

    @property
    def is_behind(self) -> bool:
        """True if too much is in flight: `clock` then waits."""
        facts = self.state.facts
        lines = facts[END] - batch_start(self.state, facts[DONE] + 1) if self.is_connected else 0
        # Bytes that the shard has not applied: they stay in the log and fill memory here and there.
        return bool(4 * lines * self.state.pending.shape[1] > MAX_IN_FLIGHT_BYTES)

    @property
    def has_unapplied(self) -> bool:
        """True if the shard has not applied all changes yet."""
        facts = self.state.facts
        is_announced = facts[ANNOUNCED] >= facts[MY_CLOCK] and facts[NEXT] == facts[DONE] + 1
        return not is_announced or bool(facts[NUM_UNSENT])

    @property
    def last_sent(self) -> int:
        """The number of the last change that was sent."""
        return int(self.state.facts[NEXT]) - 1

    def is_kept(self, version: int) -> bool:
        """True if a change is in the shard's checkpoint."""
        return bool(self.state.facts[KEPT] >= version)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send_due(self, *, is_waiting: bool) -> bool:
        """Send due messages, or prepare them for `post`; True if there were any.

        ``is_waiting``: all workers of this process wait for rows, and none computes.
        """
        facts = self.state.facts
        if not self.is_connected:
            return False
        has_asked = bool(self._asks)
        for rows, need in self._asks:
            self._send_ask(rows, need)
        self._asks.clear()
        if self._is_hurried:
            self._is_hurried = False
            self._send_plain(PING)
        if self.spec.mode == "managed" and not self.is_flushing:
            return self._send_managed(is_waiting) or has_asked
        has_clocked = facts[MY_CLOCK] > facts[ANNOUNCED]
        if not has_clocked and not self.is_flushing:
            return has_asked
        self.is_flushing = False
        unsent = unsent_rows(self.state)
        # Without changes the batch still tells the shard the new clock.
        if has_clocked or len(unsent):
            self._ready.append(self._next_batch(unsent))
        return True

    def post(self) -> None:
        """Send the prepared messages without blocking workers.

        Log lines do not move until the same thread makes the next batch.
        """
        for message in self._ready:
            self._send_batch(message)
        self._ready.clear()

    def _send_batch(self, message: Message) -> None:
        self.route.send(self.number, message)
        self._posted = int(message.head[VERSION])

    def _send_managed(self, is_waiting: bool) -> bool:
        budget, has_sent = self.route.budget, False
        newest = self._newest(is_waiting)
        is_ahead = newest == self.state.facts[MY_CLOCK]
        limit_bytes = budget.chunk_bytes if is_ahead else budget.window_bytes
        limit = max(1, limit_bytes // (4 * self.state.pending.shape[1] + 4))
        while self.route.allows(self._use):
            rows = next_changes(self.state, limit, self.spec.order, self.spec.staleness,
                                self._random, newest=newest)  # fmt: skip
            if not len(rows) and not self._can_tell_clock():
                break
            self._send_batch(self._next_batch(rows))
            has_sent = True
        return has_sent

    def _newest(self, is_waiting: bool) -> float:
        """The latest clock whose changes may be sent now."""
        clock, slack = int(self.state.facts[MY_CLOCK]), self.spec.staleness
        # Until the shard has everybody's changes of ended clocks, the link to it is theirs.
        is_busy = slack != math.inf and self.shard_clock < clock
        if self._use.has_spare_time(clock, is_busy=is_busy):
            return clock
        if self._use.is_starved and not is_waiting:
            # A worker that still computes will add to what may wait: both go as one.
            return clock - max(1.0, slack)
        return clock - 1

    def _can_tell_clock(self) -> bool:
        """True if all changes of a clock are sent but the shard has not been sent the clock."""
        facts, rows = self.state.facts, unsent_rows(self.state)
        oldest = self.state.oldest[rows].min(initial=facts[MY_CLOCK])
        return bool(oldest > facts[ANNOUNCED])

    def _next_batch(self, rows: LongArray) -> Message:
        """The changes of some rows as one batch."""
        self._reserve(len(rows))
        head = np.zeros(HEAD, np.int64)
        num = send_changes(self.state, rows, head)
        return self._batch(head, int(self.state.facts[END]) - num)

    def _batch(self, head: LongArray, start: int) -> Message:
        first = start - int(self.state.facts[BASE])
        lines = slice(first, first + int(head[COUNT]))
        return Message(head, self.state.log_row[lines], self.state.log_cells[lines])

    def ask(self, missing: LongArray, num: int, need: int) -> bool:
        """Record rows to request that are not in flight yet; True if there are any."""
        rows, now_s = self._scratch, time.monotonic()
        if now_s - self._asked_s > _ASK_AGAIN_S:
            # What was asked may have been lost with a connection: nobody would ever answer it.
            self.state.asked[missing[:num]] = -1
        if not self.is_connected:
            return False
        count = mark_asked(self.state, missing, num, need, rows)
        if self.spec.mode == "managed" and need > self._needed and count < num:
            self._needed = need
            self._is_hurried = True
        if not count:
            return self._is_hurried
        self._asks.append((rows[:count].copy(), need))
        self._asked_s = now_s
        return True

    def _send_ask(self, rows: LongArray, need: int) -> None:
        message = plain(ASK, int(self.state.facts[ME]), int(self.state.facts[MY_LIFE]))
        message.head[COUNT], message.head[NEED] = len(rows), need
        self.route.send(self.number, Message(message.head, rows, message.cells))

    def ping(self) -> None:
        """Ask for the shard's clock; a restarted shard answers with RESTORED."""
        self._send_plain(PING)

    def keep(self) -> None:
        """Ask the shard to write a checkpoint now."""
        self._send_plain(KEEP)

    def _send_plain(self, kind: int) -> None:
        message = plain(kind, int(self.state.facts[ME]), int(self.state.facts[MY_LIFE]))
        message.head[VERSION], message.head[NEED] = self._posted, self._needed
        self.route.send(self.number, message)

    # ── receiving ───────────────────────────────────────────────────────────────────────────────

    def take(self, message: Message) -> None:
        """Process a message from the shard."""
        # RESTORED alone changes what was sent; all other messages report progress.
        if message.head[KIND] != RESTORED:
            self.shard_clock = int(message.head[CLOCK])
            if message.head[KIND] == PING:
                self.slowest = int(message.head[SLOWEST])
                self.slowest_silent_s = message.head[SILENT_MS] / 1e3
            take_rows(self.state, message)
            if message.head[EPOCH] != self.state.facts[MY_LIFE]:
                self.ping()  # a shard that was restarted: it will say what it lacks
            return
        if message.head[APPLIED] < self.state.facts[KEPT]:
            raise RunError(
                "came back without changes that it had called safe",
                hint="a shard that is to be started again needs a checkpoint, and the last one",
                where=f"shard {self.route.peer}",
            )
        is_new = self.state.facts[MY_LIFE] != message.head[EPOCH]
        first = take_restored(self.state, message.head)
        if is_new:
            self._asks.clear()  # of the earlier life; who waits asks again
            self._subscribe_again()
        head = np.zeros(HEAD, np.int64)
        for version in range(first, int(self.state.facts[NEXT])):
            batch_head(self.state, version, head)
            self._send_batch(self._batch(head, batch_start(self.state, version)))

    def has_lost(self, message: Message) -> None:
        """Request all pushed rows again after a broken connection lost messages of the shard.

        If the shard was restarted, its RESTORED message is used instead.
        """
        if message.head[EPOCH] == self.state.facts[MY_LIFE]:
            forget_pushes(self.state)
            self._subscribe_again()

    def _subscribe_again(self) -> None:
        if self.spec.pushes and (count := ask_again(self.state, self._scratch)):
            self._send_ask(self._scratch[:count], newest_clock(self.state))

    # ── the log's memory ────────────────────────────────────────────────────────────────────────

    def _reserve(self, num_lines: int) -> None:
        """Make room in the log for a batch of ``num_lines`` lines."""
        state, facts = self.state, self.state.facts
        if facts[END] - facts[BASE] + num_lines > len(state.log_row):
            compact_log(state)
            needed = int(facts[END] - facts[TAIL]) + num_lines
            # Compacting must not happen at every batch, so half of the log is kept free.
            if needed > len(state.log_row) // 2:
                self.state = state = _with_lines(state, 2 * needed)
        if facts[NEXT] - facts[KEPT] >= len(state.batch_end) - 1:
            self.state = _with_batches(state, 2 * len(state.batch_end))


def _with_lines(state: ClientState, num: int) -> ClientState:
    more = num - len(state.log_row)
    return state._replace(
        log_row=np.pad(state.log_row, (0, more)),
        log_before=np.pad(state.log_before, (0, more)),
        log_version=np.pad(state.log_version, (0, more)),
        log_cells=np.pad(state.log_cells, ((0, more), (0, 0))),
    )


def _with_batches(state: ClientState, num: int) -> ClientState:
    old = len(state.batch_end)
    end, clock = np.zeros(num, np.int64), np.zeros(num, np.int64)
    first = max(int(state.facts[KEPT]), 0)
    for version in range(first, int(state.facts[NEXT])):
        end[version % num] = state.batch_end[version % old]
        clock[version % num] = state.batch_clock[version % old]
    return state._replace(batch_end=end, batch_clock=clock)
