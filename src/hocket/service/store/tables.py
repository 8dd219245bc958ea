"""Tables of the store, and their rows as records.

Columns that queries use are columns of their own; the rest of a record is one JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hocket.fleet.rounds.state import FleetState
from hocket.service.records import AttemptRecord, CheckpointRecord, EventRecord, JobRecord
from hocket.service.spec import JobSpec

APPLICATION_ID = 0x686F636B
"""Marks the file as hocket's (``file fleet.db`` shows it)."""
# Raised with every change of tables or records; older databases are refused.
SCHEMA_VERSION = 6

CREATE_SQL = f"""
BEGIN IMMEDIATE;
CREATE TABLE meta (name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE part (name TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE spec (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE job (number INTEGER PRIMARY KEY, status TEXT NOT NULL, ended_s REAL,
                  body TEXT NOT NULL);
CREATE INDEX job_index ON job (status, number);
CREATE INDEX job_end_index ON job (ended_s);
CREATE TABLE attempt (job INTEGER, attempt INTEGER, ended_s REAL, body TEXT NOT NULL,
                      PRIMARY KEY (job, attempt));
CREATE INDEX attempt_index ON attempt (ended_s);
CREATE TABLE checkpoint (number INTEGER PRIMARY KEY, job INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX checkpoint_index ON checkpoint (job, number);
CREATE TABLE event (sequence INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE idempotency (key TEXT PRIMARY KEY, body TEXT NOT NULL);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
"""Statements that create an empty store."""


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """An idempotency key and the job that it made."""

    key: str
    body_hash: str
    job: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """New and changed rows of one commit, and the state after it."""

    state: FleetState
    jobs: Sequence[JobRecord] = ()
    attempts: Sequence[AttemptRecord] = ()
    checkpoints: Sequence[CheckpointRecord] = ()
    events: Sequence[EventRecord] = ()
    keys: Sequence[KeyRecord] = ()
    first_new_number: int = 1
    """Jobs from this number on are new: their specs are stored too."""


class RecordTable(NamedTuple):
    """A table whose rows are records of one type."""

    name: str
    record: Any


ATTEMPT = RecordTable("attempt", AttemptRecord)
CHECKPOINT = RecordTable("checkpoint", CheckpointRecord)
EVENT = RecordTable("event", EventRecord)
KEY = RecordTable("idempotency", KeyRecord)


def body_of(record: Any) -> str:
    """A record as JSON; the spec of a job has a row of its own, because it never changes."""
    names = (field.name for field in fields(record) if field.name != "spec")
    return json.dumps({name: getattr(record, name) for name in names}, separators=(",", ":"))


def record_of(table: RecordTable, body: str) -> Any:
    """The record that `body_of` wrote."""
    return table.record(**_content(body))


def job_of(body: str, spec: str) -> JobRecord:
    """A job from its two rows."""
    return JobRecord(**_content(body), spec=JobSpec.model_validate_json(spec))


def _content(body: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(body)
    if "devices" in content:
        content["devices"] = tuple(content["devices"])
    return content
