"""ParDNN step 2: move ops away from devices that overflow, with the least damage.

Heuristic II is fast and runs first: residual nodes (variables) move, with the ops that read them,
from the fullest device to the emptiest one, the largest first, until no device overflows. If one
cluster dominates, its critical path is split: the deepest layers of the device that overflows most,
with their backward ops, move to the device with most space. Heuristic I: at the moment when a
device overflows most, every unit has a potential (the bytes freed if it moves) and a damage (its
time and the transfers that moving it adds). Units move by decreasing ratio of potential to damage
until enough bytes are freed (a greedy minimum knapsack), each to the device with the lowest peak
that can hold the unit during its lifetime; then the placement is simulated again. O(rounds ·
(simulation + reads log reads)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers, spans
from hocket.graph.graph import Phase, Role
from hocket.plan.problem import Problem
from hocket.planners.devices import workers
from hocket.planners.placement.pardnn.unit_work import units
from hocket.planners.shared import is_large
from hocket.planners.tables import mean_transfer_s
from hocket.simulate.engine import simulate_placement
from hocket.simulate.instructions import PlaceTable
from hocket.simulate.lowering import owner_devices
from hocket.simulate.timeline import Timeline

# ParDNN step 2, emulation: when every storage is allocated on a device and when it is freed.
#
# ParDNN imitates the framework's scheduler to learn the lifetimes of tensors; here the simulator is
# that scheduler, since devices pick ready ops by the same rule when the plan is executed.
# O(simulation + reads log reads).


@dataclass(frozen=True, eq=False, kw_only=True)
class Emulation:
    """A simulated placement and the lifetimes of its places, the storages on each device."""

    device_of: IntArray
    timeline: Timeline
    places: PlaceTable
    start_s: FloatArray
    """Per place: when its bytes are allocated."""
    end_s: FloatArray
    """Per place: when its bytes are freed; infinite if they are kept."""
    excess_bytes: FloatArray
    """Per device: peak minus memory; negative if memory is free."""
    priority: FloatArray | None
    is_strict: bool
    """True if devices run ops in exactly the order of ``priority``, or of the graph."""

    @property
    def overflow_bytes(self) -> float:
        """Bytes beyond the memory of each device, summed over devices."""
        return float(np.maximum(self.excess_bytes, 0.0).sum())

    def moved(self, problem: Problem, device_of: IntArray) -> Emulation:
        """Simulate another placement; a strict order is replaced by that of the graph."""
        priority = None if self.is_strict else self.priority
        return emulate(problem, device_of, priority, is_strict=self.is_strict)


def emulate(
    problem: Problem,
    device_of: IntArray,
    priority: FloatArray | None = None,
    *,
    is_strict: bool = False,
) -> Emulation:
    """Simulate a placement and compute the lifetimes of its storages."""
    tables, timeline = simulate_placement(problem, device_of, priority, is_strict=is_strict)
    graph, num_devices = problem.graph, problem.cluster.num_devices
    places, transfers = tables.places, tables.transfers
    sent = timeline.transfer_tensor.astype(np.int64) * num_devices + timeline.transfer_dst
    by_place = np.argsort(sent, kind="stable")
    start_s, end_s = np.zeros(len(places.tensor)), np.zeros(len(places.tensor))
    made = np.flatnonzero(graph.tensor_producer >= 0)
    producer = graph.tensor_producer[made]
    start_s[made] = timeline.op_start_s[producer]
    start_s[transfers.place] = timeline.transfer_start_s[by_place]
    np.maximum.at(end_s, places.storage[made], timeline.op_end_s[producer])
    np.maximum.at(end_s, places.storage[places.read_place], timeline.op_end_s[places.reader])
    source = places.storage[places.tensor[transfers.place]]
    np.maximum.at(end_s, source, timeline.transfer_end_s[by_place])
    end_s[places.is_kept] = np.inf
    return Emulation(
        device_of=device_of,
        timeline=timeline,
        places=places,
        start_s=start_s,
        end_s=end_s,
        excess_bytes=(timeline.peak_bytes - problem.memory_bytes).astype(np.float64),
        priority=priority,
        is_strict=is_strict,
    )


# Memory potentials of ParDNN: which bytes would leave a device if a unit, or several, moved away.
#
# A storage stays on a device as long as some op there still needs it: an op that reads it after the
# given moment, or the one that made it where it is kept until the end of the step. Where
# these belong to one unit, that unit alone holds the bytes; where they belong to several (the
# readers of a variable, a chain of aliases), all of them together are one further candidate.
# O(reads log reads) in numpy.

_MAX_SHARED = 32
"""Number of storages held by several units (the largest) whose holders become a candidate."""


class Candidates(NamedTuple):
    """Sets of ops on one device that could move away."""

    ptr: LongArray
    op: LongArray
    """Ops of candidate c: ``op[ptr[c]:ptr[c + 1]]``."""
    potential_bytes: FloatArray
    """Per candidate: bytes freed on the device at the given moment."""
    incoming_bytes: FloatArray
    """Per candidate: bytes that the target device would hold for it."""
    damage_s: FloatArray
    """Per candidate: its time plus the transfers that moving it adds."""
    start_s: FloatArray
    end_s: FloatArray
    """Per candidate: end of the lifetime of its ops and of the bytes that only it holds."""

    def ops_of(self, candidate: int) -> LongArray:
        """Ops of a candidate."""
        return self.op[self.ptr[candidate] : self.ptr[candidate + 1]]


class _Pairs(NamedTuple):
    """Distinct pairs of a unit and an item that it uses, sorted by unit."""

    ptr: LongArray
    item: LongArray
    """Items of unit u: ``item[ptr[u]:ptr[u + 1]]``."""
    num_units: LongArray
    """Per item: number of units that use it."""


class _UnitSets(NamedTuple):
    """Sets of units; unit u of set s is in ``unit[ptr[s]:ptr[s + 1]]``."""

    ptr: LongArray
    unit: LongArray

    @property
    def num_sets(self) -> int:
        """Number of sets."""
        return len(self.ptr) - 1


class _Shares(NamedTuple):
    """Distinct pairs of a set of units and an item that the set uses."""

    which: LongArray
    item: LongArray
    is_own: BoolArray
    """True if no unit outside the set uses the item."""


def candidates_at(
    problem: Problem, run: Emulation, unit: IntArray, device: int, moment_s: float
) -> Candidates:
    """Candidates at one moment: each unit of a device, and sets of units that hold one storage."""
    ops = np.flatnonzero(run.device_of == device)
    num_units = int(unit.max(initial=-1)) + 1
    members = _pairs(unit[ops], ops, num_units, problem.graph.num_ops)
    holds = _holds(problem, run, unit, device, moment_s)
    sets = _sets(run, holds, unit[ops])
    own_ops = _potential_shares(sets, members)
    held, touched = (
        _potential_shares(sets, holds),
        _potential_shares(sets, _touches(problem, run, unit, device)),
    )

    potential = _total(held, held.is_own, run.places.num_bytes, sets)
    running = (run.timeline.op_start_s <= moment_s) & (run.timeline.op_end_s > moment_s)
    workspace = np.where(running, problem.graph.workspace_bytes, 0)
    potential += _total(own_ops, own_ops.is_own, workspace, sets)
    copied = _total(touched, ~touched.is_own, problem.graph.tensor_bytes, sets)
    added_s = _total(touched, ~touched.is_own, mean_transfer_s(problem), sets)
    op_s = run.timeline.op_end_s - run.timeline.op_start_s
    start_s, end_s = _lives(run, own_ops, held, sets.num_sets)
    return Candidates(
        ptr=pointers(np.bincount(own_ops.which, minlength=sets.num_sets)),
        op=own_ops.item,
        potential_bytes=potential,
        incoming_bytes=potential + copied,
        damage_s=added_s + _total(own_ops, own_ops.is_own, op_s, sets),
        start_s=start_s,
        end_s=end_s,
    )


def _sets(run: Emulation, holds: _Pairs, unit: IntArray) -> _UnitSets:
    """Each unit as a set, and the holders of each of the largest storages with several holders."""
    alone = np.unique(unit).astype(np.int64)
    shared = np.flatnonzero(holds.num_units > 1)
    largest = shared[np.argsort(-run.places.num_bytes[shared], kind="stable")[:_MAX_SHARED]]
    holder = np.repeat(np.arange(len(holds.ptr) - 1), np.diff(holds.ptr))
    together = [holder[holds.item == storage] for storage in largest]
    sizes = [1] * len(alone) + [len(units) for units in together]
    return _UnitSets(
        ptr=pointers(sizes),
        unit=np.concatenate((alone, *together)),
    )


def _pairs(unit: IntArray, item: LongArray, num_units: int, num_items: int) -> _Pairs:
    width = max(num_items, 1)
    # Pairs are coded as one integer each, which `np.unique` sorts much faster than rows.
    pair = np.unique(unit.astype(np.int64) * width + item)
    return _Pairs(
        ptr=pointers(np.bincount(pair // width, minlength=num_units)),
        item=pair % width,
        num_units=np.bincount(pair % width, minlength=num_items),
    )


def _potential_shares(sets: _UnitSets, pairs: _Pairs) -> _Shares:
    """Return the items that each set uses, and which of them no other unit uses."""
    set_of = np.repeat(np.arange(sets.num_sets), np.diff(sets.ptr))
    index, of_unit = spans(pairs.ptr, sets.unit)
    which, item = set_of[of_unit], pairs.item[index]
    width = max(len(pairs.num_units), 1)
    key, num_inside = np.unique(which * width + item, return_counts=True)
    return _Shares(key // width, key % width, num_inside == pairs.num_units[key % width])


def _total(
    shares: _Shares, chosen: BoolArray, value: NDArray[np.generic], sets: _UnitSets
) -> FloatArray:
    """Per set: sum of a value over its chosen items."""
    weights = value[shares.item[chosen]]
    total = np.bincount(shares.which[chosen], weights=weights, minlength=sets.num_sets)
    return total.astype(np.float64)


def _lives(
    run: Emulation, ops: _Shares, held: _Shares, num_sets: int
) -> tuple[FloatArray, FloatArray]:
    """Return when the lifetime of each set starts and ends."""
    start_s, end_s = np.full(num_sets, np.inf), np.zeros(num_sets)
    np.minimum.at(start_s, ops.which, run.timeline.op_start_s[ops.item])
    np.maximum.at(end_s, ops.which, run.timeline.op_end_s[ops.item])
    which, storage = held.which[held.is_own], held.item[held.is_own]
    np.minimum.at(start_s, which, run.start_s[storage])
    np.maximum.at(end_s, which, run.end_s[storage])
    return start_s, end_s


def _holds(
    problem: Problem, run: Emulation, unit: IntArray, device: int, moment_s: float
) -> _Pairs:
    """Pairs of a unit and a storage on the device that the unit still needs at the moment."""
    graph, places, end_s = problem.graph, run.places, run.timeline.op_end_s
    live = (places.device == device) & (places.num_bytes > 0)
    live &= (run.start_s <= moment_s) & (run.end_s > moment_s)
    # A variable stays on its owner device for all of its readers, whenever they run.
    is_before = ~places.is_copy & (graph.tensor_producer[places.tensor] < 0)
    is_always = places.is_kept & is_before
    read_from = places.storage[places.read_place]
    reads = live[read_from] & (is_always[read_from] | (end_s[places.reader] > moment_s))
    made = np.flatnonzero(graph.tensor_producer >= 0)
    lives_in, producer = places.storage[made], graph.tensor_producer[made]
    makes = live[lives_in] & (places.is_kept[lives_in] | (end_s[producer] > moment_s))
    storage = np.concatenate((read_from[reads], lives_in[makes]))
    holder = np.concatenate((unit[places.reader[reads]], unit[producer[makes]]))
    return _pairs(holder, storage, int(unit.max(initial=-1)) + 1, len(places.tensor))


def _touches(problem: Problem, run: Emulation, unit: IntArray, device: int) -> _Pairs:
    """Pairs of a unit of the device and a tensor that it reads or makes."""
    graph = problem.graph
    made = np.flatnonzero(graph.tensor_producer >= 0)
    op = np.concatenate((run.places.reader, graph.tensor_producer[made]))
    tensor = np.concatenate((graph.reads, made))
    here = run.device_of[op] == device
    num_units = int(unit.max(initial=-1)) + 1
    return _pairs(unit[op[here]], tensor[here], num_units, graph.num_tensors)


_MAX_ROUNDS = 30
_EMULATED_OPS = 600_000
"""Limit on rounds: total number of ops that they may simulate."""
_MAX_FAILED = 3
"""Number of successive rounds without improvement after which moves end."""
_NUM_BUCKETS = 256
"""Number of time buckets in which each device's bytes are tracked between simulations."""
_MAX_REFUSED = 256
"""Number of successive candidates that fit nowhere after which the search for a device ends."""
_MARGIN = 1.02
"""Bytes to move relative to the overflow, because copies that return are only partly predicted."""
_NO_DAMAGE_S = 1e-12
"""Smallest damage, which keeps the ratio of potential to damage finite."""
_MOVES_PER_DEVICE = 16
"""Limit on moves of variables, per device."""
_MAX_CUTS = 8
"""Maximum number of simulations to find the position at which a cluster is split."""
_COUNTED_OPS = 4_000_000
"""Limit on moves of variables: total number of ops over which memory fractions are counted."""
_EVEN = 1.02
"""Ratio to the even share of memory up to which a device is not relieved."""


def fit_memory(
    problem: Problem, device_of: IntArray, priority: FloatArray | None = None
) -> IntArray:
    """Return the placement with the least overflow that the two heuristics find."""
    start = emulate(problem, device_of, priority)
    if start.overflow_bytes == 0:
        return device_of
    spread = _fewest_moves(problem, start, spread_variables(problem, device_of))
    runs = [spread, split_critical_path(problem, start), start]
    # Repairing one start takes many simulations: on large graphs only the best is repaired.
    if is_large(problem.graph.num_ops):
        runs = [min(runs, key=_rank)]
    return min((relieve(problem, run) for run in runs), key=_rank).device_of


def _rank(run: Emulation) -> tuple[float, float]:
    """Sort key: less overflow first, then the shorter step."""
    return run.overflow_bytes, run.timeline.makespan_s


# ── heuristic II ─────────────────────────────────────────────────────────────────────────────────


def spread_variables(problem: Problem, device_of: IntArray) -> list[IntArray]:
    """Placements after each of a sequence of moves that even out the fill of devices.

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
        owner = owner_devices(graph, device_of)
        share = _shares(problem, owner)
        source = devices[np.argmax(share[devices])]
        target = devices[np.argmin(share[devices])]
        if share[source] <= _EVEN:
            break
        variable = _largest_variable(problem, owner, source, is_moved)
        if variable < 0:
            break
        # A variable moves once at most, or it could go back and forth between two devices.
        is_moved[variable] = True
        readers = graph.users_of(variable)
        going = np.isin(unit, unit[readers[device_of[readers] == source]])
        if can_run[target][going].all():
            device_of = np.where(going, target, device_of).astype(device_of.dtype)
            placements.append(device_of)
    return placements


def _fewest_moves(problem: Problem, start: Emulation, placements: list[IntArray]) -> Emulation:
    """Return the first placement of a sequence without overflow, by bisection; else the last.

    On large graphs the last is returned without bisection.
    """
    best, low, high = start, 0, len(placements)
    if placements:
        best = start.moved(problem, placements[-1])
    if best.overflow_bytes or is_large(problem.graph.num_ops):
        return best
    while low < high:
        middle = (low + high) // 2
        run = start.moved(problem, placements[middle])
        if run.overflow_bytes:
            low = middle + 1
        else:
            best, high = run, middle
    return best


def split_critical_path(problem: Problem, start: Emulation) -> Emulation:
    """Cut the clusters of devices that overflow by depth and move the deeper part away."""
    unit = units(problem)
    depth_s = _layer_start_s(problem, start)
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    current, best = start, start
    for _ in range(problem.cluster.num_devices):
        source = int(np.argmax(current.excess_bytes))
        if current.excess_bytes[source] <= 0:
            break
        target = _most_space(problem, current)
        cut = _best_cut(problem, current, unit, depth_s, source, target, can_run[target])
        if cut is None:
            break
        current = cut
        best = min(best, current, key=_rank)
    return best


def _layer_start_s(problem: Problem, run: Emulation) -> FloatArray:
    """Per op: start of its layer.

    A backward op belongs to the layer of its forward op or, if unknown, of the earliest producer
    among its inputs: it reads results of the forward ops of its layer.
    """
    graph = problem.graph
    start_s = run.timeline.op_start_s
    producer = graph.tensor_producer[graph.reads]
    earliest_s, made = start_s.copy(), producer >= 0
    np.minimum.at(earliest_s, graph.reader[made], start_s[producer[made]])
    is_forward = graph.op_phase == Phase.FORWARD
    # Graphs from other programs may not mark the backward pass.
    layer_s = earliest_s if is_forward.all() else np.where(is_forward, start_s, earliest_s)
    return np.where(graph.partner >= 0, start_s[graph.partner], layer_s)


def _most_space(problem: Problem, run: Emulation) -> int:
    devices = workers(problem)
    return int(devices[np.argmin(run.excess_bytes[devices])])


def _best_cut(
    problem: Problem, run: Emulation, unit: IntArray, depth_s: FloatArray, source: int,
    target: int, can_run: np.ndarray,
) -> Emulation | None:  # fmt: skip
    """Bisect for the smallest end of a cluster to move away; returns the best emulation tried.

    The best has the least overflow, then the shortest step. None if the cluster cannot be cut.
    """
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
        tried = run.moved(problem, device_of)
        if best is None or _rank(tried) < _rank(best):
            best = tried
        if tried.excess_bytes[source] > 0:
            low = middle + 1
        else:
            high = middle - 1
    return best


def _shares(problem: Problem, owner: IntArray) -> FloatArray:
    """Per device: mean of its fractions of all intermediates and variables, relative to memory."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    share = np.zeros(num_devices)
    is_made = graph.tensor_producer >= 0
    for is_kind in (is_made, ~is_made & (graph.tensor_role != Role.INPUT)):
        held = np.bincount(owner[is_kind], weights=graph.held_bytes[is_kind], minlength=num_devices)
        share += held / max(held.sum(), 1.0) / 2
    memory = np.maximum(problem.memory_bytes, 1)
    fair: FloatArray = share / (memory / memory[workers(problem)].sum())
    return fair


def _largest_variable(problem: Problem, owner: IntArray, device: int, is_moved: np.ndarray) -> int:
    """Largest variable that the device owns, has readers and was not moved yet; -1 if none."""
    graph = problem.graph
    fits = (graph.tensor_producer < 0) & (graph.tensor_role != Role.INPUT) & ~is_moved
    fits &= (owner == device) & (graph.held_bytes > 0) & (np.diff(graph.user_ptr) > 0)
    if not fits.any():
        return -1
    return int(np.argmax(np.where(fits, graph.held_bytes, -1)))


# ── heuristic I ──────────────────────────────────────────────────────────────────────────────────


def relieve(problem: Problem, best: Emulation) -> Emulation:
    """Move units away from devices that overflow, in rounds, as long as this helps."""
    unit = units(problem)
    num_rounds = min(_MAX_ROUNDS, _EMULATED_OPS // max(problem.graph.num_ops, 1))
    current, num_failed = best, 0
    for _ in range(num_rounds):
        if current.overflow_bytes == 0 or num_failed == _MAX_FAILED:
            break
        moved = _relieved_once(problem, current, unit)
        if np.array_equal(moved, current.device_of):
            break
        current = current.moved(problem, moved)
        if current.overflow_bytes < best.overflow_bytes:
            best, num_failed = current, 0
        else:
            num_failed += 1
    return best


def _relieved_once(problem: Problem, run: Emulation, unit: IntArray) -> IntArray:
    """Return the placement after moves at the worst moment of each device that overflows."""
    capacity = _bucket_capacity(problem, run)
    device_of = run.device_of.copy()
    for device in np.argsort(-run.excess_bytes, kind="stable").tolist():
        if run.excess_bytes[device] <= 0:
            break
        times_s, held = run.timeline.memory_curve(device)
        moment_s = float(times_s[np.argmax(held)])
        candidates = candidates_at(problem, run, unit, device, moment_s)
        _move_enough(device_of, capacity, candidates, device, run.excess_bytes[device] * _MARGIN)
    return device_of


def _move_enough(
    device_of: IntArray,
    capacity: _BucketCapacity,
    candidates: Candidates,
    device: int,
    excess_bytes: float,
) -> None:
    """Move candidates by decreasing ratio of potential to damage until the excess is gone."""
    ratio = candidates.potential_bytes / np.maximum(candidates.damage_s, _NO_DAMAGE_S)
    num_refused = 0
    for candidate in np.argsort(-ratio, kind="stable").tolist():
        if excess_bytes <= 0 or num_refused == _MAX_REFUSED:
            break
        ops = candidates.ops_of(candidate)
        # An earlier candidate may have taken some of these ops along.
        if candidates.potential_bytes[candidate] <= 0 or (device_of[ops] != device).any():
            continue
        target = capacity.lowest_for(candidates, candidate, device)
        if target < 0:
            num_refused += 1
            continue
        num_refused = 0
        capacity.move(candidates, candidate, device, target)
        device_of[ops] = target
        # The estimate is updated; the simulation after the round corrects it.
        excess_bytes -= candidates.potential_bytes[candidate]


class _BucketCapacity(NamedTuple):
    """Bytes held on each device per time bucket of the step."""

    held: FloatArray
    """[device, bucket]: maximum bytes held."""
    memory_bytes: LongArray
    bucket_s: float
    can_run: np.ndarray
    """[device, op]: True if the device can run the op."""
    is_worker: np.ndarray

    def span(self, candidates: Candidates, candidate: int) -> slice:
        """Buckets that overlap the lifetime of a candidate."""
        first = int(candidates.start_s[candidate] / self.bucket_s)
        last = min(candidates.end_s[candidate] / self.bucket_s, float(_NUM_BUCKETS))
        return slice(min(first, _NUM_BUCKETS - 1), max(int(np.ceil(last)), first + 1))

    def lowest_for(self, candidates: Candidates, candidate: int, device: int) -> int:
        """Device with the lowest relative peak that can hold a candidate; -1 if none."""
        within = self.held[:, self.span(candidates, candidate)].max(axis=1)
        fits = within + candidates.incoming_bytes[candidate] <= self.memory_bytes
        fits &= self.is_worker & self.can_run[:, candidates.ops_of(candidate)].all(axis=1)
        fits[device] = False
        if not fits.any():
            return -1
        peak = self.held.max(axis=1) / np.maximum(self.memory_bytes, 1)
        return int(np.argmin(np.where(fits, peak, np.inf)))

    def move(self, candidates: Candidates, candidate: int, device: int, target: int) -> None:
        """Transfer the bytes of a candidate from one device to another."""
        span = self.span(candidates, candidate)
        self.held[device, span] -= candidates.potential_bytes[candidate]
        self.held[target, span] += candidates.incoming_bytes[candidate]


def _bucket_capacity(problem: Problem, run: Emulation) -> _BucketCapacity:
    num_devices = problem.cluster.num_devices
    bucket_s = max(run.timeline.makespan_s, np.finfo(np.float64).tiny) / _NUM_BUCKETS
    held = np.zeros((num_devices, _NUM_BUCKETS))
    for device in range(num_devices):
        times_s, num_bytes = run.timeline.memory_curve(device)
        bucket = np.minimum((times_s / bucket_s).astype(np.int64), _NUM_BUCKETS - 1)
        np.maximum.at(held[device], bucket, num_bytes)
        # At the start of a bucket the device still holds the bytes of the last change before it.
        last = np.searchsorted(times_s, np.arange(_NUM_BUCKETS) * bucket_s, side="right") - 1
        held[device] = np.maximum(held[device], num_bytes[last] if len(num_bytes) else 0)
    is_worker = np.zeros(num_devices, dtype=np.bool_)
    is_worker[workers(problem)] = True
    can_run = np.isfinite(problem.costs.op_s[problem.costs.device_row])
    return _BucketCapacity(held, problem.memory_bytes, bucket_s, can_run, is_worker)
