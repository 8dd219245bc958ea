"""Address of the service of a state folder, in a small file that each start rewrites."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import read_json

NAME = "endpoint.json"
_MAX_BYTES = 10_000


def write_endpoint(folder: Path, url: str) -> None:
    """Write the address of the service."""
    data = {"url": url, "pid": os.getpid()}
    write_atomically(folder / NAME, (json.dumps(data) + "\n").encode())


def read_endpoint(folder: Path) -> str:
    """The address of the service; raises `UsageError` if none was ever started."""
    path = folder / NAME
    # os.path.exists, because Path.exists raises an error for names that are too long.
    if not os.path.exists(path):
        hint = "wait until hocket fleet serve says that it serves, or name its folder with --state"
        raise UsageError(f"no fleet was ever served from {str(folder)!r}", hint=hint)
    content = read_json(path, _MAX_BYTES)
    url = content.get("url") if isinstance(content, dict) else None
    if not isinstance(url, str):
        hint = "start the service again"
        raise InputFileError("the file holds no address of a service", hint=hint, where=str(path))
    return url
