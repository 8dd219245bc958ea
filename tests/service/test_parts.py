"""The state in parts: it comes back whole, little of it is written, older forms are read."""

from __future__ import annotations

import json
import os
import sqlite3
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.fake_executor import fleet_devices
from service.store_story import batch, content, read
from service.test_snapshot import states

from hocket.base.errors import InputFileError
from hocket.fleet.rounds import Job, Rules, Submit, Tick, new_state, step
from hocket.fleet.rounds.state import BLANK, JOB_RECORD, FleetState
from hocket.service.errors import UnavailableError
from hocket.service.store import Store, parts, schema, snapshot
from hocket.service.store.commit_sequence import CommitSequence


class Shelf:
    """What a database would hold."""

    def __init__(self) -> None:
        self.parts = parts.StoredParts()
        self.rows: dict[str, bytes] = {}
        self.head = b""

    def put(self, state: FleetState) -> int:
        """Bytes that were written, the head not counted."""
        change = self.parts.changed(state)
        self.rows.update(change.written)
        for name in change.gone:
            del self.rows[name]
        self.head = change.head()
        self.parts.accept(change)
        return sum(map(len, change.written.values()))

    def taken(self) -> FleetState:
        return parts.joined(self.head, self.rows)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(story=st.lists(states(), min_size=1, max_size=4), rows=st.sampled_from([1, 2, 3, 1024]))
def test_whatever_was_stored_before_the_state_comes_back_exactly(story, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "BLOCK_ROWS", rows)
        shelf = Shelf()
        for state in story:
            shelf.put(state)
            back = shelf.taken().but(names=state.names)
            assert snapshot.pack(back) == snapshot.pack(state)
        # A daemon that begins with what it read goes on writing what differs, and no more.
        again = parts.StoredParts()
        again.begin_with(shelf.taken(), shelf.rows)
        assert again.changed(shelf.taken()).written == {}


def filled(num_jobs: int) -> FleetState:
    jobs = tuple(Job(number=n, name="x" * 20, steps_per_s=(1.0, 2.0)) for n in range(1, num_jobs))
    state = new_state(("v100", "k80"), fleet_devices(v100=4, k80=4), Rules(), time_s=5.0)
    return step(state, Submit(time_s=6.0, jobs=jobs))[0]


def test_one_more_job_among_thousands_is_little_to_write():
    state, shelf = filled(5000), Shelf()
    shelf.put(state)
    one = Job(number=5000, name="one", steps_per_s=(1.0, 2.0))
    after = step(state, Submit(time_s=7.0, jobs=(one,)))[0]
    assert shelf.put(after) < len(snapshot.pack(state)) / 10
    assert len(shelf.head) < 20_000
    assert snapshot.pack(shelf.taken().but(names=after.names)) == snapshot.pack(after)
    after = step(after, Tick(time_s=after.next_tick_s))[0]
    shelf.put(after)
    assert snapshot.pack(shelf.taken().but(names=after.names)) == snapshot.pack(after)


def test_parts_of_another_commit_are_refused():
    shelf = Shelf()
    shelf.put(filled(20))
    before = dict(shelf.rows)
    shelf.put(step(shelf.taken().but(names={}), Tick(time_s=400.0))[0])
    changed = [name for name in before if before[name] != shelf.rows.get(name)]
    assert changed
    for name in changed:
        with pytest.raises(InputFileError, match="not that of the last commit"):
            parts.joined(shelf.head, {**shelf.rows, name: before[name]})
    for head in (b"{}", shelf.head[:-5], shelf.head.replace(b'"version":2', b'"version":3')):
        with pytest.raises((InputFileError, ValueError, KeyError)):
            parts.joined(head, shelf.rows)


def tampered(folder, sql, *values):
    connection = sqlite3.connect(folder / "fleet.db")
    connection.execute(sql, values)
    connection.commit()
    connection.close()


def test_a_state_of_another_commit_is_not_started_from(tmp_path):
    """Each row is sound by itself; only together they are not what the last commit stored."""
    store = Store.open(tmp_path)
    for number in (1, 2):
        store.commit(batch(number))
        if number == 1:
            rows = [store._rows(table, "") for table in (schema.STATE, schema.PART)]
    store.close()
    (head,) = rows[0]
    for key in (head[0], 2):
        tampered(tmp_path, "DELETE FROM state")
        row = schema.sealed(key, head[1])
        tampered(tmp_path, schema.STATE.put_sql, *row)
        if key == 1:
            with pytest.raises(InputFileError, match="not that of the last commit"):
                Store.open(tmp_path)
    name, body, _ = rows[1][0]
    other = bytes([body[0] ^ 1]) + body[1:]
    tampered(tmp_path, schema.PART.put_sql, *schema.sealed(name, other))
    with pytest.raises(InputFileError, match="not that of the last commit"):
        Store.open(tmp_path)


# ── older forms ──────────────────────────────────────────────────────────────────────────────────


def as_schema_1(folder, state: FleetState) -> None:
    """Make a database look as the first version left it: one blob, with fewer columns."""
    packed = snapshot.pack(state)
    (length,) = struct.unpack_from(">Q", packed)
    head = json.loads(packed[8 : 8 + length])
    old = [
        name
        for name in head["columns"]
        if name not in ("preemptible", "losses", "user", "reserved_s")
    ]
    arrays = list(snapshot.taken_apart(state)[1].values())
    head["columns"] = old
    # Rules that came and went since.
    head["state"]["fields"]["rules"]["fields"].pop("reserve_after_s")
    head["state"]["fields"]["rules"]["fields"]["max_losses"] = 3
    dtype = np.dtype([(name, JOB_RECORD[name]) for name in old])
    bodies = []
    for array in arrays:
        if array.dtype == JOB_RECORD:
            rows = np.empty(len(array), dtype)
            for name in old:
                rows[name] = array[name]
            array = rows
        bodies.append(array.tobytes())
    text = json.dumps(head).encode()
    blob = struct.pack(">Q", len(text)) + text + b"".join(bodies)
    connection = sqlite3.connect(folder / "fleet.db")
    connection.execute("DROP TABLE part")
    (commit,) = connection.execute("SELECT only FROM state").fetchone()
    connection.execute(schema.STATE.put_sql, schema.sealed(commit, blob))
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()


def test_a_state_folder_of_the_first_version_opens(tmp_path):
    store = Store.open(tmp_path)
    state = filled(3)
    for number in (1, 2):
        two = batch(number)
        store.commit(type(two)(**{**vars(two), "state": state.but(time_s=state.time_s + number)}))
    before = content(store)
    store.close()
    as_schema_1(tmp_path, state.but(time_s=state.time_s + 2))
    assert read(tmp_path) == before
    assert read(tmp_path) == before, "and again, as one of this version"
    rows = Store.open(tmp_path)
    loaded = rows.load().state
    rows.close()
    assert loaded is not None
    assert loaded.names == {1: "job 1", 2: "job 2"}
    assert set(loaded.jobs.rows["preemptible"].tolist()) == {BLANK["preemptible"]}


# ── durability ───────────────────────────────────────────────────────────────────────────────────


def test_a_commit_waits_for_the_disk_before_it_is_told(tmp_path, monkeypatch):
    store = Store.open(tmp_path)
    for connection in (store._writer, store._reader):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    calls = []

    def noted(name):
        real = getattr(os, name)

        def call(descriptor, *values):
            calls.append((name, descriptor))
            return real(descriptor, *values)

        return call

    for name in ("pwrite", "fdatasync"):
        monkeypatch.setattr(os, name, noted(name))
    store.commit(batch(1))
    commit_sequence = store._commit_sequence._descriptor
    assert calls == [("pwrite", commit_sequence), ("fdatasync", commit_sequence)]
    store.close()
    found = CommitSequence.open(tmp_path)
    assert found.number == 1
    found.close()


def test_the_commit_sequence_is_told_after_the_database_and_of_this_commit(tmp_path, monkeypatch):
    store = Store.open(tmp_path)
    seen = []

    def record(number):
        other = sqlite3.connect(tmp_path / "fleet.db")
        seen.append((number, len(other.execute("SELECT * FROM job").fetchall())))
        other.close()

    monkeypatch.setattr(store._commit_sequence, "record", record)
    for number in (1, 2):
        store.commit(batch(number))
    assert seen == [(1, 1), (2, 2)]
    store.close()


def test_a_new_store_puts_its_names_on_disk_before_it_is_used(tmp_path, monkeypatch):
    """Files whose folder was not synced may be gone after a power cut, whatever is in them."""
    synced = []
    real = os.fsync

    def noted(descriptor):
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            synced.append(sorted(path.name for path in tmp_path.iterdir()))
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Store.open(tmp_path).close()
    assert synced
    assert {"fleet.db", "commit-sequence"} <= set(synced[-1])


class FullDisk:
    """A connection whose next COMMIT finds no room."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real
        self._is_full = True

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if sql == "COMMIT" and self._is_full:
            self._is_full = False
            raise sqlite3.OperationalError("database or disk is full")
        return self._real.execute(sql, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def test_a_commit_that_finds_no_room_at_its_end_leaves_the_next_one_whole(tmp_path):
    store = Store.open(tmp_path)
    first, second = batch(1), batch(2)
    state = filled(3).but(time_s=200.0)
    store.commit(first)
    store._writer = FullDisk(store._writer)  # type: ignore[assignment]
    changed = type(second)(**{**vars(second), "state": state})
    with pytest.raises(UnavailableError, match="full"):
        store.commit(changed)
    store.commit(changed)
    before = content(store)
    store.close()
    assert read(tmp_path) == before


def test_a_write_of_the_commit_sequence_that_was_cut_leaves_the_one_before(tmp_path):
    commit_sequence = CommitSequence.create(tmp_path, b"0" * 16)
    path = tmp_path / "commit-sequence"
    for number in range(1, 5):
        before = path.read_bytes()
        commit_sequence.record(number)
        after = path.read_bytes()
        changed = [at for at, byte in enumerate(after) if byte != before[at]]
        # As a disk that wrote half of a sector leaves it.
        cut = bytearray(after)
        cut[min(changed)] ^= 0xFF
        path.write_bytes(cut)
        found = CommitSequence.open(tmp_path)
        assert found.number == number - 1
        found.close()
        path.write_bytes(after)
    commit_sequence.close()


def test_a_commit_sequence_of_two_fleets_is_refused(tmp_path):
    CommitSequence.create(tmp_path, b"0" * 16).close()
    path = tmp_path / "commit-sequence"
    one = path.read_bytes()
    CommitSequence.create(tmp_path, b"1" * 16).close()
    path.write_bytes(one[: len(one) // 2] + path.read_bytes()[len(one) // 2 :])
    with pytest.raises(InputFileError, match="commit sequence is damaged"):
        CommitSequence.open(tmp_path)


def test_the_commit_sequence_of_an_earlier_version_is_taken_over(tmp_path):
    store = Store.open(tmp_path)
    identity = store.identity
    store.close()
    (tmp_path / "commit-sequence").rename(tmp_path / "witness")
    store = Store.open(tmp_path)
    assert store.identity == identity
    store.close()
    assert not (tmp_path / "witness").exists()
