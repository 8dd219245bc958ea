"""The state in parts: it comes back whole, and little of it is written."""

from __future__ import annotations

import os
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.fake_executor import fleet_devices
from service.store_story import batch, content, packed, read
from service.test_snapshot import states

from hocket.base.errors import InputFileError
from hocket.fleet.rounds import Job, Rules, Submit, new_state, step
from hocket.fleet.rounds.state import FleetState
from hocket.service.errors import UnavailableError
from hocket.service.store import Store, schema
from hocket.service.store import store as store_module
from hocket.service.store.commit_sequence import CommitSequence
from hocket.service.store.store import join_state, split_state


@settings(derandomize=True, deadline=None, max_examples=40)
@given(state=states(), block_bytes=st.sampled_from([8, 24, 8192]))
def test_a_state_in_parts_comes_back_exactly(state, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "BLOCK_BYTES", block_bytes)
        parts = split_state(state)
        assert packed(join_state(parts).but(names=state.names)) == packed(state)
        assert split_state(join_state(parts)) == parts


def filled(num_jobs: int) -> FleetState:
    jobs = tuple(Job(number=n, name="x" * 20, steps_per_s=(1.0, 2.0)) for n in range(1, num_jobs))
    state = new_state(("v100", "k80"), fleet_devices(v100=4, k80=4), Rules(), time_s=5.0)
    return step(state, Submit(time_s=6.0, jobs=jobs))[0]


def test_one_more_job_among_thousands_is_little_to_write():
    state = filled(5000)
    before = split_state(state)
    one = Job(number=5000, name="one", steps_per_s=(1.0, 2.0))
    after = split_state(step(state, Submit(time_s=7.0, jobs=(one,)))[0])
    changed = [body for name, body in after.items() if before.get(name) != body]
    assert sum(map(len, changed)) < sum(map(len, before.values())) / 4
    assert len(after["head"]) < 20_000


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
            first = dict(store._parts)
    second = dict(store._parts)
    store.close()
    changed = [name for name, body in second.items() if first.get(name) != body]
    assert changed
    for name in changed:
        tampered(tmp_path, schema.PART.put_sql, *schema.sealed(name, first[name]))
        with pytest.raises(InputFileError, match="not that of the last commit"):
            Store.open(tmp_path)
        tampered(tmp_path, schema.PART.put_sql, *schema.sealed(name, second[name]))
    Store.open(tmp_path).close()


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
