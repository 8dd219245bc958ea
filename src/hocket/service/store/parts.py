"""A `FleetState` in small parts, so that a commit writes only those that changed.

Arrays are cut into blocks of rows, and the table of jobs into its columns before: most events
change the moment up to which all jobs are counted and little else. What is compared is bits, so
that a state comes back exactly. A head says which arrays there are, holds all that is no array, and
seals the checksums of all parts: one that belongs to another commit is found. Names of jobs are
left out, for the rows of jobs have them.
O(bytes) to compare, O(changed bytes) to write.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.errors import InputFileError
from hocket.fleet.rounds.state import JOB_RECORD, FleetState
from hocket.service.store import snapshot

VERSION = 2
BLOCK_ROWS = 1024


class StoredParts:
    """What is stored of a state; `changed` tells what the next one needs written."""

    def __init__(self) -> None:
        self._state: FleetState | None = None
        self._crcs: dict[str, int] = {}

    def changed(self, state: FleetState) -> CommitParts:
        """What to write so that this state is stored in place of the last one."""
        tree, arrays = snapshot.taken_apart(replace(state, names={}))
        _, before = ({}, {}) if self._state is None else snapshot.taken_apart(self._state)
        written: dict[str, bytes] = {}
        present: set[str] = set()
        for path, array in arrays.items():
            present.update(_name(path, *at) for at in _all_blocks(array))
            for at in _changed_blocks(before.get(path), array):
                written[_name(path, *at)] = _block(array, *at)
        gone = [name for name in self._crcs if name not in present]
        crcs = {name: crc for name, crc in self._crcs.items() if name in present}
        crcs.update((name, zlib.crc32(body)) for name, body in written.items())
        return CommitParts(replace(state, names={}), tree, arrays, written, gone, crcs)

    def begin_with(self, state: FleetState, parts: Mapping[str, bytes]) -> None:
        """This is what is stored."""
        self._state = state
        self._crcs = {name: zlib.crc32(body) for name, body in parts.items()}

    def accept(self, change: CommitParts) -> None:
        """The change is stored."""
        self._state, self._crcs = change.state, change.crcs


class CommitParts:
    """A commit's worth of parts."""

    def __init__(
        self,
        state: FleetState,
        tree: Any,
        arrays: Mapping[str, NDArray[Any]],
        written: dict[str, bytes],
        gone: list[str],
        crcs: dict[str, int],
    ) -> None:
        self.state = state
        self.written = written
        self.gone = gone
        self.crcs = crcs
        self._tree = tree
        self._arrays = arrays

    def head(self) -> bytes:
        """All that is no array, and what arrays there are."""
        content = {
            "format": snapshot.FORMAT,
            "version": VERSION,
            "columns": list(snapshot.COLUMNS),
            "arrays": snapshot.described(self._arrays),
            "state": self._tree,
            "seal": seal(self.crcs),
        }
        return json.dumps(content, separators=(",", ":")).encode()


def seal(crcs: Mapping[str, int]) -> int:
    """Of the names and checksums of all parts."""
    return zlib.crc32(repr(sorted(crcs.items())).encode())


def check_seal(head: bytes, parts: Mapping[str, bytes]) -> None:
    """Refuse parts that are not those of their head."""
    crcs = {name: zlib.crc32(body) for name, body in parts.items()}
    if json.loads(head)["seal"] != seal(crcs):
        raise InputFileError("the state is not that of the last commit")


def joined(head: bytes, parts: Mapping[str, bytes]) -> FleetState:
    """The state that was stored, without names of jobs; raises `InputFileError` otherwise."""
    check_seal(head, parts)
    with snapshot.refusing_damage():
        content = json.loads(head)
        if content["format"] != snapshot.FORMAT or content["version"] != VERSION:
            raise ValueError("it was written by another version")
        columns = content["columns"]
        arrays = {
            path: _joined(path, kind, tuple(shape), columns, parts)
            for path, (kind, *shape) in content["arrays"].items()
        }
        return snapshot.put_together(content["state"], arrays)


def numbers_in(state: FleetState) -> list[int]:
    """The jobs that a state has rows of."""
    numbers: list[int] = state.jobs.rows["number"].tolist()
    return numbers


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────


def _name(path: str, column: int, block: int) -> str:
    return f"{path}/{column}/{block}"


def _all_blocks(array: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Column and block of each."""
    return itertools.product(range(_num_columns(array)), range(_num_blocks(array)))


def _num_blocks(array: NDArray[Any]) -> int:
    return -(-len(array) // BLOCK_ROWS)


def _num_columns(array: NDArray[Any]) -> int:
    return len(snapshot.COLUMNS) if array.dtype == JOB_RECORD else 1


def _words(array: NDArray[Any]) -> NDArray[Any]:
    """An array as whole numbers, a row for each of its rows: bits can be compared, NaN too."""
    if array.dtype == JOB_RECORD:
        return array.view(np.int64).reshape(len(array), len(snapshot.COLUMNS))
    word = np.uint8 if array.dtype == np.bool_ else np.int64
    return array.view(word).reshape(len(array), -1)


def _changed_blocks(before: NDArray[Any] | None, array: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Column and block of those that are not as before."""
    num_blocks, num_columns = _num_blocks(array), _num_columns(array)
    if before is array or not num_blocks:
        return
    if before is None or before.dtype != array.dtype or before.shape[1:] != array.shape[1:]:
        yield from _all_blocks(array)
        return
    # A block that has grown or shrunk has changed, whatever is in it.
    same_rows = min(len(before), len(array))
    is_new = np.zeros((num_blocks, num_columns), bool)
    if len(before) != len(array):
        is_new[same_rows // BLOCK_ROWS :] = True
    if same_rows:
        differs = _words(before)[:same_rows] != _words(array)[:same_rows]
        if num_columns == 1:
            differs = differs.any(axis=1, keepdims=True)
        starts = np.arange(0, same_rows, BLOCK_ROWS)
        found = np.logical_or.reduceat(differs, starts, axis=0)
        is_new[: len(found)] |= found
    for column, block in np.argwhere(is_new.T):
        yield int(column), int(block)


def _block(array: NDArray[Any], column: int, block: int) -> bytes:
    """The bytes of a block; of one whose rows are all alike, those of one row."""
    words = _words(array)[block * BLOCK_ROWS :][:BLOCK_ROWS]
    if _num_columns(array) > 1:
        words = words[:, column : column + 1]
    if len(words) > 1 and (words == words[:1]).all():
        words = words[:1]
    return words.tobytes()


def _joined(
    path: str,
    kind: str,
    shape: tuple[int, ...],
    columns: list[str],
    parts: Mapping[str, bytes],
) -> NDArray[Any]:
    """An array from its blocks."""
    if kind == "job":
        values = _joined_blocks(path, np.dtype("<i8"), (shape[0],), len(columns), parts)
        dtype = snapshot.job_dtype(columns)
        rows = np.ascontiguousarray(np.stack(values, axis=1)).view(dtype).reshape(shape[0])
        return snapshot.with_all_columns(rows)
    (array,) = _joined_blocks(path, snapshot.dtype_of(kind), shape, 1, parts)
    return array


def _joined_blocks(
    path: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    num_columns: int,
    parts: Mapping[str, bytes],
) -> list[NDArray[Any]]:
    num_blocks = -(-shape[0] // BLOCK_ROWS)
    found = []
    for column in range(num_columns):
        array = np.empty(shape, dtype)
        for block in range(num_blocks):
            rows = array[block * BLOCK_ROWS :][:BLOCK_ROWS]
            values = np.frombuffer(parts[_name(path, column, block)], dtype)
            # One row stands for all where they are alike.
            rows[...] = values.reshape(-1, *shape[1:])
        found.append(array)
    return found
