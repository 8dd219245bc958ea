"""ParDNN step 2: move ops away from devices that overflow, with the least damage.

Heuristic II, first and fast: variables move, with the ops that read them, from the device that has
most of what there is to the one that has least, the largest first. Heuristic I: at the moment when
a device overflows most, every unit has a potential (the bytes that go if it moves) and a damage
(its time and the transfers that its moving adds). Units are taken by potential over damage until
enough goes (a greedy minimum knapsack), each to the device with the lowest peak that has room while
it lives; then all is emulated again. O(rounds · (simulation + reads log reads)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.planners.parts.large import is_large
from hocket.planners.placement.devices import workers
from hocket.planners.placement.pardnn.emulate import Emulation, emulate
from hocket.planners.placement.pardnn.potential import Candidates, candidates_at
from hocket.planners.placement.pardnn.work import units
from hocket.simulate.lowering import home_devices

_MAX_ROUNDS = 30
_EMULATED_OPS = 600_000
"""Rounds end when they have emulated this many ops, if that is sooner."""
_MAX_FAILED = 3
_NUM_BUCKETS = 256
"""Parts of the step for which the bytes on each device are followed between emulations."""
_MAX_REFUSED = 256
"""So many candidates in a row that fit nowhere end the search for one device."""
_MARGIN = 1.02
"""How much more than the overflow is moved: what comes back as copies is not foreseen in full."""
_NO_DAMAGE_S = 1e-12
_MOVES_PER_DEVICE = 16
_COUNTED_OPS = 4_000_000
"""Moves of variables end when shares have been counted over this many ops, if that is sooner."""
_EVEN = 1.02
"""Share of memory above the fair one that is left as it is."""


def fit_memory(
    problem: Problem, device_of: IntArray, priority: FloatArray | None = None
) -> IntArray:
    """The placement with the least overflow that the two heuristics find."""
    start = emulate(problem, device_of, priority)
    if start.overflow_bytes == 0:
        return device_of
    spread = emulate(problem, spread_variables(problem, device_of), priority)
    runs = [spread, start]
    if is_large(problem.graph.num_ops):
        runs = [min(runs, key=_rank)]
    return min((relieve(problem, run, priority) for run in runs), key=_rank).device_of


def _rank(run: Emulation) -> tuple[float, float]:
    """What is better comes first."""
    return run.overflow_bytes, run.timeline.makespan_s


# ── heuristic II ─────────────────────────────────────────────────────────────────────────────────


def spread_variables(problem: Problem, device_of: IntArray) -> IntArray:
    """Even out the shares of intermediates and variables by moving variables with their readers."""
    graph, unit = problem.graph, units(problem)
    devices = workers(problem)
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    device_of, is_moved = device_of.copy(), np.zeros(graph.num_tensors, dtype=np.bool_)
    num_moves = max(_COUNTED_OPS // graph.num_ops, len(devices))
    for _ in range(min(_MOVES_PER_DEVICE * len(devices), num_moves)):
        home = home_devices(graph, device_of)
        share = _shares(problem, home)
        source = devices[np.argmax(share[devices])]
        target = devices[np.argmin(share[devices])]
        if share[source] <= _EVEN:
            break
        variable = _largest_variable(problem, home, source, is_moved)
        if variable < 0:
            break
        is_moved[variable] = True
        readers = graph.users_of(variable)
        going = np.isin(unit, unit[readers[device_of[readers] == source]])
        if can_run[target][going].all():
            device_of[going] = target
    return device_of


def _shares(problem: Problem, home: IntArray) -> FloatArray:
    """Per device: mean of its shares of intermediates and of variables, over that of memory."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    share = np.zeros(num_devices)
    is_made = graph.tensor_producer >= 0
    for is_kind in (is_made, ~is_made & (graph.tensor_role != Role.INPUT)):
        held = np.bincount(home[is_kind], weights=graph.held_bytes[is_kind], minlength=num_devices)
        share += held / max(held.sum(), 1.0) / 2
    memory = np.maximum(problem.memory_bytes, 1)
    fair: FloatArray = share / (memory / memory[workers(problem)].sum())
    return fair


def _largest_variable(problem: Problem, home: IntArray, device: int, is_moved: np.ndarray) -> int:
    """The largest tensor that exists before the step, is read, at home there and not moved yet."""
    graph = problem.graph
    fits = (graph.tensor_producer < 0) & (graph.tensor_role != Role.INPUT) & ~is_moved
    fits &= (home == device) & (graph.held_bytes > 0) & (np.diff(graph.user_ptr) > 0)
    if not fits.any():
        return -1
    return int(np.argmax(np.where(fits, graph.held_bytes, -1)))


# ── heuristic I ──────────────────────────────────────────────────────────────────────────────────


def relieve(problem: Problem, best: Emulation, priority: FloatArray | None = None) -> Emulation:
    """Move units away from overflows, round by round, as long as that helps."""
    unit = units(problem)
    num_rounds = min(_MAX_ROUNDS, _EMULATED_OPS // max(problem.graph.num_ops, 1))
    current, num_failed = best, 0
    for _ in range(num_rounds):
        if current.overflow_bytes == 0 or num_failed == _MAX_FAILED:
            break
        moved = _relieved_once(problem, current, unit)
        if np.array_equal(moved, current.device_of):
            break
        current = emulate(problem, moved, priority)
        if current.overflow_bytes < best.overflow_bytes:
            best, num_failed = current, 0
        else:
            num_failed += 1
    return best


def _relieved_once(problem: Problem, run: Emulation, unit: IntArray) -> IntArray:
    """The placement after moves for the worst moment of each device that overflows."""
    room = _room_of(problem, run)
    device_of = run.device_of.copy()
    for device in np.argsort(-run.excess_bytes, kind="stable").tolist():
        if run.excess_bytes[device] <= 0:
            break
        times_s, held = run.timeline.memory_curve(device)
        moment_s = float(times_s[np.argmax(held)])
        candidates = candidates_at(problem, run, unit, device, moment_s)
        _move_enough(device_of, room, candidates, device, run.excess_bytes[device] * _MARGIN)
    return device_of


def _move_enough(
    device_of: IntArray, room: _BucketRoom, candidates: Candidates, device: int, excess_bytes: float
) -> None:
    """Take candidates by potential over damage until the excess is gone."""
    ratio = candidates.potential_bytes / np.maximum(candidates.damage_s, _NO_DAMAGE_S)
    num_refused = 0
    for candidate in np.argsort(-ratio, kind="stable").tolist():
        if excess_bytes <= 0 or num_refused == _MAX_REFUSED:
            break
        ops = candidates.ops_of(candidate)
        if candidates.potential_bytes[candidate] <= 0 or (device_of[ops] != device).any():
            continue
        target = room.lowest_for(candidates, candidate, device)
        if target < 0:
            num_refused += 1
            continue
        num_refused = 0
        room.move(candidates, candidate, device, target)
        device_of[ops] = target
        excess_bytes -= candidates.potential_bytes[candidate]


class _BucketRoom(NamedTuple):
    """Bytes held on each device in parts of the step."""

    held: FloatArray
    """[device, bucket]: the most that is held there."""
    memory_bytes: LongArray
    bucket_s: float
    can_run: np.ndarray
    """[device, op]."""
    is_worker: np.ndarray

    def span(self, candidates: Candidates, candidate: int) -> slice:
        """The buckets in which a candidate lives."""
        first = int(candidates.start_s[candidate] / self.bucket_s)
        last = min(candidates.end_s[candidate] / self.bucket_s, float(_NUM_BUCKETS))
        return slice(min(first, _NUM_BUCKETS - 1), max(int(np.ceil(last)), first + 1))

    def lowest_for(self, candidates: Candidates, candidate: int, device: int) -> int:
        """The device with the lowest peak, of its memory, that can take a candidate; -1: none."""
        within = self.held[:, self.span(candidates, candidate)].max(axis=1)
        fits = within + candidates.incoming_bytes[candidate] <= self.memory_bytes
        fits &= self.is_worker & self.can_run[:, candidates.ops_of(candidate)].all(axis=1)
        fits[device] = False
        if not fits.any():
            return -1
        peak = self.held.max(axis=1) / np.maximum(self.memory_bytes, 1)
        return int(np.argmin(np.where(fits, peak, np.inf)))

    def move(self, candidates: Candidates, candidate: int, device: int, target: int) -> None:
        """Count a candidate on another device."""
        span = self.span(candidates, candidate)
        self.held[device, span] -= candidates.potential_bytes[candidate]
        self.held[target, span] += candidates.incoming_bytes[candidate]


def _room_of(problem: Problem, run: Emulation) -> _BucketRoom:
    num_devices = problem.cluster.num_devices
    bucket_s = max(run.timeline.makespan_s, np.finfo(np.float64).tiny) / _NUM_BUCKETS
    held = np.zeros((num_devices, _NUM_BUCKETS))
    for device in range(num_devices):
        times_s, num_bytes = run.timeline.memory_curve(device)
        bucket = np.minimum((times_s / bucket_s).astype(np.int64), _NUM_BUCKETS - 1)
        np.maximum.at(held[device], bucket, num_bytes)
        # What is held at the start of a bucket is what the last change before it left.
        last = np.searchsorted(times_s, np.arange(_NUM_BUCKETS) * bucket_s, side="right") - 1
        held[device] = np.maximum(held[device], num_bytes[last] if len(num_bytes) else 0)
    is_worker = np.zeros(num_devices, dtype=np.bool_)
    is_worker[workers(problem)] = True
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    return _BucketRoom(held, problem.memory_bytes, bucket_s, can_run, is_worker)
