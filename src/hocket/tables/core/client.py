"""The client's side of the protocol: a row cache, unsent changes, and a log of sent changes.

All workers of a process share one client. A cached row has the clock at which the shard sent it. A
worker at clock c with staleness s may read the row if that clock is at least c - s; otherwise the
client requests the row and the worker waits. A worker's own changes are applied to the cache at
once. When a row arrives, this client's changes that the shard had not yet applied, and the unsent
ones, are applied on top of it, so own writes are always visible. Sent changes stay in the log until
the shard reports that they are durable. A restarted shard gets the log again from the end of its
checkpoint.

The log is a list of lines in the order of sending, each with the number of the previous line of the
same row. Reading, changing and sending a row costs O(width), and a batch O(unsent rows) in
addition. A row that arrives costs O(width x own changes in flight).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels import kernel
from hocket.tables.core.message import (
    APPLIED,
    CLAIM,
    CLIENT,
    CLOCK,
    COUNT,
    DURABLE,
    EPOCH,
    HEAD,
    KIND,
    ROWS,
    UPDATES,
    VERSION,
    Cells,
    Message,
)
from hocket.tables.core.rule import (
    ADD,
    LARGEST,
    apply_locally,
    cell_width,
    change_width,
    gather_change,
    relative,
    size_of,
)

(ME, MY_LIFE, NEXT, DONE, KEPT, MY_CLOCK, CLAIMED, ANNOUNCED, MY_PUSHES, MY_RULE, MY_WIDTH,
 BASE, TAIL, END, MY_REFUSED, NUM_UNSENT) = range(16)  # fmt: skip
"""Indices into `ClientState.facts`. NEXT: number of the next change to send. DONE, KEPT: last
change that the shard has applied, and made durable. MY_CLOCK: clock of the slowest worker. CLAIMED:
the shard's claim. ANNOUNCED: clock that the shard knows. BASE: number of the log's first line in
memory. TAIL: number of the first line that is still needed. END: number of the next line.
"""
NEVER = np.int64(1 << 60)


class ClientState(NamedTuple):
    """A client's view of one shard of one table; R rows, L lines and B batches of log."""

    facts: LongArray
    rate: FloatArray
    cells: Cells
    """Cached rows, including all own changes."""
    row_clock: LongArray
    """Clock at which the shard sent a row; -1 if the row is not cached."""
    subscribed: BoolArray
    asked: LongArray
    """Clock for which a row was requested; -1 if it was not."""
    pending: Cells
    oldest: LongArray
    """Clock of a row's oldest unsent change, or NEVER."""
    unsent: LongArray
    """Rows with unsent changes; only the first NUM_UNSENT entries are valid."""
    importance: Cells
    last: LongArray
    """Number of the row's last line in the log, or -1."""
    log_row: LongArray
    log_before: LongArray
    log_version: LongArray
    log_cells: Cells
    batch_end: LongArray
    """Number of the line after a batch, by the batch's version modulo B."""
    batch_clock: LongArray


def new_client(
    client: int,
    num_rows: int,
    width: int,
    *,
    rule: int = 0,
    pushes: bool = True,
    rate: float = 0.1,
    num_lines: int = 1024,
    num_batches: int = 1024,
) -> ClientState:
    """A client with an empty cache and no connection to a shard yet."""
    facts = np.zeros(16, np.int64)
    facts[ME], facts[NEXT], facts[MY_PUSHES], facts[MY_RULE], facts[MY_WIDTH] = (
        client,
        1,
        pushes,
        rule,
        width,
    )
    change = change_width(rule, width)
    return ClientState(
        facts, np.array([rate]), np.zeros((num_rows, cell_width(rule, width)), np.float32),
        np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.bool_),
        np.full(num_rows, -1, np.int64), np.zeros((num_rows, change), np.float32),
        np.full(num_rows, NEVER, np.int64), np.zeros(num_rows, np.int64),
        np.zeros((1, num_rows), np.float32),
        np.full(num_rows, -1, np.int64), np.zeros(num_lines, np.int64),
        np.zeros(num_lines, np.int64), np.zeros(num_lines, np.int64),
        np.zeros((num_lines, change), np.float32), np.zeros(num_batches, np.int64),
        np.zeros(num_batches, np.int64),
    )  # fmt: skip


@kernel
def fresh_clock(client: ClientState, row: int) -> int:
    """Clock before which all changes are in the cached row; -1 if the row is not cached."""
    own = client.row_clock[row]
    return int(max(own, client.facts[CLAIMED]) if client.subscribed[row] else own)


@kernel
def find_missing(client: ClientState, rows: LongArray, need: int, missing: LongArray) -> int:
    """Write the rows that are too old for a reader into ``missing``; return their number."""
    count = 0
    for i in range(len(rows)):
        clock = fresh_clock(client, rows[i])
        if clock < need or clock < 0:
            missing[count] = rows[i]
            count += 1
    return count


@kernel
def mark_asked(client: ClientState, rows: LongArray, num: int, need: int, out: LongArray) -> int:
    """Select the rows to request: those without an answer or push in flight."""
    count = 0
    for i in range(num):
        row = rows[i]
        # A pushed row, or one whose answer is in flight, arrives without another request.
        if 0 <= client.asked[row] <= need or client.subscribed[row]:
            continue
        client.asked[row] = need
        out[count] = row
        count += 1
    return count


@kernel
def read_rows(client: ClientState, rows: LongArray, out: Cells) -> None:
    """Copy cached rows into ``out``, up to its width."""
    for i in range(len(rows)):
        for j in range(out.shape[1]):
            out[i, j] = client.cells[rows[i], j]


@kernel
def change_rows(client: ClientState, clock: int, rows: LongArray, changes: Cells) -> int:
    """Apply a worker's changes at ``clock``; those that are not finite are refused and counted."""
    facts, refused = client.facts, 0
    for i in range(len(rows)):
        row = rows[i]
        change = size_of(changes, i, facts[MY_WIDTH])
        # The square of a gradient must be finite too.
        if not (change if facts[MY_RULE] == ADD else change * change) < LARGEST:
            refused += 1
            continue
        size = size_of(client.cells, row, facts[MY_WIDTH])
        is_first = client.oldest[row] == NEVER
        if is_first:
            client.unsent[facts[NUM_UNSENT]] = row
            facts[NUM_UNSENT] += 1
        gather_change(facts[MY_RULE], client.cells, row, client.pending, is_first, changes, i)
        if client.row_clock[row] >= 0:
            apply_locally(facts[MY_RULE], client.rate[0], client.cells, row, changes, i)
        client.oldest[row] = min(client.oldest[row], clock)
        client.importance[0, row] += relative(change, size)
    facts[MY_REFUSED] += refused
    return refused


@kernel
def send_changes(client: ClientState, rows: LongArray, head: LongArray) -> int:
    """Move the unsent changes of ``rows`` to the log as the next batch; return its number of lines.

    The lines begin at number END - result. The caller has made sure that they fit.
    """
    facts = client.facts
    version, start = facts[NEXT], facts[END]
    for i in range(len(rows)):
        row = rows[i]
        if client.oldest[row] == NEVER:
            continue
        line = facts[END] - facts[BASE]
        for j in range(client.pending.shape[1]):
            client.log_cells[line, j] = client.pending[row, j]
            client.pending[row, j] = 0.0
        client.log_row[line] = row
        client.log_version[line] = version
        client.log_before[line] = client.last[row]
        client.last[row] = facts[END]
        client.oldest[row] = NEVER
        client.importance[0, row] = 0.0
        facts[END] += 1
    # The shard may treat a clock as complete only if none of its changes is unsent.
    clock, left = facts[MY_CLOCK], 0
    for i in range(facts[NUM_UNSENT]):
        row = client.unsent[i]
        if client.oldest[row] != NEVER:
            clock = min(clock, client.oldest[row])
            client.unsent[left] = row
            left += 1
    facts[NUM_UNSENT] = left
    facts[ANNOUNCED] = max(facts[ANNOUNCED], clock)
    place = version % len(client.batch_end)
    client.batch_end[place] = facts[END]
    client.batch_clock[place] = facts[ANNOUNCED]
    facts[NEXT] = version + 1
    batch_head(client, version, head)
    return int(facts[END] - start)


@kernel
def batch_head(client: ClientState, version: int, head: LongArray) -> None:
    """Fill the head of UPDATES for a batch of the log, sent for the first time or again."""
    for i in range(HEAD):
        head[i] = 0
    place = version % len(client.batch_end)
    head[KIND] = UPDATES
    head[CLIENT] = client.facts[ME]
    head[EPOCH] = client.facts[MY_LIFE]
    head[VERSION] = version
    head[CLOCK] = client.batch_clock[place]
    head[COUNT] = client.batch_end[place] - batch_start(client, version)


@kernel
def batch_start(client: ClientState, version: int) -> int:
    """Number of the first line of a batch that is still needed."""
    if version <= client.facts[KEPT] + 1:
        return int(client.facts[TAIL])
    return int(client.batch_end[(version - 1) % len(client.batch_end)])


@kernel
def take_rows(client: ClientState, message: Message) -> None:
    """Process ROWS or PING from a shard: the rows' values, and the shard's progress."""
    head, facts = message.head, client.facts
    if head[EPOCH] != facts[MY_LIFE]:
        return
    if head[KIND] == ROWS:
        for i in range(head[COUNT]):
            _install(client, message, i)
    facts[CLAIMED] = max(facts[CLAIMED], head[CLAIM])
    facts[DONE] = max(facts[DONE], head[APPLIED])
    _forget(client, head[DURABLE])


@kernel
def _install(client: ClientState, message: Message, line: int) -> None:
    """Put a row into the cache and apply the own changes that the shard had not applied."""
    facts, row, head = client.facts, message.rows[line], message.head
    for j in range(client.cells.shape[1]):
        client.cells[row, j] = message.cells[line, j]
    number = client.last[row]
    while number >= facts[TAIL]:
        place = number - facts[BASE]
        if client.log_version[place] <= head[APPLIED]:
            break
        apply_locally(facts[MY_RULE], client.rate[0], client.cells, row, client.log_cells, place)
        number = client.log_before[place]
    if client.oldest[row] != NEVER:
        apply_locally(facts[MY_RULE], client.rate[0], client.cells, row, client.pending, row)
    client.row_clock[row] = head[CLOCK]
    client.subscribed[row] = facts[MY_PUSHES]
    client.asked[row] = -1


@kernel
def _forget(client: ClientState, durable: int) -> None:
    """Drop log lines that the shard's checkpoint holds."""
    facts = client.facts
    if durable > facts[KEPT]:
        facts[KEPT] = durable
        facts[TAIL] = client.batch_end[durable % len(client.batch_end)]


@kernel
def take_restored(client: ClientState, head: LongArray) -> int:
    """Process RESTORED; return the number of the first change that the shard lacks.

    Cached rows stay valid for the clocks at which they were sent.
    """
    facts = client.facts
    if facts[NEXT] == 1 and head[APPLIED] > 0:
        # A process that replaces an earlier one continues from the state that the earlier one
        # reached.
        facts[NEXT] = head[APPLIED] + 1
        facts[KEPT] = head[APPLIED]
        facts[MY_CLOCK] = facts[ANNOUNCED] = head[CLOCK]
    if head[EPOCH] != facts[MY_LIFE]:
        forget_pushes(client)
        facts[MY_LIFE] = head[EPOCH]
    facts[DONE] = head[APPLIED]
    _forget(client, head[DURABLE])
    return int(facts[DONE] + 1)


@kernel
def forget_pushes(client: ClientState) -> None:
    """Drop subscriptions, claims and pending requests after messages in flight were lost."""
    for row in range(len(client.row_clock)):
        # Earlier claims stay valid for the row's clock; later claims will not cover the row.
        client.row_clock[row] = fresh_clock(client, row)
        client.subscribed[row] = False
        client.asked[row] = -1
    client.facts[CLAIMED] = 0


@kernel
def ask_again(client: ClientState, rows: LongArray) -> int:
    """After `forget_pushes`: request all cached rows again, to subscribe to them.

    Writes the rows into ``rows`` and returns their number. They are requested at the newest clock
    of any cached row, because a restarted shard may be behind the cache.
    """
    count = 0
    for row in range(len(client.row_clock)):
        if client.row_clock[row] >= 0 and not client.subscribed[row]:
            rows[count] = row
            count += 1
    need = newest_clock(client)
    for i in range(count):
        client.asked[rows[i]] = need
    return count


@kernel
def newest_clock(client: ClientState) -> int:
    """The newest clock of a cached row."""
    newest = np.int64(0)
    for row in range(len(client.row_clock)):
        newest = max(newest, client.row_clock[row])
    return int(newest)


@kernel
def compact_log(client: ClientState) -> None:
    """Move the lines that are still needed to the front."""
    facts = client.facts
    shift = facts[TAIL] - facts[BASE]
    for line in range(facts[END] - facts[TAIL]):
        client.log_row[line] = client.log_row[line + shift]
        client.log_version[line] = client.log_version[line + shift]
        client.log_before[line] = client.log_before[line + shift]
        for j in range(client.log_cells.shape[1]):
            client.log_cells[line, j] = client.log_cells[line + shift, j]
    facts[BASE] = facts[TAIL]
