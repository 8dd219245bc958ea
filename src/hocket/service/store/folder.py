"""The state folder: made private, looked at before its database is, set aside on request."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path

from hocket.base.errors import InputFileError, system_reason
from hocket.service.plain_file import whose_trouble
from hocket.service.store import commit_sequence, lock

DATABASE = "fleet.db"
_SET_ASIDE = "damaged-"
_TRACES = ("jobs", "attempts")
"""Folders that only a fleet that ran has something in."""


def prepared(folder: Path) -> None:
    """Make the folder where it is missing, for its owner only; one that was there is taken as it
    is, or refused where others own it or may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trouble = whose_trouble(os.stat(folder), is_secret=False)
    except OSError as error:
        raise unusable(folder, error) from None
    if trouble:
        hint = "name a folder of your own with --state; one that is missing is made"
        raise InputFileError(
            f"the state folder cannot be trusted: {trouble}", hint=hint, where=str(folder)
        )
    for name in PRIVATE:
        check_private(folder / name)


PRIVATE = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", commit_sequence.NAME, lock.NAME)


def check_private(path: Path) -> None:
    """Refuse a file of the state that others own, can read or may write, or that is no plain file;
    one that is missing is none of these."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(path.parent, error) from None
    is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    trouble = whose_trouble(found, is_secret=True) if is_plain else "it is no plain file"
    if trouble:
        hint = f"look at it, then chmod 600 {path}" if is_plain else "look who put it there"
        raise InputFileError(
            f"this file of the state cannot be trusted: {trouble}", hint=hint, where=str(path)
        )


def synced(folder: Path) -> None:
    """Put on disk which files there are; their own content is the business of who wrote it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unusable(folder: Path, error: OSError) -> InputFileError:
    """For a folder that cannot be written."""
    return InputFileError(
        f"the state folder cannot be used: {system_reason(error)}",
        hint="name a folder on a disk with free space that you may write to",
        where=str(folder),
    )


def is_full(error: Exception) -> bool:
    """True if sqlite found the disk full, which is no damage."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def full(folder: Path) -> InputFileError:
    """Error for a full disk."""
    return InputFileError(
        "the disk of the state folder is full",
        hint="free space on it and start again; nothing was changed",
        where=str(folder),
    )


def damaged(folder: Path, what: str) -> InputFileError:
    """For a store that must not be started from."""
    return InputFileError(
        what,
        hint="bring the folder back from a backup; or stop what its jobs left running and start "
        "with --discard-state, which sets the old content aside and begins without jobs",
        where=str(folder / DATABASE),
    )


def is_fresh(folder: Path) -> bool:
    """True if no fleet was ever here; raises `InputFileError` where one was and its database, or
    its commit sequence, is gone."""
    has_database = (folder / DATABASE).exists()
    if (folder / commit_sequence.NAME).exists():
        return False
    if has_database:
        raise damaged(folder, "the commit sequence of the database is missing")
    if (folder / f"{DATABASE}-wal").exists() or _has_traces(folder):
        raise damaged(folder, "the database is missing, but jobs were run from this folder")
    return True


def _has_traces(folder: Path) -> bool:
    return any((folder / name).is_dir() and any((folder / name).iterdir()) for name in _TRACES)


def set_aside(folder: Path) -> Path | None:
    """Move everything but the lock into a folder of its own; None where there was nothing."""
    entries = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.name != lock.NAME and not entry.name.startswith(_SET_ASIDE)
    ]
    if not entries:
        return None
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{_SET_ASIDE}{date}{suffix}" for suffix in ("", *(f"-{n}" for n in range(1, 1000))))
    target = next(folder / name for name in names if not (folder / name).exists())
    target.mkdir(mode=0o700)
    for entry in entries:
        os.rename(entry, target / entry.name)
    return target
