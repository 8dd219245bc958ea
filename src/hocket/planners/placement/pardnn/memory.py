"""ParDNN step 2: move ops away from devices that overflow, with the least damage.

Heuristic II, first and fast: residual nodes (variables) move, with the ops that read them, from the
device that has most of what there is to the one that has least, the largest first, and no more of
them than it takes until nothing overflows. Where one cluster dominates, its critical path is split:
the deepest layers of the device that overflows most, with their backward ops, go to the device with
most space. Heuristic I: at the moment when a device overflows most, every unit has a potential (the
bytes that go if it moves) and a damage (its time and the transfers that its moving adds). Units are
taken by potential over damage until enough goes (a greedy minimum knapsack), each to the device
with the lowest peak that can hold it while it lives; then all is emulated again.
O(rounds · (simulation + reads log reads)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.graph import Phase, Role
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
_MAX_CUTS = 8
"""Emulations that look for the place where a cluster is split."""
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
    spread = _fewest_moves(problem, start, spread_variables(problem, device_of), priority)
    runs = [spread, split_critical_path(problem, start, priority), start]
    if is_large(problem.graph.num_ops):
        runs = [min(runs, key=_rank)]
    return min((relieve(problem, run, priority) for run in runs), key=_rank).device_of


def _rank(run: Emulation) -> tuple[float, float]:
    """What is better comes first."""
    return run.overflow_bytes, run.timeline.makespan_s


# ── heuristic II ─────────────────────────────────────────────────────────────────────────────────


def spread_variables(problem: Problem, device_of: IntArray) -> list[IntArray]:
    """Placements that even out the shares of intermediates and variables, a move after the other.

    Each moves the largest variable of the fullest device, with the ops that read it, to the
    emptiest one.
    """
    graph, unit = problem.graph, units(problem)
    devices = workers(problem)
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    device_of, is_moved = device_of.copy(), np.zeros(graph.num_tensors, dtype=np.bool_)
    num_moves = max(_COUNTED_OPS // graph.num_ops, len(devices))
    placements: list[IntArray] = []
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
            device_of = np.where(going, target, device_of).astype(device_of.dtype)
            placements.append(device_of)
    return placements


def _fewest_moves(
    problem: Problem, start: Emulation, placements: list[IntArray], priority: FloatArray | None
) -> Emulation:
    """The earliest of a row of placements that overflows nowhere, by bisection; else the last."""
    best, low, high = start, 0, len(placements)
    if placements:
        best = emulate(problem, placements[-1], priority)
    if best.overflow_bytes or is_large(problem.graph.num_ops):
        return best
    while low < high:
        middle = (low + high) // 2
        run = emulate(problem, placements[middle], priority)
        if run.overflow_bytes:
            low = middle + 1
        else:
            best, high = run, middle
    return best


def split_critical_path(
    problem: Problem, start: Emulation, priority: FloatArray | None
) -> Emulation:
    """Cut the clusters of devices that overflow by depth and give the deeper part away."""
    unit = units(problem)
    depth_s = _layer_start_s(problem, start)
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    current, best = start, start
    for _ in range(problem.cluster.num_devices):
        source = int(np.argmax(current.excess_bytes))
        if current.excess_bytes[source] <= 0:
            break
        target = _most_space(problem, current)
        cut = _best_cut(problem, current, unit, depth_s, source, target, can_run[target], priority)
        if cut is None:
            break
        current = cut
        best = min(best, current, key=_rank)
    return best


def _layer_start_s(problem: Problem, run: Emulation) -> FloatArray:
    """Per op: when the layer that it belongs to starts.

    A backward op belongs to the layer of its forward op or, where that is not known, of the
    earliest producer among its inputs: it reads what its layer's forward ops made.
    """
    graph = problem.graph
    start_s = run.timeline.op_start_s
    producer = graph.tensor_producer[graph.reads]
    earliest_s, made = start_s.copy(), producer >= 0
    np.minimum.at(earliest_s, graph.reader[made], start_s[producer[made]])
    is_forward = graph.op_phase == Phase.FORWARD
    # Files of other programs may not tell the passes apart.
    layer_s = earliest_s if is_forward.all() else np.where(is_forward, start_s, earliest_s)
    return np.where(graph.partner >= 0, start_s[graph.partner], layer_s)


def _most_space(problem: Problem, run: Emulation) -> int:
    devices = workers(problem)
    return int(devices[np.argmin(run.excess_bytes[devices])])


def _best_cut(
    problem: Problem, run: Emulation, unit: IntArray, depth_s: FloatArray, source: int,
    target: int, can_run: np.ndarray, priority: FloatArray | None,
) -> Emulation | None:  # fmt: skip
    """The emulation with the least moved from the end of a cluster that stops its overflow."""
    ops = np.flatnonzero(run.device_of == source)
    unit_depth_s = np.full(int(unit.max()) + 1, np.inf)
    np.minimum.at(unit_depth_s, unit[ops], depth_s[ops])
    order = np.unique(unit_depth_s[unit[ops]])[::-1]
    best: Emulation | None = None
    low, high = 1, len(order) - 1
    for _ in range(_MAX_CUTS):
        if low > high:
            break
        middle = (low + high) // 2
        going = ops[unit_depth_s[unit[ops]] >= order[middle]]
        going = going[can_run[going]]
        device_of = run.device_of.copy()
        device_of[going] = target
        tried = emulate(problem, device_of, priority)
        if best is None or _rank(tried) < _rank(best):
            best = tried
        if tried.excess_bytes[source] > 0:
            low = middle + 1
        else:
            high = middle - 1
    return best


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
