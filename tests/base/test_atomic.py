"""Files are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import stat

import pytest

from hocket.base.atomic import write_atomically, write_together
from hocket.base.errors import UsageError


def test_write_replaces_the_content_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    for content in (b"first", b"second, longer"):
        write_atomically(target, content)
        assert target.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_write_obeys_the_umask_and_keeps_permissions_of_an_existing_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    write_atomically(tmp_path / "new", b"y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604


def test_write_follows_a_symbolic_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_write_keeps_the_old_content_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match="No space left on device"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_one_who_is_killed_while_it_writes_leaves_the_old_content(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    child = os.fork()
    if not child:
        os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_together({tmp_path / "b": b"other", tmp_path / "a": b"new"})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
    assert not (tmp_path / "b").exists()


def _open_paths():
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed by now
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def test_writes_that_succeed_and_fail_leave_no_descriptor_and_no_name(tmp_path):
    (tmp_path / "folder").mkdir()
    umask = os.umask(0)
    try:
        write_atomically(tmp_path / "open to all", b"x")
    finally:
        os.umask(umask)
    with pytest.raises(UsageError):
        write_together({tmp_path / "folder": b"", tmp_path / "z": b""})
    assert not [path for path in _open_paths() if path.startswith(str(tmp_path))]
    assert stat.S_IMODE((tmp_path / "open to all").stat().st_mode) == 0o666
    assert sorted(os.listdir(tmp_path)) == ["folder", "open to all"]


@pytest.mark.parametrize("name", ["missing/a.json", "", "nul\0"])
def test_write_to_an_impossible_place_is_a_usage_error_with_a_hint(tmp_path, name):
    with pytest.raises(UsageError, match="cannot write") as caught:
        write_atomically(f"{tmp_path}/{name}", b"x")
    assert caught.value.hint
    assert caught.value.where == f"{tmp_path}/{name}"


def test_write_to_a_device_writes_directly():
    write_atomically("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_write_to_a_pipe_writes_directly():
    reader, writer = os.pipe()
    try:
        write_atomically(f"/dev/fd/{writer}", b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    finally:
        os.close(reader)
        os.close(writer)


def test_write_to_a_named_pipe_keeps_the_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, b"x")
        assert os.read(reader, 100) == b"x"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_write_to_a_pipe_without_a_reader_raises_a_broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(BrokenPipeError):
            write_atomically(f"/dev/fd/{writer}", b"x")
    finally:
        os.close(writer)
