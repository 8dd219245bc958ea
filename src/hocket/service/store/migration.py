"""Databases of earlier versions, brought to the form of this one in one transaction.

Schema 1 held the state as one blob, written whole at every commit; since schema 2 it is in parts.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.service.store import folder as folders
from hocket.service.store import schema, snapshot
from hocket.service.store.parts import StoredParts


def migrated(folder: Path, connection: sqlite3.Connection) -> None:
    """Bring a database to this version's schema where it has an older one that is known."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != 1:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(schema.PART.create_sql)
        row = connection.execute(schema.STATE.select_sql("")).fetchone()
        if row is not None:
            commit, packed = schema.opened(schema.STATE, row)
            change = StoredParts().changed(snapshot.unpack(packed))
            rows = (schema.sealed(name, body) for name, body in change.written.items())
            connection.executemany(schema.PART.put_sql, rows)
            connection.execute(schema.STATE.put_sql, schema.sealed(commit, change.head()))
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException as error:
        connection.rollback()
        if isinstance(error, InputFileError):
            raise folders.damaged(folder, error.message) from None
        raise
