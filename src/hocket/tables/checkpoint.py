"""A shard on disk: one .npz file of arrays and a JSON text, replaced as a whole, read without code.

It holds the rows, which changes of each client are in them, and the clocks of the clients; what
clients have sent since is sent by them again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, UsageError
from hocket.base.locks import try_lock
from hocket.base.npz import read_npz
from hocket.tables.core.shard import ShardState
from hocket.tables.spec import Layout

FORMAT = "hocket.table-shard/1"
_ARRAYS = ("cells", "hidden", "applied", "clocks")


class CheckpointFile:
    """The file of one running shard; a second shard on it is refused.

    The lock is a file beside it, which the kernel lets go with the process that held it.
    """

    def __init__(self, path: Path, layout: Layout, shard: int) -> None:
        self.path, self._facts = path, _facts(layout, shard)
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._lock = self._locked()

    def _locked(self) -> BinaryIO:
        while True:
            try:
                lock = open(self._lock_path, "ab")  # noqa: SIM115
            except OSError as error:
                raise UsageError(
                    f"no checkpoint can be written here: {error.strerror}",
                    hint="name a file in an existing folder that you may write to",
                    where=str(self.path),
                ) from None
            if not try_lock(lock.fileno()):
                lock.close()
                raise UsageError(
                    "another shard that runs writes its checkpoint here",
                    hint="end it, or name another file",
                    where=str(self.path),
                )
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self._lock_path)):
                    return lock
            lock.close()  # who held it has removed it in this moment

    def close(self) -> None:
        """Let another shard have the file."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
            self._lock.close()

    def write(self, states: Sequence[ShardState]) -> None:
        """Replace what is in the file; raises `UsageError` where that is impossible."""
        text = json.dumps(self._facts).encode()
        arrays: dict[str, Any] = {"facts": np.frombuffer(text, np.uint8)}
        for number, state in enumerate(states):
            for name in _ARRAYS:
                arrays[f"{name}_{number}"] = getattr(state, name)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(self.path, buffer.getvalue())

    def read(self, states: Sequence[ShardState]) -> None:
        """Put what is in the file, if there is one, into the states of the shard.

        Raises `InputFileError` if it is not theirs.
        """
        if not self.path.exists():
            return
        what, hint = (
            "is no checkpoint of a shard",
            "give one that a shard has written, or a new name",
        )
        found = read_npz(self.path, what=what, hint=hint)
        try:
            facts = json.loads(found["facts"].tobytes())
        except (KeyError, ValueError) as error:
            raise InputFileError(what, hint=hint, where=str(self.path)) from error
        expected = self._facts
        if facts != expected:
            keys = set(facts) | set(expected) if isinstance(facts, dict) else {"format"}
            differ = ", ".join(key for key in sorted(keys) if not isinstance(facts, dict)
                               or facts.get(key) != expected.get(key))  # fmt: skip
            raise InputFileError(
                f"is a checkpoint of another shard or other tables (differs in {differ})",
                hint="name another file, or start with the tables that wrote this one",
                where=str(self.path),
            )
        for number, state in enumerate(states):
            for name in _ARRAYS:
                target, source = getattr(state, name), found.get(f"{name}_{number}")
                if source is None or source.shape != target.shape or source.dtype != target.dtype:
                    where = str(self.path)
                    raise InputFileError(f"has no fitting {name!r} of table {number}", where=where)
                target[...] = source


def _facts(layout: Layout, shard: int) -> dict[str, Any]:
    tables = [
        [table.name, table.num_rows, table.width, table.is_adaptive] for table in layout.tables
    ]
    return {
        "format": FORMAT, "shard": shard, "shards": layout.num_shards,
        "clients": layout.num_clients, "tables": tables,
    }  # fmt: skip
