"""Arrays of the price search, allocated in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray


class JobClassTable(NamedTuple):
    """Classes of jobs and the pools of devices that they share, a column for each pool."""

    rates: FloatArray
    """``[class, column]``: progress of one job, in the unit of its demand."""
    num_jobs: FloatArray
    gang: FloatArray
    capacity: FloatArray
    """``[column]``: devices of the pool."""


class PriceSearch(NamedTuple):
    """Memory of the search over prices: prices asked so far and the load each led to."""

    prices: FloatArray
    """``[question, pool]``: summing to one; what all devices of a pool cost together."""
    load: FloatArray
    """``[question, pool]``: used devices per device, where every job buys as cheaply as it can."""
    weight: FloatArray
    """``[question]``: how the answer mixes what the jobs bought."""
    inverse: FloatArray
    basis: LongArray
    price: FloatArray
    """``[column]``: of one device, at the prices asked last."""
    asked: FloatArray
    """``[pool]``: the prices asked last."""
    best: FloatArray
    """``[pool]``: the prices with the highest bill so far."""
    entering: FloatArray
    step: FloatArray
    demand: FloatArray
    """``[class]``: at the level of the moment."""
    low: LongArray
    """``[class]``: slower column of the two that it bought last, -1 for none."""
    high: LongArray


def new_search(job_classes: JobClassTable, max_questions: int) -> PriceSearch:
    """Buffers for a search that asks at most ``max_questions`` times."""
    num_pools, rows = len(job_classes.capacity), len(job_classes.capacity) + 1
    return PriceSearch(
        prices=np.zeros((max_questions, num_pools)),
        load=np.zeros((max_questions, num_pools)),
        weight=np.zeros(max_questions),
        inverse=np.zeros((rows, rows)),
        basis=np.zeros(rows, dtype=np.int64),
        price=np.zeros(num_pools),
        asked=np.zeros(num_pools),
        best=np.zeros(num_pools),
        entering=np.zeros(rows),
        step=np.zeros(rows),
        demand=np.zeros(len(job_classes.gang)),
        low=np.full(len(job_classes.gang), -1),
        high=np.full(len(job_classes.gang), -1),
    )
