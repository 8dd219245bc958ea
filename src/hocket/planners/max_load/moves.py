"""Local moves on the maximum load: simulated annealing with exact loads.

Pieces, stretches of pieces that follow each other, and pairs of stretches move between
devices. A move is judged by the 16-norm of the loads, which sees more than the busiest device; what
is kept is the placement with the least maximum. Loads are updated per net that a moved piece is in.
With stages given, only moves that keep the split contiguous are taken. Deterministic: the
number of tries is fixed and randomness is seeded. O(tries · nets per piece · devices).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.max_load.pieces import Pieces
from hocket.planners.parts.annealing import RandomState, seeded
from hocket.simulate.load import link_times


class MoveTable(NamedTuple):
    """Pieces, nets and links as compiled code reads them."""

    seconds: FloatArray
    """[device, piece]."""
    memory_bytes: LongArray
    limit_bytes: LongArray
    pays: FloatArray
    """Per device: 1 where transfers take its time."""
    latency_s: FloatArray
    unit_s: FloatArray
    net_ptr: LongArray
    net_pieces: LongArray
    net_count: FloatArray
    net_work: FloatArray
    piece_ptr: LongArray
    piece_nets: LongArray
    before_ptr: LongArray
    before: LongArray
    """Pieces that may not stand on a later stage; empty where order does not matter."""
    after_ptr: LongArray
    after: LongArray
    stage_of: LongArray
    """Per device."""


class MoveState(NamedTuple):
    """What annealing writes to."""

    device_of: LongArray
    best_of: LongArray
    load_s: FloatArray
    held_bytes: LongArray
    inside: LongArray
    """[net, device]: pieces of the net on the device."""
    moved: LongArray
    moved_from: LongArray
    random: RandomState


class Heat(NamedTuple):
    """How long to anneal and how warm, in parts of the first maximum load."""

    num_tries: int
    start: float = 0.01
    end: float = 2e-5
    max_length: int = 64
    """Pieces in the longest stretch that moves at once."""


class Annealed(NamedTuple):
    """The best placement that was met."""

    device_of: IntArray
    """Per piece."""
    max_load_s: float


def annealed(
    problem: Problem,
    pieces: Pieces,
    device_of: IntArray,
    heat: Heat,
    *,
    limit_bytes: LongArray,
    stage_of: IntArray | None = None,
    seed: int = 0,
) -> Annealed:
    """The best placement of the pieces that is met when annealing starts from ``device_of``.

    ``stage_of`` numbers the devices; then no precedence may go to a smaller number.
    """
    from hocket.planners.max_load.move_kernels import anneal

    if pieces.num_pieces == 0 or problem.cluster.num_devices < 2:
        heat = heat._replace(num_tries=0)
    tables = _tables(problem, pieces, limit_bytes, stage_of)
    state = _state(pieces, device_of, problem.cluster.num_devices, problem.seed + seed)
    load_s = anneal(tables, state, heat.num_tries, heat.start, heat.end, heat.max_length)
    return Annealed(state.best_of.astype(np.int32), float(load_s))


def _tables(
    problem: Problem, pieces: Pieces, limit_bytes: LongArray, stage_of: IntArray | None
) -> MoveTable:
    links, count = link_times(problem), pieces.num_pieces
    is_free = stage_of is None
    before, after = (pieces.before[:0],) * 2 if is_free else (pieces.before, pieces.after)
    before_ptr, before_list = _lists(after, before, count)
    after_ptr, after_list = _lists(before, after, count)
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
        before_ptr=table(before_ptr, np.int64),
        before=table(before_list, np.int64),
        after_ptr=table(after_ptr, np.int64),
        after=table(after_list, np.int64),
        stage_of=table(np.zeros(len(links.pays)) if stage_of is None else stage_of, np.int64),
    )


def _lists(key: IntArray, value: IntArray, count: int) -> tuple[LongArray, IntArray]:
    """The values of each key, in order."""
    ptr = pointers(np.bincount(key, minlength=count))
    return ptr, value[np.argsort(key, kind="stable")]


def _state(pieces: Pieces, device_of: IntArray, num_devices: int, seed: int) -> MoveState:
    count = pieces.num_pieces
    return MoveState(
        device_of=device_of.astype(np.int64),
        best_of=np.zeros(count, dtype=np.int64),
        load_s=np.zeros(num_devices),
        held_bytes=np.zeros(num_devices, dtype=np.int64),
        inside=np.zeros((pieces.num_nets, num_devices), dtype=np.int64),
        moved=np.zeros(2 * count, dtype=np.int64),
        moved_from=np.zeros(2 * count, dtype=np.int64),
        random=seeded(seed),
    )
