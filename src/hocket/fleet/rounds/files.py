"""A state as plain data, and back: what a service stores between two steps.

Numbers come back exactly; infinities are written as texts, which JSON has no numbers for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from hocket.base.errors import InputFileError
from hocket.fleet.allocation import Warm
from hocket.fleet.rounds.state import (
    BLANK,
    JOB_RECORD,
    PHASES,
    RUNNING,
    Jobs,
    PairPlan,
    PairTable,
    Rules,
    State,
    lay_out,
)

FORMAT = "hocket-fleet-state"
VERSION = 2
_YOUNG = ("preemptible", "losses")


def state_to_data(state: State) -> dict[str, Any]:
    """A state as lists, texts and numbers."""
    rows = state.jobs.rows
    return {
        "format": FORMAT,
        "version": VERSION,
        "rules": asdict(state.rules),
        "kinds": list(state.kinds),
        "price_per_hour": _listed(state.price_per_hour),
        "times": _listed(np.array([state.time_s, state.next_tick_s, state.solved_s])),
        "round_number": state.round_number,
        "is_dirty": state.is_dirty,
        "jobs": {name: _listed(rows[name]) for name in JOB_RECORD.names or ()},
        "by_kind": {name: _listed(getattr(state.jobs, name)) for name in Jobs._fields[1:]},
        "names": {str(number): name for number, name in state.names.items()},
        "device_names": list(state.device_names),
        "device_kind": _listed(state.device_kind),
        "device_server": _listed(state.device_server),
        "servers": [list(server) for server in state.servers],
        "is_up": state.is_up.tolist(),
        "holders": _listed(state.holders),
        "warm": _warm_data(state.warm),
        "pair_steps_per_s": None if state.pair_table is None else _listed(_table(state)),
        "pair_plan": None
        if state.pair_plan is None
        else {
            "amount": _listed(state.pair_plan.amount),
            "credit_s": _listed(state.pair_plan.credit_s),
        },
        "teams": list(state.teams),
        "team_weight": _listed(state.team_weight),
        "notes": dict(state.notes),
    }


def state_from_data(data: Mapping[str, Any]) -> State:
    """The state that `state_to_data` wrote; raises `InputFileError` for anything else."""
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise InputFileError("this is no state of a fleet, or one of another version")
    try:
        state = _read(data)
        _refuse_wrong_indices(state)
        return state
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise InputFileError(f"the state of the fleet is damaged: {error}") from error


def _read(data: Mapping[str, Any]) -> State:
    kinds = tuple(data["kinds"])
    time_s, next_tick_s, solved_s = _array(data["times"])
    device_kind, device_server = _whole(data["device_kind"]), _whole(data["device_server"])
    is_up = np.array(data["is_up"], dtype=bool)
    table, plan = data["pair_steps_per_s"], data["pair_plan"]
    known = {field.name for field in fields(Rules)}
    return State(
        rules=Rules(**{key: value for key, value in data["rules"].items() if key in known}),
        kinds=kinds,
        price_per_hour=_array(data["price_per_hour"]),
        time_s=float(time_s),
        next_tick_s=float(next_tick_s),
        solved_s=float(solved_s),
        round_number=int(data["round_number"]),
        is_dirty=bool(data["is_dirty"]),
        jobs=_jobs(data, len(kinds)),
        names={int(number): name for number, name in data["names"].items()},
        device_names=tuple(data["device_names"]),
        device_kind=device_kind,
        device_server=device_server,
        servers=_servers(data, device_server),
        is_up=is_up,
        holders=_whole(data["holders"]).reshape(-1, 2),
        layout=lay_out(device_kind, device_server, is_up, len(kinds)),
        warm=_warm(data["warm"]),
        pair_table=None if table is None else PairTable(steps_per_s=_cube(table, len(kinds))),
        pair_plan=None
        if plan is None
        else PairPlan(
            amount=_cube(plan["amount"], len(kinds)), credit_s=_cube(plan["credit_s"], len(kinds))
        ),
        teams=tuple(data["teams"]),
        team_weight=_array(data["team_weight"]),
        notes=dict(data["notes"]),
    )


def _jobs(data: Mapping[str, Any], num_kinds: int) -> Jobs:
    columns = data["jobs"]
    rows = np.zeros(len(columns["number"]), dtype=JOB_RECORD)
    for name in JOB_RECORD.names or ():
        # A state that was written before there was such a column says nothing of it.
        values = columns[name] if name not in _YOUNG else columns.get(name, BLANK[name])
        rows[name] = _array(values) if JOB_RECORD[name].kind == "f" else values
    by_kind = (_array(data["by_kind"][name]).reshape(-1, num_kinds) for name in Jobs._fields[1:])
    return Jobs(rows, *by_kind)


def _refuse_wrong_indices(state: State) -> None:
    """Compiled code reads and writes at these without looking."""
    rows, num_kinds, num_devices = state.jobs.rows, state.num_kinds, len(state.device_names)
    by_kind = (state.price_per_hour[None], *state.jobs[1:])
    if {len(part) for part in state.jobs} != {len(rows)} or any(
        part.shape[1:] != (num_kinds,) for part in by_kind
    ):
        raise ValueError("tables of jobs do not have one row per job and one column per kind")
    devices = (state.device_kind, state.device_server, state.is_up, state.holders)
    if any(len(column) != num_devices for column in devices):
        raise ValueError("tables of devices do not have one row per device")
    numbers, is_running = rows["number"], rows["phase"] == RUNNING
    ranges = (
        (numbers[:1], 0, np.inf),
        (np.diff(numbers), 1, np.inf),
        (rows["phase"], 0, len(PHASES) - 1),
        (rows["kind"], -1, num_kinds - 1),
        (rows["kind"][is_running], 0, num_kinds - 1),
        (rows["team"], 0, len(state.teams) - 1),
        (state.device_kind, 0, num_kinds - 1),
        (state.device_server, 0, len(state.servers) - 1),
    )
    if any(((values < low) | (values > high)).any() for values, low, high in ranges):
        raise ValueError("a number points to nothing")
    if not np.isin(state.holders, [-1, *numbers[is_running].tolist()]).all():
        raise ValueError("a device is held by a job that does not run")
    _refuse_wrong_pairs(state)


def _refuse_wrong_pairs(state: State) -> None:
    table, plan, profile = state.pair_table, state.pair_plan, state.jobs.rows["profile"]
    if table is None and plan is None:
        return
    if table is None or plan is None:
        raise ValueError("pairs have a table or a plan, but not both")
    size = len(table.steps_per_s)
    parts = (table.steps_per_s, plan.amount, plan.credit_s)
    if any(part.shape != (size, size, state.num_kinds) for part in parts):
        raise ValueError("tables of pairs do not have one row and one column per profile")
    if ((profile < 0) | (profile >= size)).any():
        raise ValueError("a job names a profile that does not exist")


def _servers(data: Mapping[str, Any], device_server: np.ndarray) -> tuple[tuple[int, str], ...]:
    """Kinds and names of servers; of a state that was written without them, nobody's."""
    if "servers" in data:
        return tuple((int(kind), str(name)) for kind, name in data["servers"])
    return tuple((-1, str(server)) for server in range(int(device_server.max(initial=-1)) + 1))


def _table(state: State) -> np.ndarray:
    assert state.pair_table is not None
    return state.pair_table.steps_per_s


def _warm_data(warm: Warm | None) -> dict[str, Any] | None:
    if warm is None:
        return None
    columns = None if warm.columns is None else warm.columns.tolist()
    return {"prices": _listed(warm.prices), "level": _number(warm.level), "columns": columns}


def _warm(data: Mapping[str, Any] | None) -> Warm | None:
    if data is None:
        return None
    columns = None if data["columns"] is None else _whole(data["columns"]).reshape(-1, 3)
    return Warm(prices=_array(data["prices"]), level=float(data["level"]), columns=columns)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _listed(values: np.ndarray) -> list[Any]:
    if values.dtype.kind != "f" or np.isfinite(values).all():
        listed: list[Any] = values.tolist()
        return listed
    return [_listed(part) if part.ndim else _number(float(part)) for part in values]


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


def _whole(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _cube(values: Any, num_kinds: int) -> np.ndarray:
    array = _array(values)
    return (
        array.reshape(*array.shape[:2], num_kinds)
        if array.ndim == 3
        else np.zeros((0, 0, num_kinds))
    )
