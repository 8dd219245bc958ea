"""Throughputs of job types on device types, alone and two on a device.

The file has Gavel's JSON format, unchanged: ``{type: {"('job type', gang)": {"null": steps_per_s,
"('other type', gang)": [mine, other's]}}}``; device types that end in ``_unconsolidated`` are gangs
spread over servers. An entry that is missing or 0 means: cannot run on that type (alone), or
may not share it (pair).
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, UsageError, did_you_mean
from hocket.base.fields import inside, items, located, mapping, number, shown
from hocket.base.jsonfile import read_json

# Limits against files that would exhaust memory.
_MAX_STEPS_PER_S = 1e12
_MAX_CELLS = 20_000_000
"""Numbers in the table of pairs."""
_MAX_GANG = 1_000_000
_MAX_KEY = 1000
"""Characters of the name of a profile in a file."""


class JobProfile(NamedTuple):
    """A job type with a gang size."""

    job_type: str
    gang: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Throughputs:
    """Steps per second of whole gangs."""

    device_types: tuple[str, ...]
    profiles: tuple[JobProfile, ...]
    alone: FloatArray
    """``[profile, type]``."""
    beside: FloatArray
    """``[profile, other profile, type]``: 0 where they may not share a device."""

    def on(self, device_types: tuple[str, ...]) -> Throughputs:
        """Select device types, in the given order; raises `UsageError` for one that is missing."""
        for device_type in device_types:
            if device_type not in self.device_types:
                hint = did_you_mean(device_type, self.device_types)
                raise UsageError(
                    f"there are no throughputs for devices of type {device_type!r}", hint=hint
                )
        columns = [self.device_types.index(device_type) for device_type in device_types]
        return Throughputs(
            device_types=device_types,
            profiles=self.profiles,
            alone=np.ascontiguousarray(self.alone[:, columns]),
            beside=np.ascontiguousarray(self.beside[:, :, columns]),
        )

    def only(self, rows: Sequence[int]) -> Throughputs:
        """Select profiles by row, in the given order."""
        return Throughputs(
            device_types=self.device_types,
            profiles=tuple(self.profiles[row] for row in rows),
            alone=self.alone[rows, :],
            beside=self.beside[np.ix_(rows, rows)],
        )

    def find(self, job_type: str, gang: int) -> int:
        """Row of a profile; -1 if there is none."""
        try:
            return self.profiles.index(JobProfile(job_type, gang))
        except ValueError:
            return -1

    @property
    def relative_speed(self) -> FloatArray:
        """Speed of each device type for an unknown job: geometric mean over profiles, relative to
        the first type."""
        known = (self.alone > 0.0).all(axis=1)
        if not known.any():
            return np.ones(len(self.device_types))
        ratios = np.log(self.alone[known] / self.alone[known][:, :1])
        return np.asarray(np.exp(ratios.mean(axis=0)))


def read_throughputs(path: str | Path) -> Throughputs:
    """Read the throughputs of a file; raises `InputFileError` that names what is wrong."""
    with located(str(path)):
        tables = mapping(read_json(path), "throughputs")
        if not tables:
            raise InputFileError("the file has no device types")
        return _parse(
            {
                device_type: mapping(rows, inside("", device_type))
                for device_type, rows in tables.items()
            }
        )


def write_throughputs(path: str | Path, table: Throughputs) -> None:
    """Write a table in the format of `read_throughputs`."""
    text = json.dumps(throughputs_to_dict(table), indent=1)
    write_atomically(path, (text + "\n").encode())


def throughputs_to_dict(table: Throughputs) -> dict[str, dict[str, dict[str, object]]]:
    """Convert to the layout of Gavel's JSON."""
    keys = [profile_key(profile) for profile in table.profiles]
    return {
        device_type: {key: _entries(table, keys, row, column) for row, key in enumerate(keys)}
        for column, device_type in enumerate(table.device_types)
    }


def profile_key(profile: JobProfile) -> str:
    """Key of a profile in a file; raises `UsageError` if it could not be read back."""
    key = repr(tuple(profile))
    if len(key) >= _MAX_KEY:
        raise UsageError(
            f"the name of a job type has {len(profile.job_type)} characters",
            hint=f"use fewer than {_MAX_KEY // 2}",
        )
    return key


def _entries(table: Throughputs, keys: list[str], row: int, column: int) -> dict[str, object]:
    entries: dict[str, object] = {"null": float(table.alone[row, column])}
    for other in np.flatnonzero(table.beside[row, :, column]).tolist():
        mine, others = table.beside[row, other, column], table.beside[other, row, column]
        entries[keys[other]] = [float(mine), float(others)]
    return entries


def stacked(tables: Sequence[Throughputs]) -> Throughputs:
    """Concatenate tables of different jobs on the same device types; pairs across tables may not
    share."""
    first = tables[0]
    profiles = tuple(profile for table in tables for profile in table.profiles)
    repeated = _repeated(profiles)
    if repeated is not None:
        hint = "give each model a name of its own"
        raise UsageError(f"two jobs are called {repeated.job_type!r}", hint=hint)
    beside = np.zeros((len(profiles), len(profiles), len(first.device_types)))
    start = 0
    for table in tables:
        own = slice(start, start + len(table.profiles))
        beside[own, own] = table.on(first.device_types).beside
        start = own.stop
    alone = np.concatenate([table.on(first.device_types).alone for table in tables])
    return Throughputs(
        device_types=first.device_types, profiles=profiles, alone=alone, beside=beside
    )


def _repeated(profiles: tuple[JobProfile, ...]) -> JobProfile | None:
    return next((profile for profile, times in Counter(profiles).items() if times > 1), None)


def _parse(tables: dict[str, object]) -> Throughputs:
    device_types = tuple(tables)
    keys = list(
        dict.fromkeys(key for rows in tables.values() for key in mapping(rows, "device_type"))
    )
    # The pair table is dense, so its size is checked before it is allocated.
    num_cells = len(keys) ** 2 * len(device_types)
    if num_cells > _MAX_CELLS:
        raise InputFileError(
            f"the table has {len(keys):,} job types on {len(device_types):,} device types, which "
            f"makes {num_cells:,} pairs",
            hint=f"at most {_MAX_CELLS:,}; leave out jobs that do not occur",
        )
    profiles = tuple(_profile(key) for key in keys)
    repeated = _repeated(profiles)
    if repeated is not None:
        raise InputFileError(f"{profile_key(repeated)} is written in two ways")
    row_of = {key: row for row, key in enumerate(keys)}
    alone = np.zeros((len(keys), len(device_types)))
    beside = np.zeros((len(keys), len(keys), len(device_types)))
    for column, device_type in enumerate(device_types):
        for key, entries in mapping(tables[device_type], device_type).items():
            path = f"{device_type}[{shown(key)}]"
            for other, value in mapping(entries, path).items():
                if other == "null":
                    alone[row_of[key], column] = _speed(value, f"{path}.null")
                elif other in row_of:
                    at = f"{path}[{shown(other)}]"
                    beside[row_of[key], row_of[other], column] = _pair_speed(value, at)
                else:
                    raise InputFileError(f"{path} names an unknown job {shown(other)}")
    # Two jobs share a device only if both make progress.
    beside = np.where((beside > 0.0) & (beside.transpose(1, 0, 2) > 0.0), beside, 0.0)
    return Throughputs(device_types=device_types, profiles=profiles, alone=alone, beside=beside)


def _profile(key: str) -> JobProfile:
    try:
        value = ast.literal_eval(key) if len(key) < _MAX_KEY else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    match value:
        case (str(job_type), int(gang)) if gang is not True and 1 <= gang <= _MAX_GANG:
            return JobProfile(job_type, gang)
    raise InputFileError(f"{shown(key)} is no job type", hint="expected \"('job type', gang)\"")


def _speed(value: object, path: str) -> float:
    return number(value, path, 0.0, _MAX_STEPS_PER_S)


def _pair_speed(value: object, path: str) -> float:
    pair = items(value, path)
    if len(pair) != 2:
        raise InputFileError(f"{path} has {len(pair)} entries, expected 2", hint="[mine, other's]")
    return _speed(pair[0], f"{path}[0]")
