"""Tables of the store, and rows that carry a checksum of what they hold.

What is asked for is a column, the rest is one JSON text. The checksum covers both, so that a bit
that flips anywhere in a row is found when the store is opened, not when the row is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hocket.base.errors import InputFileError
from hocket.service.records import AttemptRecord, CheckpointRecord, EventRecord, JobRecord
from hocket.service.spec import JobSpec
from hocket.service.store.batch import KeyRecord

APPLICATION_ID = 0x686F636B
"""Marks the file as ours (``file fleet.db`` shows it)."""
SCHEMA_VERSION = 2

Row = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """A table: columns to ask by, then ``body`` and ``crc``."""

    name: str
    keys: tuple[str, ...]
    """Columns of the primary key, whole numbers but for texts."""
    others: tuple[str, ...] = ()
    is_text: bool = False
    index: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """All but the checksum."""
        return (*self.keys, *self.others, "body")

    @property
    def create_sql(self) -> str:
        """Makes the table."""
        kind = "TEXT" if self.is_text else "INTEGER"
        columns = [f"{key} {kind} NOT NULL" for key in self.keys]
        columns += [f"{other} TEXT NOT NULL" for other in self.others]
        columns += ["body BLOB NOT NULL", "crc INTEGER NOT NULL"]
        return (
            f"CREATE TABLE {self.name} ({', '.join(columns)}, PRIMARY KEY ({', '.join(self.keys)}))"
        )

    @property
    def put_sql(self) -> str:
        """Writes a row over the one with its key."""
        names = (*self.columns, "crc")
        marks = ", ".join("?" * len(names))
        return f"INSERT OR REPLACE INTO {self.name} ({', '.join(names)}) VALUES ({marks})"

    def select_sql(self, rest: str) -> str:
        """Reads whole rows."""
        return f"SELECT {', '.join((*self.columns, 'crc'))} FROM {self.name} {rest}"


META = StoredTable(name="meta", keys=("name",), is_text=True)
FLEET = StoredTable(name="fleet", keys=("only",))
"""One row: what there is after the last commit."""
STATE = StoredTable(name="state", keys=("only",))
"""One row: the head of the state, under the number of its commit; none before the first."""
PART = StoredTable(name="part", keys=("name",), is_text=True)
"""The arrays of the state, in blocks; see `hocket.service.store.parts`."""
SPEC = StoredTable(name="spec", keys=("number",))
JOB = StoredTable(name="job", keys=("number",), others=("status",), index="status, number")
ATTEMPT = StoredTable(name="attempt", keys=("job", "attempt"), others=("phase",), index="phase")
CHECKPOINT = StoredTable(name="checkpoint", keys=("number",), others=("job",), index="job, number")
EVENT = StoredTable(name="event", keys=("sequence",))
KEY = StoredTable(name="idempotency", keys=("key",), is_text=True)
TABLES = (META, FLEET, STATE, PART, SPEC, JOB, ATTEMPT, CHECKPOINT, EVENT, KEY)


def create_sqls() -> list[str]:
    """Makes an empty store."""
    indexes = [
        f"CREATE INDEX {table.name}_index ON {table.name} ({table.index})"
        for table in TABLES
        if table.index
    ]
    return [
        *(table.create_sql for table in TABLES),
        *indexes,
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {SCHEMA_VERSION}",
    ]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def sealed(*columns: Any) -> Row:
    """A row with its checksum."""
    return (*columns, checksum(columns))


def checksum(columns: Row) -> int:
    """Of all columns of a row but the last one, the body being bytes."""
    return zlib.crc32(columns[-1], zlib.crc32(repr(columns[:-1]).encode()))


def opened(table: StoredTable, row: Row) -> Row:
    """A row that was checked; raises `InputFileError` where it is damaged."""
    if not isinstance(row[-2], bytes) or row[-1] != checksum(row[:-1]):
        raise InputFileError(f"a row of table {table.name!r} is damaged", where=repr(row[0])[:60])
    return row[:-1]


def _body(record: Any, *, leave_out: tuple[str, ...] = ()) -> bytes:
    content = {
        field.name: getattr(record, field.name)
        for field in fields(record)
        if field.name not in leave_out
    }
    return json.dumps(content, separators=(",", ":")).encode()


def job_row(record: JobRecord) -> Row:
    """A job without its spec, which never changes and may be long."""
    return sealed(record.number, record.status, _body(record, leave_out=("spec",)))


def spec_row(record: JobRecord) -> Row:
    """What was submitted."""
    return sealed(record.number, record.spec.model_dump_json().encode())


def job_of(job: Row, spec: Row) -> JobRecord:
    """A job from its two rows."""
    content = _content(JOB, job)
    content["devices"] = tuple(content["devices"])
    return JobRecord(**content, spec=JobSpec.model_validate_json(opened(SPEC, spec)[-1]))


def attempt_row(record: AttemptRecord) -> Row:
    """An attempt; whether it is open is a column."""
    phase = "open" if record.ended_s is None else "ended"
    return sealed(record.job, record.attempt, phase, _body(record))


def attempt_of(row: Row) -> AttemptRecord:
    """An attempt from its row."""
    content = _content(ATTEMPT, row)
    return AttemptRecord(**{**content, "devices": tuple(content["devices"])})


def checkpoint_row(number: int, record: CheckpointRecord) -> Row:
    """A checkpoint; ``number`` counts all of them."""
    return sealed(number, str(record.job), _body(record))


def checkpoint_of(row: Row) -> CheckpointRecord:
    """A checkpoint from its row."""
    return CheckpointRecord(**_content(CHECKPOINT, row))


def event_row(record: EventRecord) -> Row:
    """Something that happened."""
    return sealed(record.sequence, _body(record))


def event_of(row: Row) -> EventRecord:
    """An event from its row."""
    return EventRecord(**_content(EVENT, row))


def key_row(record: KeyRecord) -> Row:
    """An idempotency key."""
    return sealed(record.key, _body(record))


def key_of(row: Row) -> KeyRecord:
    """A key from its row."""
    return KeyRecord(**_content(KEY, row))


def _content(table: StoredTable, row: Row) -> dict[str, Any]:
    content = json.loads(opened(table, row)[-1])
    assert isinstance(content, Mapping)
    return dict(content)
