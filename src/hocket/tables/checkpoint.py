"""A shard on disk: one .npz file of arrays and a JSON text, replaced as a whole, read without code.

It holds the rows, which changes of each client are in them, and the clocks of the clients; what
clients have sent since is sent by them again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.npz import read_npz
from hocket.tables.core.shard import ShardState
from hocket.tables.spec import Layout

FORMAT = "hocket.table-shard/1"
_ARRAYS = ("cells", "hidden", "applied", "clocks")


def write_checkpoint(path: Path, layout: Layout, shard: int, states: Sequence[ShardState]) -> None:
    """Replace the checkpoint of a shard."""
    text = json.dumps(_facts(layout, shard)).encode()
    arrays: dict[str, Any] = {"facts": np.frombuffer(text, np.uint8)}
    for number, state in enumerate(states):
        for name in _ARRAYS:
            arrays[f"{name}_{number}"] = getattr(state, name)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def read_checkpoint(path: Path, layout: Layout, shard: int, states: Sequence[ShardState]) -> None:
    """Put a checkpoint into the states of a shard; raises `InputFileError` if it is not theirs."""
    what, hint = "is no checkpoint of a shard", "give one that a shard has written, or a new name"
    found = read_npz(path, what=what, hint=hint)
    try:
        facts = json.loads(found["facts"].tobytes())
    except (KeyError, ValueError) as error:
        raise InputFileError(what, hint=hint, where=str(path)) from error
    expected = _facts(layout, shard)
    if facts != expected:
        keys = set(facts) | set(expected) if isinstance(facts, dict) else {"format"}
        differ = [key for key in sorted(keys) if not isinstance(facts, dict)
                  or facts.get(key) != expected.get(key)]  # fmt: skip
        raise InputFileError(
            f"is a checkpoint of another shard or other tables (differs in {', '.join(differ)})",
            hint="name another file, or start with the tables that wrote this one",
            where=str(path),
        )
    for number, state in enumerate(states):
        for name in _ARRAYS:
            target, source = getattr(state, name), found.get(f"{name}_{number}")
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                raise InputFileError(f"has no fitting {name!r} of table {number}", where=str(path))
            target[...] = source


def _facts(layout: Layout, shard: int) -> dict[str, Any]:
    tables = [
        [table.name, table.num_rows, table.width, table.is_adaptive] for table in layout.tables
    ]
    return {
        "format": FORMAT, "shard": shard, "shards": layout.num_shards,
        "clients": layout.num_clients, "tables": tables,
    }  # fmt: skip
