"""The limit on the slowest stage at which sum plus weighted maximum of stage times is least.

The least sum S(L) under a limit L only falls as L rises, so between two limits a < b nothing is
better than S(b) + weight · a. Intervals for which that beats nothing known are dropped, the others
are halved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.kernels.containers import table
from hocket.planners.parallel.partition.cut_state import CutState, new_cuts
from hocket.planners.parallel.partition.orders import StageWays
from hocket.planners.parallel.partition.tables import StageTables

_PRECISION = 4e-10
"""What may be lost, relatively, by leaving intervals and once more by making stages even."""


@dataclass(frozen=True)
class Cuts:
    """Where stages start, on which rows of the order they are, and what that costs."""

    starts: tuple[int, ...]
    rows: tuple[int, ...]
    sum_s: float
    max_s: float

    def total_s(self, weight: float) -> float:
        """Sum plus weighted maximum."""
        return self.sum_s + weight * self.max_s


def best_cuts(tables: StageTables, order: StageWays, weight: float) -> Cuts | None:
    """The cuts with least sum plus ``weight`` times the maximum; None where nothing fits."""
    state = new_cuts(order.num_ways, len(tables.sent_s) - 1)
    best = _cuts_within(tables, order, state, np.inf)
    if best is None:
        return None
    intervals = [(_least_max(tables), best.max_s, best.sum_s)]
    while intervals:
        low_s, high_s, sum_s = intervals.pop()
        if sum_s + weight * low_s >= best.total_s(weight) * (1.0 - _PRECISION):
            continue
        middle_s = (low_s + high_s) / 2.0
        cuts = _cuts_within(tables, order, state, middle_s)
        if cuts is None or cuts.sum_s > sum_s * (1.0 + 1e-15):
            intervals.append((middle_s, high_s, sum_s))
        if cuts is not None:
            intervals.append((low_s, cuts.max_s, cuts.sum_s))
            best = min(best, cuts, key=lambda found: found.total_s(weight))
    return _evened(tables, order, state, best)


def _evened(tables: StageTables, order: StageWays, state: CutState, best: Cuts) -> Cuts:
    """Of cuts that are as good, those with the most even stages: they bear surprises best."""
    if best.max_s <= 0.0:
        return best
    uneven = 1.0 + _PRECISION / best.max_s * tables.stage_s
    marked = tables._replace(stage_s=table(tables.stage_s * uneven, np.float64))
    cuts = _cuts_within(marked, order, state, best.max_s * (1.0 + _PRECISION) * (1.0 + 1e-15))
    if cuts is None:
        return best
    rows, starts = np.array(cuts.rows), np.array(cuts.starts)
    stage_s = tables.stage_s[rows, starts[:-1], starts[1:]]
    sum_s = float(stage_s.sum() + tables.sent_s[starts[1:]].sum())
    return Cuts(cuts.starts, cuts.rows, sum_s, float(stage_s.max()))


def _least_max(tables: StageTables) -> float:
    """No cuts have a smaller maximum: every layer is in some stage."""
    alone = np.diagonal(tables.stage_s, offset=1, axis1=1, axis2=2)
    return float(alone.min(axis=0).max())


def _cuts_within(
    tables: StageTables, order: StageWays, state: CutState, limit_s: float
) -> Cuts | None:
    from hocket.planners.parallel.partition.layer_kernels import least_sum

    sum_s = least_sum(order, tables, state, limit_s)
    if sum_s == np.inf:
        return None
    way, stop = order.num_ways - 1, len(tables.sent_s) - 1
    starts, rows, max_s = [stop], [], 0.0
    while way > 0:
        start, step = int(state.came_from[way, stop]), int(state.came_step[way, stop])
        rows.append(int(order.row[step]))
        max_s = max(max_s, float(tables.stage_s[rows[-1], start, stop]))
        starts.append(start)
        way, stop = int(order.src[step]), start
    return Cuts(tuple(reversed(starts)), tuple(reversed(rows)), sum_s, max_s)
