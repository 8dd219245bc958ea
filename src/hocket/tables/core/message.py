"""Messages between a client (one process with workers) and a shard of one table.

    UPDATES   client -> shard   numbered changes of rows, and the clock up to which all are sent
    ASK       client -> shard   rows that are needed at a clock
    ROWS      shard -> client   values, the receiver's changes in them, and the shard's clock
    PING      both              only the head: progress of the sender
    RESTORED  shard -> client   last change that the shard has; all later ones must be sent again
    KEEP      client -> shard   request to write a checkpoint now
    STRANGER  shard -> client   the sender is refused; NEED contains the reason

Channels deliver in order, or lose everything that is in flight. Every message contains the epoch of
the shard to which it belongs (EPOCH), a number that changes when the shard restarts. A message of
an earlier epoch is answered by RESTORED.
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
taken the client's number.
"""

KIND = 0
CLIENT = 1
EPOCH = 2
VERSION = 3
"""UPDATES: number in the sequence of one client and one shard, from 1. PING from a client: number
of the last UPDATES before it.
"""
CLOCK = 4
"""UPDATES: all changes of earlier clocks are sent. ROWS: all of them are in the rows."""
NEED = 5
"""ASK: clock that the shard must have reached before it answers."""
CLAIM = 6
"""ROWS, PING from a shard: clock of all rows that the client subscribed to; -1 if unknown."""
APPLIED = 7
"""From a shard: last change of the receiver that is in the values."""
DURABLE = 8
"""From a shard: last change of the receiver that is in the shard's checkpoint."""
RECEIVED = 9
"""Number of bytes that the sender has received from the receiver, for measuring throughput."""
COUNT = 10
TABLE = 11
REFUSED = 12
"""From a shard: number of row changes that were refused because they were not finite."""
SENT_BYTES = 13
"""Number of bytes sent to the receiver so far, including this message."""
SENDER = 14
"""From a client: random number of its process, which detects two processes with one client number.
"""
TABLES = 15
"""Digest of the tables and shard that the sender assumes (`Layout.digest`)."""
SLOWEST = 16
"""PING from a shard: client with the lowest clock, for which others may have to wait."""
SILENT_MS = 17
"""PING from a shard: milliseconds since the last message of that client."""
HEAD = 18


class Message(NamedTuple):
    """One message; ``rows`` are row numbers in the shard, ``cells`` has one line per row."""

    head: LongArray
    rows: LongArray
    cells: Cells


def plain(kind: int, client: int = 0, epoch: int = 0) -> Message:
    """A message without rows."""
    head = np.zeros(HEAD, np.int64)
    head[KIND], head[CLIENT], head[EPOCH], head[CLAIM] = kind, client, epoch, -1
    return Message(head, np.zeros(0, np.int64), np.zeros((0, 0), np.float32))
