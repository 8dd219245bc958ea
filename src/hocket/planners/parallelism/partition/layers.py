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

import numpy as np

from hocket.base.arrays import pointers
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import format_bytes
from hocket.planners.parallelism.partition.chunks import cuts_of_chunks
from hocket.planners.parallelism.partition.costs import LayerCosts
from hocket.planners.parallelism.partition.limits import best_cuts
from hocket.planners.parallelism.partition.orders import StageWays, any_order, fixed_order
from hocket.planners.parallelism.partition.paths import path_time, shortest_cuts
from hocket.planners.parallelism.partition.pipelines import step_time
from hocket.planners.parallelism.partition.tables import (
    choice_of,
    least_needs,
    stage_tables,
    tables_of,
)


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
    """Whether no division has a shorter step: with one stage per rank, unless one of the
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
    """The division of layers over stages with the shortest step that fits.

    ``kinds`` has the device kind of each pipeline rank, ``memory_bytes`` the memory of one device
    of each kind, ``in_flight`` the most microbatches of which each virtual stage keeps activations.
    ``rank_of_stage`` says where virtual stages are if ranks have several. With ``reorder`` ranks of
    unequal kinds may take any order. With one stage per rank the step of `paths` is least within
    one part in 10^9; with several stages it is a good start improved layer by layer.

    Raises `NoFeasiblePlanError` where no division that was tried fits the memory.
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
