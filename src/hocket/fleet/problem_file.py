"""A snapshot from a JSON file: devices by type, jobs with their throughputs.

    {"devices": {"v100": 36, "k80": {"num": 36, "price_per_hour": 0.45}},
     "jobs": [{"id": "a", "throughputs": {"v100": 10.0, "k80": null}, "gang": 1, "weight": 1,
               "remaining_steps": 1e6, "elapsed_s": 0, "deadline_s": 3600, "team": "vision"}],
     "teams": {"vision": 2}}

A throughput of null or 0, or none, means that the job cannot run there. Unknown keys are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import inside, integer, items, located, mapping, number, record, shown, text
from hocket.base.jsonfile import read_json
from hocket.fleet.cluster_snapshot import ClusterSnapshot

# Limits against files that would exhaust memory.
_MAX_JOBS = 1_000_000
_MAX_DEVICES = 10_000_000
_MAX_TYPES = 1000
_MAX_CELLS = 20_000_000
"""Jobs times device types: each is a number in several tables."""
# Largest number that is accepted.
_LARGE = 1e15
_JOB_KEYS = ("gang", "weight", "remaining_steps", "elapsed_s", "deadline_s", "isolated_s", "team")


def read_problem(path: str | Path) -> ClusterSnapshot:
    """The snapshot that a file describes; raises `InputFileError` where it cannot be used."""
    with located(str(path)):
        return parse_problem(read_json(path))


def parse_problem(value: object) -> ClusterSnapshot:
    """The snapshot that a parsed file describes."""
    top = record(value, "the problem", required=("devices", "jobs"), optional=("teams",))
    devices = mapping(top["devices"], "devices")
    if not devices:
        raise InputFileError("devices is empty", hint="name at least one device type")
    if len(devices) > _MAX_TYPES:
        raise InputFileError(f"devices has {len(devices):,} types", hint=f"at most {_MAX_TYPES:,}")
    num_devices, price_per_hour = _devices(devices)
    jobs = [
        record(job, f"jobs[{index}]", required=("id", "throughputs"), optional=_JOB_KEYS)
        for index, job in enumerate(items(top["jobs"], "jobs"))
    ]
    if len(jobs) > _MAX_JOBS:
        raise InputFileError(f"jobs has {len(jobs)} entries", hint=f"at most {_MAX_JOBS}")
    # Checked before arrays of that size are allocated.
    if len(jobs) * len(devices) > _MAX_CELLS:
        raise InputFileError(
            f"{len(jobs):,} jobs on {len(devices):,} device types are too many",
            hint=f"at most {_MAX_CELLS:,} jobs times device types",
        )
    device_types, teams = tuple(devices), _team_weights(top.get("teams"), jobs)
    return ClusterSnapshot(
        device_types=device_types,
        num_devices=num_devices,
        price_per_hour=price_per_hour,
        ids=_ids(jobs),
        steps_per_s=_throughputs(jobs, device_types),
        gang=_integers(jobs, "gang", 1),
        weight=_numbers(jobs, "weight", 1.0, 1e-6),
        remaining_steps=_numbers(jobs, "remaining_steps", math.inf, 0.0),
        elapsed_s=_numbers(jobs, "elapsed_s", 0.0, 0.0),
        deadline_s=_numbers(jobs, "deadline_s", math.inf, 0.0),
        isolated_s=_numbers(jobs, "isolated_s", 0.0, 0.0),
        arrival=np.arange(len(jobs)),
        team_of=_teams_of(jobs, tuple(teams)),
        teams=tuple(teams),
        team_weight=np.array(list(teams.values())),
    )


def _devices(devices: Mapping[str, Any]) -> tuple[Any, Any]:
    nums, prices = [], []
    for device_type, entry in devices.items():
        path = inside("devices", device_type)
        price = 1.0
        if isinstance(entry, Mapping):
            fields = record(entry, path, required=("num",), optional=("price_per_hour",))
            entry = fields["num"]
            price = number(fields.get("price_per_hour", 1.0), f"{path}.price_per_hour", 0, 1e9)
        nums.append(integer(entry, path, 0, _MAX_DEVICES))
        prices.append(price)
    return np.array(nums, dtype=np.int64), np.array(prices)


def _ids(jobs: list[Mapping[str, Any]]) -> tuple[str, ...]:
    ids = [text(job["id"], f"jobs[{index}].id") for index, job in enumerate(jobs)]
    seen: set[str] = set()
    for index, name in enumerate(ids):
        if name in seen:
            raise InputFileError(
                f"jobs[{index}].id is {shown(name)}, as is an earlier one",
                hint="rename one of them",
            )
        seen.add(name)
    return tuple(ids)


def _throughputs(jobs: list[Mapping[str, Any]], device_types: tuple[str, ...]) -> Any:
    steps = np.zeros((len(jobs), len(device_types)))
    column = {device_type: index for index, device_type in enumerate(device_types)}
    for row, job in enumerate(jobs):
        path = f"jobs[{row}].throughputs"
        for device_type, value in mapping(job["throughputs"], path).items():
            if device_type not in column:
                hint = did_you_mean(device_type, device_types)
                raise InputFileError(
                    f"unknown device type {shown(device_type)} in {path}", hint=hint
                )
            if value is not None:
                steps[row, column[device_type]] = number(
                    value, inside(path, device_type), 0.0, _LARGE
                )
    return steps


def _numbers(jobs: list[Mapping[str, Any]], key: str, default: float, low: float) -> Any:
    return np.array(
        [
            number(job[key], f"jobs[{index}].{key}", low, _LARGE)
            if job.get(key) is not None
            else default
            for index, job in enumerate(jobs)
        ],
        dtype=np.float64,
    )


def _integers(jobs: list[Mapping[str, Any]], key: str, default: int) -> Any:
    return np.array(
        [
            integer(job.get(key, default), f"jobs[{index}].{key}", 1, _MAX_DEVICES)
            for index, job in enumerate(jobs)
        ],
        dtype=np.int64,
    )


def _team_weights(given: object, jobs: list[Mapping[str, Any]]) -> dict[str, float]:
    """The weight of each team; 1 for each team of the jobs if no weights are given."""
    if given is None:
        names = [text(job.get("team", ""), f"jobs[{i}].team") for i, job in enumerate(jobs)]
        return dict.fromkeys(names, 1.0) or {"": 1.0}
    weights = {
        name: number(weight, inside("teams", name), 1e-6, _LARGE)
        for name, weight in mapping(given, "teams").items()
    }
    if any("team" not in job for job in jobs) or not weights:
        weights.setdefault("", 1.0)
    return weights


def _teams_of(jobs: list[Mapping[str, Any]], teams: tuple[str, ...]) -> Any:
    index_of = {name: index for index, name in enumerate(teams)}
    team_of = np.zeros(len(jobs), dtype=np.int64)
    for row, job in enumerate(jobs):
        name = text(job.get("team", ""), f"jobs[{row}].team")
        if name not in index_of:
            hint = did_you_mean(name, teams)
            raise InputFileError(f"unknown team {shown(name)} in jobs[{row}].team", hint=hint)
        team_of[row] = index_of[name]
    return team_of
