"""Whether a database is whole: sqlite's own check, every row's checksum, and no row missing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.service.store import folder as folders
from hocket.service.store import schema
from hocket.service.store.parts import check_seal
from hocket.service.store.totals import read_totals


def check_schema(folder: Path, connection: sqlite3.Connection) -> None:
    """Refuse files of others, and of versions that this one does not read."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != schema.APPLICATION_ID:
        raise folders.damaged(folder, "this is no database of a fleet, or its head is damaged")
    if version != schema.SCHEMA_VERSION:
        age = "newer" if version > schema.SCHEMA_VERSION else "older"
        raise InputFileError(
            f"the database has schema {version}, {age} than {schema.SCHEMA_VERSION}, the one that "
            "this version of hocket reads",
            hint="start it with the version that wrote it",
            where=str(folder / folders.DATABASE),
        )


def check_rows(folder: Path, connection: sqlite3.Connection) -> None:
    """Read everything once; O(rows)."""
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise folders.damaged(folder, f"the database is damaged: {verdict}")
    counts = {table.name: _count_sound(folder, connection, table) for table in schema.TABLES}
    if counts[schema.FLEET.name] != 1:
        raise folders.damaged(folder, "the database holds no totals")
    totals = read_totals(connection)
    (first,) = connection.execute("SELECT coalesce(min(sequence), 1) FROM event").fetchone()
    expected = {
        schema.STATE.name: int(totals.state_commit > 0),
        schema.SPEC.name: totals.last_number,
        schema.JOB.name: totals.last_number,
        schema.ATTEMPT.name: totals.num_attempts,
        schema.CHECKPOINT.name: totals.num_checkpoints,
        schema.KEY.name: totals.num_keys,
        schema.EVENT.name: totals.last_sequence - first + 1,
    }
    _check_state(folder, connection, totals.state_commit)
    for name, num in expected.items():
        if counts[name] != num:
            what = f"table {name!r} has {counts[name]} rows where {num} were stored"
            raise folders.damaged(folder, what)


def _check_state(folder: Path, connection: sqlite3.Connection, commit: int) -> None:
    """Head and parts of the state are those of one commit, and of the last that wrote them."""
    state = connection.execute("SELECT only, body FROM state").fetchone()
    parts = dict(connection.execute("SELECT name, body FROM part"))
    if state is None and not parts:
        return
    if state is None or state[0] != commit:
        raise folders.damaged(folder, "the state is not that of the last commit")
    try:
        check_seal(state[1], parts)
    except InputFileError as error:
        raise folders.damaged(folder, error.message) from None


def _count_sound(folder: Path, connection: sqlite3.Connection, table: schema.StoredTable) -> int:
    """Rows of a table, all of whose checksums hold."""
    num = 0
    for row in connection.execute(table.select_sql("")):
        try:
            schema.opened(table, row)
        except InputFileError as error:
            raise folders.damaged(folder, str(error)) from None
        num += 1
    return num
