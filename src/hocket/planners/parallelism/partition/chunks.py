"""Layers over the virtual stages of ranks that have several.

What a rank does and keeps is then a sum over stages that are far apart in the model, and the
programme over prefixes no longer sees it. Stages are first made alike, then layers are moved away
from the rank that lacks most memory or is slowest, each time to the stage where that helps most;
the stages between pass one layer on. Where layers can be run in several ways, each stage has its
share of the rank's memory. O(rounds · stages²).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels.containers import table
from hocket.planners.parallelism.partition.costs import LayerCosts
from hocket.planners.parallelism.partition.limits import best_cuts
from hocket.planners.parallelism.partition.orders import StageWays
from hocket.planners.parallelism.partition.pipelines import step_time
from hocket.planners.parallelism.partition.tables import StageTables, stage_tables

_ANY = 2**62
"""A limit that is none."""
_MAX_ROUNDS = 256
"""Layers that are moved at most."""


class _Chunked(NamedTuple):
    """What the descent reads."""

    costs: LayerCosts
    ranks: tuple[int, ...]
    num_microbatches: int
    stage_s: FloatArray
    """[row, start, stop]."""
    row: LongArray
    """[stage]: where its times are."""
    in_flight: LongArray
    """[stage]."""
    kept_sums: LongArray
    """[layer]: least bytes per microbatch in flight of all layers before."""
    state_sums: LongArray
    limit_bytes: LongArray
    """[rank]."""
    first_stop: LongArray


def cuts_of_chunks(
    costs: LayerCosts, order: StageWays, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[tuple[int, ...], StageWays]:
    """Where stages start, empty if none is found that fits, and the memory each stage may use."""
    num_chunks = len(ranks) // (max(ranks) + 1)
    weight = num_chunks * (num_chunks * num_microbatches - 1.0)
    share = order._replace(limit_bytes=table(order.limit_bytes // num_chunks, np.int64))
    anything = order._replace(limit_bytes=table(np.full_like(order.limit_bytes, _ANY), np.int64))
    # Without a choice to make, memory only matters for the rank as a whole.
    for limits in (share,) if costs.num_ways > 1 else (anything, share):
        tables = stage_tables(costs, limits)
        cuts = best_cuts(tables, limits, weight)
        if cuts is None:
            continue
        chunked = _chunked(costs, order, ranks, num_microbatches, tables)
        starts = _descend(chunked, list(cuts.starts))
        if _value(chunked, starts)[0] == 0:
            return tuple(starts), limits
    return (), share


def _chunked(
    costs: LayerCosts, order: StageWays, ranks: tuple[int, ...], num_microbatches: int,
    tables: StageTables,
) -> _Chunked:  # fmt: skip
    limit_bytes = np.zeros(max(ranks) + 1, dtype=np.int64)
    limit_bytes[list(ranks)] = order.limit_bytes[order.row]
    kept = np.asarray(costs.activation_bytes, dtype=np.int64).min(axis=0)
    return _Chunked(
        costs=costs,
        ranks=ranks,
        num_microbatches=num_microbatches,
        stage_s=tables.stage_s,
        row=order.row,
        in_flight=order.in_flight[order.row],
        kept_sums=np.concatenate(([0], np.cumsum(kept))),
        state_sums=np.concatenate(([0], np.cumsum(costs.state_bytes))),
        limit_bytes=limit_bytes,
        first_stop=tables.first_stop,
    )


def _descend(chunked: _Chunked, starts: list[int]) -> list[int]:
    """Move layers while that helps."""
    best = _value(chunked, starts)
    for _ in range(_MAX_ROUNDS):
        moved = [trial for trial in _moves(chunked, starts) if _is_legal(chunked, trial)]
        values = [_value(chunked, trial) for trial in moved]
        if not values or not min(values) < best:
            break
        best = min(values)
        starts = moved[values.index(best)]
    return starts


def _moves(chunked: _Chunked, starts: list[int]) -> list[list[int]]:
    """A layer from a stage of the worst rank to any other stage."""
    held_bytes, rank_s = _ranks(chunked, starts)
    lack_bytes = held_bytes - chunked.limit_bytes
    worst = int(np.argmax(lack_bytes)) if lack_bytes.max() > 0 else int(np.argmax(rank_s))
    moves = []
    for src in (stage for stage, rank in enumerate(chunked.ranks) if rank == worst):
        for dst in range(len(chunked.ranks)):
            first, last = min(src, dst) + 1, max(src, dst)
            shift = -1 if dst > src else 1
            passed = [start + shift for start in starts[first : last + 1]]
            moves.append([*starts[:first], *passed, *starts[last + 1 :]])
    return [move for move in moves if move != starts]


def _is_legal(chunked: _Chunked, starts: list[int]) -> bool:
    """Whether every stage has a layer that counts."""
    begins, ends = np.array(starts[:-1]), np.array(starts[1:])
    return bool(np.all(begins < ends) and np.all(chunked.first_stop[begins] <= ends))


def _value(chunked: _Chunked, starts: list[int]) -> tuple[int, float, float]:
    """Bytes that ranks lack, the time of a step, how uneven ranks are: less is better."""
    held_bytes, rank_s = _ranks(chunked, starts)
    lack_bytes = int(np.maximum(held_bytes - chunked.limit_bytes, 0).sum())
    stage_s = chunked.stage_s[chunked.row, starts[:-1], starts[1:]]
    step_s = step_time(
        chunked.costs, starts, list(stage_s), chunked.ranks, chunked.num_microbatches
    )
    return lack_bytes, step_s, float(np.square(rank_s).sum())


def _ranks(chunked: _Chunked, starts: list[int]) -> tuple[LongArray, FloatArray]:
    """What each rank keeps, and how long it works per microbatch."""
    kept, state = np.diff(chunked.kept_sums[starts]), np.diff(chunked.state_sums[starts])
    held_bytes, rank_s = np.zeros_like(chunked.limit_bytes), np.zeros(len(chunked.limit_bytes))
    np.add.at(held_bytes, list(chunked.ranks), kept * chunked.in_flight + state)
    np.add.at(rank_s, list(chunked.ranks), chunked.stage_s[chunked.row, starts[:-1], starts[1:]])
    return held_bytes, rank_s
