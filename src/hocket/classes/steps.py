"""Store results of finished steps on disk, so that an interrupted split can resume.

Each result is stored with a key, a digest of all that it depends on. A result with another key is
computed again. Arrays are in safetensors files, which are written atomically; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.atomic import write_atomically
from hocket.base.errors import UsageError

Arrays = Mapping[str, np.ndarray[Any, Any]]


def key_of(*values: object) -> str:
    """Digest of JSON-serialisable values, arrays and bytes."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(json.dumps(value, sort_keys=True, default=str).encode())
        # A separator, so that two values cannot be confused with one concatenated value.
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def digest_of_state(state: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Digest of a net's weights."""
    return key_of(*(part for name in sorted(state) for part in (name, state[name])))


class Steps:
    """Stored results in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the folder: {error.strerror}",
                hint="name a folder that you may write to with -o",
                where=str(folder),
            ) from None

    def get(self, name: str, key: str) -> Arrays | None:
        """Return the result of a step; None if there is none with this key."""
        from safetensors import SafetensorError, safe_open

        path = self._path(name)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                if (file.metadata() or {}).get("key") != key:
                    return None
                return {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        # A damaged file is treated as an unfinished step.
        except (SafetensorError, OSError):
            return None

    def put(self, name: str, key: str, arrays: Arrays) -> Arrays:
        """Store the result of a step, and return it."""
        from safetensors.numpy import save

        whole = {each: np.ascontiguousarray(value) for each, value in arrays.items()}
        write_atomically(self._path(name), save(whole, metadata={"key": key}))
        return arrays

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
