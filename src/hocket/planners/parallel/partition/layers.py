"""Layers over the stages of a pipeline, exactly: uneven stages, unequal devices, memory.

Two programmes over (stages so far, layers so far) work together. The first finds good cuts under
the simple objective sum t_i + (m - 1) max t_i for m microbatches and stage times t_i (Zheng et al.,
"Alpa", OSDI 2022, section 5), by limits on max t_i (`limits`). The second takes their step as bound
and finds the shortest step as pipelines with few microbatches in flight really take it (`paths`).
Memory enters as what a stage keeps per microbatch times its microbatches in flight; where layers
can be run in several ways, each stage takes the fastest that fits (`choices`).
O(stages · layers · layers of a stage) for each limit, and times points for the paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.kernels.containers import table
from hocket.planners.parallel.partition.costs import LayerCosts
from hocket.planners.parallel.partition.limits import best_cuts
from hocket.planners.parallel.partition.orders import StageWays, any_order, fixed_order
from hocket.planners.parallel.partition.paths import path_time, shortest_cuts
from hocket.planners.parallel.partition.pipelines import step_time
from hocket.planners.parallel.partition.tables import (
    StageTables,
    choice_of,
    least_needs,
    stage_tables,
    tables_of,
)

# Layers over the virtual stages of ranks that have several.
#
# What a rank does and keeps is then a sum over stages that are far apart in the model, and the
# programme over prefixes no longer sees it. Stages are first made alike, then layers are moved away
# from the rank that lacks most memory or is slowest, each time to the stage where that helps most;
# the stages between pass one layer on. Where layers can be run in several ways, each stage has its
# share of the rank's memory. O(rounds · stages²).

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
    """True if every stage has a layer that counts."""
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


@dataclass(frozen=True, kw_only=True)
class LayerPartition:
    """Which layers each virtual stage has, and how the pipeline then goes."""

    starts: tuple[int, ...]
    """First layer of each virtual stage, and the number of layers at the end."""
    layers: tuple[int, ...]
    """Layers that count, per virtual stage."""
    ways: tuple[int, ...]
    """The way in which each layer is run."""
    kinds: tuple[int, ...]
    """Device kind of each pipeline rank."""
    stage_s: tuple[float, ...]
    """Forward and backward of one microbatch, per virtual stage."""
    peak_bytes: tuple[int, ...]
    """Per pipeline rank."""
    step_s: float
    """Time of the pipeline for one step."""
    is_optimal: bool
    """True if no config has a shorter step: with one stage per rank, unless one of the
    programmes ran out of room."""


def partition_layers(
    costs: LayerCosts,
    *,
    kinds: Sequence[int],
    memory_bytes: Sequence[int],
    in_flight: Sequence[int],
    num_microbatches: int,
    rank_of_stage: Sequence[int] | None = None,
    reorder: bool = False,
) -> LayerPartition:
    """The config of layers over stages with the shortest step that fits.

    ``kinds`` has the device kind of each pipeline rank, ``memory_bytes`` the memory of one device
    of each kind, ``in_flight`` the most microbatches of which each virtual stage keeps activations.
    ``rank_of_stage`` says where virtual stages are if ranks have several. With ``reorder`` ranks of
    unequal kinds may take any order. With one stage per rank the step of `paths` is least within
    one part in 10^9; with several stages it is a good start improved layer by layer.

    Raises `NoFeasiblePlanError` where no config that was tried fits the memory.
    """
    ranks = tuple(range(len(kinds))) if rank_of_stage is None else tuple(rank_of_stage)
    _check(costs, kinds, memory_bytes, in_flight, ranks, num_microbatches)
    kinds_of = [kinds[rank] for rank in ranks]
    if len(ranks) == len(kinds):
        order = (any_order if reorder else fixed_order)(kinds_of, memory_bytes, in_flight)
        return _exact(costs, order, ranks, num_microbatches)
    if reorder:
        raise UsageError(
            "ranks with several stages keep their order",
            hint="use one stage per rank, or give the kinds in the order to try",
        )
    order = fixed_order(kinds_of, memory_bytes, in_flight)
    starts, order = cuts_of_chunks(costs, order, ranks, num_microbatches)
    if not starts:
        raise _lacking(costs, order, ranks)
    found = _described(costs, order, starts, tuple(order.row.tolist()), ranks)
    step_s = step_time(costs, starts, found.stage_s, ranks, num_microbatches)
    return replace(found, step_s=step_s)


def _exact(
    costs: LayerCosts, order: StageWays, ranks: tuple[int, ...], num_microbatches: int
) -> LayerPartition:
    """The best partition with one stage per rank."""
    tables = stage_tables(costs, order)
    simple = best_cuts(tables, order, num_microbatches - 1)
    if simple is None:
        raise _lacking(costs, order, ranks)
    cuts, is_proven = shortest_cuts(costs, tables, order, num_microbatches, simple)
    return replace(
        _described(costs, order, cuts.starts, cuts.rows, ranks),
        step_s=path_time(costs, tables, order, num_microbatches, cuts),
        is_optimal=is_proven and tables.num_inexact == 0,
    )


def _described(
    costs: LayerCosts, order: StageWays, starts: tuple[int, ...], rows: tuple[int, ...],
    ranks: tuple[int, ...],
) -> LayerPartition:  # fmt: skip
    """The partition with given cuts, its choices and memory worked out, without its step."""
    way_s = np.asarray(costs.forward_s)[None] + np.asarray(costs.backward_s)
    kept, state = np.asarray(costs.activation_bytes), np.asarray(costs.state_bytes)
    num_ranks = max(ranks) + 1
    ways, stage_s, kinds = [], [], [0] * num_ranks
    peak_bytes = [0] * num_ranks
    for stage, row in enumerate(rows):
        start, stop = starts[stage], starts[stage + 1]
        chosen, layers = choice_of(costs, order, row, start, stop), np.arange(start, stop)
        kind = int(order.kind[row])
        ways.extend(chosen)
        stage_s.append(float(way_s[chosen, layers, kind].sum()))
        kinds[ranks[stage]] = kind
        held_bytes = int(kept[chosen, layers].sum()) * int(order.in_flight[row])
        peak_bytes[ranks[stage]] += held_bytes + int(state[start:stop].sum())
    counted = pointers(costs.counts)
    return LayerPartition(
        starts=starts,
        layers=tuple(int(n) for n in np.diff(counted[list(starts)])),
        ways=tuple(ways),
        kinds=tuple(kinds),
        stage_s=tuple(stage_s),
        peak_bytes=tuple(peak_bytes),
        step_s=np.inf,
        is_optimal=False,
    )


def _lacking(costs: LayerCosts, order: StageWays, ranks: tuple[int, ...]) -> NoFeasiblePlanError:
    """The error that names the stage which lacks most where layers are divided to lack least."""
    lack = np.maximum(least_needs(costs, order) - order.limit_bytes[:, None, None], 0)
    cuts = best_cuts(tables_of(costs, lack.astype(np.float64)), order, 1e9)
    if cuts is None:
        raise UsageError(
            f"{int(np.sum(costs.counts))} layers cannot be divided over {len(ranks)} stages",
            hint="use fewer stages: each needs a layer",
        )
    lacks = [lack[row, *cuts.starts[i : i + 2]] for i, row in enumerate(cuts.rows)]
    worst = int(np.argmax(lacks))
    return NoFeasiblePlanError(
        f"stage {worst} lacks {format_bytes(float(lacks[worst]))} of memory however layers are"
        f" divided over {len(ranks)} stages",
        hint="recompute more, keep fewer microbatches in flight, or use more devices",
    )


def _check(
    costs: LayerCosts, kinds: Sequence[int], memory_bytes: Sequence[int],
    in_flight: Sequence[int], ranks: tuple[int, ...], num_microbatches: int,
) -> None:  # fmt: skip
    num_kinds = np.shape(costs.forward_s)[1]
    if not kinds or any(not 0 <= kind < num_kinds for kind in kinds):
        raise UsageError(
            f"device kinds {list(kinds)!r} of ranks", hint=f"expected 0 to {num_kinds - 1} for each"
        )
    if len(memory_bytes) != num_kinds:
        raise UsageError(
            f"memory of {len(memory_bytes)} device kinds", hint=f"the costs have {num_kinds}"
        )
    if sorted(set(ranks)) != list(range(len(kinds))) or len(ranks) % len(kinds):
        raise UsageError(
            f"stages are on the ranks {ranks!r}", hint="each rank needs equally many stages"
        )
    if len(in_flight) != len(ranks) or min(in_flight) < 1:
        raise UsageError(
            f"{len(in_flight)} counts of microbatches in flight for {len(ranks)} stages",
            hint="give one of 1 or more for each",
        )
    if num_microbatches < 1:
        raise UsageError(f"{num_microbatches} microbatches", hint="expected 1 or more")
