"""Annealed moves of pieces between devices, with exact loads after each, in compiled code."""

from __future__ import annotations

import math

import numpy as np

from hocket.kernels import kernel
from hocket.planners.max_load.moves import MoveState, MoveTable
from hocket.planners.parts.annealing import draw, draw_below, is_taken


@kernel
def _count_net(tables: MoveTable, state: MoveState, net: int, sign: float) -> None:
    """Add to (or take from) the loads what the devices pay for a net."""
    maker = state.device_of[tables.net_pieces[tables.net_ptr[net]]]
    slowest_s = 0.0
    for device in range(len(state.load_s)):
        if device == maker or state.inside[net, device] == 0:
            continue
        seconds = (
            tables.latency_s[maker, device] * tables.net_count[net]
            + tables.unit_s[maker, device] * tables.net_work[net]
        )
        slowest_s = max(slowest_s, seconds)
        state.load_s[device] += sign * seconds * tables.pays[device]
    state.load_s[maker] += sign * slowest_s * tables.pays[maker]


@kernel
def _move(tables: MoveTable, state: MoveState, piece: int, target: int) -> None:
    source = state.device_of[piece]
    for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
        _count_net(tables, state, tables.piece_nets[at], -1.0)
    state.device_of[piece] = target
    for at in range(tables.piece_ptr[piece], tables.piece_ptr[piece + 1]):
        net = tables.piece_nets[at]
        state.inside[net, source] -= 1
        state.inside[net, target] += 1
        _count_net(tables, state, net, 1.0)
    state.load_s[source] -= tables.seconds[source, piece]
    state.load_s[target] += tables.seconds[target, piece]
    state.held_bytes[source] -= tables.memory_bytes[piece]
    state.held_bytes[target] += tables.memory_bytes[piece]


@kernel
def _recount(tables: MoveTable, state: MoveState) -> None:
    """Loads from nothing, so that rounding errors of many moves do not add up."""
    for device in range(len(state.load_s)):
        state.load_s[device] = 0.0
        state.held_bytes[device] = 0
    for piece in range(len(state.device_of)):
        device = state.device_of[piece]
        state.load_s[device] += tables.seconds[device, piece]
        state.held_bytes[device] += tables.memory_bytes[piece]
    for net in range(len(tables.net_count)):
        for device in range(len(state.load_s)):
            state.inside[net, device] = 0
        for at in range(tables.net_ptr[net], tables.net_ptr[net + 1]):
            state.inside[net, state.device_of[tables.net_pieces[at]]] += 1
        _count_net(tables, state, net, 1.0)


@kernel
def _height(state: MoveState, scale_s: float) -> float:
    """The 16-norm of the loads: nearly the maximum, but it sees the other devices too."""
    total = 0.0
    for load_s in state.load_s:
        power = load_s / scale_s
        power *= power
        power *= power
        power *= power
        total += power * power
    return float(math.sqrt(math.sqrt(math.sqrt(math.sqrt(total)))))


@kernel
def _highest(state: MoveState) -> float:
    highest_s = 0.0
    for load_s in state.load_s:
        highest_s = max(highest_s, load_s)
    return highest_s


@kernel
def _fits(tables: MoveTable, state: MoveState) -> bool:
    for device in range(len(state.held_bytes)):
        if state.held_bytes[device] > tables.limit_bytes[device]:
            return False
    return True


@kernel
def _is_allowed(tables: MoveTable, state: MoveState, piece: int) -> bool:
    """Whether a moved piece fits where it is, and stands on a stage between its neighbours."""
    device = state.device_of[piece]
    if state.held_bytes[device] > tables.limit_bytes[device]:
        return False
    stage = tables.stage_of[device]
    for at in range(tables.before_ptr[piece], tables.before_ptr[piece + 1]):
        if tables.stage_of[state.device_of[tables.before[at]]] > stage:
            return False
    for at in range(tables.after_ptr[piece], tables.after_ptr[piece + 1]):
        if tables.stage_of[state.device_of[tables.after[at]]] < stage:
            return False
    return True


@kernel
def _target_of(tables: MoveTable, state: MoveState, piece: int) -> int:
    """Mostly the device of a piece that shares a net, sometimes any."""
    first, stop = tables.piece_ptr[piece], tables.piece_ptr[piece + 1]
    if first < stop and draw(state.random) < 0.8:
        net = tables.piece_nets[first + draw_below(state.random, stop - first)]
        begin, end = tables.net_ptr[net], tables.net_ptr[net + 1]
        return int(
            state.device_of[tables.net_pieces[begin + draw_below(state.random, end - begin)]]
        )
    return draw_below(state.random, len(state.load_s))


@kernel
def _shift(
    tables: MoveTable, state: MoveState, first: int, length: int, target: int, num_moved: int
) -> int:
    """Move a stretch of pieces, those on the device of its first; how many have moved by now."""
    source = state.device_of[first]
    if source == target:
        return num_moved
    for piece in range(first, min(first + length, len(state.device_of))):
        if state.device_of[piece] == source and tables.seconds[target, piece] < np.inf:
            state.moved[num_moved] = piece
            state.moved_from[num_moved] = source
            _move(tables, state, piece, target)
            num_moved += 1
    return num_moved


@kernel
def _propose(tables: MoveTable, state: MoveState, max_length: int) -> int:
    """Move one piece, a stretch, or two stretches against each other; how many pieces moved."""
    num_pieces = len(state.device_of)
    first, kind, length = draw_below(state.random, num_pieces), draw(state.random), 1
    if kind > 0.4:
        length = int(math.exp(draw(state.random) * math.log(max_length + 0.5)))
    source, target = state.device_of[first], _target_of(tables, state, first)
    moved = _shift(tables, state, first, length, target, 0)
    if moved == 0 or kind < 0.7:
        return moved
    for _ in range(8):
        other = draw_below(state.random, num_pieces)
        if state.device_of[other] == target and (other < first or other >= first + length):
            return _shift(tables, state, other, length, source, moved)
    return moved


@kernel
def anneal(
    tables: MoveTable, state: MoveState, num_tries: int, start_heat: float, end_heat: float,
    max_length: int,
) -> float:  # fmt: skip
    """Anneal in place; ``best_of`` gets the placement that fits with the least maximum load.

    Returns that load, or infinity where no placement that was met fits.
    """
    _recount(tables, state)
    scale_s = max(_highest(state), 1e-30)
    best_s = _highest(state) if _fits(tables, state) else np.inf
    for piece in range(len(state.device_of)):
        state.best_of[piece] = state.device_of[piece]
    height = _height(state, scale_s)
    cooling = (end_heat / start_heat) ** (1.0 / max(num_tries, 1))
    heat = start_heat
    for attempt in range(num_tries):
        heat *= cooling
        if attempt & 0xFFFF == 0xFFFF:
            _recount(tables, state)
            height = _height(state, scale_s)
        num_moved = _propose(tables, state, max_length)
        if num_moved == 0:
            continue
        after = _height(state, scale_s)
        is_accepted = is_taken(after - height, heat, state.random)
        for index in range(num_moved):
            is_accepted = is_accepted and _is_allowed(tables, state, state.moved[index])
        if not is_accepted:
            for index in range(num_moved - 1, -1, -1):
                _move(tables, state, state.moved[index], state.moved_from[index])
            continue
        height = after
        if _highest(state) < best_s * (1 - 1e-9) and _fits(tables, state):
            best_s = _highest(state)
            for piece in range(len(state.device_of)):
                state.best_of[piece] = state.device_of[piece]
    return best_s
