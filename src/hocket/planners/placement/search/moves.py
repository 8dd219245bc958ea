"""Moves of a local search that might make the critical path shorter, best guess first.

Single units, swaps with the op that occupies the device, runs of the critical path that share a
device, shifts of the boundary between two devices, several promising moves at once, a device given
up or distributed over the others, and ops put before the op that kept their device busy.

Of some six hundred moves about thirty are tried before one is better. So each kind is a stream that
generates its moves on demand, the best guess first, out of what it read from the evaluator
before its first move: trying a move changes what the evaluator shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.order.levels import levels
from hocket.planners.placement.search.critical import Critical
from hocket.planners.placement.search.state import Change, LocalSearch
from hocket.planners.placement.search.units import SearchUnits

MAX_SINGLE = 400
MAX_SWAPS = 100
MAX_BORDERS = 24
MAX_ORDERS = 100
MAX_MERGED = 8
MAX_SPLIT = 2
LAST_RESORT = 0.1
"""Moves of half a device look good early in many searches that end better without, so they wait."""


class Move(NamedTuple):
    """A guess at what a change gains. Of many moves few are tried, so the change is made later."""

    kind: str
    key: tuple[int | bytes, ...]
    """Identifies the move among others of its kind."""
    gain_s: float
    make: Callable[[], Change]
    place: tuple[int, ...]
    """Decides between moves from which the same is expected: the lower first."""


def moves(search: LocalSearch, units: SearchUnits, critical: Critical) -> list[Iterator[Move]]:
    """Streams of moves of one kind each, by falling gain, then by place."""
    return [
        _single(units, critical),
        _together(units, critical),
        *_swaps(search, units, critical),
        *_borders(search, units, critical),
        _by_gain(_merged(search, units)),
        _by_gain(_split(search, units)),
        _earlier(search, critical),
    ]


def _by_gain(found: Iterable[Move]) -> Iterator[Move]:
    yield from sorted(found, key=lambda move: -move.gain_s)


def _to(units: SearchUnits, chosen: LongArray, device: int | LongArray) -> Callable[[], Change]:
    """Units to a device, or to one each."""

    def make() -> Change:
        ops, position = units.ops_of_all(chosen)
        devices = np.broadcast_to(np.asarray(device, dtype=np.int64), len(chosen))[position]
        return Change(ops, devices)

    return make


def _ordered_anew(
    search: LocalSearch, units: SearchUnits, chosen: LongArray, device: int
) -> Callable[[], Change]:
    """Units to a device, with bottom levels as the order of all ops: after a move of this size
    the current order is hardly useful."""

    def make() -> Change:
        ops, _ = units.ops_of_all(chosen)
        device_of = search.device_of.copy()
        device_of[ops] = device
        priority = -levels(search.problem, device_of).to_end_s
        return Change(np.arange(len(device_of)), device_of.astype(np.int64), priority)

    return make


def _ranked(gain_s: np.ndarray, count: int) -> LongArray:
    """Positions of the highest gains in the flattened array, those that are possible at all."""
    flat = gain_s.ravel()
    order = np.argsort(-flat, kind="stable")[:count]
    return order[flat[order] > -np.inf]


def _single(units: SearchUnits, critical: Critical) -> Iterator[Move]:
    num_devices = critical.gain_s.shape[1]
    for place, at in enumerate(_ranked(critical.gain_s, MAX_SINGLE).tolist()):
        row, device = divmod(at, num_devices)
        unit = int(critical.units[row])
        make = _to(units, critical.units[row : row + 1], device)
        gain_s = float(critical.gain_s[row, device])
        yield Move("single", (unit, device), gain_s, make, (0, place))


def _together(units: SearchUnits, critical: Critical) -> Iterator[Move]:
    """The most promising moves of many units at once, then of fewer and fewer of them.

    Not of all: moves that look good one by one conflict with each other.
    """
    best = critical.gain_s.argmax(axis=1)
    gain_s = critical.gain_s[np.arange(len(best)), best]
    order = np.argsort(-gain_s, kind="stable")
    count = (int((gain_s > 0).sum()) + 1) // 2
    while count >= 2:
        rows = order[:count]
        chosen = critical.units[rows]
        key = (count, chosen.tobytes(), best[rows].tobytes())
        make = _to(units, chosen, best[rows])
        yield Move("together", key, float(gain_s[rows].sum()), make, (1, -count))
        count //= 2


def _swaps(search: LocalSearch, units: SearchUnits, critical: Critical) -> Iterator[Iterator[Move]]:
    """Critical units with the unit that runs elsewhere at the time of their first critical op."""
    start_s, gain_s = search.evaluator.op_start_s, critical.gain_s
    ops = np.flatnonzero(critical.is_critical)
    _, first = np.unique(units.unit_of[ops], return_index=True)
    moment_s, current = start_s[ops[first]], search.device_of[ops[first]]
    for device in range(gain_s.shape[1]):
        part = slice(critical.device_ptr[device], critical.device_ptr[device + 1])
        there = critical.by_device[part]
        if not len(there):
            continue
        found = np.searchsorted(start_s[there], moment_s, side="right") - 1
        partner = units.unit_of[there[np.maximum(found, 0)]]
        is_possible = (gain_s[:, device] > -np.inf) & (partner != critical.units)
        is_possible &= units.can_run[current, partner]
        rows = np.flatnonzero(is_possible)
        rows = rows[np.argsort(-gain_s[rows, device], kind="stable")][
            : MAX_SWAPS // gain_s.shape[1]
        ]
        pairs = np.stack((critical.units[rows], partner[rows]), axis=1)
        yield _swapped(units, pairs, device, current[rows], gain_s[rows, device])


def _swapped(
    units: SearchUnits, pairs: LongArray, device: int, current: np.ndarray, gain_s: np.ndarray
) -> Iterator[Move]:
    for place, pair in enumerate(pairs):
        make = _to(units, pair, np.array([device, current[place]]))
        key = (int(pair[0]), int(pair[1]))
        yield Move("swap", key, float(gain_s[place]), make, (2, device, place))


def _borders(
    search: LocalSearch, units: SearchUnits, critical: Critical
) -> tuple[Iterator[Move], Iterator[Move]]:
    """Where the critical path goes from one device to another: units next to that border change
    sides, and so do runs of the path between two borders."""
    start_s = search.evaluator.op_start_s
    path = np.flatnonzero(critical.is_critical)
    path = path[np.lexsort((path, start_s[path]))]
    on = search.device_of[path]
    borders = np.flatnonzero(on[1:] != on[:-1])
    gap_s = start_s[path[borders + 1]] - search.evaluator.op_end_s[path[borders]]
    widest = np.argsort(-gap_s, kind="stable")[:MAX_BORDERS]
    found = list(zip(borders[widest].tolist(), gap_s[widest].tolist(), strict=True))
    return _runs(units, path, on, found), _near_borders(search, units, path, on, found)


def _runs(
    units: SearchUnits, path: LongArray, on: np.ndarray, borders: list[tuple[int, float]]
) -> Iterator[Move]:
    for place, (at, gap_s) in enumerate(borders):
        for side, (op, other, step) in enumerate(((at, at + 1, -1), (at + 1, at, 1))):
            chosen = np.unique(units.unit_of[path[_run(on, op, step)]])
            yield from _sides(units, chosen, int(on[other]), gap_s, "run", (3, place, side, 0))


def _near_borders(
    search: LocalSearch,
    units: SearchUnits,
    path: LongArray,
    on: np.ndarray,
    borders: list[tuple[int, float]],
) -> Iterator[Move]:
    for place, (at, gap_s) in enumerate(borders):
        for side, (op, other) in enumerate(((at, at + 1), (at + 1, at))):
            near = _near(search, units, int(path[op]), is_last=op < other)
            count = 1
            while count <= len(near):
                where = (3, place, side, count)
                yield from _sides(units, near[:count], int(on[other]), gap_s, "border", where)
                count *= 2


def _sides(
    units: SearchUnits,
    chosen: LongArray,
    device: int,
    gap_s: float,
    kind: str,
    place: tuple[int, ...],
) -> Iterator[Move]:
    chosen = chosen[units.can_run[device, chosen]].astype(np.int64)
    if len(chosen):
        key = (device, len(chosen), chosen.tobytes())
        yield Move(kind, key, gap_s, _to(units, chosen, device), place)


def _run(on: np.ndarray, at: int, step: int) -> LongArray:
    """Positions from ``at`` on, in one direction, that are on the same device."""
    stop = at
    while 0 <= stop < len(on) and on[stop] == on[at]:
        stop += step
    return np.arange(at, stop, step)


def _near(search: LocalSearch, units: SearchUnits, op: int, is_last: bool) -> LongArray:
    """Units of the device of ``op``, from its own on, away from the border."""
    first = units.groups.ops[units.groups.ptr[:-1]]
    own = int(units.unit_of[op])
    here = np.flatnonzero(search.device_of[first] == search.device_of[op])
    here = here[first[here] <= first[own]] if is_last else here[first[here] >= first[own]]
    order = np.argsort(first[here], kind="stable")
    near: LongArray = here[order[::-1] if is_last else order]
    return near[: max(1, units.num_units // 8)]


def _merged(search: LocalSearch, units: SearchUnits) -> Iterator[Move]:
    """All units of one device on another: for plans that send more than they can gain."""
    duration_s = search.evaluator.runs.duration_s
    first = units.groups.ops[units.groups.ptr[:-1]]
    on = search.device_of[first]
    used = np.unique(on).tolist()
    for src in used if len(used) <= MAX_MERGED else ():
        chosen = np.flatnonzero(on == src)
        for dst in used:
            if dst != src and units.can_run[dst, chosen].all():
                work_s = duration_s[search.device_of == dst].sum()
                gain_s = LAST_RESORT * float(search.score.step_s - work_s)
                make = _ordered_anew(search, units, chosen, dst)
                yield Move("merge", (src, dst, len(chosen)), gain_s, make, (4, src, dst))


def _split(search: LocalSearch, units: SearchUnits) -> Iterator[Move]:
    """The last half, quarter, eighth of the busiest device's units on the idlest that can."""
    duration_s = search.evaluator.runs.duration_s
    busy_s = np.bincount(search.device_of, duration_s, minlength=len(units.can_run))
    src = int(busy_s.argmax())
    first = units.groups.ops[units.groups.ptr[:-1]]
    there = np.flatnonzero(search.device_of[first] == src)
    there = there[np.argsort(first[there], kind="stable")]
    for place, dst in enumerate(np.argsort(busy_s, kind="stable")[:MAX_SPLIT].tolist()):
        for part in (2, 4, 8):
            chosen = there[len(there) - len(there) // part :]
            if dst != src and len(chosen) and units.can_run[dst, chosen].all():
                make = _ordered_anew(search, units, chosen, dst)
                key = (src, dst, len(chosen), len(there))
                gain_s = LAST_RESORT * float(busy_s[src]) / part
                yield Move("split", key, gain_s, make, (5, place, part))


def _earlier(search: LocalSearch, critical: Critical) -> Iterator[Move]:
    """Critical ops that started when another op on their device ended, before that one."""
    evaluator = search.evaluator
    ops, previous = critical.by_device[1:], critical.by_device[:-1]
    is_kept = critical.is_critical[ops] & (search.device_of[ops] == search.device_of[previous])
    is_kept &= evaluator.op_end_s[previous] == evaluator.op_start_s[ops]
    found = np.flatnonzero(is_kept)
    wait_s = evaluator.op_end_s[previous[found]] - evaluator.op_start_s[previous[found]]
    for place, at in enumerate(np.argsort(-wait_s, kind="stable")[:MAX_ORDERS].tolist()):
        op, ahead = int(ops[found[at]]), int(previous[found[at]])
        yield Move(
            "earlier", (op, ahead), float(wait_s[at]), _before(search, op, ahead), (6, place)
        )


def _before(search: LocalSearch, op: int, ahead: int) -> Callable[[], Change]:
    def make() -> Change:
        device = np.array([search.device_of[op]], dtype=np.int64)
        return Change(np.array([op]), device, np.array([search.priority[ahead] - 0.5]))

    return make
