"""The dynamic programme over a lattice of ideals, in compiled code."""

from __future__ import annotations

from hocket.kernels import kernel
from hocket.planners.max_load.lattice import Lattice
from hocket.planners.max_load.split import SplitState, SplitTable


@kernel
def _touch_below(lattice: Lattice, tables: SplitTable, state: SplitState, ideal: int) -> None:
    """Count, per net, its pieces in an ideal."""
    for net in range(len(state.below)):
        state.below[net] = 0
    while lattice.from_ideal[ideal] >= 0:
        piece = lattice.from_piece[ideal]
        for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
            state.below[tables.piece_nets[at]] += 1
        ideal = lattice.from_ideal[ideal]


@kernel
def _find_live(tables: SplitTable, state: SplitState, ideal: int, limit_s: float) -> int:
    """List the ways to have filled an ideal that can still lead below the limit.

    A way is dropped where one with fewer devices is as good, or where the devices that are left
    cannot take the rest below the limit: any weights per class give a bound, because the weighted
    work of the rest and of the nets cut here is at most the limit times the weights of the devices.
    """
    num_classes, num_rows = len(tables.num_devices), len(tables.weight)
    for row in range(num_rows):
        rest_s = state.rest_s[row, ideal]
        for net in range(len(state.below)):
            if 0 < state.below[net] < tables.net_size[net]:
                rest_s += tables.weighted_net_s[row, net]
        state.rest_here_s[row] = rest_s
    num_live = 0
    for way in range(state.value.shape[1]):
        value, is_live, mask, best = state.value[ideal, way], True, 0, state.value[ideal, way]
        for kind in range(num_classes):
            used = (way // tables.stride[kind]) % (tables.num_devices[kind] + 1)
            if used > 0:
                fewer = state.best_within[way - tables.stride[kind]]
                is_live = is_live and value < fewer
                best = min(best, fewer)
            if used < tables.num_devices[kind]:
                mask |= 1 << kind
        state.best_within[way] = best
        if not is_live or not value < limit_s or mask == 0:
            continue
        row = tables.row_of_mask[mask]
        room = 0.0
        for kind in range(num_classes):
            used = (way // tables.stride[kind]) % (tables.num_devices[kind] + 1)
            room += tables.weight[row, kind] * (tables.num_devices[kind] - used)
        if state.rest_here_s[row] < limit_s * room:
            state.live[num_live] = way
            num_live += 1
    return num_live


@kernel
def _add(tables: SplitTable, state: SplitState, piece: int, depth: int, limit_s: float) -> bool:
    """Add a piece to the stage; whether some class could still run what the stage grows into.

    ``fixed_s`` counts the nets that the stages below share: they stay cut however it grows.
    """
    num_classes = len(tables.num_devices)
    memory_bytes = state.memory_bytes[depth - 1] + tables.memory_bytes[piece]
    state.memory_bytes[depth] = memory_bytes
    for kind in range(num_classes):
        state.work_s[depth, kind] = state.work_s[depth - 1, kind] + tables.class_s[kind, piece]
        state.cut_s[depth, kind] = state.cut_s[depth - 1, kind]
        state.fixed_s[depth, kind] = state.fixed_s[depth - 1, kind]
    for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
        net = tables.piece_nets[at]
        inside = state.inside[net] + 1
        state.inside[net] = inside
        if 1 < inside < tables.net_size[net]:
            continue
        sign = 1.0 if inside == 1 else -1.0
        for kind in range(num_classes):
            state.cut_s[depth, kind] += sign * tables.net_s[kind, net]
            if inside == 1 and state.below[net] > 0:
                state.fixed_s[depth, kind] += tables.net_s[kind, net]
    for kind in range(num_classes):
        at_least_s = state.work_s[depth, kind] + state.fixed_s[depth, kind]
        if at_least_s < limit_s and memory_bytes <= tables.limit_bytes[kind]:
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
    """Try the stage between two ideals on a device of each class."""
    for kind in range(len(tables.num_devices)):
        load_s = state.work_s[depth, kind] + state.cut_s[depth, kind]
        if not load_s < limit_s or state.memory_bytes[depth] > tables.limit_bytes[kind]:
            continue
        stride, most = tables.stride[kind], tables.num_devices[kind]
        for index in range(num_live):
            way = state.live[index]
            if (way // stride) % (most + 1) == most:
                continue
            value = max(state.value[start, way], load_s)
            if value < state.value[stop, way + stride]:
                state.value[stop, way + stride] = value
                state.came_from[stop, way + stride] = start
                state.came_kind[stop, way + stride] = kind


@kernel
def _stages_from(
    lattice: Lattice, tables: SplitTable, state: SplitState, start: int, num_live: int,
    limit_s: float,
) -> int:  # fmt: skip
    """Grow every stage above an ideal, depth first; how many were looked at."""
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
    """Fill the values of all ideals below the limit; False where it took too many looks."""
    last, looked = len(lattice.step_ptr) - 2, 0
    for ideal in range(last):
        _touch_below(lattice, tables, state, ideal)
        for way in range(state.value.shape[1]):
            limit_s = min(limit_s, state.value[last, way])
        num_live = _find_live(tables, state, ideal, limit_s)
        if num_live:
            looked += _stages_from(lattice, tables, state, ideal, num_live, limit_s)
        if looked > max_looks:
            return False
    return True
