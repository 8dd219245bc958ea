"""A damaged, cut, older or foreign store is refused, and can be set aside."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.store_story import Story, batch, read, tell_story

from hocket.base.errors import InputFileError
from hocket.service.store import Store, schema


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell_story(tmp_path_factory.mktemp("story"))


def test_all_that_was_committed_comes_back(story):
    crashed, clean, held = story
    assert (crashed / "fleet.db-wal").stat().st_size > 0
    assert held[4].commit == 4  # type: ignore[attr-defined]
    for name, folder in (("crashed", crashed), ("clean", clean)):
        copy = folder.parent / f"{name}-read"
        shutil.copytree(folder, copy)
        assert read(copy) == held


def damaged(folder: Path, copy: Path, name: str, change: Callable[[bytearray], object]) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    data = bytearray((copy / name).read_bytes())
    change(data)
    (copy / name).write_bytes(data)
    return copy


def _with(name: str, story: Story) -> tuple[Path, tuple[object, ...]]:
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


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "commit-sequence"])
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
    assert refused > {"fleet.db-wal": 110, "fleet.db": 40, "commit-sequence": -1}[name]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_a_row_with_any_changed_byte_is_refused(story, tmp_path_factory, data):
    """Not only where sqlite notices: the cell of a row is found in the file and changed."""
    _, folder, _ = story
    database = (folder / "fleet.db").read_bytes()
    marks = [b"train.py", b"secret", b"key-2", b'"path":"/c"', b'"commit"']
    mark = data.draw(st.sampled_from(marks))
    places = [match.start() for match in re.finditer(re.escape(mark), database)]
    at = data.draw(st.sampled_from(places)) + data.draw(st.integers(0, len(mark) - 1))

    def change(content: bytearray) -> None:
        content[at] ^= data.draw(st.integers(1, 255))

    copy = tmp_path_factory.getbasetemp() / "changed-row"
    with pytest.raises(InputFileError):
        read(damaged(folder, copy, "fleet.db", change))


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "commit-sequence"])
@pytest.mark.parametrize("quarter", range(4))
def test_a_truncated_file_is_refused(story, tmp_path, name, quarter):
    folder, held = _with(name, story)

    def cut(data: bytearray) -> None:
        del data[len(data) * quarter // 4 :]

    was_refused = is_refused_or_the_same(damaged(folder, tmp_path / "copy", name, cut), held)
    if name == "commit-sequence" and quarter >= 2:
        return  # One slot is left, and the database is not older than it.
    assert was_refused


@pytest.mark.parametrize("name", ["fleet.db", "fleet.db-wal", "commit-sequence"])
def test_a_missing_file_is_refused(story, tmp_path, name):
    shutil.copytree(story[0], tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(InputFileError, match=r"missing|older|cannot be used"):
        Store.open(tmp_path / "copy")


def test_a_database_and_commit_sequence_that_were_both_deleted_are_missed(tmp_path):
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


@pytest.mark.parametrize(("version", "age"), [(2, "older"), (4, "newer")])
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
    (tmp_path / "copy" / "commit-sequence").write_bytes(b"x")
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
