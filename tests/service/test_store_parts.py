"""The state in parts: it comes back whole, and little of it is written."""

from __future__ import annotations

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
from hocket.service.store import Store, snapshot
from hocket.service.store.snapshot import join_state, split_state


@settings(derandomize=True, deadline=None, max_examples=40)
@given(state=states(), block_bytes=st.sampled_from([8, 24, 8192]))
def test_a_state_in_parts_comes_back_exactly(state, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "BLOCK_BYTES", block_bytes)
        parts = split_state(state)
        assert packed(join_state(parts).but(names=state.names)) == packed(state)
        assert split_state(join_state(parts)) == parts


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_a_state_of_which_any_byte_or_part_is_another_is_refused(data):
    parts = split_state(filled(40))
    name = data.draw(st.sampled_from(sorted(parts)))
    body = bytearray(parts[name])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    for damaged in (
        {**parts, name: bytes(body)},
        {**parts, name: parts[name] + b"x"},
        {other: parts[other] for other in parts if other != name},
        {**{other: parts[other] for other in parts if other != name}, f"{name}1": parts[name]},
    ):
        with pytest.raises(InputFileError, match="damaged"):
            join_state(damaged)


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


# ── durability ───────────────────────────────────────────────────────────────────────────────────


def test_a_commit_waits_for_the_disk(tmp_path):
    store = Store.open(tmp_path)
    for connection in (store._writer, store._reader):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


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
