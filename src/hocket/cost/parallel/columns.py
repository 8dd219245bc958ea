"""Fields of parallel configs and tables of their times, as arrays for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.kernels.containers import table
from hocket.transformer import ParallelConfigs

Bytes = NDArray[np.int8]


class ConfigColumns(NamedTuple):
    """Fields of parallel configs as columns, one entry per config."""

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
    """Per field and value: the value's rank among those that occur, times the field's stride.

    The sum of the entries of all fields numbers a combination of values.
    """

    tensor: IntArray
    context: IntArray
    expert: IntArray
    microbatch: IntArray
    recompute: IntArray
    sequence_parallel: IntArray
    pipeline: IntArray
    crosses: IntArray


class RankPlaces(NamedTuple):
    """The same as `Places`, for the fields that the collectives and state of a rank depend on."""

    tensor: IntArray
    context: IntArray
    expert: IntArray
    pipeline: IntArray
    data: IntArray
    zero: IntArray


class Seen(NamedTuple):
    """Per field and value: True if the value occurs; written by compiled code."""

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
    """Times of distinct stages and ranks from `StageTimes` and `RankTimes`, for compiled code."""

    busy_s: FloatArray
    exchange_s: FloatArray
    fill_s: FloatArray
    lag_s: FloatArray
    once_s: FloatArray
    each_s: FloatArray
    fixed_s: FloatArray
    pattern: IntArray
    """[schedule]: pattern of filling and draining the pipeline."""


def columns_of(configs: ParallelConfigs) -> ConfigColumns:
    """Return the fields of configs as read-only columns."""
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
