"""Messages between a client (one process of workers) and a shard of one table.

    UPDATES   client -> shard   numbered changes of rows, and the clock up to which all are sent
    ASK       client -> shard   rows that are needed at a clock
    ROWS      shard -> client   values, the changes of the receiver in them, and the shard's clock
    PING      both              nothing but the head: how far the other side is
    RESTORED  shard -> client   which changes the shard has; all later ones must be sent (again)
    KEEP      client -> shard   what is applied should outlive the shard now, not at its next turn
    STRANGER  shard -> client   the sender is not served; NEED says why

Channels deliver in order or lose everything that is in flight. Every message names the life of the
shard that it belongs to (EPOCH); one of an earlier life is answered by RESTORED.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import LongArray

Cells = NDArray[np.float32]

UPDATES, ASK, ROWS, PING, RESTORED, KEEP, STRANGER = range(1, 8)
OTHER_TABLES, REPLACED = 1, 2
"""Reasons for STRANGER: the client uses another layout or another shard, or another process has
taken its number."""

KIND = 0
CLIENT = 1
EPOCH = 2
VERSION = 3
"""UPDATES: its number in the sequence of one client and one shard, from 1. PING from a client: the
number of the last UPDATES before it."""
CLOCK = 4
"""UPDATES: all changes of earlier clocks are sent. ROWS: all of them are in the rows."""
NEED = 5
"""ASK: the clock that the shard must have reached before it answers."""
CLAIM = 6
"""ROWS, PING from a shard: clock of all rows that the client subscribed to; -1 if unknown."""
APPLIED = 7
"""From a shard: the receiver's last change that is in the values."""
DURABLE = 8
"""From a shard: the receiver's last change that is in the shard's checkpoint."""
RECEIVED = 9
"""Bytes that the sender has received from the receiver, which measures throughput with them."""
COUNT = 10
TABLE = 11
REFUSED = 12
"""From a shard: changes of rows that were not finite and were left out."""
SENT_BYTES = 13
"""Bytes that the sender has sent to the receiver so far, this message included."""
SENDER = 14
"""From a client: random number of its process, to detect two processes with one client number."""
TABLES = 15
"""Digest of the tables and shard that the sender assumes (`Layout.digest`)."""
SLOWEST = 16
"""PING from a shard: the client with the lowest clock, for which others may have to wait."""
SILENT_MS = 17
"""PING of a shard: milliseconds since the last message of that client."""
HEAD = 18


class Message(NamedTuple):
    """One message; ``rows`` are row numbers in the shard, ``cells`` has a line for each."""

    head: LongArray
    rows: LongArray
    cells: Cells


def plain(kind: int, client: int = 0, epoch: int = 0) -> Message:
    """A message without rows."""
    head = np.zeros(HEAD, np.int64)
    head[KIND], head[CLIENT], head[EPOCH], head[CLAIM] = kind, client, epoch, -1
    return Message(head, np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
