"""ParallelConfigs and the tables of their times, as the arrays that compiled code reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.kernels.containers import table
from hocket.transformer import ParallelConfigs

Bytes = NDArray[np.int8]


class ConfigColumns(NamedTuple):
    """The fields of configs."""

    tensor: IntArray
    pipeline: IntArray
    data: IntArray
    context: IntArray
    expert: IntArray
    chunks: IntArray
    microbatch: IntArray
    global_batch: IntArray
    schedule: Bytes
    recompute: Bytes
    zero: Bytes
    sequence_parallel: Bytes


class Places(NamedTuple):
    """For each value of a field: its position among those that occur, times a stride."""

    tensor: IntArray
    context: IntArray
    expert: IntArray
    microbatch: IntArray
    recompute: IntArray
    sequence_parallel: IntArray
    pipeline: IntArray
    crosses: IntArray


class RankPlaces(NamedTuple):
    """As `Places`, for the fields that holding weights depends on."""

    tensor: IntArray
    context: IntArray
    expert: IntArray
    pipeline: IntArray
    data: IntArray
    zero: IntArray


class Seen(NamedTuple):
    """Values that occur, per field; written by compiled code."""

    tensor: BoolArray
    pipeline: BoolArray
    data: BoolArray
    context: BoolArray
    expert: BoolArray
    microbatch: BoolArray
    recompute: BoolArray
    zero: BoolArray
    sequence_parallel: BoolArray
    crosses: BoolArray


class StepTables(NamedTuple):
    """Times of distinct stages and ranks; see `StageTimes` and `RankTimes`."""

    busy_s: FloatArray
    exchange_s: FloatArray
    fill_s: FloatArray
    lag_s: FloatArray
    once_s: FloatArray
    each_s: FloatArray
    fixed_s: FloatArray
    pattern: IntArray
    """Fill pattern of each config's schedule."""


def columns_of(configs: ParallelConfigs) -> ConfigColumns:
    """The fields of configs, read-only."""
    numbers = {
        name: table(getattr(configs, name), np.int32)
        for name in ConfigColumns._fields
        if getattr(configs, name).dtype == np.int32
    }
    return ConfigColumns(
        **numbers,
        schedule=table(configs.schedule, np.int8),
        recompute=table(configs.recompute, np.int8),
        zero=table(configs.zero, np.int8),
        sequence_parallel=table(configs.sequence_parallel, np.int8),
    )
