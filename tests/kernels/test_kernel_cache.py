"""Compiled kernels on disk: found again, and never in the way when something is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.base.errors import UsageError
from hocket.kernels import files, is_compiled, kernel, progress

MANY = """
import sys
from hocket.kernels import kernel

@kernel
def add(left: int, right: int) -> int:
    return left + right

@kernel
def double(value: int) -> int:
    return add(value, value)

assert add(1, 2) + double(2) == 7
"""


def new_kernel() -> Any:
    @kernel
    def add(left: int, right: int) -> int:
        return left + right

    return add


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(files, "_messages", [])
    monkeypatch.setattr(progress, "_listeners", [])  # a command that ran before may have told
    return tmp_path / "kernels"


def test_a_kernel_is_compiled_once_and_then_read(folder, capsys) -> None:
    first = new_kernel()
    assert not is_compiled(first)
    assert first(1, 2) == 3
    (kept,) = folder.iterdir()
    second = new_kernel()
    assert is_compiled(second)
    assert second(3, 4) == 7
    assert sum(second.entry.stats.cache_hits.values()) == 1
    assert second(1.5, 2.0) == 3.5
    assert len(list(folder.iterdir())) == 2
    assert kept.stat().st_size > 0
    assert capsys.readouterr().err == ""


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "one byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "other file": lambda path: path.write_bytes(b"\x80\x04\x95" * 99),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again_and_replaced(damage, folder, capsys) -> None:
    assert new_kernel()(1, 2) == 3
    (kept,) = folder.iterdir()
    DAMAGES[damage](kept)
    again = new_kernel()
    assert again(3, 4) == 7
    assert "is damaged: compiled again" in capsys.readouterr().err
    assert sum(again.entry.stats.cache_hits.values()) == 0
    third = new_kernel()
    assert third(3, 4) == 7
    assert sum(third.entry.stats.cache_hits.values()) == 1


def test_content_that_the_compiler_cannot_load_is_compiled_again(folder, capsys) -> None:
    assert new_kernel()(1, 2) == 3
    (kept,) = folder.iterdir()
    _, _, _, digest, form, _ = kept.name.rsplit(".", 5)
    source = new_kernel()
    files.write(source, source.digest, form, b"no compiled form")
    assert digest == source.digest[:20]
    assert source(3, 4) == 7
    assert "cannot be loaded" in capsys.readouterr().err


def test_something_that_is_no_file_is_left_alone(folder) -> None:
    assert new_kernel()(1, 2) == 3
    (kept,) = folder.iterdir()
    kept.unlink()
    kept.mkdir()
    assert new_kernel()(3, 4) == 7


def test_a_full_disk_is_told_once(folder, capsys, monkeypatch) -> None:
    def fail(path, data) -> None:
        raise UsageError("cannot write: No space left on device")

    monkeypatch.setattr(files, "write_atomically", fail)
    assert new_kernel()(1, 2) == 3
    assert new_kernel()(1.0, 2) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot be kept (cannot write: No space left on device)" in error


def test_where_no_folder_can_be_written_kernels_are_compiled_all_the_same(tmp_path) -> None:
    # The script's folder cannot be written beside: a file stands where `__pycache__` would.
    (tmp_path / "__pycache__").write_text("in the way")
    script = tmp_path / "script.py"
    script.write_text(MANY)
    environment = {"PATH": "", "HOME": "/dev/null/home"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hocket: compiled kernels cannot be kept (File exists: ")


def test_the_users_cache_takes_what_cannot_be_kept_beside_the_source(tmp_path) -> None:
    (tmp_path / "__pycache__").write_text("in the way")
    script = tmp_path / "script.py"
    script.write_text(MANY)
    environment = {"PATH": "", "HOME": "/dev/null", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "cache/hocket/kernels").iterdir())) == 2
