"""The store: what was committed comes back, and nothing else is ever started from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.fake_executor import fleet_devices

from hocket.errors import InputFileError
from hocket.fleet.rounds.state import Rules, new_state
from hocket.service.errors import UnavailableError
from hocket.service.records import (
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    JobRecord,
)
from hocket.service.spec import JobSpec
from hocket.service.store import Store, schema, snapshot
from hocket.service.store import store as store_module
from hocket.service.store.batch import Batch, KeyRecord
from hocket.service.store.witness import Witness

STATE = new_state(("v100", "k80"), fleet_devices(v100=2, k80=1), Rules(), time_s=100.0)


def job(number: int, **changes: object) -> JobRecord:
    spec = JobSpec(name=f"job {number}", command=("python", "train.py"), gang=number)
    values = {"number": number, "spec": spec, "status": "queued", "submitted_s": 1.5, **changes}
    return JobRecord(**values)  # type: ignore[arg-type]


def attempt(number: int, **changes: object) -> AttemptRecord:
    values: dict[str, object] = {
        "job": number, "attempt": 1, "devices": ("v100-0",), "kind": "v100", "token": "secret",
        "decided_s": 2.5, **changes,
    }  # fmt: skip
    return AttemptRecord(**values)  # type: ignore[arg-type]


def batch(number: int) -> Batch:
    """The nth of a story: each submits a job, starts it and commits a checkpoint."""
    return Batch(
        state=STATE.but(time_s=100.0 + number),
        jobs=[job(number, status="running", devices=("v100-0",), done_steps=0.1 + number)],
        attempts=[attempt(number, started_s=3.25)],
        checkpoints=[CheckpointRecord(job=number, attempt=1, step=7.0, path="/c", committed_s=4.0)],
        events=[
            EventRecord(
                sequence=number, time_s=1.0, kind="submitted", job=number, detail={"name": "ä"}
            )
        ],
        keys=[KeyRecord(key=f"key-{number}", body_hash="00", job=number)],
        first_new_number=number,
        last_number=number,
        last_sequence=number,
        num_attempts=number,
        num_checkpoints=number,
    )


def content(store: Store) -> tuple[object, ...]:
    """All that a store tells."""
    loaded = store.load()
    state = None if loaded.state is None else snapshot.pack(loaded.state)
    numbers = range(1, loaded.totals.last_number + 1)
    return (
        state,
        loaded.jobs,
        loaded.attempts,
        loaded.checkpoints,
        loaded.totals,
        store.jobs(),
        [store.attempts(number) for number in numbers],
        [store.checkpoints(number) for number in numbers],
        store.events(),
        [store.key(f"key-{number}") for number in numbers],
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, tuple[object, ...]]:
    """A folder after four commits as a crash leaves it (with a log), one after a clean end, and
    what both hold."""
    top = tmp_path_factory.mktemp("story")
    store = Store.open(top / "live")
    for number in range(1, 4):
        store.commit(batch(number))
    store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.commit(batch(4))
    held = content(store)
    shutil.copytree(top / "live", top / "crashed")
    store.close()
    return top / "crashed", top / "live", held


def read(folder: Path) -> tuple[object, ...]:
    store = Store.open(folder)
    try:
        return content(store)
    finally:
        store.close()


def test_all_that_was_committed_comes_back(story):
    crashed, clean, held = story
    assert (crashed / "fleet.db-wal").stat().st_size > 0
    assert held[4].commit == 4  # type: ignore[attr-defined]
    for name, folder in (("crashed", crashed), ("clean", clean)):
        copy = folder.parent / f"{name}-read"
        shutil.copytree(folder, copy)
        assert read(copy) == held


def test_jobs_are_listed_by_number_and_status(tmp_path):
    store = Store.open(tmp_path)
    for number in range(1, 4):
        store.commit(batch(number))
    ended = batch(3)
    changed = job(2, status="failed", version=2)
    counts = {"last_number": 3, "last_sequence": 3, "num_attempts": 3, "num_checkpoints": 3}
    store.commit(Batch(state=ended.state, jobs=[changed], first_new_number=4, **counts))  # type: ignore[arg-type]
    assert [one.number for one in store.jobs(after=1)] == [2, 3]
    assert [one.number for one in store.jobs(limit=2)] == [1, 2]
    assert store.jobs(status="failed") == [changed]
    assert store.job(2) == changed
    assert store.job(9) is None
    assert store.key("other") is None
    assert [one.sequence for one in store.events(after=1, limit=1)] == [2]
    assert set(store.load().jobs) == {1, 3}
    store.close()
    assert len(read(tmp_path)[5]) == 3  # type: ignore[arg-type]


def test_old_events_are_dropped_and_the_rest_is_still_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_EVENTS", 50)
    monkeypatch.setattr(store_module, "_DROP_EVERY", 10)
    store = Store.open(tmp_path)
    for first in range(1, 200, 20):
        events = [
            EventRecord(sequence=n, time_s=0.0, kind="round") for n in range(first, first + 20)
        ]
        store.commit(Batch(state=STATE, events=events, last_sequence=first + 19))
    assert [one.sequence for one in store.events()] == list(range(151, 201))
    store.close()
    Store.open(tmp_path).close()


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def damaged(folder: Path, copy: Path, name: str, change: Callable[[bytearray], object]) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    data = bytearray((copy / name).read_bytes())
    change(data)
    (copy / name).write_bytes(data)
    return copy


def _with(
    name: str, story: tuple[Path, Path, tuple[object, ...]]
) -> tuple[Path, tuple[object, ...]]:
    """The folder in which this file counts: a page that is in the log is not read elsewhere."""
    return story[1 if name == "fleet.db" else 0], story[2]


def is_refused_or_the_same(folder: Path, held: tuple[object, ...]) -> bool:
    """Whether it was refused; fails where it was opened and tells something else."""
    try:
        found = read(folder)
    except InputFileError:
        return True
    assert found == held
    return False


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "witness"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(story, tmp_path, name):
    folder, held = _with(name, story)
    content = (folder / name).read_bytes()
    # Most of a small database is the empty space of its pages.
    used = [at for at, byte in enumerate(content) if byte]
    refused = 0
    for at in used[:: max(len(used) // 120, 1)]:

        def flip(data: bytearray, at: int = at) -> None:
            data[at] ^= 1 << at % 8

        refused += is_refused_or_the_same(damaged(folder, tmp_path / "copy", name, flip), held)
    assert refused > {"fleet.db-wal": 110, "fleet.db": 40, "witness": -1}[name]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_a_row_with_any_changed_byte_is_refused(story, tmp_path_factory, data):
    """Not only where sqlite notices: the cell of a row is found in the file and changed."""
    _, folder, _ = story
    database = (folder / "fleet.db").read_bytes()
    marks = [b"train.py", b"secret", b"key-2", b'"path":"/c"', b"hocket-fleet", b'"commit"']
    mark = data.draw(st.sampled_from(marks))
    places = [match.start() for match in re.finditer(re.escape(mark), database)]
    at = data.draw(st.sampled_from(places)) + data.draw(st.integers(0, len(mark) - 1))

    def change(content: bytearray) -> None:
        content[at] ^= data.draw(st.integers(1, 255))

    copy = tmp_path_factory.getbasetemp() / "changed-row"
    with pytest.raises(InputFileError):
        read(damaged(folder, copy, "fleet.db", change))


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "witness"])
@pytest.mark.parametrize("quarter", range(4))
def test_a_truncated_file_is_refused(story, tmp_path, name, quarter):
    folder, held = _with(name, story)

    def cut(data: bytearray) -> None:
        del data[len(data) * quarter // 4 :]

    was_refused = is_refused_or_the_same(damaged(folder, tmp_path / "copy", name, cut), held)
    if name == "witness" and quarter >= 2:
        return  # One slot is left, and the database is not older than it.
    assert was_refused


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "witness"])
def test_a_missing_file_is_refused(story, tmp_path, name):
    shutil.copytree(story[0], tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(InputFileError, match=r"missing|older|cannot be used"):
        Store.open(tmp_path / "copy")


def test_a_database_and_witness_that_were_both_deleted_are_missed(tmp_path):
    (tmp_path / "jobs" / "1").mkdir(parents=True)
    with pytest.raises(InputFileError, match="jobs were run from this folder"):
        Store.open(tmp_path)


def test_an_older_copy_of_the_database_is_refused(tmp_path):
    store = Store.open(tmp_path / "a")
    store.commit(batch(1))
    store.close()
    old = (tmp_path / "a" / "fleet.db").read_bytes()
    store = Store.open(tmp_path / "a")
    store.commit(batch(2))
    store.close()
    (tmp_path / "a" / "fleet.db").write_bytes(old)
    with pytest.raises(InputFileError, match="1 commits are missing"):
        Store.open(tmp_path / "a")


def test_the_database_of_another_fleet_is_refused(tmp_path):
    for name in ("a", "b"):
        store = Store.open(tmp_path / name)
        store.commit(batch(1))
        store.close()
    shutil.copy(tmp_path / "a" / "fleet.db", tmp_path / "b" / "fleet.db")
    with pytest.raises(InputFileError, match="another fleet"):
        Store.open(tmp_path / "b")


@pytest.mark.parametrize(("version", "age"), [(0, "older"), (2, "newer")])
def test_another_schema_is_refused(story, tmp_path, version, age):
    shutil.copytree(story[1], tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / "fleet.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(InputFileError, match=age) as refused:
        Store.open(tmp_path / "copy")
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("table", [table.name for table in schema.TABLES])
def test_a_deleted_row_is_missed(story, tmp_path, table):
    """Deleted the right way, so that sqlite has nothing to complain about."""
    shutil.copytree(story[1], tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / "fleet.db")
    rows = connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    assert rows.rowcount == 1
    connection.commit()
    connection.close()
    with pytest.raises(InputFileError):
        Store.open(tmp_path / "copy")


def test_discarding_sets_everything_aside_and_deletes_nothing(story, tmp_path):
    shutil.copytree(story[1], tmp_path / "copy")
    (tmp_path / "copy" / "witness").write_bytes(b"x")
    (tmp_path / "copy" / "jobs").mkdir()
    with pytest.raises(InputFileError, match="discard-state"):
        Store.open(tmp_path / "copy")
    store = Store.open(tmp_path / "copy", discard=True)
    assert store.jobs() == []
    store.close()
    (aside,) = (tmp_path / "copy").glob("damaged-*")
    assert (aside / "fleet.db").read_bytes() == (story[1] / "fleet.db").read_bytes()
    assert (aside / "jobs").is_dir()
    again = Store.open(tmp_path / "copy", discard=True)
    again.close()
    assert len(list((tmp_path / "copy").glob("damaged-*"))) == 2


# ── making and sharing ───────────────────────────────────────────────────────────────────────────


def test_files_are_private_to_their_owner(tmp_path):
    store = Store.open(tmp_path / "state")
    store.commit(batch(1))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    for entry in (tmp_path / "state").iterdir():
        assert entry.stat().st_mode & 0o077 == 0, entry
    store.close()


def test_a_start_that_was_killed_while_making_the_store_can_be_repeated(tmp_path):
    Witness.create(tmp_path, b"0" * 16).close()
    store = Store.open(tmp_path)
    store.commit(batch(1))
    assert len(store.jobs()) == 1
    store.close()
    (tmp_path / "half").mkdir()
    Witness.create(tmp_path / "half", b"0" * 16).close()
    (tmp_path / "half" / "fleet.db").write_bytes(b"")
    store = Store.open(tmp_path / "half")
    assert (store.jobs(), store.load().state) == ([], None)
    store.close()


def test_a_crash_between_commit_and_witness_loses_nothing(tmp_path):
    store = Store.open(tmp_path)
    store.commit(batch(1))
    store._witness.record = lambda number: (_ for _ in ()).throw(OSError(5, "broken"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        store.commit(batch(2))
    store.close()
    again = Store.open(tmp_path)
    assert len(again.jobs()) == 2
    again.commit(batch(3))
    again.close()


def test_a_second_store_on_one_folder_is_refused_and_names_the_first(tmp_path):
    store = Store.open(tmp_path)
    with pytest.raises(InputFileError, match=f"process {os.getpid()}"):
        Store.open(tmp_path)
    with pytest.raises(InputFileError, match="another daemon"):
        Store.open(tmp_path, discard=True)
    store.close()
    Store.open(tmp_path).close()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    program = (
        "import os, signal, sys; from hocket.service.store import Store;"
        "Store.open(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    Store.open(tmp_path).close()


def test_a_full_disk_refuses_a_commit_and_keeps_what_there_was(tmp_path):
    store = Store.open(tmp_path)
    store.commit(batch(1))
    held = content(store)
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    big = batch(2)
    spec = JobSpec(name="big", command=("x" * 4000,) * 100)
    full = Batch(
        state=big.state, jobs=[job(2, spec=spec)], first_new_number=2, last_number=2,
        last_sequence=1, num_attempts=1, num_checkpoints=1,
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(UnavailableError, match="full"):
            store.commit(full)
        assert content(store) == held
    store._writer.execute("PRAGMA max_page_count = 1000000")
    store.commit(full)
    assert store.job(2) is not None
    store.close()
    assert len(read(tmp_path)[5]) == 2  # type: ignore[arg-type]


@pytest.fixture
def small_disk(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    return path


def test_a_disk_without_room_is_told_from_a_damaged_store(small_disk):
    filler = fill(small_disk)
    with pytest.raises(InputFileError, match=r"full|No space") as told:
        Store.open(small_disk / "state")
    assert "discard" not in str(told.value)
    filler.unlink()
    store = Store.open(small_disk / "state")
    store.commit(batch(1))
    held = content(store)
    filler = fill(small_disk)
    for number in range(2, 200):
        try:
            store.commit(batch(number))
        except UnavailableError:
            break
        held = content(store)
    else:
        pytest.fail("the disk was never full")
    assert content(store) == held
    filler.unlink()
    store.close()
    again = Store.open(small_disk / "state")
    assert content(again) == held
    again.close()


def test_a_commit_that_breaks_midway_leaves_no_transaction_open(tmp_path, monkeypatch):
    store = Store.open(tmp_path)
    store.commit(batch(1))
    before = content(store)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "pack", lambda state: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            store.commit(batch(2))
    assert content(store) == before
    store.commit(batch(2))
    store.close()
    assert [one.number for one in read(tmp_path)[5]] == [1, 2]  # type: ignore[attr-defined]


def test_numbers_that_no_row_can_have_find_nothing(tmp_path):
    store = Store.open(tmp_path)
    store.commit(batch(1))
    assert store.job(10**30) is None
    assert store.attempts(-(10**30)) == store.events(after=10**30) == []
    store.close()


def test_a_start_that_was_killed_while_writing_the_witness_can_be_repeated(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("pwrite", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, killed)
            with pytest.raises(KeyboardInterrupt):
                Witness.create(tmp_path, b"x" * 16)
        assert not (tmp_path / "witness").exists()
    Store.open(tmp_path).close()
    assert not (tmp_path / "witness.new").exists()


@pytest.mark.parametrize("folder", ["/proc/hocket-fleet", "/dev/null/state"])
def test_a_folder_that_cannot_be_written_is_refused(folder):
    with pytest.raises(InputFileError, match="cannot be used") as refused:
        Store.open(folder)
    assert refused.value.exit_code == 3
