"""The best contiguous split over a lattice of ideals (Tarnawski et al., NeurIPS 2020).

Dynamic programming: the least maximum load of an ideal, for given numbers of used devices per
class, is the minimum over smaller ideals of the larger of two values: the least maximum load of the
smaller ideal with one device less, and the load of the stage between the two ideals. Over all
ideals this is exact; over the prefixes of one order it is their heuristic DPL. Stages are grown
only while below the best known load, and only from ideals whose remaining work still fits on the
remaining devices (`_find_live`); neither rule loses a better split. O(pairs of ideals that survive
· device usages), where a device usage is the number of devices used of each class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.planners.max_load.device_classes import DeviceClasses, dual_weights, least_weighted
from hocket.planners.max_load.load_pieces import Pieces

# Lattices of ideals: the sets of pieces that the first stages of a contiguous split can hold.
#
# An ideal is a set of pieces that contains all predecessors of its pieces. A split into contiguous
# stages is a chain of ideals; each stage is the difference of two successive ideals. A lattice
# numbers its ideals so that smaller sets come first, and lists the steps that add one piece. For a
# single topological order the lattice is a chain: the order's prefixes. O(ideals · pieces · 64-bit
# words per set of pieces).


class Lattice(NamedTuple):
    """Ideals by number: 0 is empty, the last one contains all pieces."""

    step_ptr: LongArray
    """Steps from ideal i: ``step_ptr[i]`` up to ``step_ptr[i + 1]``."""
    step_piece: LongArray
    """Per step: the piece that it adds."""
    step_ideal: LongArray
    """Per step: the ideal that it leads to."""
    from_ideal: LongArray
    """Per ideal: an ideal with one piece less; -1 for the empty one."""
    from_piece: LongArray
    """Per ideal: the piece that ``from_ideal`` lacks."""

    @property
    def num_ideals(self) -> int:
        """Number of ideals."""
        return len(self.step_ptr) - 1


def chain_lattice(order: IntArray) -> Lattice:
    """Return the lattice of the prefixes of an order."""
    count = len(order)
    numbers = np.arange(count + 1)
    return Lattice(
        step_ptr=table(np.minimum(np.arange(count + 2), count), np.int64),
        step_piece=table(order, np.int64),
        step_ideal=table(numbers[1:], np.int64),
        from_ideal=table(numbers - 1, np.int64),
        from_piece=table(np.concatenate(([-1], order)), np.int64),
    )


def ideal_lattice(pieces: Pieces, max_ideals: int) -> Lattice | None:
    """Return all ideals of the pieces' precedence; None if there are more than ``max_ideals``.

    Breadth-first search; each ideal is an integer whose bits are its pieces.
    """
    needs = [0] * pieces.num_pieces
    followers: list[list[int]] = [[] for _ in needs]
    for before, after in zip(pieces.before.tolist(), pieces.after.tolist(), strict=True):
        needs[after] |= 1 << before
        followers[before].append(after)
    ideals, number = [0], {0: 0}
    can_follow = [[piece for piece, need in enumerate(needs) if not need]]
    step_ptr, step_piece, step_ideal, from_ideal, from_piece = [0], [], [], [-1], [-1]
    for at, ideal in enumerate(ideals):
        for piece in can_follow[at]:
            # Python integers serve as bit sets of any size.
            larger = ideal | 1 << piece
            if larger not in number:
                if len(ideals) == max_ideals:
                    return None
                number[larger] = len(ideals)
                ideals.append(larger)
                from_ideal.append(at)
                from_piece.append(piece)
                freed = [other for other in followers[piece] if not needs[other] & ~larger]
                # Built from the smaller ideal, which avoids testing all pieces.
                can_follow.append([other for other in can_follow[at] if other != piece] + freed)
            step_piece.append(piece)
            step_ideal.append(number[larger])
        step_ptr.append(len(step_piece))
    columns = (step_ptr, step_piece, step_ideal, from_ideal, from_piece)
    return Lattice(*(table(column, np.int64) for column in columns))


# The dynamic programme over a lattice of ideals, in compiled code.

_ROUNDING = 1e-12
"""Relative error of sums over pieces."""


@kernel
def _touch_below(lattice: Lattice, tables: SplitTable, state: SplitState, ideal: int) -> None:
    """Count, per net, its pieces inside an ideal."""
    for net in range(len(state.below)):
        state.below[net] = 0
    while lattice.from_ideal[ideal] >= 0:
        piece = lattice.from_piece[ideal]
        for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
            state.below[tables.piece_nets[at]] += 1
        ideal = lattice.from_ideal[ideal]


@kernel
def _find_live(tables: SplitTable, state: SplitState, ideal: int, limit_s: float) -> int:
    """List the device usages of an ideal that can still lead to a load below the limit.

    A usage is dropped if one with fewer devices is as good, or if the remaining devices cannot run
    the remaining pieces below the limit: the weighted work of the remaining pieces and of the nets
    cut here must be below the limit times the weights of the remaining devices, for any weights per
    class.
    """
    num_classes = len(tables.num_devices)
    rest_s = state.rest_s[ideal]
    for net in range(len(state.below)):
        if 0 < state.below[net] < tables.net_size[net]:
            rest_s += tables.weighted_net_s[net]
    num_live = 0
    for usage in range(state.value.shape[1]):
        value, is_live, best = state.value[ideal, usage], True, state.value[ideal, usage]
        for device_class in range(num_classes):
            used = (usage // tables.stride[device_class]) % (tables.num_devices[device_class] + 1)
            if used > 0:
                fewer = state.best_within[usage - tables.stride[device_class]]
                is_live = is_live and value < fewer
                # best_within: least value over all usages with no more devices of any class.
                best = min(best, fewer)
        state.best_within[usage] = best
        if not is_live or not value < limit_s:
            continue
        capacity = 0.0
        for device_class in range(num_classes):
            used = (usage // tables.stride[device_class]) % (tables.num_devices[device_class] + 1)
            capacity += tables.weight[device_class] * (tables.num_devices[device_class] - used)
        # A class of weight 0 needs no capacity for what it runs. The margin keeps rounding from
        # ruling out the best split.
        if rest_s <= limit_s * capacity + _ROUNDING * state.rest_s[0]:
            state.live[num_live] = usage
            num_live += 1
    return num_live


@kernel
def _add(tables: SplitTable, state: SplitState, piece: int, depth: int, limit_s: float) -> bool:
    """Add a piece to the stage; returns True if some class could still run a larger stage.

    ``fixed_s`` is the cost of nets shared with earlier stages: they stay cut however the stage
    grows.
    """
    num_classes = len(tables.num_devices)
    memory_bytes = state.memory_bytes[depth - 1] + tables.memory_bytes[piece]
    state.memory_bytes[depth] = memory_bytes
    for device_class in range(num_classes):
        state.work_s[depth, device_class] = (
            state.work_s[depth - 1, device_class] + tables.class_s[device_class, piece]
        )
        state.cut_s[depth, device_class] = state.cut_s[depth - 1, device_class]
        state.fixed_s[depth, device_class] = state.fixed_s[depth - 1, device_class]
    for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
        net = tables.piece_nets[at]
        inside = state.inside[net] + 1
        state.inside[net] = inside
        # Only the first and the last piece of a net in the stage change what is cut.
        if 1 < inside < tables.net_size[net]:
            continue
        sign = 1.0 if inside == 1 else -1.0
        for device_class in range(num_classes):
            state.cut_s[depth, device_class] += sign * tables.net_s[device_class, net]
            if inside == 1 and state.below[net] > 0:
                state.fixed_s[depth, device_class] += tables.net_s[device_class, net]
    for device_class in range(num_classes):
        at_least_s = state.work_s[depth, device_class] + state.fixed_s[depth, device_class]
        if at_least_s < limit_s and memory_bytes <= tables.limit_bytes[device_class]:
            # Other nets may become whole again as the stage grows, so only fixed costs count here.
            return True
    return False


@kernel
def _remove(tables: SplitTable, state: SplitState, piece: int) -> None:
    for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
        state.inside[tables.piece_nets[at]] -= 1


@kernel
def _relax(
    tables: SplitTable, state: SplitState, start: int, stop: int, depth: int, num_live: int,
    limit_s: float,
) -> None:  # fmt: skip
    """Try the stage between two ideals on one more device of each class."""
    for device_class in range(len(tables.num_devices)):
        load_s = state.work_s[depth, device_class] + state.cut_s[depth, device_class]
        if not load_s < limit_s or state.memory_bytes[depth] > tables.limit_bytes[device_class]:
            continue
        stride, most = tables.stride[device_class], tables.num_devices[device_class]
        for index in range(num_live):
            usage = state.live[index]
            # All devices of the class are in use.
            if (usage // stride) % (most + 1) == most:
                continue
            value = max(state.value[start, usage], load_s)
            if value < state.value[stop, usage + stride]:
                state.value[stop, usage + stride] = value
                state.came_from[stop, usage + stride] = start
                state.came_class[stop, usage + stride] = device_class


@kernel
def _stages_from(
    lattice: Lattice, tables: SplitTable, state: SplitState, start: int, num_live: int,
    limit_s: float,
) -> int:  # fmt: skip
    """Grow every stage above an ideal, depth first; returns the number of stages evaluated."""
    depth, looked = 0, 0
    state.path_ideal[0], state.path_step[0] = start, lattice.step_ptr[start]
    while True:
        at, step = state.path_ideal[depth], state.path_step[depth]
        if step == lattice.step_ptr[at + 1]:
            if depth == 0:
                return looked
            depth -= 1
            _remove(tables, state, lattice.step_piece[state.path_step[depth] - 1])
            continue
        state.path_step[depth] += 1
        ideal = lattice.step_ideal[step]
        # Another path from the same start has evaluated this ideal: a stage is a set of pieces.
        if state.seen[ideal] == start:
            continue
        state.seen[ideal] = start
        looked += 1
        piece = lattice.step_piece[step]
        if not _add(tables, state, piece, depth + 1, limit_s):
            _remove(tables, state, piece)
            continue
        depth += 1
        _relax(tables, state, start, ideal, depth, num_live, limit_s)
        state.path_ideal[depth], state.path_step[depth] = ideal, lattice.step_ptr[ideal]


@kernel
def fill(
    lattice: Lattice, tables: SplitTable, state: SplitState, limit_s: float, max_looks: int
) -> bool:
    """Fill the values of all ideals below the limit; False if ``max_looks`` was exceeded."""
    last, looked = len(lattice.step_ptr) - 2, 0
    for ideal in range(last):
        _touch_below(lattice, tables, state, ideal)
        for usage in range(state.value.shape[1]):
            # A full split below the limit is a new limit for all further stages.
            limit_s = min(limit_s, state.value[last, usage])
        num_live = _find_live(tables, state, ideal, limit_s)
        if num_live:
            looked += _stages_from(lattice, tables, state, ideal, num_live, limit_s)
        if looked > max_looks:
            return False
    return True


class SplitTable(NamedTuple):
    """Pieces, nets and device classes as compiled code reads them."""

    class_s: FloatArray
    """[class, piece]: seconds; infinite if the class cannot run the piece."""
    memory_bytes: LongArray
    limit_bytes: LongArray
    """Per class: bytes that each device may hold."""
    net_s: FloatArray
    """[class, net]: seconds that a device of the class pays if the net is cut."""
    net_size: LongArray
    piece_ptr: LongArray
    piece_nets: LongArray
    num_devices: LongArray
    """Per class: number of devices."""
    stride: LongArray
    """Per class: a device usage has the index sum(devices used · stride)."""
    weight: FloatArray
    """Per class: weight in the bound on the remaining work."""
    weighted_s: FloatArray
    """Per piece: least weighted time over the classes."""
    weighted_net_s: FloatArray
    """Per net: least weighted time over the classes."""


class SplitState(NamedTuple):
    """Working arrays of the dynamic programme."""

    value: FloatArray
    """[ideal, usage]: least maximum load."""
    came_from: LongArray
    came_class: LongArray
    rest_s: FloatArray
    """Per ideal: sum of the least weighted times of the pieces outside it."""
    best_within: FloatArray
    live: LongArray
    below: LongArray
    """Per net: number of its pieces in the ideal below the stage."""
    inside: LongArray
    """Per net: number of its pieces in the stage."""
    seen: LongArray
    """Per ideal: the start ideal from which it was last reached."""
    path_ideal: LongArray
    path_step: LongArray
    work_s: FloatArray
    """[depth, class]: seconds of the stage after ``depth`` pieces were added."""
    cut_s: FloatArray
    fixed_s: FloatArray
    memory_bytes: LongArray


@dataclass(frozen=True, eq=False)
class StageSplit:
    """Stages of pieces, in order."""

    max_load_s: float
    stage_of: IntArray
    """Per piece: its stage."""
    class_of: IntArray
    """Per stage: the class of the device that runs it."""


class Outcome(NamedTuple):
    """Result of a search for a split below a limit."""

    split: StageSplit | None
    is_complete: bool
    """True if the search was exhaustive, so that the lattice has no better split."""


def best_split(
    pieces: Pieces, classes: DeviceClasses, lattice: Lattice, limit_s: float, max_looks: int
) -> Outcome:
    """Return the best split with a maximum load below ``limit_s``, if there is one."""

    tables = _tables(pieces, classes)
    state = _state(pieces, tables, lattice)
    is_complete = fill(lattice, tables, state, limit_s, max_looks)
    last = lattice.num_ideals - 1
    usage = int(np.argmin(state.value[last]))
    if last > 0 and not state.value[last, usage] < limit_s:
        return Outcome(None, is_complete)
    return Outcome(_traced(lattice, tables, state, usage), is_complete)


def _traced(lattice: Lattice, tables: SplitTable, state: SplitState, usage: int) -> StageSplit:
    """Reconstruct the split from the full ideal backward, stage by stage."""
    ideal = lattice.num_ideals - 1
    value = float(state.value[ideal, usage])
    stages: list[list[int]] = []
    chosen_classes: list[int] = []
    while ideal > 0:
        smaller, device_class = (
            int(state.came_from[ideal, usage]),
            int(state.came_class[ideal, usage]),
        )
        stages.append(_between(lattice, smaller, ideal))
        chosen_classes.append(device_class)
        ideal, usage = smaller, usage - int(tables.stride[device_class])
    stage_of = np.zeros(len(tables.memory_bytes), dtype=np.int32)
    for number, members in enumerate(reversed(stages)):
        stage_of[members] = number
    return StageSplit(value, stage_of, np.array(chosen_classes[::-1], dtype=np.int32))


def _between(lattice: Lattice, smaller: int, larger: int) -> list[int]:
    return sorted(_members(lattice, larger) - _members(lattice, smaller))


def _members(lattice: Lattice, ideal: int) -> set[int]:
    found = set()
    while lattice.from_ideal[ideal] >= 0:
        found.add(int(lattice.from_piece[ideal]))
        ideal = int(lattice.from_ideal[ideal])
    return found


def _tables(pieces: Pieces, classes: DeviceClasses) -> SplitTable:
    # Mixed radix: the digit of a class counts its used devices, from 0 to all.
    stride = np.concatenate(([1], np.cumprod(classes.counts + 1)[:-1])).astype(np.int64)
    class_s = classes.piece_s(pieces)
    net_s = classes.net_s(pieces)
    weight = dual_weights(class_s, classes.counts)
    return SplitTable(
        class_s=table(class_s, np.float64),
        memory_bytes=table(pieces.memory_bytes, np.int64),
        limit_bytes=table(classes.limit_bytes, np.int64),
        net_s=table(net_s, np.float64),
        net_size=table(np.diff(pieces.net_ptr), np.int64),
        piece_ptr=table(pieces.piece_ptr, np.int64),
        piece_nets=table(pieces.piece_nets, np.int64),
        num_devices=table(classes.counts, np.int64),
        stride=table(stride, np.int64),
        weight=table(weight, np.float64),
        weighted_s=table(_least_weighted(weight, class_s), np.float64),
        weighted_net_s=table(_least_weighted(weight, net_s), np.float64),
    )


def _least_weighted(weight: FloatArray, seconds: FloatArray) -> FloatArray:
    """Per item: least weighted time over the classes; 0 if none can run it."""
    found = least_weighted(weight, seconds)
    return np.where(np.isfinite(found), found, 0.0)


def _state(pieces: Pieces, tables: SplitTable, lattice: Lattice) -> SplitState:
    num_ideals, num_nets = lattice.num_ideals, pieces.num_nets
    num_usages, depth = int(np.prod(tables.num_devices + 1)), pieces.num_pieces + 1
    value = np.full((num_ideals, num_usages), np.inf)
    value[0, 0] = 0.0
    least_s = tables.weighted_s
    rest_s = np.zeros(num_ideals)
    rest_s[0] = least_s.sum()
    # A larger ideal comes after the one that it was made from, so one pass in order is enough.
    for ideal in range(1, num_ideals):
        rest_s[ideal] = rest_s[lattice.from_ideal[ideal]] - least_s[lattice.from_piece[ideal]]
    shape = (depth, len(tables.num_devices))
    return SplitState(
        value=value,
        came_from=np.zeros((num_ideals, num_usages), dtype=np.int64),
        came_class=np.zeros((num_ideals, num_usages), dtype=np.int64),
        rest_s=rest_s,
        best_within=np.zeros(num_usages),
        live=np.zeros(num_usages, dtype=np.int64),
        below=np.zeros(num_nets, dtype=np.int64),
        inside=np.zeros(num_nets, dtype=np.int64),
        seen=np.full(num_ideals, -1),
        path_ideal=np.zeros(depth, dtype=np.int64),
        path_step=np.zeros(depth, dtype=np.int64),
        work_s=np.zeros(shape),
        cut_s=np.zeros(shape),
        fixed_s=np.zeros(shape),
        memory_bytes=np.zeros(depth, dtype=np.int64),
    )
