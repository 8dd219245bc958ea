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
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
from hocket.service.store import schema
from hocket.service.store.batch import Batch, KeyRecord
from hocket.service.store.commit_sequence import CommitSequence
from hocket.service.store.lock import FolderLock
from hocket.service.store.schema import Row, StoredTable
from hocket.service.store.snapshot import put_together, take_apart

MAX_EVENTS = 100_000
"""Older ones are dropped: what happened to jobs is in their own rows."""
BLOCK_BYTES = 8192
_DROP_EVERY = 1_000
_PAGE_BYTES = 16_384
_LOG_BYTES = 16 * 2**20
_TOTALS, _HEAD = "totals", "head"


@dataclass(frozen=True, kw_only=True)
class StoredTotals:
    """Counts of rows after the last commit: missing rows are found by them."""

    commit: int = 0
    last_number: int = 0
    last_sequence: int = 0
    num_attempts: int = 0
    num_checkpoints: int = 0
    num_keys: int = 0
    seal: int = 0
    """Checksum of all parts of the state: one that belongs to another commit is found."""

    @property
    def row(self) -> Row:
        """Totals as they are stored."""
        return schema.sealed(_TOTALS, json.dumps(asdict(self)).encode())


def _read_totals(connection: sqlite3.Connection) -> StoredTotals:
    row = connection.execute(schema.META.select_sql("WHERE name = ?"), (_TOTALS,)).fetchone()
    if row is None:
        raise InputFileError("the database holds no totals")
    return StoredTotals(**json.loads(schema.opened(schema.META, row)[-1]))


# The state in small parts, so that a commit writes only those that changed.
#
# Arrays are cut into blocks, and the table of jobs into its columns before: most events change the
# moment up to which all jobs are counted and little else. Names of jobs are left out, for the rows
# of jobs have them.


def split_state(state: FleetState) -> dict[str, bytes]:
    """The parts of a state by name; O(bytes)."""
    head, arrays = take_apart(state.but(names={}))
    parts = {_HEAD: head}
    for at, array in enumerate(arrays):
        columns = [array[name] for name in array.dtype.names or ()] or [array]
        for column, values in enumerate(columns):
            body = values.tobytes()
            for start in range(0, len(body), BLOCK_BYTES):
                parts[f"{at}/{column}/{start}"] = body[start : start + BLOCK_BYTES]
    return parts


def join_state(parts: Mapping[str, bytes]) -> FleetState:
    """Inverse of `split_state`; raises `InputFileError` for anything else."""
    found: dict[int, dict[tuple[int, int], bytes]] = {}
    for name, body in parts.items():
        if name != _HEAD:
            at, column, start = map(int, name.split("/"))
            found.setdefault(at, {})[column, start] = body
    head = parts[_HEAD]
    arrays = []
    for at, (kind, *shape) in enumerate(json.loads(head)["arrays"]):
        blocks = found.get(at, {})
        data = b"".join(blocks[key] for key in sorted(blocks))
        if kind == "job" and data:
            data = np.frombuffer(data, np.int64).reshape(-1, shape[0]).T.tobytes()
        arrays.append(data)
    return put_together(head, arrays)


def seal_of(parts: Mapping[str, bytes]) -> int:
    """Checksum of names and bodies, in any order."""
    seal = 0
    for name in sorted(parts):
        seal = zlib.crc32(parts[name], zlib.crc32(name.encode(), seal))
    return seal


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
    try:
        counts = {table.name: _count_sound(connection, table) for table in schema.TABLES}
        totals = _read_totals(connection)
    except InputFileError as error:
        raise folders.damaged(folder, str(error)) from None
    (first,) = connection.execute("SELECT coalesce(min(sequence), 1) FROM event").fetchone()
    expected = {
        schema.META.name: 2,
        schema.SPEC.name: totals.last_number,
        schema.JOB.name: totals.last_number,
        schema.ATTEMPT.name: totals.num_attempts,
        schema.CHECKPOINT.name: totals.num_checkpoints,
        schema.KEY.name: totals.num_keys,
        schema.EVENT.name: totals.last_sequence - first + 1,
    }
    if seal_of(dict(connection.execute("SELECT name, body FROM part"))) != totals.seal:
        raise folders.damaged(folder, "the state is not that of the last commit")
    for name, num in expected.items():
        if counts[name] != num:
            what = f"table {name!r} has {counts[name]} rows where {num} were stored"
            raise folders.damaged(folder, what)


def _count_sound(connection: sqlite3.Connection, table: StoredTable) -> int:
    """Rows of a table, all of whose checksums hold."""
    num = 0
    for row in connection.execute(table.select_sql("")):
        schema.opened(table, row)
        num += 1
    return num


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
        self._totals = _read_totals(writer)
        self._state: FleetState | None = None
        """The one that is stored; a commit that leaves it alone need not write it again."""
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
        """Unique identity of this fleet, by which engines recognize its attempts."""
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
        try:
            with self._undoing():
                parts = self._parts if batch.state is self._state else split_state(batch.state)
                totals = self._write(batch, parts)
        except sqlite3.Error as error:
            raise UnavailableError(
                f"nothing could be stored: {error}",
                hint="free space on the disk of the state folder; what runs goes on meanwhile",
                where=str(self.folder),
            ) from None
        self._totals, self._state, self._parts = totals, batch.state, parts
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

    def _write(self, batch: Batch, parts: dict[str, bytes]) -> StoredTotals:
        before = self._totals
        totals = StoredTotals(
            commit=before.commit + 1,
            last_number=batch.last_number,
            last_sequence=batch.last_sequence,
            num_attempts=batch.num_attempts,
            num_checkpoints=batch.num_checkpoints,
            num_keys=before.num_keys + len(batch.keys),
            seal=before.seal if parts is self._parts else seal_of(parts),
        )
        new = [job for job in batch.jobs if job.number >= batch.first_new_number]
        changed = [
            schema.sealed(name, body)
            for name, body in parts.items()
            if self._parts.get(name) != body
        ]
        row = schema.record_row
        self._writer.execute("BEGIN IMMEDIATE")
        self._put(schema.SPEC, map(schema.spec_row, new))
        self._put(schema.JOB, (row(one, one.number, one.status) for one in batch.jobs))
        attempts = (
            row(one, one.job, one.attempt, int(one.ended_s is None)) for one in batch.attempts
        )
        self._put(schema.ATTEMPT, attempts)
        checkpoints = enumerate(batch.checkpoints, before.num_checkpoints + 1)
        self._put(schema.CHECKPOINT, (row(one, number, one.job) for number, one in checkpoints))
        self._put(schema.EVENT, (row(one, one.sequence) for one in batch.events))
        self._put(schema.KEY, (row(one, one.key) for one in batch.keys))
        self._put(schema.META, [totals.row])
        self._put(schema.PART, changed)
        gone = ((name,) for name in self._parts if name not in parts)
        self._writer.executemany("DELETE FROM part WHERE name = ?", gone)
        if totals.last_sequence // _DROP_EVERY > before.last_sequence // _DROP_EVERY:
            oldest = totals.last_sequence - MAX_EVENTS
            self._writer.execute("DELETE FROM event WHERE sequence <= ?", (oldest,))
        self._writer.execute("COMMIT")
        return totals

    def _put(self, table: StoredTable, rows: Iterable[Row]) -> None:
        self._writer.executemany(table.put_sql, rows)

    # ── reading ──

    def load(self) -> Loaded:
        """All that is not over."""
        jobs = {job.number: job for status in LIVE for job in self._jobs_of(status)}
        attempts: dict[int, tuple[AttemptRecord, ...]] = {}
        record: AttemptRecord
        for record in self._records(schema.ATTEMPT, "WHERE is_open ORDER BY job, attempt"):
            attempts[record.job] = (*attempts.get(record.job, ()), record)
        rest = "WHERE number IN (SELECT max(number) FROM checkpoint GROUP BY job)"
        return Loaded(
            state=self._load_state(jobs) if self._parts else None,
            jobs=dict(sorted(jobs.items())),
            attempts=attempts,
            checkpoints={
                one.job: one for one in self._records(schema.CHECKPOINT, rest) if one.job in jobs
            },
            totals=self._totals,
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
        return self._records(schema.ATTEMPT, "WHERE job = ? ORDER BY attempt", number)

    def held_since(self, since_s: float) -> Iterator[tuple[AttemptRecord, str, str]]:
        """Attempts that held devices after a moment, with the user and the team of their jobs."""
        rows = self._asked(
            "SELECT attempt.job, attempt.attempt, attempt.is_open, attempt.body, attempt.crc, "
            "json_extract(CAST(job.body AS TEXT), '$.owner'), "
            "json_extract(CAST(spec.body AS TEXT), '$.team') FROM attempt "
            "JOIN job ON job.number = attempt.job JOIN spec ON spec.number = attempt.job "
            "WHERE coalesce(json_extract(CAST(attempt.body AS TEXT), '$.ended_s'), 1e300) > ?",
            (since_s,),
        )
        for row in rows:
            yield schema.ATTEMPT.read(row[:5]), row[5] or "", row[6] or ""

    def checkpoints(self, number: int) -> list[CheckpointRecord]:
        """All checkpoints of a job, the oldest first."""
        return self._records(schema.CHECKPOINT, "WHERE job = ? ORDER BY number", number)

    def events(self, after: int = 0, limit: int = 100) -> list[EventRecord]:
        """Events after an event, the oldest first."""
        rest = "WHERE sequence > ? ORDER BY sequence LIMIT ?"
        return self._records(schema.EVENT, rest, after, limit)

    def key(self, key: str) -> KeyRecord | None:
        """The job that an idempotency key made."""
        return next(iter(self._records(schema.KEY, "WHERE key = ?", key)), None)

    def _jobs_of(self, status: JobStatus) -> Iterator[JobRecord]:
        return self._jobs("WHERE job.status = ?", status)

    def _jobs(self, rest: str, *values: object) -> Iterator[JobRecord]:
        sql = (
            "SELECT job.number, job.status, job.body, job.crc, spec.number, spec.body, spec.crc "
            f"FROM job JOIN spec USING (number) {rest}"
        )
        for row in self._asked(sql, values):
            yield schema.job_of(row[:4], row[4:])

    def _records(self, table: StoredTable, rest: str, *values: object) -> list[Any]:
        return [table.read(row) for row in self._asked(table.select_sql(rest), values)]

    def _asked(self, sql: str, values: tuple[object, ...]) -> list[Row]:
        with self._reading:
            try:
                return self._reader.execute(sql, values).fetchall()
            except OverflowError:
                # Numbers beyond what sqlite counts with: no row has such a one.
                return []
            except sqlite3.Error as error:
                raise UnavailableError(f"the store cannot be read: {error}") from None


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
    check_schema(folder, writer)
    check_rows(folder, writer)
    identity = writer.execute("SELECT body FROM meta WHERE name = 'identity'").fetchone()
    if identity is None or identity[0] != commit_sequence.identity.hex().encode():
        raise folders.damaged(
            folder, "the database is that of another fleet than its commit sequence"
        )
    commit = _read_totals(writer).commit
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
    identity = schema.sealed("identity", commit_sequence.identity.hex().encode())
    writer.executemany(schema.META.put_sql, [identity, StoredTotals().row])
    writer.execute("COMMIT")
