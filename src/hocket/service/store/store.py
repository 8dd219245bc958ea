"""The service's durable state: one sqlite file in write-ahead mode, one transaction per decision.

`Store.open` takes the folder's lock and has sqlite check the whole file; it raises `InputFileError`
for a database that is damaged or not hocket's. `Store.commit` returns once the transaction is on
disk (``synchronous=FULL``); where it raises `UnavailableError`, nothing was stored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base.errors import InputFileError
from hocket.fleet.rounds.state import FleetState
from hocket.service.errors import UnavailableError
from hocket.service.plain_file import open_plain
from hocket.service.records import (
    LIVE,
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    HeldAttempt,
    JobRecord,
    JobStatus,
)
from hocket.service.store import folder as folders
from hocket.service.store import tables
from hocket.service.store.lock import FolderLock
from hocket.service.store.snapshot import join_state, split_state
from hocket.service.store.tables import Batch, KeyRecord, RecordTable

MAX_EVENTS = 100_000
"""Number of newest events that are kept; older ones can be seen from the rows of jobs."""
# Old events are dropped each time after so many new ones.
_DROP_EVERY = 1_000
# Page size of the database, and size of the log at which it is moved to the database.
_PAGE_BYTES = 16_384
_LOG_BYTES = 16 * 2**20
Row = tuple[Any, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """Content of the store at a start."""

    state: FleetState | None
    """The stored state; None if nothing was ever committed."""
    jobs: dict[int, JobRecord]
    attempts: dict[int, tuple[AttemptRecord, ...]]
    checkpoints: dict[int, CheckpointRecord]
    last_number: int
    last_sequence: int


class Store:
    """Rows on disk. One thread commits; any thread may read what was committed."""

    def __init__(self, folder: Path, lock: FolderLock, writer: sqlite3.Connection) -> None:
        self.folder = folder
        self._lock = lock
        self._writer = writer
        self.identity = str(writer.execute("SELECT body FROM meta").fetchone()[0])
        """Unique identity of this fleet, by which engines recognize its attempts."""
        self._state: FleetState | None = None
        """The stored state; a commit with the same state does not write it again."""
        self._parts = dict(writer.execute("SELECT name, body FROM part"))
        self._reader = _connected(folder, "ro")
        self._reading = threading.Lock()

    @classmethod
    def open(cls, folder: str | Path, *, discard: bool = False) -> Store:
        """The store of a state folder, made where there was none; ``discard`` sets aside what is
        there. Raises `InputFileError` where the folder is in use, or what is there is damaged."""
        path = Path(os.path.abspath(folder))
        folders.prepared(path)
        with contextlib.ExitStack() as undo:
            try:
                lock = FolderLock(path)
                undo.callback(lock.close)
                if discard:
                    folders.set_aside(path)
                writer = _connected(path, "rwc")
                undo.callback(writer.close)
                _verify(path, writer)
                store = cls(path, lock, writer)
            except (sqlite3.Error, ValueError) as error:
                # sqlite raises ValueError for names and texts that are no UTF-8.
                if folders.is_full(error):
                    raise folders.full(path) from None
                raise folders.damaged(path, f"the database cannot be used: {error}") from None
            except OSError as error:
                raise folders.unusable(path, error) from None
            undo.pop_all()
        return store

    def close(self) -> None:
        """Close the database and release the folder."""
        with self._reading:
            self._reader.close()
        self._writer.close()
        self._lock.close()

    # ── writing ──

    def commit(self, batch: Batch) -> None:
        """Store a batch atomically."""
        try:
            with self._undoing():
                parts = self._parts if batch.state is self._state else split_state(batch.state)
                self._write(batch, parts)
        except sqlite3.Error as error:
            raise UnavailableError(
                f"nothing could be stored: {error}",
                hint="free space on the disk of the state folder; what runs goes on meanwhile",
                where=str(self.folder),
            ) from None
        self._state, self._parts = batch.state, parts

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        """Roll back the open transaction on an error, so that the next commit finds none."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._writer.rollback()
            raise

    def _write(self, batch: Batch, parts: dict[str, bytes]) -> None:
        body = tables.body_of
        self._writer.execute("BEGIN IMMEDIATE")
        new = [job for job in batch.jobs if job.number >= batch.first_new_number]
        self._put("spec", ((job.number, job.spec.model_dump_json()) for job in new))
        self._put("job", ((job.number, job.status, job.ended_s, body(job)) for job in batch.jobs))
        attempts = ((one.job, one.attempt, one.ended_s, body(one)) for one in batch.attempts)
        self._put("attempt", attempts)
        self._put("checkpoint", ((None, one.job, body(one)) for one in batch.checkpoints))
        self._put("event", ((one.sequence, body(one)) for one in batch.events))
        self._put("idempotency", ((one.key, body(one)) for one in batch.keys))
        self._put("part", (one for one in parts.items() if self._parts.get(one[0]) != one[1]))
        gone = ((name,) for name in self._parts if name not in parts)
        self._writer.executemany("DELETE FROM part WHERE name = ?", gone)
        if any(event.sequence % _DROP_EVERY == 0 for event in batch.events):
            oldest = batch.events[-1].sequence - MAX_EVENTS
            self._writer.execute("DELETE FROM event WHERE sequence <= ?", (oldest,))
        self._writer.execute("COMMIT")

    def _put(self, table: str, rows: Iterable[Row]) -> None:
        """Insert rows, replacing those with the same keys."""
        for row in rows:
            marks = ", ".join("?" * len(row))
            self._writer.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)

    # ── reading ──

    def load(self) -> Loaded:
        """All rows that have not ended; raises `InputFileError` if a row cannot be read."""
        try:
            return self._load()
        except (KeyError, TypeError, ValueError) as error:
            raise folders.damaged(self.folder, f"the database is damaged: {error!r}") from None

    def _load(self) -> Loaded:
        jobs = {job.number: job for status in LIVE for job in self._jobs_of(status)}
        attempts: dict[int, tuple[AttemptRecord, ...]] = {}
        record: AttemptRecord
        for record in self._records(tables.ATTEMPT, "WHERE ended_s IS NULL ORDER BY job, attempt"):
            attempts[record.job] = (*attempts.get(record.job, ()), record)
        rest = "WHERE number IN (SELECT max(number) FROM checkpoint GROUP BY job)"
        newest = self._records(tables.CHECKPOINT, rest)
        ((last_number, last_sequence),) = self._asked(
            "SELECT coalesce((SELECT max(number) FROM job), 0), "
            "coalesce((SELECT max(sequence) FROM event), 0)",
            (),
        )
        return Loaded(
            state=self._load_state(jobs) if self._parts else None,
            jobs=dict(sorted(jobs.items())),
            attempts=attempts,
            checkpoints={one.job: one for one in newest if one.job in jobs},
            last_number=last_number,
            last_sequence=last_sequence,
        )

    def _load_state(self, jobs: Mapping[int, JobRecord]) -> FleetState:
        state = join_state(self._parts)
        numbers = state.jobs.rows["number"].tolist()
        known = {number: jobs.get(number) or self.job(number) for number in numbers}
        return state.but(names={n: job.spec.name if job else "" for n, job in known.items()})

    def job(self, number: int) -> JobRecord | None:
        """A job, whether it has ended or not."""
        return next(self._jobs("WHERE job.number = ?", number), None)

    def jobs(
        self, after: int = 0, limit: int = 100, status: JobStatus | None = None
    ) -> list[JobRecord]:
        """Up to ``limit`` jobs with numbers above ``after``, in order."""
        if status is None:
            rest = "WHERE job.number > ? ORDER BY job.number LIMIT ?"
            return list(self._jobs(rest, after, limit))
        rest = "WHERE job.number > ? AND job.status = ? ORDER BY job.number LIMIT ?"
        return list(self._jobs(rest, after, status, limit))

    def newest_jobs(self, status: JobStatus, limit: int) -> list[JobRecord]:
        """Up to ``limit`` newest jobs with a status, in order of their numbers."""
        rest = "WHERE job.status = ? ORDER BY job.number DESC LIMIT ?"
        return list(self._jobs(rest, status, limit))[::-1]

    def last_ended(self, limit: int) -> list[JobRecord]:
        """The jobs that ended last, the last one first."""
        return list(
            self._jobs("WHERE job.ended_s IS NOT NULL ORDER BY job.ended_s DESC LIMIT ?", limit)
        )

    def attempts(self, number: int) -> list[AttemptRecord]:
        """All attempts of a job, the oldest first."""
        return self._records(tables.ATTEMPT, "WHERE job = ? ORDER BY attempt", number)

    def held_since(self, since_s: float) -> list[HeldAttempt]:
        """Attempts that ended after ``since_s`` or have not ended."""
        rows = self._asked(
            "SELECT attempt.body, json_extract(job.body, '$.owner'), "
            "json_extract(spec.body, '$.team'), json_extract(spec.body, '$.name') FROM attempt "
            "JOIN job ON job.number = attempt.job JOIN spec ON spec.number = attempt.job "
            "WHERE attempt.ended_s IS NULL OR attempt.ended_s > ?",
            (since_s,),
        )
        return [HeldAttempt(tables.record_of(tables.ATTEMPT, body), *rest) for body, *rest in rows]

    def checkpoints(self, number: int) -> list[CheckpointRecord]:
        """All checkpoints of a job, the oldest first."""
        return self._records(tables.CHECKPOINT, "WHERE job = ? ORDER BY number", number)

    def events(self, after: int = 0, limit: int = 100) -> list[EventRecord]:
        """Up to ``limit`` events with numbers above ``after``, the oldest first."""
        rest = "WHERE sequence > ? ORDER BY sequence LIMIT ?"
        return self._records(tables.EVENT, rest, after, limit)

    def key(self, key: str) -> KeyRecord | None:
        """The record of an idempotency key; None if the key is unknown."""
        return next(iter(self._records(tables.KEY, "WHERE key = ?", key)), None)

    def _jobs_of(self, status: JobStatus) -> Iterator[JobRecord]:
        return self._jobs("WHERE job.status = ?", status)

    def _jobs(self, rest: str, *values: object) -> Iterator[JobRecord]:
        sql = f"SELECT job.body, spec.body FROM job JOIN spec USING (number) {rest}"
        for row in self._asked(sql, values):
            yield tables.job_of(*row)

    def _records(self, table: RecordTable, rest: str, *values: object) -> list[Any]:
        rows = self._asked(f"SELECT body FROM {table.name} {rest}", values)
        return [tables.record_of(table, body) for (body,) in rows]

    def _asked(self, sql: str, values: tuple[object, ...]) -> list[Row]:
        with self._reading:
            try:
                return self._reader.execute(sql, values).fetchall()
            except OverflowError:
                # The number is too large for sqlite, so no row has it.
                return []
            except sqlite3.Error as error:
                raise UnavailableError(f"the store cannot be read: {error}") from None


# ── opening ──────────────────────────────────────────────────────────────────────────────────────


def _connected(folder: Path, mode: str) -> sqlite3.Connection:
    """A connection in a mode of sqlite, whose commits wait for the disk."""
    path = folder / folders.DATABASE
    if mode == "rwc" and not path.exists():
        # The file is created here with mode 0600: sqlite would make it readable for others, and
        # they could open it before its mode is changed.
        os.close(open_plain(path, os.O_RDWR | os.O_CREAT))
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=30.0,
    )
    connection.execute("PRAGMA synchronous = FULL")
    if mode != "ro":
        # A round of a large fleet writes hundreds of kilobytes. Large pages that are seldom moved
        # from the log take half the time of the defaults.
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}")
    return connection


def _verify(folder: Path, writer: sqlite3.Connection) -> None:
    """Make the tables of a new store; refuse a damaged one, and files of other programs."""
    (application,) = writer.execute("PRAGMA application_id").fetchone()
    if application == 0 and not writer.execute("SELECT * FROM sqlite_master").fetchall():
        folders.refuse_lost_database(folder)
        writer.executescript(tables.CREATE_SQL)
        writer.execute("INSERT INTO meta VALUES ('identity', ?)", (secrets.token_hex(16),))
        return
    (version,) = writer.execute("PRAGMA user_version").fetchone()
    if application != tables.APPLICATION_ID:
        raise folders.damaged(folder, "this is no database of a fleet, or its head is damaged")
    if version != tables.SCHEMA_VERSION:
        age = "newer" if version > tables.SCHEMA_VERSION else "older"
        raise InputFileError(
            f"the database has schema {version}, {age} than {tables.SCHEMA_VERSION}, the one that "
            "this version of hocket reads",
            hint="let its jobs end with the version that wrote it, then start this one with "
            "--discard-state, which sets the old content aside and begins without jobs",
            where=str(folder / folders.DATABASE),
        )
    (verdict,) = writer.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise folders.damaged(folder, f"the database is damaged: {verdict}")
