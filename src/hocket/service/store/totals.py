"""The one row of table ``fleet``: what there is after the last commit."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass

from hocket.base.errors import InputFileError
from hocket.service.store.schema import FLEET, Row, opened, sealed


@dataclass(frozen=True, kw_only=True)
class StoredTotals:
    """What the last commit said there is: rows that are missing are found by it."""

    commit: int = 0
    state_commit: int = 0
    """The commit that wrote the state; later ones left it as it was."""
    last_number: int = 0
    last_sequence: int = 0
    num_attempts: int = 0
    num_checkpoints: int = 0
    num_keys: int = 0


def totals_row(totals: StoredTotals) -> Row:
    """Totals as they are stored."""
    return sealed(1, json.dumps(asdict(totals)).encode())


def read_totals(connection: sqlite3.Connection) -> StoredTotals:
    """What `totals_row` wrote."""
    row = connection.execute(FLEET.select_sql("")).fetchone()
    if row is None:
        raise InputFileError("the database holds no totals")
    return StoredTotals(**json.loads(opened(FLEET, row)[-1]))
