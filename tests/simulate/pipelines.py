"""Pipelines for tests: even and generated stage costs, generated orders, a plain-Python twin."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from hocket.cost.parallel.costs import StageCosts
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallel.schedules import make_schedule

CASES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("looped-bfs", 2),
    ("zb-h1", 1), ("zb-h1", 2), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2),
]  # fmt: skip
"""Every schedule, with chunks per device."""


def even_costs(
    num_devices: int, chunks: int = 1, times: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> StageCosts:
    """Equal stages that together take ``times`` per device and hold one byte per chunk."""
    num_stages = num_devices * chunks
    forward_s, input_s, weight_s = ((time_s / chunks,) * num_stages for time_s in times)
    return StageCosts(
        forward_s=forward_s,
        input_gradient_s=input_s,
        weight_gradient_s=weight_s,
        send_s=(0.0,) * (num_stages - 1),
        activation_bytes=(1,) * num_stages,
        weight_gradient_bytes=(1,) * num_stages,
        state_bytes=(0,) * num_devices,
        after_s=(0.0,) * num_devices,
    )


TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 0.1, 0.0])
SENDS = st.sampled_from([0.0, 0.0, 0.125, 0.3])


@st.composite
def stage_costs(draw: Any, num_devices: int, chunks: int, times: Any = TIMES) -> StageCosts:
    """Unequal stages."""
    num_stages = num_devices * chunks

    def row(values: Any, size: int) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    held = row(st.integers(0, 20), num_stages)
    return StageCosts(
        forward_s=row(times, num_stages),
        input_gradient_s=row(times, num_stages),
        weight_gradient_s=row(times, num_stages),
        send_s=row(SENDS, num_stages - 1),
        activation_bytes=held,
        weight_gradient_bytes=tuple(draw(st.integers(0, size)) for size in held),
        state_bytes=row(st.integers(0, 50), num_devices),
        after_s=row(TIMES, num_devices),
    )


@st.composite
def schedules(draw: Any, max_devices: int = 4, max_microbatches: int = 9) -> Schedule:
    """A known schedule of a small pipeline."""
    name, chunks = draw(st.sampled_from(CASES))
    num_devices = draw(st.integers(1, max_devices))
    return make_schedule(name, num_devices, draw(st.integers(1, max_microbatches)), chunks)


def with_row(schedule: Schedule, **changes: Any) -> Schedule:
    """The schedule with some fields replaced."""
    fields = ("name", "num_microbatches", "device_of_stage", "start", "work", "stage", "microbatch")
    values = {field: getattr(schedule, field) for field in fields}
    return Schedule(**{**values, **changes})


def needs_of(schedule: Schedule) -> list[list[int]]:
    """For each action, the actions whose results it needs; -1 for one that is not there."""
    where = {
        (int(w), int(s), int(m)): index
        for index, (w, s, m) in enumerate(
            zip(schedule.work, schedule.stage, schedule.microbatch, strict=True)
        )
    }

    def back(stage: int, microbatch: int) -> int:
        split = where.get((StageWork.INPUT_GRADIENT, stage, microbatch), -1)
        return where.get((StageWork.BACKWARD, stage, microbatch), split)

    needs: list[list[int]] = []
    for (work, stage, microbatch), _ in sorted(where.items(), key=lambda item: item[1]):
        if work == StageWork.FORWARD:
            needs.append([where.get((0, stage - 1, microbatch), -1)] if stage else [])
        elif work == StageWork.WEIGHT_GRADIENT:
            needs.append([where.get((2, stage, microbatch), -1)])
        else:
            later = [back(stage + 1, microbatch)] if stage + 1 < schedule.num_stages else []
            needs.append([where.get((0, stage, microbatch), -1), *later])
    return needs


def twin(schedule: Schedule, costs: StageCosts) -> tuple[np.ndarray, list[int]] | None:
    """Ends of actions and peaks of devices, found by repeated passes; None for a deadlock."""
    needs, total = needs_of(schedule), len(schedule.work)
    end_s = np.full(total, np.nan)
    cursor = schedule.start[:-1].tolist()
    free_s = [0.0] * schedule.num_devices
    held = list(costs.state_bytes)
    peak = list(costs.state_bytes)
    progress = True
    while progress:
        progress = False
        for device in range(schedule.num_devices):
            action = cursor[device]
            if action == schedule.start[device + 1]:
                continue
            if any(need < 0 or np.isnan(end_s[need]) for need in needs[action]):
                continue
            stage, work = int(schedule.stage[action]), StageWork(int(schedule.work[action]))
            ready = [0.0]
            for need in needs[action]:
                other = int(schedule.stage[need])
                is_near = schedule.device_of_stage[other] == device
                ready.append(end_s[need] + (0 if is_near else costs.send_s[min(other, stage)]))
            backward_s = costs.input_gradient_s[stage], costs.weight_gradient_s[stage]
            length = (costs.forward_s[stage], sum(backward_s), *backward_s)[work]
            end_s[action] = free_s[device] = max(free_s[device], *ready) + length
            late, all_bytes = costs.weight_gradient_bytes[stage], costs.activation_bytes[stage]
            held[device] += (all_bytes, -all_bytes, late - all_bytes, -late)[work]
            peak[device] = max(peak[device], held[device])
            cursor[device] += 1
            progress = True
    return None if np.isnan(end_s).any() else (end_s, peak)
