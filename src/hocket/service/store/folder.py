"""The state folder: made private, checked before its database is opened, set aside on request."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path

from hocket.base.errors import InputFileError, system_reason
from hocket.service.plain_file import trust_problem
from hocket.service.store import lock

DATABASE = "fleet.db"
# Prefix of the folders that hold content that was set aside.
_SET_ASIDE = "damaged-"
_TRACES = ("jobs", "attempts")
"""Folders that are filled only once a fleet has run jobs."""


def prepared(folder: Path) -> None:
    """Create the folder, for its owner only, if it is missing.

    An existing folder is refused if others own it or may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trouble = trust_problem(os.stat(folder), is_secret=False)
    except OSError as error:
        raise unusable(folder, error) from None
    if trouble:
        hint = "name a folder of your own with --state; one that is missing is made"
        raise InputFileError(
            f"the state folder cannot be trusted: {trouble}", hint=hint, where=str(folder)
        )
    for name in PRIVATE:
        check_private(folder / name)


# Files of the state that must be private to their owner.
PRIVATE = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", lock.NAME)


def check_private(path: Path) -> None:
    """Refuse a file of the state that others own, can read or may write, or that is no plain file.

    A missing file is accepted.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(path.parent, error) from None
    is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    trouble = trust_problem(found, is_secret=True) if is_plain else "it is no plain file"
    if trouble:
        hint = f"look at it, then chmod 600 {path}" if is_plain else "look who put it there"
        raise InputFileError(
            f"this file of the state cannot be trusted: {trouble}", hint=hint, where=str(path)
        )


def unusable(folder: Path, error: OSError) -> InputFileError:
    """Error for a state folder that cannot be written."""
    return InputFileError(
        f"the state folder cannot be used: {system_reason(error)}",
        hint="name a folder on a disk with free space that you may write to",
        where=str(folder),
    )


def is_full(error: Exception) -> bool:
    """True if sqlite reported a full disk, which does not mean a damaged database."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def full(folder: Path) -> InputFileError:
    """Error for a full disk."""
    return InputFileError(
        "the disk of the state folder is full",
        hint="free space on it and start again; nothing was changed",
        where=str(folder),
    )


def damaged(folder: Path, what: str) -> InputFileError:
    """Error for a store that the service must not start from."""
    return InputFileError(
        what,
        hint="bring the folder back from a backup; or stop what its jobs left running and start "
        "with --discard-state, which sets the old content aside and begins without jobs",
        where=str(folder / DATABASE),
    )


def refuse_lost_database(folder: Path) -> None:
    """Raise `InputFileError` where jobs were run from a folder whose database is gone or empty."""
    if any((folder / name).is_dir() and any((folder / name).iterdir()) for name in _TRACES):
        raise damaged(folder, "the database is missing, but jobs were run from this folder")


def set_aside(folder: Path) -> Path | None:
    """Move everything except the lock into a new folder and return it; None if there was
    nothing."""
    entries = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.name != lock.NAME and not entry.name.startswith(_SET_ASIDE)
    ]
    if not entries:
        return None
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = folder / f"{_SET_ASIDE}{date}-{os.urandom(3).hex()}"
    target.mkdir(mode=0o700)
    for entry in entries:
        os.rename(entry, target / entry.name)
    return target
