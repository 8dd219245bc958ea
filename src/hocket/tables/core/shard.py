"""The shard's side of stale synchronous tables.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS
2013); pushes as in Dai et al., "High-performance distributed ML at scale through parameter server
consistency models" (AAAI 2015). A client's clock c means that all its changes of clocks before c
have arrived; the minimum over clients is the shard's clock. A row is sent with the shard's clock,
so it contains every change of earlier clocks. With pushes, a client that has received a row is
subscribed to it. At each advance of the clock, the rows that others changed become due. When no row
is due any more, all rows of the client are at the shard's clock, which the head then claims.

The order of sending rows is chosen in `hocket.tables.priority`; correctness does not depend on it.
Changing a row costs O(width + clients), sending it O(width), an advance O(clients), and O(rows) for
clients with rows to be sent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels import kernel
from hocket.tables.core.message import (
    APPLIED,
    ASK,
    CLAIM,
    CLIENT,
    CLOCK,
    COUNT,
    DURABLE,
    EPOCH,
    HEAD,
    KIND,
    NEED,
    PING,
    REFUSED,
    RESTORED,
    ROWS,
    UPDATES,
    VERSION,
    Cells,
    Message,
)
from hocket.tables.core.rule import (
    LARGEST,
    apply_change,
    is_bearable,
    relative,
    size_of,
    starting_cells,
    starting_hidden,
)

LIFE, NOW, PUSHES, RULE, NUM_REFUSED, WIDTH, NUM_CHANGES = range(7)
"""Indices into `ShardState.facts`; NOW is the shard's clock."""


class ShardState(NamedTuple):
    """A shard of one table; P clients, R rows."""

    facts: LongArray
    rate: FloatArray
    cells: Cells
    hidden: Cells
    applied: LongArray
    """[P] last change of each client that is in ``cells``."""
    durable: LongArray
    """[P] last change of each client that is in a checkpoint."""
    clocks: LongArray
    """[P] clock of each client: all its changes of earlier clocks have arrived."""
    asked: LongArray
    """[P, R] clock for which a client requested the row, or -1."""
    subscribed: BoolArray
    dirty: BoolArray
    """[P, R] True if others changed the row since it was sent to a subscribed client."""
    due: BoolArray
    """[P, R] True if dirty since before the last advance; due rows prevent the claim."""
    num_due: LongArray
    num_dirty: LongArray
    num_asked: LongArray
    """[P] number of rows set in ``due``, ``dirty`` and ``asked``."""
    since: LongArray
    """[P, R] number of the change that made the row dirty."""
    importance: Cells
    """[P, R] accumulated relative magnitude of changes not yet sent to a client."""


def new_shard(
    num_clients: int,
    num_rows: int,
    width: int,
    *,
    rule: int = 0,
    pushes: bool = True,
    rate: float = 0.1,
    curvature: float = 1.0,
    epoch: int = 1,
) -> ShardState:
    """A shard with initial rows."""
    facts = np.zeros(7, np.int64)
    facts[LIFE], facts[PUSHES], facts[RULE], facts[WIDTH] = epoch, pushes, rule, width
    pairs = (num_clients, num_rows)
    return ShardState(
        facts, np.array([rate]),
        starting_cells(rule, num_rows, width, curvature),
        starting_hidden(rule, num_rows, width, curvature),
        np.zeros(num_clients, np.int64), np.zeros(num_clients, np.int64),
        np.zeros(num_clients, np.int64), np.full(pairs, -1, np.int64),
        np.zeros(pairs, np.bool_), np.zeros(pairs, np.bool_), np.zeros(pairs, np.bool_),
        np.zeros(num_clients, np.int64), np.zeros(num_clients, np.int64),
        np.zeros(num_clients, np.int64), np.zeros(pairs, np.int64), np.zeros(pairs, np.float32),
    )  # fmt: skip


@kernel
def shard_take(shard: ShardState, message: Message) -> bool:
    """Process a message; return False if its sender must get RESTORED instead."""
    head = message.head
    client = head[CLIENT]
    if head[EPOCH] != shard.facts[LIFE]:
        return False
    if head[KIND] == ASK:
        for i in range(head[COUNT]):
            row = message.rows[i]
            asked = shard.asked[client, row]
            # The earliest of several requests is kept. A client that needs a later clock asks
            # again, but a worker that waits for the earlier clock may be the one for which the
            # later clock waits.
            shard.asked[client, row] = head[NEED] if asked < 0 else min(asked, head[NEED])
            shard.num_asked[client] += asked < 0
    if head[KIND] == PING and head[VERSION] > shard.applied[client]:
        return False  # what was sent before it has not arrived
    if head[KIND] == UPDATES:
        if head[VERSION] > shard.applied[client] + 1:
            return False
        # A batch that was resent after a restart although it had arrived must not count twice.
        if head[VERSION] <= shard.applied[client]:
            return True
        for i in range(head[COUNT]):
            _change(shard, client, message, i)
        shard.applied[client] = head[VERSION]
        shard.clocks[client] = max(shard.clocks[client], head[CLOCK])
        now = _slowest(shard)
        if now > shard.facts[NOW]:
            _advance(shard, now)
    return True


@kernel
def _slowest(shard: ShardState) -> int:
    now = shard.clocks[0]
    for client in range(len(shard.clocks)):
        now = min(now, shard.clocks[client])
    return int(now)


@kernel
def _change(shard: ShardState, client: int, message: Message, line: int) -> None:
    row = message.rows[line]
    change = size_of(message.cells, line, message.cells.shape[1])
    size = size_of(shard.cells, row, shard.facts[WIDTH])
    fine = change + size < LARGEST and is_bearable(  # not so where one is NaN
        shard.facts[RULE], shard.cells, shard.hidden, row, message.cells, line
    )
    if fine:
        apply_change(
            shard.facts[RULE], shard.rate[0], shard.cells, shard.hidden, row, message.cells, line
        )
    else:
        shard.facts[NUM_REFUSED] += 1
    if not shard.facts[PUSHES]:
        return
    shard.facts[NUM_CHANGES] += 1
    for other in range(len(shard.clocks)):
        # A client has its own changes, unless one was refused: then it must receive the row as it
        # is.
        if shard.subscribed[other, row] and (other == client) != fine:
            if not shard.dirty[other, row]:
                shard.since[other, row] = shard.facts[NUM_CHANGES]
                shard.num_dirty[other] += 1
            shard.dirty[other, row] = True
            shard.importance[other, row] += relative(change, size) if fine else 1.0


@kernel
def _advance(shard: ShardState, now: int) -> None:
    """Mark changed rows as due: all changes of clocks before ``now`` have arrived."""
    shard.facts[NOW] = now
    for client in range(shard.dirty.shape[0]):
        if shard.num_dirty[client] == shard.num_due[client]:
            continue
        for row in range(shard.dirty.shape[1]):
            if shard.dirty[client, row] and not shard.due[client, row]:
                shard.due[client, row] = True
                shard.num_due[client] += 1


@kernel
def can_send(shard: ShardState, client: int, row: int) -> bool:
    """True if a row may be sent to a client now: requested and ready, or changed by others."""
    asked = shard.asked[client, row]
    return bool(0 <= asked <= shard.facts[NOW] or shard.dirty[client, row])


@kernel
def shard_send(shard: ShardState, client: int, rows: LongArray, out: Message) -> None:
    """Fill ROWS with those of ``rows`` that may be sent, and mark them as sent."""
    count = 0
    now = shard.facts[NOW]
    for i in range(len(rows)):
        row = rows[i]
        if not can_send(shard, client, row):
            continue
        for j in range(shard.cells.shape[1]):
            out.cells[count, j] = shard.cells[row, j]
        out.rows[count] = row
        count += 1
        if 0 <= shard.asked[client, row] <= now:
            shard.asked[client, row] = -1
            shard.num_asked[client] -= 1
        if shard.due[client, row]:
            shard.due[client, row] = False
            shard.num_due[client] -= 1
        shard.num_dirty[client] -= shard.dirty[client, row]
        shard.dirty[client, row] = False
        shard.importance[client, row] = 0.0
        shard.subscribed[client, row] = shard.facts[PUSHES]
    shard_head(shard, client, ROWS, out.head)
    out.head[COUNT] = count


@kernel
def shard_head(shard: ShardState, client: int, kind: int, head: LongArray) -> None:
    """Fill a message head with the shard's state for a client."""
    for i in range(HEAD):
        head[i] = 0
    head[KIND] = kind
    head[CLIENT] = client
    head[EPOCH] = shard.facts[LIFE]
    head[CLOCK] = shard.clocks[client] if kind == RESTORED else shard.facts[NOW]
    # A claim means that every pushed row is as new as the clock, so no row may be due.
    claims = shard.facts[PUSHES] and shard.num_due[client] == 0
    head[CLAIM] = shard.facts[NOW] if claims else -1
    head[APPLIED] = shard.applied[client]
    head[DURABLE] = shard.durable[client]
    head[REFUSED] = shard.facts[NUM_REFUSED]


@kernel
def shard_restore(shard: ShardState, epoch: int) -> None:
    """Restart with the rows, changes and clocks of a checkpoint, without subscriptions.

    Claims of the new life do not cover rows that it has not sent: clients start without any.
    """
    shard.facts[LIFE] = epoch
    shard.facts[NOW] = _slowest(shard)
    for client in range(len(shard.clocks)):
        shard.durable[client] = shard.applied[client]
        shard.num_due[client] = shard.num_dirty[client] = shard.num_asked[client] = 0
        for row in range(shard.asked.shape[1]):
            shard.asked[client, row] = -1
            shard.subscribed[client, row] = False
            shard.dirty[client, row] = False
            shard.due[client, row] = False
            shard.importance[client, row] = 0.0
