"""Writing files so that a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from hocket.base.errors import UsageError


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data``; raises `UsageError` where that is impossible.

    A symbolic link keeps pointing at its target, and a target that exists keeps its permissions.
    Devices and pipes (``/dev/stdout``) cannot be replaced and are written directly; a pipe whose
    reader went away raises `BrokenPipeError`.
    """
    write_together({path: data})


def write_together(contents: Mapping[str | Path, bytes]) -> None:
    """As `write_atomically` for files that belong together: all are replaced, or none.

    All contents are on the disk before the first name changes, so a full disk changes nothing.
    """
    prepared: dict[Path, Path] = {}
    try:
        for path, data in contents.items():
            with _told(path):
                if not _is_special(path):
                    target = Path(os.path.realpath(path))
                    prepared[target] = _prepared(target, data)
        for path, data in contents.items():
            with _told(path):
                if _is_special(path):
                    # Not the real path: a pipe has none, only a text such as ``pipe:[4711]``.
                    _write_directly(path, data)
        for target in [*prepared]:
            with _told(target):
                os.replace(prepared[target], target)
            del prepared[target]
            _sync_folder(target.parent)
    finally:
        for temporary in prepared.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """Errors of the system as what a person can do about them."""
    try:
        yield
    except BrokenPipeError:
        # The reader went away, as `| head` does: for the caller no wrong path, but the end.
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot write {str(path)!r}: {reason}",
            hint="name a file in an existing folder that you may write to",
            where=str(path),
        ) from error


def _is_special(path: str | Path) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _write_directly(path: str | Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _prepared(target: Path, data: bytes) -> Path:
    """A file beside the target that holds its new content, durably."""
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    # Not tempfile: its files are private to the user whatever the umask says.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if target.exists():
                os.fchmod(descriptor, target.stat().st_mode & 0o7777)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
