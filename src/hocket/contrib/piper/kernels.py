"""Piper's programme over sets of layers as a test of one time limit, in compiled code."""

from __future__ import annotations

import numpy as np

from hocket.contrib.piper.downsets import DownsetStages
from hocket.contrib.piper.state import (
    BEHIND,
    DATA,
    DEVICES,
    REPLICAS,
    STAGE,
    TENSOR,
    FrontState,
    StageState,
)
from hocket.contrib.piper.tables import PiperTable
from hocket.kernels import kernel
from hocket.planners.parallelism.partition.choice_kernels import least_time

_MANY = 2**40


@kernel
def _fill_slots(tables: PiperTable, stages: DownsetStages, state: StageState, stage: int) -> None:
    """Time and cut edges of each layer of a stage, for all degrees and ways."""
    start, stop = stages.slot_ptr[stage], stages.slot_ptr[stage + 1]
    for slot in range(start, stop):
        state.is_inside[stages.slot_layer[slot]] = stage
    for slot in range(start, stop):
        layer = stages.slot_layer[slot]
        for degree in range(len(tables.tensor)):
            for way in range(tables.num_ways[layer, degree]):
                time_s = tables.time_s[layer, degree, way]
                for at in range(tables.near_ptr[layer], tables.near_ptr[layer + 1]):
                    if state.is_inside[tables.near_layer[at]] != stage:
                        time_s += tables.near_s[at, degree, way]
                state.slot_s[slot, degree, way] = time_s


@kernel
def _find_fastest(
    tables: PiperTable,
    stages: DownsetStages,
    state: StageState,
    stage: int,
    degree: int,
    index: int,
) -> None:
    """The stage with each layer run in its fastest way."""
    data, total_s, kept, fixed = tables.data[index], 0.0, 0, 0
    for slot in range(stages.slot_ptr[stage], stages.slot_ptr[stage + 1]):
        layer, best, best_s = stages.slot_layer[slot], 0, np.inf
        for way in range(tables.num_ways[layer, degree]):
            sync_s = (data - 1) * tables.sync_s[layer, degree, way]
            time_s = (state.slot_s[slot, degree, way] + sync_s) / data
            if time_s < best_s:
                best, best_s = way, time_s
        total_s += best_s
        kept += tables.activation_bytes[layer, degree, best]
        fixed += tables.fixed_bytes[layer, degree, best]
    state.fast_s[stage, degree, index] = total_s
    room, high = tables.limit_bytes - fixed, -(-tables.max_replicas // data)
    at_least = 0
    if room >= 0:
        at_least = high if kept == 0 or room // kept >= high else room // kept
    state.at_least[stage, degree, index] = at_least
    state.at_most[stage, degree, index] = high
    if at_least < high:
        most = _most_that_fit(tables, stages, stage, degree, at_least + 1, high)
        state.at_most[stage, degree, index] = most


@kernel
def fill_stages(tables: PiperTable, stages: DownsetStages, state: StageState) -> None:
    """Work out what all stages cost."""
    for stage in range(len(stages.after)):
        _fill_slots(tables, stages, state, stage)
        for degree in range(len(tables.tensor)):
            for index in range(len(tables.data)):
                _find_fastest(tables, stages, state, stage, degree, index)


@kernel
def _fill_choices(
    tables: PiperTable, stages: DownsetStages, state: StageState, stage: int, degree: int,
    data: int, in_flight: int,
) -> int:  # fmt: skip
    """Set up the choice of ways for a stage; how many layers it has."""
    start, stop = int(stages.slot_ptr[stage]), int(stages.slot_ptr[stage + 1])
    for slot in range(start, stop):
        layer, choices = stages.slot_layer[slot], state.choices
        choices.num_ways[slot - start] = tables.num_ways[layer, degree]
        for way in range(tables.num_ways[layer, degree]):
            sync_s = (data - 1) * tables.sync_s[layer, degree, way]
            time_s = (state.slot_s[slot, degree, way] + sync_s) / data
            choices.time_s[slot - start, way] = time_s
            held_bytes = in_flight * tables.activation_bytes[layer, degree, way]
            held_bytes += tables.fixed_bytes[layer, degree, way]
            choices.memory_bytes[slot - start, way] = min(held_bytes, tables.limit_bytes + 1)
    return stop - start


@kernel
def _most_that_fit(
    tables: PiperTable, stages: DownsetStages, stage: int, degree: int, low: int, high: int
) -> int:
    """The most microbatches in flight for which there is memory at all, if not below ``low``."""
    while low <= high:
        middle, held_bytes = (low + high) // 2, 0
        for slot in range(stages.slot_ptr[stage], stages.slot_ptr[stage + 1]):
            layer, least = stages.slot_layer[slot], tables.limit_bytes + 1
            for way in range(tables.num_ways[layer, degree]):
                way_bytes = middle * tables.activation_bytes[layer, degree, way]
                least = min(least, way_bytes + tables.fixed_bytes[layer, degree, way])
            held_bytes += least
            if held_bytes > tables.limit_bytes:
                break
        if held_bytes <= tables.limit_bytes:
            low = middle + 1
        else:
            high = middle - 1
    return int(high)


@kernel
def _most_in_flight(
    tables: PiperTable, stages: DownsetStages, state: StageState, stage: int, degree: int,
    index: int, low: int, limit_s: float,
) -> int:  # fmt: skip
    """The most microbatches in flight with which a stage keeps the limit.

    Less than ``low`` is of no use and may be returned as less than it is. What is found narrows
    the range for later limits.
    """
    first, last = state.at_least[stage, degree, index], state.at_most[stage, degree, index]
    data = tables.data[index]
    while first < last and last >= low:
        # The first question is whether the stage is of any use.
        middle = low if first < low else (first + last + 1) // 2
        count = _fill_choices(tables, stages, state, stage, degree, data, middle)
        if least_time(state.choices, count, tables.limit_bytes, limit_s) <= limit_s:
            first = middle
        else:
            last = middle - 1
    state.at_least[stage, degree, index] = first
    state.at_most[stage, degree, index] = last
    return int(first)


@kernel
def _find_options(
    tables: PiperTable, stages: DownsetStages, state: StageState, fronts: FrontState, stage: int,
    room: int, limit_s: float,
) -> int:  # fmt: skip
    """List the ways to run a stage within the limit, without those that another one beats."""
    least = fronts.point[fronts.front_ptr[stages.after[stage]], REPLICAS]
    num_options = 0
    for degree in range(len(tables.tensor)):
        for index in range(len(tables.data)):
            data = tables.data[index]
            devices = tables.tensor[degree] * data
            if devices > room or least + data > tables.max_replicas:
                break
            if state.fast_s[stage, degree, index] > limit_s:
                continue
            low = -(-(least + data) // data)
            most = _most_in_flight(tables, stages, state, stage, degree, index, low, limit_s)
            replicas = min(most * data, tables.max_replicas)
            is_beaten = most < low
            for other in range(num_options):
                is_beaten = is_beaten or (
                    fronts.option[other, 1] <= data
                    and fronts.option[other, 2] <= devices
                    and fronts.option[other, 3] >= replicas
                )
            if is_beaten:
                continue
            fronts.option[num_options, 0], fronts.option[num_options, 1] = degree, data
            fronts.option[num_options, 2], fronts.option[num_options, 3] = devices, replicas
            num_options += 1
            if replicas == tables.max_replicas:
                # More replicas only cost more devices.
                break
    return num_options


@kernel
def _extend(fronts: FrontState, stage: int, after: int, option: int, most_devices: int) -> None:
    """Put a stage before every point of a front that leaves it devices and memory."""
    data, devices = fronts.option[option, 1], fronts.option[option, 2]
    for number in range(fronts.front_ptr[after], fronts.front_ptr[after + 1]):
        replicas = fronts.point[number, REPLICAS] + data
        if replicas > fronts.option[option, 3]:
            break
        total = fronts.point[number, DEVICES] + devices
        if total <= most_devices and total < fronts.row[replicas, DEVICES]:
            fronts.row[replicas, REPLICAS], fronts.row[replicas, DEVICES] = replicas, total
            fronts.row[replicas, BEHIND], fronts.row[replicas, STAGE] = number, stage
            fronts.row[replicas, TENSOR] = fronts.option[option, 0]
            fronts.row[replicas, DATA] = data


@kernel
def _close(fronts: FrontState, number: int) -> bool:
    """Keep the points of the set at hand that no other beats; False if there is no room."""
    fill, fewest = fronts.front_ptr[number], _MANY
    for replicas in range(len(fronts.row)):
        if fronts.row[replicas, DEVICES] >= fewest:
            continue
        if fill == len(fronts.point):
            return False
        fewest = fronts.row[replicas, DEVICES]
        for column in range(fronts.row.shape[1]):
            fronts.point[fill, column] = fronts.row[replicas, column]
        fill += 1
    fronts.front_ptr[number + 1] = fill
    return True


@kernel
def find_fronts(
    tables: PiperTable, stages: DownsetStages, state: StageState, fronts: FrontState, limit_s: float
) -> bool:
    """Fill the fronts of all sets within a limit on the time of stages; False if out of room.

    Points from which the devices that are left cannot do what is left of the work are dropped.
    """
    num_sets = len(stages.stage_ptr) - 1
    fronts.front_ptr[0], fronts.front_ptr[1] = 0, 1
    fronts.point[0, REPLICAS], fronts.point[0, DEVICES] = 0, 0
    for number in range(1, num_sets):
        for replicas in range(len(fronts.row)):
            fronts.row[replicas, DEVICES] = _MANY
        # Less a little, because sums of times are rounded.
        needed = np.ceil(tables.rest_work_s[number] / limit_s * (1.0 - 1e-9))
        most_devices = tables.num_devices - int(needed)
        for stage in range(stages.stage_ptr[number], stages.stage_ptr[number + 1]):
            after = stages.after[stage]
            if fronts.front_ptr[after] == fronts.front_ptr[after + 1]:
                continue
            room = most_devices - fronts.point[fronts.front_ptr[after + 1] - 1, DEVICES]
            if room < 1:
                continue
            count = _find_options(tables, stages, state, fronts, stage, room, limit_s)
            for option in range(count):
                _extend(fronts, stage, after, option, most_devices)
        if not _close(fronts, number):
            return False
    return True
