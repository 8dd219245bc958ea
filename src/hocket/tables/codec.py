"""Encode messages as bytes: the head, the rows, then all cells or only the nonzero ones.

The shorter of the two forms is sent, so the size of a sparse row depends on its nonzero cells only.
Received bytes are checked before compiled code reads them: a message of wrong length, with rows
outside the table, or with more rows than the table has, is refused.
"""

from __future__ import annotations

import numpy as np

from hocket.base.errors import RunError
from hocket.tables.core.message import (
    COUNT,
    HEAD,
    KIND,
    SENT_BYTES,
    STRANGER,
    TABLE,
    UPDATES,
    Cells,
    Message,
)

_HEAD_BYTES = 8 * HEAD
_DENSE, _SPARSE = b"\0", b"\1"
_MAX_COLUMNS = 2**16
"""Maximum number of columns that the 16-bit column numbers of a sparse row can address."""


def longest(num_rows: int, width: int) -> int:
    """Maximum number of bytes of a message with ``num_rows`` rows of ``width`` cells each."""
    return _HEAD_BYTES + 1 + num_rows * (4 + 4 * width)


def encode(message: Message, sent_bytes: int = 0, *, is_counted: bool = True) -> bytes:
    """Encode a message with its first COUNT rows.

    The head receives the number of bytes sent so far, including this message if it is counted.
    """
    parts = _parts(message, int(message.head[COUNT]))
    own_bytes = _HEAD_BYTES + sum(map(len, parts)) if is_counted else 0
    message.head[SENT_BYTES] = sent_bytes + own_bytes
    return b"".join((message.head.tobytes(), *parts))


def _parts(message: Message, count: int) -> tuple[bytes | memoryview, ...]:
    # 32 bits suffice, because a table has at most 2**31 - 1 rows (`MAX_ROWS`).
    rows = message.rows[:count].astype(np.int32).tobytes()
    if not count or not message.cells.shape[1] or not len(message.cells):
        return (rows,)
    cells = message.cells[:count]
    # Counting in booleans takes a third of the time of counting floats.
    filled = cells != 0
    num = int(np.count_nonzero(filled))
    # A nonzero cell costs 6 bytes (column and value) and a row 2, a cell of the dense form 4.
    if 6 * num + 2 * count < 4 * cells.size and cells.shape[1] < _MAX_COLUMNS:
        lengths = filled.sum(axis=1, dtype=np.uint16)
        columns = np.nonzero(filled)[1].astype(np.uint16)
        return rows, _SPARSE, lengths.tobytes(), columns.tobytes(), cells[filled].tobytes()
    return rows, _DENSE, cells.data.cast("B")


def head_of(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the head of a message; raises `RunError` if the bytes hold none."""
    if len(data) < _HEAD_BYTES:
        raise RunError("a message of a table is too short")
    head = np.frombuffer(data, np.int64, HEAD).copy()
    if not UPDATES <= head[KIND] <= STRANGER or head[TABLE] < 0:
        raise RunError("a message is not one of a table")
    return head


def decode(data: bytes, num_rows: int, width: int) -> Message:
    """Decode a message of a table that has ``num_rows`` rows of ``width`` cells on this shard."""
    head = head_of(data)
    count = int(head[COUNT])
    start = _HEAD_BYTES + 4 * count
    if count < 0 or len(data) < start:
        raise RunError("a message of a table is cut off")
    # Each row occurs once, so a longer list is an error and must not take memory.
    if count > num_rows:
        raise RunError(f"a message names {count} rows of a table that has {num_rows} here")
    rows = np.frombuffer(data, np.int32, count, _HEAD_BYTES).astype(np.int64)
    if count and (rows.min() < 0 or rows.max() >= num_rows):
        raise RunError(f"a message names rows that the table does not have ({num_rows} here)")
    if len(data) == start:
        return Message(head, rows, np.zeros((0, width), np.float32))
    return Message(head, rows, _cells(data, start, count, width))


def _cells(data: bytes, start: int, count: int, width: int) -> Cells:
    body = len(data) - start - 1
    if data[start : start + 1] == _DENSE and body == 4 * count * width:
        # Copied, because the bytes may not be aligned for floats.
        flat = np.frombuffer(data, np.uint8, body, start + 1).copy()
        return flat.view(np.float32).reshape(count, width)
    if data[start : start + 1] == _SPARSE and body >= 2 * count:
        lengths = np.frombuffer(data[start + 1 : start + 1 + 2 * count], np.uint16)
        num = int(lengths.sum(dtype=np.int64))
        rest = data[start + 1 + 2 * count :]
        if len(rest) == 6 * num:
            columns = np.frombuffer(rest[: 2 * num], np.uint16)
            if not num or columns.max() < width:
                cells = np.zeros((count, width), np.float32)
                lines = np.repeat(np.arange(count), lengths)
                cells[lines, columns] = np.frombuffer(rest[2 * num :], np.float32)
                return cells
    raise RunError("a message of a table has the wrong length")
