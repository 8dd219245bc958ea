"""Memory potentials of ParDNN: which bytes would leave a device if a unit, or several, moved away.

A storage stays on a device as long as some op there still needs it: an op that reads it after the
moment in question, or the one that made it where it is kept until the end of the step. Where these
belong to one unit, that unit alone holds the bytes; where they belong to several (the readers of a
variable, a chain of aliases), all of them together are one further candidate.
O(reads log reads) in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.emulate import Emulation
from hocket.planners.tables import mean_transfer_s

_MAX_SHARED = 32
"""So many of the largest storages that several units hold make further candidates."""


class Candidates(NamedTuple):
    """Sets of ops of one device that could move away."""

    ptr: LongArray
    op: LongArray
    """Ops of candidate c: ``op[ptr[c]:ptr[c + 1]]``."""
    potential_bytes: FloatArray
    """What leaves the device at the moment in question."""
    incoming_bytes: FloatArray
    """What another device would hold for it."""
    damage_s: FloatArray
    """Its time and the transfers that moving it adds."""
    start_s: FloatArray
    end_s: FloatArray
    """When it lives: its ops and the bytes that only it holds."""

    def ops_of(self, candidate: int) -> LongArray:
        """Ops of a candidate."""
        return self.op[self.ptr[candidate] : self.ptr[candidate + 1]]


class _Pairs(NamedTuple):
    """Which units have to do with which items, each pair once, by unit."""

    ptr: LongArray
    item: LongArray
    """Items of unit u: ``item[ptr[u]:ptr[u + 1]]``."""
    num_units: LongArray
    """Per item."""


class _UnitSets(NamedTuple):
    """Sets of units."""

    ptr: LongArray
    unit: LongArray

    @property
    def num_sets(self) -> int:
        """Number of sets."""
        return len(self.ptr) - 1


class _Shares(NamedTuple):
    """Items that sets have to do with: (set, item) each once."""

    which: LongArray
    item: LongArray
    is_own: BoolArray
    """Whether no unit outside the set has to do with the item."""


def candidates_at(
    problem: Problem, run: Emulation, unit: IntArray, device: int, moment_s: float
) -> Candidates:
    """Units of a device, and sets of units that hold a storage together, at one moment."""
    ops = np.flatnonzero(run.device_of == device)
    num_units = int(unit.max(initial=-1)) + 1
    members = _pairs(unit[ops], ops, num_units, problem.graph.num_ops)
    holds = _holds(problem, run, unit, device, moment_s)
    sets = _sets(run, holds, unit[ops])
    own_ops = _shares(sets, members)
    held, touched = _shares(sets, holds), _shares(sets, _touches(problem, run, unit, device))

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
    """Every unit alone, and the holders of each of the largest storages that have several."""
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
    pair = np.unique(unit.astype(np.int64) * width + item)
    return _Pairs(
        ptr=pointers(np.bincount(pair // width, minlength=num_units)),
        item=pair % width,
        num_units=np.bincount(pair % width, minlength=num_items),
    )


def _shares(sets: _UnitSets, pairs: _Pairs) -> _Shares:
    """What the sets have to do with, and what of it they have for themselves."""
    set_of = np.repeat(np.arange(sets.num_sets), np.diff(sets.ptr))
    count = pairs.ptr[sets.unit + 1] - pairs.ptr[sets.unit]
    which = np.repeat(set_of, count)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    item = pairs.item[np.repeat(pairs.ptr[sets.unit], count) + offset]
    width = max(len(pairs.num_units), 1)
    key, num_inside = np.unique(which * width + item, return_counts=True)
    return _Shares(key // width, key % width, num_inside == pairs.num_units[key % width])


def _total(
    shares: _Shares, chosen: BoolArray, value: NDArray[np.generic], sets: _UnitSets
) -> FloatArray:
    """Sum of a value of the chosen items over each set."""
    weights = value[shares.item[chosen]]
    total = np.bincount(shares.which[chosen], weights=weights, minlength=sets.num_sets)
    return total.astype(np.float64)


def _lives(
    run: Emulation, ops: _Shares, held: _Shares, num_sets: int
) -> tuple[FloatArray, FloatArray]:
    """From when to when each set lives."""
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
    """Which units need which storages that are on the device at a moment."""
    graph, places, end_s = problem.graph, run.places, run.timeline.op_end_s
    live = (places.device == device) & (places.num_bytes > 0)
    live &= (run.start_s <= moment_s) & (run.end_s > moment_s)
    # A variable at home stays for all of its readers, whenever they run.
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
    """Which units of the device read or make which tensors."""
    graph = problem.graph
    made = np.flatnonzero(graph.tensor_producer >= 0)
    op = np.concatenate((run.places.reader, graph.tensor_producer[made]))
    tensor = np.concatenate((graph.reads, made))
    here = run.device_of[op] == device
    num_units = int(unit.max(initial=-1)) + 1
    return _pairs(unit[op[here]], tensor[here], num_units, graph.num_tensors)
