"""Write checkpoints atomically: into a temporary folder, flushed to disk, then renamed.

A lock on the temporary folder distinguishes checkpoints in progress from those of killed writers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from hocket.base.locks import try_lock, wait_for_lock

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_UNFINISHED = ".tmp"


def write_checkpoint(
    folder: str | os.PathLike[str], step: int, write: Callable[[Path], object]
) -> Path:
    """Call ``write`` with a new folder below ``folder``, and return the folder's final path.

    The path appears only after everything in it is on disk. Existing checkpoints are never
    replaced: a second one of the same step is named ``step-100.1``, and so on. Incomplete folders
    of killed writers are removed.
    """
    parent = Path(os.path.abspath(folder))
    _make_folder(parent)
    _remove_unfinished(parent)
    temporary, lock = _new_folder(parent)
    try:
        write(temporary)
        _sync(temporary)
        path = _name(temporary, parent / f"step-{step}")
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    finally:
        os.close(lock)
    _sync_one(parent)
    return path


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_one(folder.parent)


def _new_folder(parent: Path) -> tuple[Path, int]:
    """Create a temporary checkpoint folder and lock it, so that other writers do not remove it."""
    while True:
        folder = parent / f".{secrets.token_hex(8)}{_UNFINISHED}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        # Without locks try_lock returns False, so no writer removes folders and no lock is needed.
        with contextlib.suppress(OSError):
            wait_for_lock(lock)
        if folder.exists():
            return folder, lock
        # Another writer removed the folder as an abandoned one before it was locked: try again.
        os.close(lock)


def _remove_unfinished(parent: Path) -> None:
    for folder in parent.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _name(temporary: Path, path: Path) -> Path:
    """Rename to the first free name; ``rename`` replaces an empty folder."""
    candidate, count = path, 0
    while True:
        try:
            os.rename(temporary, candidate)
            return candidate
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        count += 1
        candidate = path.with_name(f"{path.name}.{count}")


def _sync(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            _sync_one(Path(place, name))
        _sync_one(Path(place))


def _sync_one(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
