"""The arrays in which the programme over sets of layers keeps what it found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.contrib.piper.tables import Prepared
from hocket.planners.parallelism.partition.choices import ChoiceState, new_choices

_MAX_POINTS = 4_000_000


class StageState(NamedTuple):
    """What stages cost, worked out once."""

    slot_s: FloatArray
    """[slot, degree, way]: time and traffic of a layer in a stage, without replicas."""
    fast_s: FloatArray
    """[stage, degree, data degree]: with the fastest way of each layer; infinite if none."""
    at_least: LongArray
    """[stage, degree, data degree]: so many microbatches in flight keep the limit for sure."""
    at_most: LongArray
    """[stage, degree, data degree]: more of them break it for sure."""
    is_inside: LongArray
    choices: ChoiceState


REPLICAS, DEVICES, BEHIND, STAGE, TENSOR, DATA = range(6)
"""Columns of a point: the sum of data degrees, devices, the point that it extends, the stage that
it puts before that, the position of this one's tensor degree, and its data degree."""


class FrontState(NamedTuple):
    """Per set, the points (sum of data degrees, devices) of which none beats another."""

    front_ptr: LongArray
    """The front of set i is from ``front_ptr[i]`` up to ``front_ptr[i + 1]``."""
    point: LongArray
    """[point, column]."""
    row: LongArray
    """[sum of data degrees, column]: the best points of the set at hand."""
    option: LongArray
    """[option, 4]: degrees, devices and most replicas of the ways to run the stage at hand."""


def new_stage_state(prepared: Prepared) -> StageState:
    """Arrays for one model."""
    stages, tables = prepared.stages, prepared.table
    num_degrees, num_ways = tables.time_s.shape[1:]
    shape = (len(stages.after), num_degrees, len(tables.data))
    longest = int(np.diff(stages.slot_ptr).max())
    return StageState(
        slot_s=np.zeros((len(stages.slot_layer), num_degrees, num_ways)),
        fast_s=np.zeros(shape),
        at_least=np.zeros(shape, dtype=np.int64),
        at_most=np.full(shape, tables.max_replicas, dtype=np.int64),
        is_inside=np.full(len(prepared.nodes), -1, dtype=np.int64),
        choices=new_choices(longest, num_ways),
    )


def new_fronts(prepared: Prepared) -> FrontState:
    """Arrays for one model."""
    tables, num_sets = prepared.table, prepared.stages.num_sets
    width = tables.max_replicas + 1
    num_options = len(tables.tensor) * len(tables.data)
    return FrontState(
        front_ptr=np.zeros(num_sets + 1, dtype=np.int64),
        point=np.zeros((min(_MAX_POINTS, num_sets * width), 6), dtype=np.int64),
        row=np.zeros((width, 6), dtype=np.int64),
        option=np.zeros((num_options + 1, 4), dtype=np.int64),
    )
