"""Tables of the store, and rows with a checksum of their content.

What is asked for is a column, the rest is one JSON text. The checksum covers both, so that a bit
that flips anywhere in a row is found when the store is opened, not when the row is used.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, fields
from typing import Any

from hocket.base.errors import InputFileError
from hocket.service.records import AttemptRecord, CheckpointRecord, EventRecord, JobRecord
from hocket.service.spec import JobSpec
from hocket.service.store.batch import KeyRecord

APPLICATION_ID = 0x686F636B
"""Marks the file as ours (``file fleet.db`` shows it)."""
SCHEMA_VERSION = 3

Row = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """A table: columns to ask by, then ``body`` and ``crc``."""

    name: str
    keys: str
    """Columns of the primary key, with their types."""
    others: str = ""
    """Columns beside the key, with their types."""
    index: str = ""
    record: Any = None
    """Type of the records in its rows, where all fields are in the body."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns."""
        typed = f"{self.keys}, {self.others}" if self.others else self.keys
        return [*(one.split()[0] for one in typed.split(", ")), "body", "crc"]

    @property
    def create_sql(self) -> str:
        """Makes the table."""
        others = f"{self.others}, " if self.others else ""
        key = ", ".join(one.split()[0] for one in self.keys.split(", "))
        return (
            f"CREATE TABLE {self.name} ({self.keys}, {others}body BLOB NOT NULL, "
            f"crc INTEGER NOT NULL, PRIMARY KEY ({key}))"
        )

    @property
    def put_sql(self) -> str:
        """Writes a row over the one with its key."""
        names = self.columns
        marks = ", ".join("?" * len(names))
        return f"INSERT OR REPLACE INTO {self.name} ({', '.join(names)}) VALUES ({marks})"

    def select_sql(self, rest: str) -> str:
        """Reads whole rows."""
        return f"SELECT {', '.join(self.columns)} FROM {self.name} {rest}"

    def read(self, row: Row) -> Any:
        """The record of a row; raises `InputFileError` where it is damaged."""
        return self.record(**_content(self, row))


META = StoredTable(name="meta", keys="name TEXT")
"""Identity of the fleet, and what there is after the last commit."""
PART = StoredTable(name="part", keys="name TEXT")
"""The state: its head, and its arrays in blocks."""
SPEC = StoredTable(name="spec", keys="number INTEGER")
JOB = StoredTable(
    name="job", keys="number INTEGER", others="status TEXT NOT NULL", index="status, number"
)
ATTEMPT = StoredTable(
    name="attempt",
    keys="job INTEGER, attempt INTEGER",
    others="is_open INTEGER NOT NULL",
    index="is_open",
    record=AttemptRecord,
)
CHECKPOINT = StoredTable(
    name="checkpoint",
    keys="number INTEGER",
    others="job INTEGER NOT NULL",
    index="job, number",
    record=CheckpointRecord,
)
EVENT = StoredTable(name="event", keys="sequence INTEGER", record=EventRecord)
KEY = StoredTable(name="idempotency", keys="key TEXT", record=KeyRecord)
TABLES = (META, PART, SPEC, JOB, ATTEMPT, CHECKPOINT, EVENT, KEY)


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


def record_row(record: Any, *keys: Any) -> Row:
    """A record under its keys; the spec of a job has a row of its own."""
    content = {
        field.name: getattr(record, field.name) for field in fields(record) if field.name != "spec"
    }
    return sealed(*keys, json.dumps(content, separators=(",", ":")).encode())


def spec_row(record: JobRecord) -> Row:
    """Row of a job's spec, which never changes and may be long."""
    return sealed(record.number, record.spec.model_dump_json().encode())


def job_of(job: Row, spec: Row) -> JobRecord:
    """A job from its two rows."""
    found = JobSpec.model_validate_json(opened(SPEC, spec)[-1])
    return JobRecord(**_content(JOB, job), spec=found)


def _content(table: StoredTable, row: Row) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(opened(table, row)[-1])
    if "devices" in content:
        content["devices"] = tuple(content["devices"])
    return content
