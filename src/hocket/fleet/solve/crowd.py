"""The tables that the price search runs on, made in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.arrays import ByteArray, FloatArray


class Crowd(NamedTuple):
    """Classes of jobs and the pools of devices that they share."""

    rates: FloatArray
    """``[class, column]``: progress of one job, in the unit of its demand."""
    num_jobs: FloatArray
    gang: FloatArray
    pool_of: ByteArray
    """The pool whose devices each column uses."""
    capacity: FloatArray
    """Devices of each pool."""


class Search(NamedTuple):
    """What the search over prices remembers: prices asked so far and the load each led to."""

    prices: FloatArray
    """``[question, pool]``: summing to one; what all devices of a pool cost together."""
    load: FloatArray
    """``[question, pool]``: used devices per device, where every job buys as cheaply as it can."""
    weight: FloatArray
    """``[question]``: how the answer mixes what the jobs bought."""
    inverse: FloatArray
    basis: ByteArray
    price: FloatArray
    """``[column]``: of one device, at the prices asked last."""
    asked: FloatArray
    """``[pool]``: the prices asked last."""
    best: FloatArray
    """``[pool]``: the prices with the highest bill so far."""
    entering: FloatArray
    step: FloatArray


def new_search(crowd: Crowd, max_questions: int) -> Search:
    """Room for a search that asks at most ``max_questions`` times."""
    num_pools, rows = len(crowd.capacity), len(crowd.capacity) + 1
    return Search(
        prices=np.zeros((max_questions, num_pools)),
        load=np.zeros((max_questions, num_pools)),
        weight=np.zeros(max_questions),
        inverse=np.zeros((rows, rows)),
        basis=np.zeros(rows, dtype=np.int64),
        price=np.zeros(len(crowd.pool_of)),
        asked=np.zeros(num_pools),
        best=np.zeros(num_pools),
        entering=np.zeros(rows),
        step=np.zeros(rows),
    )
