"""Results of finished steps, kept on disk, so that an interrupted split goes on where it was.

Each step has a key, a digest of all that its result depends on; a result under another key is made
again. Arrays are in safetensors files, written whole or not at all; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.atomic import write_atomically
from hocket.base.errors import UsageError

Arrays = Mapping[str, np.ndarray[Any, Any]]


def key_of(*values: object) -> str:
    """A digest of values that JSON can write, of arrays and of bytes."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(json.dumps(value, sort_keys=True, default=str).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def digest_of_state(state: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """A digest of a network's weights."""
    return key_of(*(part for name in sorted(state) for part in (name, state[name])))


@dataclass(frozen=True)
class Saved:
    """The result of a step."""

    arrays: Arrays
    info: Any


class Steps:
    """The results in one folder."""

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

    def get(self, name: str, key: str) -> Saved | None:
        """The result of a step, if it was made from the same things."""
        from safetensors import SafetensorError, safe_open

        path = self._path(name)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != key:
                    return None
                arrays = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
        return Saved(arrays, json.loads(metadata.get("info", "null")))

    def put(self, name: str, key: str, arrays: Arrays, info: object = None) -> Saved:
        """Keep the result of a step."""
        from safetensors.numpy import save

        whole = {each: np.ascontiguousarray(value) for each, value in arrays.items()}
        content = save(whole, metadata={"key": key, "info": json.dumps(info)})
        write_atomically(self._path(name), content)
        return Saved(arrays, info)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
