"""Where compiled kernels are kept: bytes that are what was written, or nothing.

A file holds the digest of its content, then the content: one that was cut or damaged is not used.
Kernels are kept next to their sources, as Python keeps its own compiled form, or below the user's
cache folder where that cannot be written, or in the folder that ``NUMBA_CACHE_DIR`` names.
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
    """Stored form of a kernel."""
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
    """Keep a form of a kernel in the first folder that takes it; where none does, say so once."""
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
    """True if any form of a kernel is stored."""
    pattern = f"{_stem(source, digest)}.*.kernel"
    return any(any(folder.glob(pattern)) for folder in _folders(source))


def tell(message: str) -> None:
    """Print a message about the kernel cache: the first only, since others mostly repeat it."""
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
