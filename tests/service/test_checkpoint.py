"""Checkpoints that are whole or not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.checkpoint_folder import write_checkpoint


@given(contents=st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=50), max_size=3))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_a_checkpoint_has_all_that_was_written(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("checkpoints")

    def write(place):
        (place / "inner").mkdir()
        for name, data in contents.items():
            (place / "inner" / name).write_bytes(data)

    first, second = (write_checkpoint(folder, 100, write) for _ in range(2))
    assert (first.name, second.name) == ("step-100", "step-100.1")
    for path in (first, second):
        found = {one.name: one.read_bytes() for one in (path / "inner").iterdir()}
        assert found == contents


def test_a_checkpoint_that_failed_is_not_there(tmp_path):
    def fail(place: Path):
        (place / "part").write_text("half")
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        write_checkpoint(tmp_path, 1, fail)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path):
    abandoned = tmp_path / ".0123456789abcdef.tmp"
    abandoned.mkdir()
    (abandoned / "half").write_text("half")

    def write(place: Path):
        (place / "one").write_text("1")
        # Meanwhile another rank writes, too.
        write_checkpoint(tmp_path, 2, lambda other: (other / "two").write_text("2"))

    assert (write_checkpoint(tmp_path, 1, write) / "one").read_text() == "1"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_a_checkpoint_is_on_the_disk_before_it_has_a_name(tmp_path, monkeypatch):
    happened = []

    def note(function, name):
        def noting(first, *others):
            what = os.readlink(f"/proc/self/fd/{first}") if name == "sync" else first
            happened.append((name, Path(what).name))
            return function(first, *others)

        return noting

    monkeypatch.setattr(os, "fsync", note(os.fsync, "sync"))
    monkeypatch.setattr(os, "rename", note(os.rename, "rename"))
    write_checkpoint(tmp_path, 1, lambda place: [(place / name).touch() for name in "ab"])
    before, after = happened[:-2], happened[-2:]
    assert {("sync", "a"), ("sync", "b")} < set(before)
    assert len(before) == 3
    assert after[0][0] == "rename"
    assert after[1] == ("sync", tmp_path.name)


KILLED = """
import os, signal, sys
from hocket.base.checkpoint_folder import write_checkpoint
calls = 0
def trace(frame, event, argument):
    global calls
    calls += event == "call"
    if calls > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
def write(place):
    for name in "abc":
        (place / name).write_text(name * 1000)
sys.setprofile(trace)
write_checkpoint(sys.argv[1], 5, write)
"""


@pytest.mark.parametrize("calls", [0, 20, 50, 80, 100, 120, 10_000])
def test_a_named_checkpoint_is_whole_wherever_its_writer_is_killed(tmp_path, calls):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(calls)], check=False)
    named = [one for one in tmp_path.iterdir() if not one.name.startswith(".")]
    assert len(named) == (calls == 10_000) or named
    for path in named:
        assert {one.name: one.read_text() for one in path.iterdir()} == {
            name: name * 1000 for name in "abc"
        }


def test_folders_that_are_not_there_are_made_and_no_file_stays_open(tmp_path, monkeypatch):
    folder, is_there = tmp_path / "a" / "checkpoints", Path.exists
    open_before = len(os.listdir("/proc/self/fd"))
    # The first folder is taken for one that somebody left.
    looked = []
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path) or len(looked) > 1)
    write_checkpoint(folder, 1, lambda place: (place / "w").touch())
    monkeypatch.setattr(Path, "exists", is_there)
    assert len(os.listdir("/proc/self/fd")) == open_before
    write_checkpoint(folder, 2, lambda place: (place / "w").touch())
    assert sorted(one.name for one in folder.iterdir()) == ["step-1", "step-2"]
