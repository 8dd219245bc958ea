"""A damaged, cut, older or foreign store is refused, and can be set aside."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from service.store_story import Story, read, tell_story

from hocket.base.errors import InputFileError
from hocket.service.store import Store


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell_story(tmp_path_factory.mktemp("story"))


def test_all_that_was_committed_comes_back(story):
    crashed, clean, held = story
    assert (crashed / "fleet.db-wal").stat().st_size > 0
    assert held[4] == (4, 4)
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


@pytest.mark.parametrize("quarter", range(4))
def test_a_truncated_database_is_refused(story, tmp_path, quarter):
    folder, _ = _with("fleet.db", story)

    def cut(data: bytearray) -> None:
        del data[len(data) * quarter // 4 :]

    copy = damaged(folder, tmp_path / "copy", "fleet.db", cut)
    (copy / "jobs" / "1").mkdir(parents=True)
    with pytest.raises(InputFileError):
        Store.open(copy)


def test_a_database_with_damaged_pages_is_refused(story, tmp_path):
    folder, _ = _with("fleet.db", story)
    size_bytes = (folder / "fleet.db").stat().st_size
    for page in range(1, size_bytes // 16_384):

        def spoil(data: bytearray, start: int = page * 16_384) -> None:
            data[start : start + 64] = b"\x5a" * 64

        with pytest.raises(InputFileError):
            Store.open(damaged(folder, tmp_path / "copy", "fleet.db", spoil))


def test_a_row_that_cannot_be_read_is_refused(story, tmp_path):
    shutil.copytree(story[1], tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / "fleet.db")
    connection.execute("UPDATE job SET body = '{\"number\": 1}' WHERE number = 1")
    connection.commit()
    connection.close()
    with pytest.raises(InputFileError, match="the database is damaged"):
        read(tmp_path / "copy")


def test_a_deleted_database_is_missed(tmp_path):
    (tmp_path / "jobs" / "1").mkdir(parents=True)
    with pytest.raises(InputFileError, match="jobs were run from this folder"):
        Store.open(tmp_path)


@pytest.mark.parametrize(("version", "age"), [(5, "older"), (7, "newer")])
def test_another_schema_is_refused(story, tmp_path, version, age):
    shutil.copytree(story[1], tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / "fleet.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(InputFileError, match=age) as refused:
        Store.open(tmp_path / "copy")
    assert refused.value.exit_code == 3
    assert "--discard-state" in str(refused.value.hint)


def test_discarding_sets_everything_aside_and_deletes_nothing(story, tmp_path):
    shutil.copytree(story[1], tmp_path / "copy")
    content = b"x" + (story[1] / "fleet.db").read_bytes()[1:]
    (tmp_path / "copy" / "fleet.db").write_bytes(content)
    (tmp_path / "copy" / "jobs").mkdir()
    with pytest.raises(InputFileError, match="discard-state"):
        Store.open(tmp_path / "copy")
    store = Store.open(tmp_path / "copy", discard=True)
    assert store.jobs() == []
    store.close()
    (aside,) = (tmp_path / "copy").glob("damaged-*")
    assert (aside / "fleet.db").read_bytes() == content
    assert (aside / "jobs").is_dir()
    again = Store.open(tmp_path / "copy", discard=True)
    again.close()
    assert len(list((tmp_path / "copy").glob("damaged-*"))) == 2
