"""A `State` as bytes, and back, exactly: a JSON head that names the parts, then raw arrays.

Unlike `rounds.files`, which writes a state for people and other programs, this is written at every
commit, so it must take few milliseconds at thousands of jobs. Only the classes and element types
that are listed here are ever made of what is read.
O(bytes).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from hocket.errors import InputFileError
from hocket.fleet.allocation import Warm
from hocket.fleet.rounds.state import JOB_RECORD, Jobs, Layout, PairPlan, PairTable, Rules, State

FORMAT = "hocket-fleet-snapshot"
VERSION = 1
_LENGTH = struct.Struct(">Q")
_CLASSES: dict[str, Callable[..., Any]] = {
    cls.__name__: cls for cls in (State, Rules, Jobs, Layout, Warm, PairTable, PairPlan)
}
_DTYPES = {
    "int64": np.dtype("<i8"),
    "float64": np.dtype("<f8"),
    "bool": np.dtype("?"),
    "job": JOB_RECORD,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(state: State) -> bytes:
    """A state as bytes."""
    arrays: list[np.ndarray] = []
    tree = _tree(state, arrays)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "columns": list(JOB_RECORD.names or ()),
        "arrays": [[_NAMES[array.dtype], *array.shape] for array in arrays],
        "state": tree,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    # Raw bytes of contiguous arrays are joined without copying them first.
    parts = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes) -> State:
    """The state that `pack` wrote; raises `InputFileError` for anything else."""
    try:
        head, start = _head(data)
        arrays = []
        for name, *shape in head["arrays"]:
            array = np.frombuffer(data, _DTYPES[name], int(np.prod(shape)), start)
            start += array.nbytes
            arrays.append(array.reshape(shape).copy())
        if start != len(data):
            raise ValueError("its length is wrong")
        state = _value(head["state"], arrays)
        if not isinstance(state, State):
            raise ValueError("it holds no state")
    except (KeyError, TypeError, ValueError, IndexError, struct.error, RecursionError) as error:
        raise InputFileError(f"the stored state of the fleet is damaged: {error}") from None
    return state


def _head(data: bytes) -> tuple[dict[str, Any], int]:
    (length,) = _LENGTH.unpack_from(data, 0)
    start = _LENGTH.size + length
    head = json.loads(data[_LENGTH.size : start])
    if head["format"] != FORMAT or head["version"] != VERSION:
        raise ValueError("it was written by another version")
    if head["columns"] != list(JOB_RECORD.names or ()):
        raise ValueError("it was written by a version with other columns")
    return head, start


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as JSON; arrays are set apart and named by their position."""
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return _object(value, names, arrays)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _object(value, list(value._fields), arrays)
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return {"texts": value}
    if isinstance(value, tuple):
        return {"tuple": [_tree(part, arrays) for part in value]}
    if isinstance(value, dict):
        return {"keys": list(value.keys()), "values": list(value.values())}
    return value


def _object(value: Any, names: list[str], arrays: list[np.ndarray]) -> dict[str, Any]:
    parts = {name: _tree(getattr(value, name), arrays) for name in names}
    return {"class": type(value).__name__, "fields": parts}


def _value(tree: Any, arrays: list[np.ndarray]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "texts" in tree:
        return tuple(tree["texts"])
    if "tuple" in tree:
        return tuple(_value(part, arrays) for part in tree["tuple"])
    if "keys" in tree:
        return dict(zip(tree["keys"], tree["values"], strict=True))
    parts = {name: _value(part, arrays) for name, part in tree["fields"].items()}
    return _CLASSES[tree["class"]](**parts)
