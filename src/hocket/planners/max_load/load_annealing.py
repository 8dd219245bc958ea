"""Simulated annealing of the maximum load, with exact loads.

A move is one piece, a run of consecutive pieces, or an exchange of two runs between devices. Moves
are accepted by the 16-norm of the loads, which is close to the maximum but also depends on the
other devices; the result is the placement with the smallest maximum. Loads are updated per net of a
moved piece. Deterministic: the number of tries is fixed and the random numbers are seeded. O(tries
· nets per piece · devices).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.max_load.load_pieces import Pieces
from hocket.simulate.load import link_times

# Simulated annealing in compiled code: random numbers and the Metropolis rule.
#
# A change that increases the cost is accepted with a probability that falls with the increase and
# with falling temperature (heat). Each planner defines its own changes and costs; if all moves are
# drawn in advance, the same rule becomes a tolerance (`placement/local_search.py`). The random
# numbers are those of splitmix64, so they are the same on every machine. O(1) per call.
#
# Metropolis et al., "Equation of state calculations by fast computing machines", 1953; Steele, Lea,
# Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.


RandomState = NDArray[np.uint64]
"""Generator state, an array of one number that every draw changes."""
# Constants of splitmix64 (Steele, Lea, Flood); 53 bits fill the mantissa of a float.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_UNIT = 1.0 / (1 << 53)


def seeded(seed: int) -> RandomState:
    """Return the initial generator state for a seed."""
    return np.array([seed], dtype=np.uint64)


@kernel
def draw(state: RandomState) -> float:
    """Return the next random number in [0, 1)."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return float(mixed >> np.uint64(11)) * _UNIT


@kernel
def draw_below(state: RandomState, count: int) -> int:
    """Return the next random integer from 0 to ``count`` - 1."""
    return int(draw(state) * count)


@kernel
def is_taken(rise: float, heat: float, state: RandomState) -> bool:
    """True if a change that increases the cost by ``rise`` is accepted at temperature ``heat``."""
    if rise <= 0.0:
        return True
    return heat > 0.0 and draw(state) < math.exp(-rise / heat)


# Annealed moves of pieces between devices, with exact loads after each, in compiled code.


@kernel
def _count_net(tables: MoveTable, state: MoveState, net: int, sign: float) -> None:
    """Add the cost of a net to the loads of its devices, or subtract it."""
    maker = state.device_of[tables.net_pieces[tables.net_ptr[net]]]
    slowest_s = 0.0
    for device in range(len(state.load_s)):
        if device == maker or state.inside[net, device] == 0:
            # The maker pays for sending once, at the slowest of the links that it uses.
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
    """Recompute the loads, so that rounding errors of many moves do not add up."""
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
    """The 16-norm of the loads: close to the maximum, but it depends on all devices."""
    # Four squarings give the 16th power; scaling keeps it within the range of a float.
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
def _target_of(tables: MoveTable, state: MoveState, piece: int) -> int:
    """Draw a target device: usually that of a piece in the same net, sometimes any."""
    first, stop = tables.piece_ptr[piece], tables.piece_ptr[piece + 1]
    # Most moves go where the piece already shares a tensor, because these can save transfers.
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
    """Move the pieces of a run that share its first piece's device; returns all moved so far."""
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
    """Move one piece or a run, or exchange two runs; returns the number of moved pieces."""
    num_pieces = len(state.device_of)
    first, kind, length = draw_below(state.random, num_pieces), draw(state.random), 1
    if kind > 0.4:
        # Lengths are drawn log-uniformly, so that short runs are as likely as long ones.
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

    Returns that load, or infinity if no placement found during annealing fits.
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
        # Every 65,536 tries the loads are computed anew, before rounding errors add up.
        if attempt & 0xFFFF == 0xFFFF:
            _recount(tables, state)
            height = _height(state, scale_s)
        num_moved = _propose(tables, state, max_length)
        if num_moved == 0:
            continue
        after = _height(state, scale_s)
        is_accepted = is_taken(after - height, heat, state.random)
        if not is_accepted or not _fits(tables, state):
            # Undone in reverse order, so that each piece returns to the device it came from.
            for index in range(num_moved - 1, -1, -1):
                _move(tables, state, state.moved[index], state.moved_from[index])
            continue
        height = after
        if _highest(state) < best_s * (1 - 1e-9):
            best_s = _highest(state)
            for piece in range(len(state.device_of)):
                state.best_of[piece] = state.device_of[piece]
    return best_s


class MoveTable(NamedTuple):
    """Pieces, nets and links as compiled code reads them."""

    seconds: FloatArray
    """[device, piece]: seconds."""
    memory_bytes: LongArray
    limit_bytes: LongArray
    pays: FloatArray
    """Per device: 1 if its load includes transfers, else 0."""
    latency_s: FloatArray
    unit_s: FloatArray
    net_ptr: LongArray
    net_pieces: LongArray
    net_count: FloatArray
    net_work: FloatArray
    piece_ptr: LongArray
    piece_nets: LongArray


class MoveState(NamedTuple):
    """Working arrays that annealing overwrites."""

    device_of: LongArray
    best_of: LongArray
    load_s: FloatArray
    held_bytes: LongArray
    inside: LongArray
    """[net, device]: number of the net's pieces on the device."""
    moved: LongArray
    moved_from: LongArray
    random: RandomState


class Heat(NamedTuple):
    """Annealing settings; temperatures are relative to the initial maximum load."""

    num_tries: int
    start: float = 0.01
    end: float = 2e-5
    max_length: int = 64
    """Maximum number of pieces in a run that moves at once."""


class Annealed(NamedTuple):
    """The best placement found during annealing."""

    device_of: IntArray
    """Per piece: its device."""
    max_load_s: float


def annealed(
    problem: Problem,
    pieces: Pieces,
    device_of: IntArray,
    heat: Heat,
    *,
    limit_bytes: LongArray,
    seed: int = 0,
) -> Annealed:
    """Anneal from ``device_of``; returns the best placement of the pieces that was found."""
    if pieces.num_pieces == 0 or problem.cluster.num_devices < 2:
        heat = heat._replace(num_tries=0)
    tables = _tables(problem, pieces, limit_bytes)
    state = _state(pieces, device_of, problem.cluster.num_devices, problem.seed + seed)
    load_s = anneal(tables, state, heat.num_tries, heat.start, heat.end, heat.max_length)
    return Annealed(state.best_of.astype(np.int32), float(load_s))


def _tables(problem: Problem, pieces: Pieces, limit_bytes: LongArray) -> MoveTable:
    links = link_times(problem)
    return MoveTable(
        seconds=table(pieces.seconds, np.float64),
        memory_bytes=table(pieces.memory_bytes, np.int64),
        limit_bytes=table(limit_bytes, np.int64),
        pays=table(links.pays, np.float64),
        latency_s=table(links.latency_s, np.float64),
        unit_s=table(links.unit_s, np.float64),
        net_ptr=table(pieces.net_ptr, np.int64),
        net_pieces=table(pieces.net_pieces, np.int64),
        net_count=table(pieces.net_count, np.float64),
        net_work=table(pieces.net_work, np.float64),
        piece_ptr=table(pieces.piece_ptr, np.int64),
        piece_nets=table(pieces.piece_nets, np.int64),
    )


def _state(pieces: Pieces, device_of: IntArray, num_devices: int, seed: int) -> MoveState:
    count = pieces.num_pieces
    return MoveState(
        device_of=device_of.astype(np.int64),
        best_of=np.zeros(count, dtype=np.int64),
        load_s=np.zeros(num_devices),
        held_bytes=np.zeros(num_devices, dtype=np.int64),
        inside=np.zeros((pieces.num_nets, num_devices), dtype=np.int64),
        # An exchange moves two runs, each of at most all pieces.
        moved=np.zeros(2 * count, dtype=np.int64),
        moved_from=np.zeros(2 * count, dtype=np.int64),
        random=seeded(seed),
    )
