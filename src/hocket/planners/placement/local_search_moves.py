"""Moves of a local search that might make the critical path shorter, best guess first.

The types of move: a single unit; several promising units at once; a run of the critical path that
shares a device; units next to a border, where the critical path changes device; and running a
critical op before the op that kept its device busy.

Of some six hundred moves about thirty are tried before one is better. So each type is an iterator
that generates its moves on demand, the best guess first, from data read before its first move:
trying a move overwrites the evaluator's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.planners.order.levels import latest_starts
from hocket.planners.placement.local_search_state import NO_SLACK, Change, LocalSearch, SearchUnits
from hocket.simulate.instructions import Given, PlaceTable, RunTable

# Estimated gain of moving a unit, compiled: longest paths through its ops on another device.


class SimulatedStep(NamedTuple):
    """The simulated step, as compiled code reads it."""

    end_s: FloatArray
    latest_s: FloatArray
    """Per op: latest start that does not make the step longer."""
    unit_of: LongArray
    is_critical: LongArray
    """Per op: 1 if critical, else 0."""
    step_s: FloatArray
    """Step time, an array of one number."""
    by_device: LongArray
    """Ops by device, in the order of their starts."""
    device_ptr: LongArray
    """Ops of device d: ``by_device[device_ptr[d]:device_ptr[d + 1]]``."""
    started_s: FloatArray
    """Start of each op in ``by_device``."""
    busy_s: FloatArray
    """Per entry of ``by_device``: seconds that its device worked before that op."""


@kernel
def _transfer_s(given: Given, tensor: int, src: int, dst: int) -> float:
    if src == dst:
        return 0.0
    pair = src * len(given.row) + dst
    seconds: float = (
        given.latency_s[pair] + given.work[tensor] * given.hops[pair] / given.slowest[pair]
    )
    return seconds


@kernel
def _busy_until(step: SimulatedStep, runs: RunTable, device: int, time_s: float) -> float:
    """Seconds that a device works before ``time_s``."""
    first, high = step.device_ptr[device], step.device_ptr[device + 1]
    low = first
    while low < high:
        middle = (low + high) >> 1
        if step.started_s[middle] < time_s:
            low = middle + 1
        else:
            high = middle
    if low == first:
        return 0.0
    last_s = runs.duration_s[step.by_device[low - 1]]
    busy_s: float = step.busy_s[low - 1] + min(last_s, time_s - step.started_s[low - 1])
    return busy_s


@kernel
def _path_s(
    given: Given, runs: RunTable, places: PlaceTable, step: SimulatedStep, op: int, device: int
) -> float:
    """Longest path through an op if it ran on the device, including work there that delays it."""
    unit, head_s, tail_s = step.unit_of[op], 0.0, 0.0
    for index in range(runs.read_ptr[op], runs.read_ptr[op + 1]):
        tensor = given.reads[index]
        producer = given.owner_op[tensor]
        if not given.is_made[tensor]:
            continue
        sent_s = 0.0
        if step.unit_of[producer] != unit:
            sent_s = _transfer_s(given, tensor, runs.device[producer], device)
        head_s = max(head_s, step.end_s[producer] + sent_s)
    for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
        for index in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
            user = places.reader[given.user_read[index]]
            sent_s = 0.0
            if step.unit_of[user] != unit:
                sent_s = _transfer_s(given, tensor, device, runs.device[user])
            tail_s = max(tail_s, step.step_s[0] - step.latest_s[user] + sent_s)
    duration_s: float = given.op_s[given.row[device], op]
    occupied_s = 0.0
    if device != runs.device[op]:
        occupied_s = _busy_until(step, runs, device, head_s + duration_s) - _busy_until(
            step, runs, device, head_s
        )
    return head_s + duration_s + occupied_s + tail_s


@kernel
def fill_gains(
    given: Given,
    runs: RunTable,
    places: PlaceTable,
    step: SimulatedStep,
    listed_op: LongArray,
    listed_row: LongArray,
    gain_s: FloatArray,
) -> None:
    """Add up, per row and device, the seconds gained if the row's listed ops moved there.

    A critical op gains the decrease of its longest path. Any other op can only lose: the time by
    which its path would exceed the step.
    """
    for index in range(len(listed_op)):
        op = listed_op[index]
        for device in range(len(given.row)):
            gain = step.step_s[0] - _path_s(given, runs, places, step, op, device)
            gain_s[listed_row[index], device] += gain if step.is_critical[op] else min(gain, 0.0)


_NEARLY = 0.05
"""Fraction of the step: an op with more slack hardly becomes critical by one move."""

_MAX_GUESSES = 400_000
"""Limit on (op, device) pairs that are evaluated; above it, only every n-th op is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Critical:
    """The critical ops of the current plan and the gains estimated for moving their units."""

    is_critical: BoolArray
    """Per op: True if it is critical or its device overflows."""
    units: LongArray
    """Units that contain critical ops, ascending."""
    gain_s: FloatArray
    """[entry of ``units``, device]: estimate; -inf on its own device and where it cannot run."""
    by_device: LongArray
    """Ops by device, in the order of their starts."""


def find_critical(search: LocalSearch, units: SearchUnits) -> Critical:
    """Find the critical ops of the current plan and estimate the gain of moving their units."""

    # Trying moves overwrites the evaluator's results, so those of the current plan are restored.
    search.show()
    evaluator = search.evaluator
    runs, places, _, _ = evaluator.buffers.tables
    start_s, end_s, step_s = evaluator.op_start_s, evaluator.op_end_s, search.score.step_s
    latest_s = latest_starts(evaluator, keeps_order=True)
    slack_s = latest_s - start_s
    is_critical = slack_s <= NO_SLACK * step_s
    is_critical |= _is_overfull(search)[search.device_of]
    by_device = np.lexsort((end_s, start_s, search.device_of))
    num_devices = search.problem.cluster.num_devices
    device_ptr = pointers(np.bincount(search.device_of, minlength=num_devices))
    duration_s = runs.duration_s[by_device]
    before_s = np.concatenate(([0.0], np.cumsum(duration_s)))[:-1]
    # From prefix sums over all ops to prefix sums per device; the appended 0 stands for the
    # start of devices without ops at the end.
    before_s -= np.append(before_s, 0.0)[device_ptr[:-1]][search.device_of[by_device]]
    chosen = np.unique(units.unit_of[is_critical]).astype(np.int64)
    listed_op, listed_row = units.ops_of_all(chosen)
    matters = is_critical[listed_op] | (slack_s[listed_op] < _NEARLY * step_s)
    # Sampling every n-th op bounds the time of an estimate that only ranks moves.
    every = 1 + int(matters.sum()) * num_devices // _MAX_GUESSES
    listed_op, listed_row = listed_op[matters][::every], listed_row[matters][::every]
    gain_s = np.zeros((len(chosen), len(device_ptr) - 1))
    step = SimulatedStep(
        end_s=end_s,
        latest_s=latest_s,
        unit_of=table(units.unit_of, np.int64),
        is_critical=table(is_critical, np.int64),
        step_s=np.array([step_s]),
        by_device=by_device,
        device_ptr=device_ptr,
        started_s=start_s[by_device],
        busy_s=before_s,
    )
    fill_gains(evaluator.buffers.given, runs, places, step, listed_op, listed_row, gain_s)
    gain_s[~units.can_run[:, chosen].T] = -np.inf
    # All ops of a unit are on one device, so the first op shows the unit's current device.
    first = units.groups.ops[units.groups.ptr[chosen]]
    gain_s[np.arange(len(chosen)), search.device_of[first]] = -np.inf
    return Critical(is_critical=is_critical, units=chosen, gain_s=gain_s, by_device=by_device)


def _is_overfull(search: LocalSearch) -> BoolArray:
    """Per device: True if its peak exceeds its memory, so that moving any of its ops may help."""
    has = search.evaluator.buffers.given.memory_bytes
    is_overfull: BoolArray = search.evaluator.peak_bytes > has
    return is_overfull


# Limits per round: about thirty moves are tried before one succeeds.
MAX_SINGLE = 400
MAX_BORDERS = 24
MAX_ORDERS = 100


class Move(NamedTuple):
    """A change with its estimated gain; the change itself is built only if the move is tried."""

    kind: str
    key: tuple[int | bytes, ...]
    """Identifies the move among others of its type."""
    gain_s: float
    make: Callable[[], Change]
    place: tuple[int, ...]
    """Tie-break between moves of equal expected gain: the smaller comes first."""


def moves(search: LocalSearch, units: SearchUnits, critical: Critical) -> list[Iterator[Move]]:
    """Return one iterator per type of move, each by decreasing gain, then by place."""
    return [
        _single(units, critical),
        _together(units, critical),
        *_borders(search, units, critical),
        _earlier(search, critical),
    ]


def _to(units: SearchUnits, chosen: LongArray, device: int | LongArray) -> Callable[[], Change]:
    """Return a function that makes the change: units to one device, or to one device each."""

    def make() -> Change:
        ops, position = units.ops_of_all(chosen)
        devices = np.broadcast_to(np.asarray(device, dtype=np.int64), len(chosen))[position]
        return Change(ops, devices)

    return make


def _ranked(gain_s: np.ndarray, count: int) -> LongArray:
    """Positions of the ``count`` highest finite gains in the flattened array."""
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
    """Moves of the best half of the promising units at once, then of a quarter, and so on.

    Moves that look good one by one conflict with each other, so all are never moved at once.
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


def _borders(
    search: LocalSearch, units: SearchUnits, critical: Critical
) -> tuple[Iterator[Move], Iterator[Move]]:
    """Moves at borders, where the critical path goes from one device to another.

    Returns two iterators: runs of the path between two borders change devices, and units next to a
    border do.
    """
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
            # Lengths double, so a border yields few moves, but short and long ones.
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
    """Positions from ``at`` in direction ``step`` that are on the same device."""
    stop = at
    while 0 <= stop < len(on) and on[stop] == on[at]:
        stop += step
    return np.arange(at, stop, step)


def _near(search: LocalSearch, units: SearchUnits, op: int, is_last: bool) -> LongArray:
    """Units on the device of ``op``, from its own unit on, away from the border."""
    first = units.groups.ops[units.groups.ptr[:-1]]
    own = int(units.unit_of[op])
    here = np.flatnonzero(search.device_of[first] == search.device_of[op])
    here = here[first[here] <= first[own]] if is_last else here[first[here] >= first[own]]
    order = np.argsort(first[here], kind="stable")
    near: LongArray = here[order[::-1] if is_last else order]
    return near[: max(1, units.num_units // 8)]


def _earlier(search: LocalSearch, critical: Critical) -> Iterator[Move]:
    """Moves of a critical op ahead of the op that kept its device busy until its start."""
    evaluator = search.evaluator
    ops, previous = critical.by_device[1:], critical.by_device[:-1]
    is_kept = critical.is_critical[ops] & (search.device_of[ops] == search.device_of[previous])
    # Exact comparison is right: the engine starts a waiting op at the very end of the other.
    is_kept &= evaluator.op_end_s[previous] == evaluator.op_start_s[ops]
    found = np.flatnonzero(is_kept)
    wait_s = evaluator.op_end_s[previous[found]] - evaluator.op_start_s[previous[found]]
    for place, at in enumerate(np.argsort(-wait_s, kind="stable")[:MAX_ORDERS].tolist()):
        op, ahead = int(ops[found[at]]), int(previous[found[at]])
        yield Move(
            "earlier", (op, ahead), float(wait_s[at]), _before(search, op, ahead), (4, place)
        )


def _before(search: LocalSearch, op: int, ahead: int) -> Callable[[], Change]:
    def make() -> Change:
        device = np.array([search.device_of[op]], dtype=np.int64)
        # Priorities are integers (`LocalSearch._number`), so half a step less fits in between.
        return Change(np.array([op]), device, np.array([search.priority[ahead] - 0.5]))

    return make
