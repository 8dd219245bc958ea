"""The one row of table ``fleet``: what there is after the last commit, and the state itself."""

from __future__ import annotations

import json
import sqlite3
import struct
from dataclasses import asdict, dataclass

from hocket.errors import InputFileError
from hocket.service.store.schema import FLEET, Row, opened, sealed

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the last commit said there is: rows that are missing are found by it."""

    commit: int = 0
    last_number: int = 0
    last_sequence: int = 0
    num_attempts: int = 0
    num_checkpoints: int = 0
    num_keys: int = 0


def fleet_row(totals: Totals, packed: bytes) -> Row:
    """The row; ``packed`` is empty before the first commit."""
    head = json.dumps(asdict(totals)).encode()
    return sealed(1, b"".join([_LENGTH.pack(len(head)), head, packed]))


def read_fleet(connection: sqlite3.Connection) -> tuple[Totals, bytes]:
    """What `fleet_row` wrote."""
    row = connection.execute(FLEET.select_sql("")).fetchone()
    if row is None:
        raise InputFileError("the database holds no state")
    body = opened(FLEET, row)[-1]
    stop = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return Totals(**json.loads(body[_LENGTH.size : stop])), body[stop:]
