"""A `FleetState` as a JSON head and raw arrays, and back, exactly.

The head holds everything but the arrays, and the type and shape of each array. Only classes and
element types that are listed here are created from stored data. For the store, arrays are split
into parts, so that a commit writes only the parts that changed. A checksum over all parts finds
damaged ones: compiled code reads the arrays without bounds checks. O(bytes).
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.errors import InputFileError
from hocket.fleet.allocation import Warm
from hocket.fleet.rounds.state import (
    JOB_ROW,
    DeviceLayout,
    FleetState,
    Jobs,
    PairEstimates,
    PairPlan,
    PairTable,
    Rules,
)

# Classes that stored data may name.
_CLASSES: dict[str, Any] = {
    one.__name__: one
    for one in (FleetState, Rules, Jobs, DeviceLayout, Warm, PairTable, PairPlan, PairEstimates)
}
# Element types that stored data may name, and their types in numpy.
_DTYPES = {
    "int64": np.dtype("<i8"),
    "float64": np.dtype("<f8"),
    "bool": np.dtype("?"),
    "job": JOB_ROW,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def take_apart(state: FleetState) -> tuple[bytes, list[NDArray[Any]]]:
    """The head of a state and its arrays, made contiguous."""
    arrays: list[NDArray[Any]] = []
    tree = _tree(state, arrays)
    head = {
        "columns": JOB_ROW.names,
        "arrays": [[_NAMES[array.dtype], *array.shape] for array in arrays],
        "state": tree,
    }
    return json.dumps(head, separators=(",", ":")).encode(), arrays


def put_together(head: bytes, arrays: Sequence[bytes | bytearray]) -> FleetState:
    """Inverse of `take_apart`; raises `InputFileError` for anything else."""
    try:
        content = json.loads(head)
        if content["columns"] != list(JOB_ROW.names or ()):
            raise ValueError("it was written by a version with other columns")
        read = [
            np.frombuffer(data, _DTYPES[name]).reshape(shape).copy()
            for (name, *shape), data in zip(content["arrays"], arrays, strict=True)
        ]
        state = _value(content["state"], read)
        if not isinstance(state, FleetState):
            raise ValueError("it holds no state")
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise InputFileError(f"the stored state of the fleet is damaged: {error}") from None
    return state


# Names of the parts that are not blocks of arrays, and the size of blocks.
HEAD, CHECKSUM = "head", "checksum"
BLOCK_BYTES = 8192


def split_state(state: FleetState) -> dict[str, bytes]:
    """The parts of a state by name: its head, and blocks of its arrays.

    The table of jobs is split into its columns first: most events change few columns. Names of jobs
    are left out, for the rows of jobs have them.
    """
    head, arrays = take_apart(state.but(names={}))
    parts = {HEAD: head}
    for at, array in enumerate(arrays):
        columns = [array[name] for name in array.dtype.names or ()] or [array]
        for column, values in enumerate(columns):
            body = values.tobytes()
            for start in range(0, len(body), BLOCK_BYTES):
                parts[f"{at}/{column}/{start}"] = body[start : start + BLOCK_BYTES]
    return {**parts, CHECKSUM: _checksum(parts)}


def _checksum(parts: Mapping[str, bytes]) -> bytes:
    """CRC-32 of the names and contents of all parts."""
    value = 0
    for name in sorted(parts):
        value = zlib.crc32(parts[name], zlib.crc32(name.encode(), value))
    return value.to_bytes(4)


def join_state(parts: Mapping[str, bytes]) -> FleetState:
    """Inverse of `split_state`; raises `InputFileError` for anything else."""
    parts = dict(parts)
    if parts.pop(CHECKSUM, b"") != _checksum(parts):
        raise InputFileError("the stored state of the fleet is damaged: its checksum is another")
    blocks: dict[int, dict[tuple[int, int], bytes]] = defaultdict(dict)
    for name, body in parts.items():
        if name != HEAD:
            at, column, start = map(int, name.split("/"))
            blocks[at][column, start] = body
    arrays = []
    for at, (kind, *shape) in enumerate(json.loads(parts[HEAD])["arrays"]):
        data = b"".join(body for _, body in sorted(blocks[at].items()))
        # See `split_state`: a table of jobs was stored column by column.
        if kind == "job" and data:
            data = np.frombuffer(data, np.int64).reshape(-1, shape[0]).T.tobytes()
        arrays.append(data)
    return put_together(parts[HEAD], arrays)


def _tree(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """A value as JSON; arrays are appended to ``arrays`` and replaced by their positions there."""
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) or hasattr(value, "_fields"):
        names = getattr(value, "_fields", None) or [field.name for field in fields(value)]
        parts = {name: _tree(getattr(value, name), arrays) for name in names}
        return {"class": type(value).__name__, "fields": parts}
    if isinstance(value, tuple):
        return {"tuple": [_tree(part, arrays) for part in value]}
    if isinstance(value, dict):
        return {"keys": list(value.keys()), "values": list(value.values())}
    return value


def _value(tree: Any, arrays: Sequence[Any]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "tuple" in tree:
        return tuple(_value(part, arrays) for part in tree["tuple"])
    if "keys" in tree:
        return dict(zip(tree["keys"], tree["values"], strict=True))
    parts = {name: _value(part, arrays) for name, part in tree["fields"].items()}
    return _CLASSES[tree["class"]](**parts)
