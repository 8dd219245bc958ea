"""Write files atomically: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from hocket.base.errors import UsageError, system_reason


def write_atomically(path: str | Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data``; raises `UsageError` if that is impossible.

    A symbolic link keeps pointing at its target, and an existing target keeps its permissions.
    Devices and pipes (``/dev/stdout``) cannot be replaced and are written directly; a pipe whose
    reader has closed raises `BrokenPipeError`.
    """
    write_together({path: data})


def write_together(contents: Mapping[str | Path, bytes]) -> None:
    """Like `write_atomically` for files that belong together: all are replaced, or none.

    All contents are on disk before the first file is renamed, so a full disk changes nothing.
    """
    temporaries: dict[Path, _TemporaryFile] = {}
    try:
        for path, data in contents.items():
            with _as_input_error(path):
                if not _is_special(path):
                    target = Path(os.path.realpath(path))
                    temporaries[target] = _written(target, data)
        for path, data in contents.items():
            with _as_input_error(path):
                if _is_special(path):
                    # Not the real path: a pipe has none, only a text such as ``pipe:[4711]``.
                    _write_directly(path, data)
        for target in [*temporaries]:
            with _as_input_error(target):
                temporaries[target].take_the_place_of(target)
            temporaries.pop(target).close()
            _sync_folder(target.parent)
    finally:
        for temporary in temporaries.values():
            temporary.close()


class _TemporaryFile:
    """New content of a file, without a name in the folder if the file system supports that.

    A process that is killed while it writes then leaves nothing behind.
    """

    def __init__(self, folder: Path) -> None:
        self._name: Path | None = None
        nameless = _open_nameless(folder)
        if nameless is not None:
            self.descriptor = nameless
            return
        name = _fresh_name(folder)
        # Not tempfile: its files are private to the user whatever the umask says.
        self.descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._name = name

    def take_the_place_of(self, target: Path) -> None:
        """Rename to the target."""
        if self._name is None:
            name = _fresh_name(target.parent)
            folder = os.open(target.parent, os.O_PATH)
            try:
                # With a folder given, links are followed: that of /proc leads to what is open.
                os.link(f"/proc/self/fd/{self.descriptor}", name.name, dst_dir_fd=folder)
            finally:
                os.close(folder)
            self._name = name
        os.replace(self._name, target)
        self._name = None

    def close(self) -> None:
        """Close the file and remove its temporary name, if it has one."""
        os.close(self.descriptor)
        if self._name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name)


def _open_nameless(folder: Path) -> int | None:
    """Open a file without a name in this folder (``O_TMPFILE``); None if that is not supported."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except OSError:
        return None


def _fresh_name(folder: Path) -> Path:
    return folder / f".{secrets.token_hex(8)}.tmp"


@contextlib.contextmanager
def _as_input_error(path: str | Path) -> Iterator[None]:
    """Convert operating system errors to `UsageError` with a hint."""
    try:
        yield
    except BrokenPipeError:
        # The reader went away, as `| head` does: for the caller no wrong path, but the end.
        raise
    except (OSError, ValueError) as error:
        reason = system_reason(error)
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


def _written(target: Path, data: bytes) -> _TemporaryFile:
    """Write and flush new content to a temporary file beside the target."""
    temporary = _TemporaryFile(target.parent)
    try:
        if target.exists():
            os.fchmod(temporary.descriptor, target.stat().st_mode & 0o7777)
        with open(temporary.descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(temporary.descriptor)
    except BaseException:
        temporary.close()
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that the new name survives a power cut, if the file system supports
    it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
