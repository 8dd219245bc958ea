"""Indices of a stored state: the smallest and largest legal ones are taken, others are refused."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.fleet.rounds import FleetDevice, FleetState, Job, Submit, new_state, step
from hocket.fleet.rounds.consistency import refuse_wrong_indices


def stored() -> FleetState:
    """Two device types, three servers, a running job and one that waits for its end."""
    devices = tuple(
        FleetDevice(name=name, device_type=device_type)
        for name, device_type in (("a0", "a"), ("a1", "a"), ("b0", "b"))
    )
    jobs = (
        Job(number=3, name="first", steps_per_s=(1.0, 1.0)),
        Job(number=5, name="second", steps_per_s=(1.0, 1.0), after=((3, "ok"),)),
    )
    state = new_state(("a", "b"), devices)
    state = state.but(users=("", "ann"), user_weight=np.ones(2))
    return step(state, Submit(time_s=0.0, jobs=jobs))[0]


def with_row(state: FleetState, column: str, value: int, row: int = 1) -> FleetState:
    rows = state.jobs.rows.copy()
    rows[column][row] = value
    return state.but(jobs=state.jobs._replace(rows=rows))


def with_entry(state: FleetState, table: str, at: tuple[int, ...], value: int) -> FleetState:
    changed = getattr(state, table).copy()
    changed[at] = value
    return state.but(**{table: changed})


CASES = {
    "phase": (lambda state, value: with_row(state, "phase", value), [0, 2, 3, 4], [-1, 5]),
    "type of a waiting job": (
        lambda s, value: with_row(s, "device_type", value), [-1, 0, 1], [-2, 2]
    ),
    "type of a running job": (
        lambda s, value: with_row(s, "device_type", value, 0), [0, 1], [-1, 2]
    ),
    "team": (lambda state, value: with_row(state, "team", value), [0], [-1, 1]),
    "user": (lambda state, value: with_row(state, "user", value), [0, 1], [-1, 2]),
    "number": (lambda state, value: with_row(state, "number", value), [4, 5, 9], [3, 2, -1]),
    "condition": (
        lambda state, value: with_entry(state, "dependencies", (0, 2), value), [0, 1, 2], [-1, 3]
    ),
    "type of a device": (
        lambda state, value: with_entry(state, "type_of_device", (0,), value), [0, 1], [-1, 2]
    ),
    "server": (
        lambda state, value: with_entry(state, "device_server", (0,), value), [0, 1, 2], [-1, 3]
    ),
    "holder": (lambda state, value: with_entry(state, "holders", (2, 0), value), [-1, 3], [5, 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_indices_are_legal_up_to_their_limits_and_refused_beyond(name: str) -> None:
    change, legal, wrong = CASES[name]
    refuse_wrong_indices(stored())
    for value in legal:
        refuse_wrong_indices(change(stored(), value))
    for value in wrong:
        with pytest.raises(ValueError, match=r"points to nothing|held by a job"):
            refuse_wrong_indices(change(stored(), value))


@pytest.mark.parametrize(
    ("table", "cut"),
    [
        ("dependencies", np.s_[:, :2]), ("device_server", np.s_[1:]), ("is_up", np.s_[1:]),
        ("holders", np.s_[1:]), ("user_weight", np.s_[1:]), ("price_per_hour", np.s_[1:]),
    ],
)  # fmt: skip
def test_tables_of_another_size_are_refused(table: str, cut: slice) -> None:
    state = stored()
    with pytest.raises(ValueError, match="do not have"):
        refuse_wrong_indices(state.but(**{table: getattr(state, table)[cut]}))
