"""All placements of a tiny graph, compiled: bounded first, then tried in the order of their bounds.

`exhaustive` says what is done and why.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.kernels import kernel
from hocket.planners.placement.exact.orders_kernel import (
    NOISE,
    Best,
    Orders,
    bound_s,
    measure,
    try_orders,
)
from hocket.simulate.lowering import Draft, lower_draft
from hocket.simulate.state import State


class Placements(NamedTuple):
    """Which unit may go where, and the placements that have been found."""

    unit_of: ByteArray
    can_run: NDArray[np.bool_]
    """[device, unit]"""
    twin: ByteArray
    """Per device: an equal one that must be used first; -1 for none."""
    digit: ByteArray
    """Per unit: its device; one entry more."""
    used: ByteArray
    """Per device: units there, then its bytes."""
    held_bytes: ByteArray
    """Per device: what stays there to the end."""
    bound_s: FloatArray
    """Per placement: no order makes its step shorter; infinite where none fits."""
    code: ByteArray
    """Per placement: its devices as the digits of a number."""


@kernel
def _bound(draft: Draft, places: Placements, orders: Orders) -> float:
    """A bound on the step of a placement; infinite where its held bytes do not fit."""
    lower_draft(draft.given, draft.tables, draft.scratch)
    table, held = draft.tables.places, places.held_bytes
    for device in range(len(held)):
        held[device] = 0
    for index in range(draft.scratch.num_found[0]):
        if table.is_kept[table.storage[index]]:
            held[table.device[index]] += table.num_bytes[index]
    for device in range(len(held)):
        if max(held[device], table.start_bytes[device]) > draft.given.memory_bytes[device]:
            return np.inf
    measure(draft, orders)
    for op in range(len(draft.tables.runs.device)):
        orders.end_s[op] = -1.0
    for device in range(len(held)):
        orders.free_s[device] = 0.0
    return bound_s(draft, orders)


@kernel
def _may_go(places: Placements, unit: int, device: int) -> bool:
    twin = places.twin[device]
    return bool(places.can_run[device, unit] and (twin < 0 or places.used[twin] > 0))


@kernel
def list_placements(draft: Draft, places: Placements, orders: Orders) -> int:
    """List every placement with its bound; returns how many, or -1 where there is no room."""
    num_units, num_devices = len(places.digit) - 1, len(places.twin)
    count, unit = 0, 0
    places.digit[0] = -1
    while unit >= 0:
        if unit == num_units:
            if count == len(places.code):
                return -1
            code = 0
            for index in range(num_units):
                code = code * num_devices + places.digit[index]
            for op in range(len(places.unit_of)):
                draft.tables.runs.device[op] = places.digit[places.unit_of[op]]
            places.code[count] = code
            places.bound_s[count] = _bound(draft, places, orders)
            count += 1
            unit -= 1
            continue
        device = places.digit[unit]
        if device >= 0:
            places.used[device] -= 1
        device += 1
        while device < num_devices and not _may_go(places, unit, device):
            device += 1
        if device == num_devices:
            unit -= 1
            continue
        places.digit[unit] = device
        places.used[device] += 1
        unit += 1
        places.digit[unit] = -1
    return count


@kernel
def try_placements(
    draft: Draft,
    state: State,
    places: Placements,
    orders: Orders,
    best: Best,
    line_up: ByteArray,
) -> int:
    """Try placements in the order ``line_up``; returns the first that was not tried to its end."""
    num_units, num_devices = len(places.digit) - 1, len(places.twin)
    for index in range(len(line_up)):
        if places.bound_s[line_up[index]] >= best.step_s[0] * (1 - NOISE):
            return len(line_up)
        if best.runs_left[0] <= 0:
            return index
        code = places.code[line_up[index]]
        for step in range(num_units):
            places.digit[num_units - 1 - step] = code % num_devices
            code //= num_devices
        for op in range(len(places.unit_of)):
            draft.tables.runs.device[op] = places.digit[places.unit_of[op]]
        lower_draft(draft.given, draft.tables, draft.scratch)
        measure(draft, orders)
        if not try_orders(draft, state, orders, best):
            return index
    return len(line_up)
