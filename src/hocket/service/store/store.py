"""The service's memory: one sqlite file in write-ahead mode, one transaction per decision.

``Store.open`` takes the folder's lock, checks every row and compares the database with its commit
sequence; what it returns can be trusted or it raises `InputFileError`. ``commit`` is on disk, and
in the commit sequence, when it returns; where it raises `UnavailableError`, nothing was stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.fleet.rounds.state import FleetState
from hocket.service.errors import UnavailableError
from hocket.service.plain_file import open_plain
from hocket.service.records import (
    LIVE,
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    JobRecord,
    JobStatus,
)
from hocket.service.store import folder as folders
from hocket.service.store import schema, snapshot
from hocket.service.store.batch import Batch, KeyRecord
from hocket.service.store.commit_sequence import CommitSequence, take_over_former
from hocket.service.store.lock import FolderLock
from hocket.service.store.parts import StoredParts, check_seal, joined, numbers_in
from hocket.service.store.schema import FLEET, Row, StoredTable, opened, sealed

# The one row of table ``fleet``: what there is after the last commit.


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


# Whether a database is whole: sqlite's own check, every row's checksum, and no row missing.


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


# Databases of earlier versions, brought to the form of this one in one transaction.
#
# Schema 1 held the state as one blob, written whole at every commit; since schema 2 it is in parts.


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


MAX_EVENTS = 100_000
"""Older ones are dropped: what happened to jobs is in their own rows."""
_DROP_EVERY = 1_000
_PAGE_BYTES = 16_384
_LOG_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """Content of the store at a start."""

    state: FleetState | None
    """None where nothing was ever committed."""
    jobs: dict[int, JobRecord]
    attempts: dict[int, tuple[AttemptRecord, ...]]
    checkpoints: dict[int, CheckpointRecord]
    totals: StoredTotals


class Store:
    """Rows on disk. One thread commits; any thread may read what was committed."""

    def __init__(
        self,
        folder: Path,
        lock: FolderLock,
        commit_sequence: CommitSequence,
        writer: sqlite3.Connection,
    ) -> None:
        self.folder = folder
        self._lock = lock
        self._commit_sequence = commit_sequence
        self._writer = writer
        self._totals = read_totals(writer)
        self._state: FleetState | None = None
        """The one that is stored; a commit that leaves it alone need not write it again."""
        self._parts = StoredParts()
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
                take_over_former(path)
                commit_sequence = _commit_sequence(path)
                undo.callback(commit_sequence.close)
                writer = _connected(path, "rwc" if commit_sequence.number == 0 else "rw")
                undo.callback(writer.close)
                _verify(path, writer, commit_sequence)
                store = cls(path, lock, commit_sequence, writer)
            except (sqlite3.Error, ValueError) as error:
                # ValueError: sqlite hands out names and texts that are no UTF-8.
                if folders.is_full(error):
                    raise folders.full(path) from None
                raise folders.damaged(path, f"the database cannot be used: {error}") from None
            except OSError as error:
                raise folders.unusable(path, error) from None
            undo.pop_all()
        return store

    @property
    def identity(self) -> str:
        """Of this fleet, unlike that of any other: engines tell its attempts apart by it."""
        return self._commit_sequence.identity.hex()

    def close(self) -> None:
        """Let go of the folder."""
        with self._reading:
            self._reader.close()
        self._writer.close()
        self._commit_sequence.close()
        self._lock.close()

    # ── writing ──

    def commit(self, batch: Batch) -> None:
        """Store a batch, all of it or nothing."""
        totals = self._after(batch)
        try:
            with self._undoing():
                self._write(batch, totals)
        except sqlite3.Error as error:
            raise UnavailableError(
                f"nothing could be stored: {error}",
                hint="make room on the disk of the state folder; what runs goes on meanwhile",
                where=str(self.folder),
            ) from None
        self._totals = totals
        self._state = batch.state
        # Not undone where this fails: the batch is stored, and whoever reads next will find it.
        self._commit_sequence.record(totals.commit)

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        """Leave no transaction open, whatever went wrong: the next commit must find none."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._writer.rollback()
            raise

    def _after(self, batch: Batch) -> StoredTotals:
        commit = self._totals.commit + 1
        return StoredTotals(
            commit=commit,
            state_commit=self._totals.state_commit if batch.state is self._state else commit,
            last_number=batch.last_number,
            last_sequence=batch.last_sequence,
            num_attempts=batch.num_attempts,
            num_checkpoints=batch.num_checkpoints,
            num_keys=self._totals.num_keys + len(batch.keys),
        )

    def _write(self, batch: Batch, totals: StoredTotals) -> None:
        first = self._totals.num_checkpoints + 1
        new = [job for job in batch.jobs if job.number >= batch.first_new_number]
        self._writer.execute("BEGIN IMMEDIATE")
        self._put(schema.SPEC, map(schema.spec_row, new))
        self._put(schema.JOB, map(schema.job_row, batch.jobs))
        self._put(schema.ATTEMPT, map(schema.attempt_row, batch.attempts))
        checkpoints = enumerate(batch.checkpoints, first)
        self._put(schema.CHECKPOINT, (schema.checkpoint_row(n, one) for n, one in checkpoints))
        self._put(schema.EVENT, map(schema.event_row, batch.events))
        self._put(schema.KEY, map(schema.key_row, batch.keys))
        self._put(schema.FLEET, [totals_row(totals)])
        change = None
        if totals.state_commit == totals.commit:
            change = self._parts.changed(batch.state)
            self._put(schema.PART, (schema.sealed(*part) for part in change.written.items()))
            gone = ((name,) for name in change.gone)
            self._writer.executemany("DELETE FROM part WHERE name = ?", gone)
            self._writer.execute("DELETE FROM state")
            self._put(schema.STATE, [schema.sealed(totals.commit, change.head())])
        if totals.last_sequence // _DROP_EVERY > self._totals.last_sequence // _DROP_EVERY:
            oldest = totals.last_sequence - MAX_EVENTS
            self._writer.execute("DELETE FROM event WHERE sequence <= ?", (oldest,))
        self._writer.execute("COMMIT")
        if change is not None:
            self._parts.accept(change)

    def _put(self, table: StoredTable, rows: Iterable[Row]) -> None:
        self._writer.executemany(table.put_sql, rows)

    # ── reading ──

    def load(self) -> Loaded:
        """All that is not over."""
        jobs = {job.number: job for status in LIVE for job in self._jobs_of(status)}
        attempts: dict[int, tuple[AttemptRecord, ...]] = {}
        rest = "WHERE phase = 'open' ORDER BY job, attempt"
        for record in map(schema.attempt_of, self._rows(schema.ATTEMPT, rest)):
            attempts[record.job] = (*attempts.get(record.job, ()), record)
        rest = "WHERE number IN (SELECT max(number) FROM checkpoint GROUP BY job)"
        newest = map(schema.checkpoint_of, self._rows(schema.CHECKPOINT, rest))
        return Loaded(
            state=self._load_state(jobs),
            jobs=dict(sorted(jobs.items())),
            attempts=attempts,
            checkpoints={one.job: one for one in newest if one.job in jobs},
            totals=self._totals,
        )

    def _load_state(self, jobs: Mapping[int, JobRecord]) -> FleetState | None:
        rows = self._rows(schema.STATE, "")
        if not rows:
            return None
        rows_of_parts = self._rows(schema.PART, "")
        parts = {name: body for name, body in map(_opened_part, rows_of_parts)}
        state = joined(schema.opened(schema.STATE, rows[0])[-1], parts)
        self._parts.begin_with(state, parts)
        known = {number: jobs.get(number) or self.job(number) for number in numbers_in(state)}
        return state.but(names={n: job.spec.name if job else "" for n, job in known.items()})

    def job(self, number: int) -> JobRecord | None:
        """A job, whether it has ended or not."""
        return next(self._jobs("WHERE job.number = ?", number), None)

    def jobs(
        self, after: int = 0, limit: int = 100, status: JobStatus | None = None
    ) -> list[JobRecord]:
        """Jobs in order of their numbers, those after one of them."""
        if status is None:
            rest = "WHERE job.number > ? ORDER BY job.number LIMIT ?"
            return list(self._jobs(rest, after, limit))
        rest = "WHERE job.number > ? AND job.status = ? ORDER BY job.number LIMIT ?"
        return list(self._jobs(rest, after, status, limit))

    def newest_jobs(self, status: JobStatus, limit: int) -> list[JobRecord]:
        """The last jobs of a status, in order of their numbers."""
        rest = "WHERE job.status = ? ORDER BY job.number DESC LIMIT ?"
        return list(self._jobs(rest, status, limit))[::-1]

    def attempts(self, number: int) -> list[AttemptRecord]:
        """All attempts of a job, the oldest first."""
        rows = self._rows(schema.ATTEMPT, "WHERE job = ? ORDER BY attempt", number)
        return list(map(schema.attempt_of, rows))

    def held_since(self, since_s: float) -> Iterator[tuple[AttemptRecord, str, str]]:
        """Attempts that held devices after a moment, with the user and the team of their jobs."""
        rows = self._asked(
            "SELECT attempt.job, attempt.attempt, attempt.phase, attempt.body, attempt.crc, "
            "json_extract(CAST(job.body AS TEXT), '$.owner'), "
            "json_extract(CAST(spec.body AS TEXT), '$.team') FROM attempt "
            "JOIN job ON job.number = attempt.job JOIN spec ON spec.number = attempt.job "
            "WHERE coalesce(json_extract(CAST(attempt.body AS TEXT), '$.ended_s'), 1e300) > ?",
            (since_s,),
        )
        for row in rows:
            yield schema.attempt_of(row[:5]), row[5] or "", row[6] or ""

    def checkpoints(self, number: int) -> list[CheckpointRecord]:
        """All checkpoints of a job, the oldest first."""
        rows = self._rows(schema.CHECKPOINT, "WHERE job = ? ORDER BY number", str(number))
        return list(map(schema.checkpoint_of, rows))

    def events(self, after: int = 0, limit: int = 100) -> list[EventRecord]:
        """Events after an event, the oldest first."""
        rest = "WHERE sequence > ? ORDER BY sequence LIMIT ?"
        return list(map(schema.event_of, self._rows(schema.EVENT, rest, after, limit)))

    def key(self, key: str) -> KeyRecord | None:
        """The job that an idempotency key made."""
        rows = self._rows(schema.KEY, "WHERE key = ?", key)
        return schema.key_of(rows[0]) if rows else None

    def _jobs_of(self, status: JobStatus) -> Iterator[JobRecord]:
        return self._jobs("WHERE job.status = ?", status)

    def _jobs(self, rest: str, *values: object) -> Iterator[JobRecord]:
        sql = (
            "SELECT job.number, job.status, job.body, job.crc, spec.number, spec.body, spec.crc "
            f"FROM job JOIN spec USING (number) {rest}"
        )
        for row in self._asked(sql, values):
            yield schema.job_of(row[:4], row[4:])

    def _rows(self, table: StoredTable, rest: str, *values: object) -> list[Row]:
        return self._asked(table.select_sql(rest), values)

    def _asked(self, sql: str, values: tuple[object, ...]) -> list[Row]:
        with self._reading:
            try:
                return self._reader.execute(sql, values).fetchall()
            except OverflowError:
                # Numbers beyond what sqlite counts with: no row has such a one.
                return []
            except sqlite3.Error as error:
                raise UnavailableError(f"the store cannot be read: {error}") from None


def _opened_part(row: Row) -> tuple[str, bytes]:
    name, body = schema.opened(schema.PART, row)
    return name, body


# ── opening ──────────────────────────────────────────────────────────────────────────────────────


def _connected(folder: Path, mode: str) -> sqlite3.Connection:
    """A connection that waits for disks, not for luck."""
    path = folder / folders.DATABASE
    if mode == "rwc":
        # Made here: sqlite would let others read it, and a mode set later leaves time for that.
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
        # A round of a large fleet writes hundreds of kilobytes: large pages, seldom moved from the
        # log, take half the time of the defaults.
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}")
    return connection


def _commit_sequence(folder: Path) -> CommitSequence:
    """Made before the database: as long as it has seen no commit, nothing was promised."""
    if folders.is_fresh(folder):
        return CommitSequence.create(folder, secrets.token_bytes(16))
    try:
        return CommitSequence.open(folder)
    except InputFileError as error:
        raise folders.damaged(folder, error.message) from None


def _verify(folder: Path, writer: sqlite3.Connection, commit_sequence: CommitSequence) -> None:
    """Make the tables of a new store, or check those of an old one."""
    if commit_sequence.number == 0 and not writer.execute("SELECT * FROM sqlite_master").fetchall():
        _create(writer, commit_sequence)
        folders.synced(folder)
    migrated(folder, writer)
    check_schema(folder, writer)
    check_rows(folder, writer)
    identity = writer.execute("SELECT body FROM meta WHERE name = 'identity'").fetchone()
    if identity is None or identity[0] != commit_sequence.identity.hex().encode():
        raise folders.damaged(
            folder, "the database is that of another fleet than its commit sequence"
        )
    commit = read_totals(writer).commit
    if commit < commit_sequence.number:
        lost = commit_sequence.number - commit
        what = f"the database is older than its commit sequence: {lost} commits are missing"
        raise folders.damaged(folder, what)
    if commit > commit_sequence.number:
        commit_sequence.record(commit)


def _create(writer: sqlite3.Connection, commit_sequence: CommitSequence) -> None:
    writer.execute("BEGIN IMMEDIATE")
    for sql in schema.create_sqls():
        writer.execute(sql)
    rows = [
        schema.sealed("format", b"hocket-fleet"),
        schema.sealed("identity", commit_sequence.identity.hex().encode()),
    ]
    writer.executemany(schema.META.put_sql, rows)
    writer.execute(schema.FLEET.put_sql, totals_row(StoredTotals()))
    writer.execute("COMMIT")
