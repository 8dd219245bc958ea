"""Store a split as a folder: table, parts as ONNX files, validation data, hashes.

Reading executes no code and checks the hash of every file that serving needs. The table is written
last, so a folder with a table is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.jsonfile import dump_json, read_json
from hocket.base.regular import read_regular
from hocket.classes.table import PartTable

TABLE, VALIDATION, REPORT = "table.json", "validation.json", "report.html"
_MAX_TABLE_BYTES = 64 * 2**20
_MAX_PART_BYTES = 4 * 2**30


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder of parts that has been read and checked."""

    path: Path
    table: PartTable
    validation: Mapping[str, Any]
    models: tuple[bytes, ...]
    """ONNX files of the parts: exactly the bytes whose hashes were checked."""


def write_folder(
    path: Path, table: PartTable, files: Mapping[str, bytes], validation: Mapping[str, Any]
) -> PartTable:
    """Write a folder and return the table with the hashes of its files."""
    path.mkdir(parents=True, exist_ok=True)
    every = {**files, VALIDATION: dump_json(dict(validation))}
    # Without a table the folder counts as incomplete until the new table is written.
    (path / TABLE).unlink(missing_ok=True)
    for name, content in every.items():
        write_atomically(path / name, content)
    hashes = {name: _digest(content) for name, content in every.items()}
    hashed = table.model_copy(update={"hashes": hashes})
    write_atomically(path / TABLE, dump_json(hashed.to_data()))
    return hashed


def read_folder(path: Path | str) -> Folder:
    """Read a folder of parts; raises `InputFileError` if it was changed or is incomplete."""
    path = Path(path)
    file = path / TABLE
    if not file.is_file():
        raise InputFileError(
            f"holds no {TABLE}", hint="name a folder that hocket split has written", where=str(path)
        )
    table = PartTable.from_data(read_json(file, _MAX_TABLE_BYTES), str(file))
    models = tuple(_checked(path, part.onnx, table) for part in table.parts)
    _checked(path, VALIDATION, table)
    validation = read_json(path / VALIDATION, _MAX_TABLE_BYTES)
    if not isinstance(validation, dict):
        raise InputFileError("is no object", where=str(path / VALIDATION))
    return Folder(path, table, validation, models)


def _checked(path: Path, name: str, table: PartTable) -> bytes:
    content = read_regular(path / name, _MAX_PART_BYTES)
    if table.hashes.get(name) != _digest(content):
        raise InputFileError(
            f"is not the file that {TABLE} was written with",
            hint="copy or make the folder again",
            where=str(path / name),
        )
    return content


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
