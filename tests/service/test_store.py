"""The store: what was committed comes back, and nothing else is ever started from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from service.store_story import STATE, batch, content, job, read

from hocket.base.errors import InputFileError
from hocket.service.errors import UnavailableError
from hocket.service.records import (
    EventRecord,
)
from hocket.service.spec import JobSpec
from hocket.service.store import Store
from hocket.service.store import store as store_module
from hocket.service.store.tables import Batch


def test_jobs_are_listed_by_number_and_status(tmp_path):
    store = Store.open(tmp_path)
    for number in range(1, 4):
        store.commit(batch(number))
    ended = batch(3)
    changed = job(2, status="failed", version=2)
    store.commit(Batch(state=ended.state, jobs=[changed], first_new_number=4))
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
        store.commit(Batch(state=STATE, events=events))
    assert [one.sequence for one in store.events()] == list(range(151, 201))
    store.close()
    Store.open(tmp_path).close()


# ── making and sharing ───────────────────────────────────────────────────────────────────────────


def test_files_are_private_to_their_owner(tmp_path):
    store = Store.open(tmp_path / "state")
    store.commit(batch(1))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    for entry in (tmp_path / "state").iterdir():
        assert entry.stat().st_mode & 0o077 == 0, entry
    store.close()


def test_a_start_that_was_killed_while_making_the_store_can_be_repeated(tmp_path):
    (tmp_path / "fleet.db").touch(mode=0o600)
    store = Store.open(tmp_path)
    assert (store.jobs(), store.load().state) == ([], None)
    store.commit(batch(1))
    assert len(store.jobs()) == 1
    store.close()


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
        state=big.state, jobs=[job(2, spec=spec)], first_new_number=2,
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
        patch.setattr(store_module, "split_state", lambda state: 1 // 0)
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


@pytest.mark.parametrize("folder", ["/proc/hocket-fleet", "/dev/null/state"])
def test_a_folder_that_cannot_be_written_is_refused(folder):
    with pytest.raises(InputFileError, match="cannot be used") as refused:
        Store.open(folder)
    assert refused.value.exit_code == 3
