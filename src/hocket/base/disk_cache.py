"""Cache results that take seconds to compute as JSON files on disk.

The file name is a digest of the key, and the file contains the key too. Files that cannot be read
or written are ignored, and the result is computed again. ``HOCKET_DISK_CACHE=0`` disables the
cache.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hocket.base import config
from hocket.base.atomic import write_atomically
from hocket.base.errors import HocketError


def recall(kind: str, key: dict[str, Any]) -> Any:
    """Cached value of a key; None if there is none."""
    path = _path(kind, key)
    if path is None:
        return None
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        # The file name is a truncated digest, so the stored key is compared as well.
        if isinstance(found, dict) and found.get("key") == json.loads(_text(key)):
            return found.get("value")
    return None


def keep(kind: str, key: dict[str, Any], value: Any) -> None:
    """Store a JSON-serialisable value."""
    path = _path(kind, key)
    if path is None:
        return
    with suppress(OSError, HocketError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, "value": value}).encode())


def _path(kind: str, key: dict[str, Any]) -> Path | None:
    folder = config.cache_folder()
    if folder is None or not config.uses_disk_cache():
        return None
    return folder / kind / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


@cache
def source_digest() -> str:
    """Digest of hocket's own source code, so that changed code invalidates cached results."""
    folder, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
