"""Random moves and swaps of units in the ledger, compiled: simulated annealing on the overflow.

A unit, most often one of a device that lacks memory, goes to another device, every other time in
exchange for a unit from there. What makes the overflow and, much less, the sum of all peaks smaller
stays; what makes them larger stays with a chance that falls to nothing in the end.
O(tries · spans of a unit · log instants).
"""

from __future__ import annotations

from hocket.base.arrays import BoolArray, LongArray
from hocket.kernels import kernel
from hocket.planners.parts.annealing import RandomState, draw_below, is_taken
from hocket.planners.parts.groups import OpGroups
from hocket.planners.placement.memory.kernel import overflow, place_unit, take_unit
from hocket.planners.placement.memory.ledger import LedgerTable, MemoryLedger
from hocket.planners.tables import TaskTable

_DRAWS = 8
_WASTE = 0.05
"""Weight of the sum of all peaks, against 1 for bytes above a limit."""


@kernel
def _copy(values: LongArray, to: LongArray) -> None:
    for index in range(len(values)):
        to[index] = values[index]


@kernel
def _cost(ledger: MemoryLedger, limit_bytes: LongArray) -> float:
    total = 0.0
    for device in range(len(limit_bytes)):
        held = ledger.top[device, 1]
        total += max(0, held - limit_bytes[device]) + _WASTE * held
    return total


@kernel
def _draw_unit(
    ledger: MemoryLedger, device_of_unit: LongArray, limit_bytes: LongArray, state: RandomState
) -> int:
    unit = 0
    for _ in range(_DRAWS):
        unit = draw_below(state, len(device_of_unit))
        device = device_of_unit[unit]
        if device >= 0 and ledger.top[device, 1] > limit_bytes[device]:
            break
    return unit


@kernel
def _draw_from(device_of_unit: LongArray, device: int, state: RandomState) -> int:
    for _ in range(4 * _DRAWS):
        unit = draw_below(state, len(device_of_unit))
        if device_of_unit[unit] == device:
            return unit
    return -1


@kernel
def _move(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, units: OpGroups,
    device_of_unit: LongArray, unit: int, target: int,
) -> None:  # fmt: skip
    take_unit(tasks, facts, ledger, units, unit, device_of_unit[unit])
    place_unit(tasks, facts, ledger, units, unit, target)
    device_of_unit[unit] = target


@kernel
def anneal(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    device_of_unit: LongArray,
    can_run: BoolArray,
    work: LongArray,
    limit_bytes: LongArray,
    best: LongArray,
    state: RandomState,
    max_tries: int,
    max_work: int,
    heat_bytes: float,
) -> int:
    """Move and swap; ``best`` gets the device of each op at the least overflow, which is returned.

    Ends after so many tries, or when the moved units add up to so much work.
    """
    num_devices = len(limit_bytes)
    cost = _cost(ledger, limit_bytes)
    least = overflow(ledger, limit_bytes)
    _copy(ledger.device_of, best)
    turn, done = 0, 0
    while turn < max_tries and done < max_work and least > 0:
        turn += 1
        unit = _draw_unit(ledger, device_of_unit, limit_bytes, state)
        source, target = device_of_unit[unit], draw_below(state, num_devices)
        if source < 0 or source == target or not can_run[target, unit]:
            continue
        other = _draw_from(device_of_unit, target, state) if turn & 1 else -1
        if other >= 0 and not can_run[source, other]:
            other = -1
        _move(tasks, facts, ledger, units, device_of_unit, unit, target)
        done += work[unit]
        if other >= 0:
            _move(tasks, facts, ledger, units, device_of_unit, other, source)
            done += work[other]
        changed = _cost(ledger, limit_bytes)
        heat = heat_bytes * (1 - max(turn / max_tries, done / max_work)) ** 2
        if is_taken(changed - cost, heat, state):
            cost = changed
            lacking = overflow(ledger, limit_bytes)
            if lacking < least:
                least = lacking
                _copy(ledger.device_of, best)
            continue
        if other >= 0:
            _move(tasks, facts, ledger, units, device_of_unit, other, target)
        _move(tasks, facts, ledger, units, device_of_unit, unit, source)
    return least
