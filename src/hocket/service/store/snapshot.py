"""A `FleetState` as bytes, and back, exactly: a JSON head that names the parts, then raw arrays.

This takes few milliseconds at thousands of jobs: whoever is asked about the future gets a state so.
Only the classes and element types that are listed here are ever made of what is read.
O(bytes).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.errors import InputFileError
from hocket.fleet.allocation import Warm
from hocket.fleet.rounds.consistency import refuse_wrong_indices
from hocket.fleet.rounds.state import (
    BLANK,
    JOB_RECORD,
    DeviceLayout,
    FleetState,
    Jobs,
    PairEstimates,
    PairPlan,
    PairTable,
    Rules,
)

FORMAT = "hocket-fleet-snapshot"
VERSION = 1
_LENGTH = struct.Struct(">Q")
_RULES = {rule.name for rule in fields(Rules)}
"""Those of other versions are passed over: a service is started with rules of its own."""
# The names that files have; those of classes may change.
_CLASSES: dict[str, Callable[..., Any]] = {
    "State": FleetState,
    "Rules": lambda **parts: Rules(**{k: v for k, v in parts.items() if k in _RULES}),
    "Jobs": Jobs,
    "Layout": DeviceLayout,
    "Warm": Warm,
    "PairTable": PairTable,
    "PairPlan": PairPlan,
    "PairEstimates": PairEstimates,
}
_NAMES_OF_CLASSES = {made: name for name, made in _CLASSES.items()} | {Rules: "Rules"}
_DTYPES = {
    "int64": np.dtype("<i8"),
    "float64": np.dtype("<f8"),
    "bool": np.dtype("?"),
    "job": JOB_RECORD,
}
COLUMNS = tuple(JOB_RECORD.names or ())
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(state: FleetState) -> bytes:
    """A state as bytes."""
    tree, arrays = taken_apart(state)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "columns": list(JOB_RECORD.names or ()),
        "arrays": list(described(arrays).values()),
        "state": tree,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    # Raw bytes of contiguous arrays are joined without copying them first.
    parts = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.size]
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes) -> FleetState:
    """The state that `pack` wrote, or that of an earlier version; raises `InputFileError` for
    anything else."""
    with refusing_damage():
        head, start = _head(data)
        arrays = []
        for name, *shape in head["arrays"]:
            dtype = job_dtype(head["columns"]) if name == "job" else dtype_of(name)
            array = np.frombuffer(data, dtype, int(np.prod(shape)), start)
            start += array.nbytes
            array = array.reshape(shape).copy()
            arrays.append(with_all_columns(array) if name == "job" else array)
        if start != len(data):
            raise ValueError("its length is wrong")
        return put_together(head["state"], arrays)


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Tell of data that is not as it was written."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, struct.error, RecursionError) as error:
        raise InputFileError(f"the stored state of the fleet is damaged: {error}") from None


def _head(data: bytes) -> tuple[dict[str, Any], int]:
    (length,) = _LENGTH.unpack_from(data, 0)
    start = _LENGTH.size + length
    head = json.loads(data[_LENGTH.size : start])
    if head["format"] != FORMAT or head["version"] != VERSION:
        raise ValueError("it was written by another version")
    return head, start


# ── columns of jobs ──────────────────────────────────────────────────────────────────────────────


def dtype_of(name: str) -> np.dtype[Any]:
    """The element type of a name; raises `KeyError` for others than those listed here."""
    return _DTYPES[name]


def job_dtype(columns: list[str]) -> np.dtype[Any]:
    """Rows of jobs with these columns, in this order; raises `ValueError` for unknown ones."""
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or len(set(columns)) < len(columns) or "number" not in columns:
        raise ValueError("it was written by a version with other columns")
    return np.dtype([(name, JOB_RECORD[name]) for name in columns])


def with_all_columns(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of an earlier version with the columns that have come since, as for jobs of which
    nothing is known."""
    if rows.dtype == JOB_RECORD:
        return rows
    whole = np.empty(len(rows), JOB_RECORD)
    for name in COLUMNS:
        whole[name] = rows[name] if name in (rows.dtype.names or ()) else BLANK[name]
    return whole


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def taken_apart(state: FleetState) -> tuple[Any, dict[str, NDArray[Any]]]:
    """A state as JSON, and its arrays by their paths in it."""
    arrays: dict[str, NDArray[Any]] = {}
    return _tree(state, "", arrays), arrays


def described(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
    """Element type and shape of each array."""
    return {path: [_NAMES[array.dtype], *array.shape] for path, array in arrays.items()}


def put_together(tree: Any, arrays: Sequence[Any] | Mapping[str, Any]) -> FleetState:
    """What `taken_apart` took apart; arrays by their paths, or in their order."""
    ordered = list(arrays.values()) if isinstance(arrays, Mapping) else arrays
    state = _value(tree, ordered)
    if not isinstance(state, FleetState):
        raise ValueError("it holds no state")
    refuse_wrong_indices(state)
    return state


def _tree(value: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """A value as JSON; arrays are set apart and named by their position."""
    if isinstance(value, np.ndarray):
        arrays[path] = np.ascontiguousarray(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return _object(value, names, path, arrays)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _object(value, list(value._fields), path, arrays)
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return {"texts": value}
    if isinstance(value, tuple):
        return {"tuple": [_tree(part, f"{path}.{at}", arrays) for at, part in enumerate(value)]}
    if isinstance(value, dict):
        return {"keys": list(value.keys()), "values": list(value.values())}
    return value


def _object(
    value: Any, names: list[str], path: str, arrays: dict[str, NDArray[Any]]
) -> dict[str, Any]:
    parts = {name: _tree(getattr(value, name), f"{path}.{name}", arrays) for name in names}
    return {"class": _NAMES_OF_CLASSES[type(value)], "fields": parts}


def _value(tree: Any, arrays: Sequence[Any]) -> Any:
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
