"""Max-min fairness (least attained service) that knows how fast each job is on each kind.

Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning Workloads",
OSDI 2020, section 4.1: make the lowest s_m thr_m / (w_m T_m) as high as can be, T_m being the
throughput on a proportional mix of all devices. Ties are broken by going on to the next lowest.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.normalise import per_unit, proportional_steps_per_s
from hocket.fleet.solve.ladder import Ladder
from hocket.fleet.solve.water_filling import climb


def las(market: Market, warm: Warm | None = None) -> Allocation:
    """Every job is owed the same normalised throughput, by weight and per device of its gang."""
    return climb("las", market, las_ladder(market), warm)


def las_ladder(market: Market) -> Ladder:
    """What every job is owed; of a job it depends on throughputs, gang and weight only."""
    owed = market.weight * proportional_steps_per_s(market) / market.gang
    rates = per_unit(market.usable_steps_per_s, owed)
    return Ladder(rates=rates, marks=np.empty((len(rates), 0)), score=lowest)


def lowest(progress: FloatArray) -> float:
    """What the job that is worst off gets."""
    return float(progress.min(initial=np.inf))
