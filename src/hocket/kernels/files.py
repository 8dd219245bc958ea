"""Disk cache of compiled kernels, checked against corruption.

A file holds the digest of its content, then the content, so truncated or damaged files are detected
and compiled again. Files are written to the folder that ``NUMBA_CACHE_DIR`` names. Without that
setting they are next to the kernel's source, in ``__pycache__``, or, if that folder cannot be
written, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from hocket.base import config
from hocket.base.atomic import write_atomically
from hocket.base.errors import UsageError
from hocket.kernels.dependencies import SourceFunction

_DIGEST_BYTES = 32
_messages: list[str] = []


def read(source: SourceFunction, digest: str, form: str) -> bytes | None:
    """Return a compiled form of a kernel from disk, or None if no intact file has it."""
    name = f"{_stem(source, digest)}.{form}.kernel"
    for folder in _folders(source):
        path = folder / name
        try:
            if not path.is_file():
                continue
            data = path.read_bytes()
        except OSError:
            continue
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == data[:_DIGEST_BYTES]:
            return content
        tell(f"the compiled kernel {str(path)!r} is damaged: compiled again")
    return None


def write(source: SourceFunction, digest: str, form: str, content: bytes) -> None:
    """Write a compiled form to the first writable folder; print one message if there is none."""
    reasons = []
    for folder in _folders(source):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{_stem(source, digest)}.{form}.kernel"
            write_atomically(path, hashlib.sha256(content).digest() + content)
            return
        except UsageError as error:
            reasons.append(error.message)
        except OSError as error:
            reasons.append(f"{error.strerror}: {str(folder)!r}")
    reason = reasons[0] if reasons else "there is no folder for them"
    tell(f"compiled kernels cannot be kept ({reason}): every run compiles them again")


def is_kept(source: SourceFunction, digest: str) -> bool:
    """Return True if any compiled form of a kernel is on disk."""
    pattern = f"{_stem(source, digest)}.*.kernel"
    return any(any(folder.glob(pattern)) for folder in _folders(source))


def tell(message: str) -> None:
    """Print a message about the kernel cache if it is the first one; most later ones repeat it."""
    if not _messages:
        sys.stderr.write(f"hocket: {message}\n")
    _messages.append(message)


def _stem(source: SourceFunction, digest: str) -> str:
    function = source.function
    name = f"{function.__module__.removeprefix('hocket.')}.{function.__name__}"
    return f"{name}.{sys.implementation.cache_tag}.{digest[:20]}"


def _folders(source: SourceFunction) -> list[Path]:
    chosen = config.kernel_folder()
    if chosen is not None:
        return [chosen]
    file = Path(source.function.__code__.co_filename)
    beside = [file.parent / "__pycache__"] if file.is_file() else []
    own = config.cache_folder()
    return beside if own is None else [*beside, own / "kernels"]
