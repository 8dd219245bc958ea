"""Write files atomically: a reader sees the old content or the new one, never a mixture."""

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
    temporaries: dict[Path, Path] = {}
    try:
        for path, data in contents.items():
            with _as_input_error(path):
                if not _is_special(path):
                    target = Path(os.path.realpath(path))
                    temporaries[target] = target.parent / f".{secrets.token_hex(8)}.tmp"
                    _write_new(temporaries[target], target, data)
        for path, data in contents.items():
            with _as_input_error(path):
                if _is_special(path):
                    # Opened by the given path, because a pipe has no real path, only a text such as
                    # ``pipe:[4711]``.
                    with open(path, "wb") as special:
                        special.write(data)
        # Renames come last: all contents are on disk by now, so they can hardly fail half-way.
        for target in [*temporaries]:
            with _as_input_error(target):
                os.replace(temporaries[target], target)
            del temporaries[target]
            _sync_folder(target.parent)
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _write_new(temporary: Path, target: Path, data: bytes) -> None:
    """Write and flush a new file with the permissions of its target."""
    # tempfile is not used, because its files have mode 0600 whatever the umask says.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        if target.exists():
            os.fchmod(descriptor, target.stat().st_mode & 0o7777)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


@contextlib.contextmanager
def _as_input_error(path: str | Path) -> Iterator[None]:
    """Convert operating system errors to `UsageError` with a hint."""
    try:
        yield
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does: that is no wrong path, and the command
        # line treats it as success.
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


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that the new name survives a power failure.

    Does nothing on file systems that cannot flush folders.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
