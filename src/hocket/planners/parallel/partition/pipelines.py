"""How long a synchronous pipeline with given stages takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import LongArray
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallel.partition.costs import LayerCosts


def step_time(
    costs: LayerCosts, starts: Sequence[int], stage_s: Sequence[float], ranks: Sequence[int],
    num_microbatches: int,
) -> float:  # fmt: skip
    """Time of a step: one microbatch through all stages, the others behind the slowest rank.

    With v stages per rank the last microbatches wait for 1/v of the way only: the sum counts 1/v
    and the slowest rank m - 1/v times, which for equal stages is the known bubble of interleaved
    schedules.
    """
    num_chunks = len(ranks) // (max(ranks) + 1)
    sent_s = 2.0 * np.asarray(costs.send_s)[np.asarray(starts[1:-1], dtype=np.int64) - 1].sum()
    rank_s = np.bincount(ranks, weights=stage_s)
    path_s = (sum(stage_s) + sent_s) / num_chunks
    return float(path_s + (num_microbatches - 1.0 / num_chunks) * rank_s.max())


def in_flight_counts(schedule: Schedule) -> LongArray:
    """The most microbatches of which each virtual stage keeps activations at once.

    Those of a microbatch are kept until its last backward action on the stage.
    """
    order = np.argsort(schedule.stage, kind="stable")
    work = schedule.work[order]
    frees = (work == StageWork.BACKWARD) | (work == StageWork.WEIGHT_GRADIENT)
    # Every stage frees what it took, so that one running sum serves all.
    held = np.cumsum((work == StageWork.FORWARD).astype(np.int64) - frees)
    starts = np.searchsorted(schedule.stage[order], np.arange(schedule.num_stages))
    counts: LongArray = np.maximum.reduceat(held, starts)
    return counts
