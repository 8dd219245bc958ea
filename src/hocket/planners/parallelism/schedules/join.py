"""Make whole backwards of halves that follow each other, where that takes no longer.

A runtime does a whole backward faster than its halves, and some can do nothing else together with
data parallelism. Joining delays the gradient of the inputs by that of the weights, so sets of pairs
are joined only if the makespan stays: all of a stage, or else halves of these, within a number of
tries. O(tries * actions).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import pointers
from hocket.cost.parallel.costs import StageCosts
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.pipeline import simulate_pipeline

_MAX_TRIES = 64
_CLOSE = 1 + 1e-12


def joined(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The schedule with many whole backwards, as far as its makespan allows."""
    limit_s = simulate_pipeline(schedule, costs).makespan_s * _CLOSE
    pairs = _pairs(schedule)
    stage = schedule.stage[pairs]
    waiting = [pairs, *(pairs[stage == own] for own in np.unique(stage).tolist())]
    chosen = np.zeros(0, dtype=np.int64)
    for _ in range(_MAX_TRIES):
        if not waiting:
            break
        some = waiting.pop(0)
        together = np.union1d(chosen, some)
        if len(together) == len(chosen):
            continue
        if simulate_pipeline(_with_joined(schedule, together), costs).makespan_s <= limit_s:
            chosen = together
        elif len(some) > 1 and len(some) < len(pairs):
            waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
    return _with_joined(schedule, chosen)


def _pairs(schedule: Schedule) -> NDArray[np.int64]:
    """Gradients of inputs that are followed by that of the weights of the same microbatch."""
    work, stage, microbatch = schedule.work, schedule.stage, schedule.microbatch
    # The last and first action of two devices never pair: their stages differ.
    return np.flatnonzero(
        (work[:-1] == StageWork.INPUT_GRADIENT)
        & (work[1:] == StageWork.WEIGHT_GRADIENT)
        & (stage[:-1] == stage[1:])
        & (microbatch[:-1] == microbatch[1:])
    )


def _with_joined(schedule: Schedule, pairs: NDArray[np.int64]) -> Schedule:
    """The schedule with whole backwards instead of the pairs that begin at these actions."""
    if not len(pairs):
        return schedule
    work = schedule.work.copy()
    work[pairs] = StageWork.BACKWARD
    kept = np.ones(len(work), dtype=np.bool_)
    kept[pairs + 1] = False
    before = pointers(kept)
    return replace(
        schedule,
        start=before[schedule.start].astype(np.int32),
        work=work[kept],
        stage=schedule.stage[kept],
        microbatch=schedule.microbatch[kept],
    )
