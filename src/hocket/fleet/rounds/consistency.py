"""Check the indices of a stored state, because compiled code reads arrays without bounds checks."""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.state import CONDITIONS, PHASES, RUNNING, FleetState


def refuse_wrong_indices(state: FleetState) -> None:
    """Raise `ValueError` where a table has the wrong size or an index points to nothing."""
    rows, num_types, num_devices = state.jobs.rows, state.num_types, len(state.device_names)
    by_type = (state.price_per_hour[None], *state.jobs[1:])
    if {len(part) for part in state.jobs} != {len(rows)} or any(
        part.shape[1:] != (num_types,) for part in by_type
    ):
        raise ValueError("tables of jobs do not have a row per job and a column per device type")
    devices = (state.type_of_device, state.device_server, state.is_up, state.holders)
    if any(len(column) != num_devices for column in devices):
        raise ValueError("tables of devices do not have one row per device")
    if state.dependencies.shape[1:] != (3,):
        raise ValueError("dependencies do not have three columns")
    if state.user_quota.shape[1:] != (2,) or state.team_quota.shape[1:] != (2,):
        raise ValueError("quotas do not have two columns")
    if len(state.user_weight) != len(state.users) or len(state.team_weight) != len(state.teams):
        raise ValueError("users or teams do not have one weight each")
    numbers, is_running = rows["number"], rows["phase"] == RUNNING
    ranges = (
        (numbers[:1], 0, np.inf),
        (np.diff(numbers), 1, np.inf),
        (rows["phase"], 0, len(PHASES) - 1),
        (rows["device_type"], -1, num_types - 1),
        (rows["device_type"][is_running], 0, num_types - 1),
        (rows["team"], 0, len(state.teams) - 1),
        (rows["user"], 0, len(state.users) - 1),
        (state.dependencies[:, 2], 0, len(CONDITIONS) - 1),
        (state.type_of_device, 0, num_types - 1),
        (state.device_server, 0, len(state.servers) - 1),
    )
    if any(((values < low) | (values > high)).any() for values, low, high in ranges):
        raise ValueError("a number points to nothing")
    if not np.isin(state.holders, np.append(numbers[is_running], -1)).all():
        raise ValueError("a device is held by a job that does not run")
    _refuse_wrong_pairs(state)


def _refuse_wrong_pairs(state: FleetState) -> None:
    table, plan, profile = state.pair_table, state.pair_plan, state.jobs.rows["profile"]
    if table is None and plan is None and state.pair_estimates is None:
        return
    if table is None or plan is None:
        raise ValueError("pairs have a table or a plan, but not both")
    size = len(table.steps_per_s)
    parts = (table.steps_per_s, plan.amount, plan.credit_s)
    if any(part.shape != (size, size, state.num_types) for part in parts):
        raise ValueError("tables of pairs do not have one row and one column per profile")
    if ((profile < 0) | (profile >= size)).any():
        raise ValueError("a job names a profile that does not exist")
    known = state.pair_estimates
    if known is not None and (
        len(known.profiles) != size - 1
        or known.alone.shape != (size - 1, state.num_types)
        or {known.part.shape, known.is_measured.shape} != {(size - 1, size - 1, state.num_types)}
    ):
        raise ValueError("estimates of pairs do not fit the table of pairs")
