"""Choose the rows that a client or shard sends next.

After Wei et al., "Managed communication and consistency for fast data-parallel iterative
analytics", SoCC 2015. Rows that a clock waits for are sent first: a client's oldest changes, and
the rows that a shard was asked for or that are due. The others are ordered by the size of their
changes relative to the row (`magnitude`), by age (`fifo`) or at random. O(rows) per choice.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.tables.core.client import MY_CLOCK, NUM_UNSENT, ClientState
from hocket.tables.core.shard import NOW, ShardState


def unsent_rows(client: ClientState) -> LongArray:
    """All rows with unsent changes."""
    return client.unsent[: client.facts[NUM_UNSENT]].copy()


def next_changes(
    client: ClientState,
    limit: int,
    order: str,
    slack: float,
    random: np.random.Generator,
    *,
    newest: float,
) -> LongArray:
    """At most ``limit`` rows of a client with changes of clock ``newest`` or earlier.

    Rows with changes that are ``slack`` or more clocks old come first.
    """
    rows = unsent_rows(client)
    rows = rows[client.oldest[rows] <= newest]
    age = client.oldest[rows]
    # Other workers may wait for changes that are about to exceed the staleness.
    first = age <= client.facts[MY_CLOCK] - max(1.0, slack)
    return _best(rows, first, order, age, client.importance[0, rows], limit, random)


def ready_rows(shard: ShardState, client: int, *, at_once: bool) -> LongArray:
    """Rows that a client waits for: requested and at the clock it needs, or due.

    ``at_once``: all changed rows now, before workers end their clock.
    """
    if not shard.num_asked[client] and not shard.num_dirty[client]:
        return np.zeros(0, np.int64)
    asked = shard.asked[client]
    changed = shard.dirty[client] if at_once else shard.due[client]
    return np.flatnonzero(((asked >= 0) & (asked <= shard.facts[NOW])) | changed)


def next_rows(
    shard: ShardState,
    client: int,
    limit: int,
    order: str,
    random: np.random.Generator,
    *,
    is_due: bool,
    is_idle: bool,
) -> LongArray:
    """At most ``limit`` rows of a shard for a client: ready ones first, then changed ones.

    ``is_due``: include due rows; ``is_idle``: include all changed rows.
    """
    if not shard.num_asked[client] and not shard.num_dirty[client]:
        return np.zeros(0, np.int64)
    asked = shard.asked[client]
    is_asked = (asked >= 0) & (asked <= shard.facts[NOW])
    wanted = is_asked
    if is_idle or is_due:
        wanted = is_asked | (shard.dirty if is_idle else shard.due)[client]
    rows = np.flatnonzero(wanted)
    first = is_asked[rows] * 2 + shard.due[client, rows]
    age = shard.since[client, rows]
    return _best(rows, first, order, age, shard.importance[client, rows], limit, random)


def _best(
    rows: LongArray,
    first: np.ndarray[tuple[int], np.dtype[np.generic]],
    order: str,
    age: LongArray,
    importance: np.ndarray[tuple[int], np.dtype[np.float32]],
    limit: int,
    random: np.random.Generator,
) -> LongArray:
    if len(rows) <= limit:
        return rows
    if order == "magnitude":
        key = -importance.astype(np.float64)
    elif order == "fifo":
        key = age.astype(np.float64)
    else:
        key = random.random(len(rows))
    chosen = np.lexsort((key, -first.astype(np.int64)))[:limit]
    return rows[chosen]
