"""Check that a schedule is legal: each action once, on its device, in an executable order.

Structure is counted with numpy. The order is checked by executing it, each device as far as
possible. Transfers are sent as soon as their tensor exists and are received in the order in which
they are sent, so they add no further cycles. O(actions).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray
from hocket.base.errors import CheckError
from hocket.cost.parallel.costs import StageCosts
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.simulate.pipeline import action_name, simulate_pipeline


def verify_schedule(schedule: Schedule) -> None:
    """Raise `CheckError` on the first error of a schedule, if there is one."""
    _check_shape(schedule)
    _check_devices(schedule)
    _check_counts(schedule)
    # Every action is there, so what the simulation cannot reach is in the wrong order.
    simulate_pipeline(schedule, _no_costs(schedule))


def _error(schedule: Schedule, message: str) -> CheckError:
    return CheckError(message, hint="make the schedule again", where=f"schedule {schedule.name!r}")


def _check_shape(schedule: Schedule) -> None:
    start, num_actions = schedule.start, len(schedule.work)
    if len(start) < 2 or start[0] != 0 or start[-1] != num_actions or np.any(np.diff(start) < 0):
        raise _error(schedule, "the devices' actions do not follow each other from first to last")
    if len(schedule.stage) != num_actions or len(schedule.microbatch) != num_actions:
        raise _error(schedule, "work, stages and microbatches differ in length")
    if schedule.num_microbatches < 1 or schedule.num_stages < 1:
        raise _error(schedule, "there are no stages or no microbatches")
    limits = {
        "work": (schedule.work, len(StageWork)),
        "stage": (schedule.stage, schedule.num_stages),
        "microbatch": (schedule.microbatch, schedule.num_microbatches),
        "device of a stage": (schedule.device_of_stage, schedule.num_devices),
    }
    for name, (values, stop) in limits.items():
        wrong = np.flatnonzero((values < 0) | (values >= stop))
        if len(wrong):
            value = int(values[wrong[0]])
            raise _error(schedule, f"{name} {value} does not exist, there are {stop}")


def _check_devices(schedule: Schedule) -> None:
    device = np.repeat(np.arange(schedule.num_devices), np.diff(schedule.start))
    elsewhere = np.flatnonzero(schedule.device_of_stage[schedule.stage] != device)
    if len(elsewhere):
        action = int(elsewhere[0])
        own = int(schedule.device_of_stage[schedule.stage[action]])
        raise _error(
            schedule,
            f"action {action_name(schedule, action)} is on device {device[action]}, its stage on "
            f"{own}",
        )


def _check_counts(schedule: Schedule) -> None:
    num_cells = schedule.num_stages * schedule.num_microbatches
    # Said before counting: a file may claim more microbatches than memory can count.
    if num_cells > len(schedule.work):
        raise _error(
            schedule,
            f"{len(schedule.work)} actions are too few for {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches",
        )
    shape = (len(StageWork), schedule.num_stages, schedule.num_microbatches)
    index = np.ravel_multi_index((schedule.work, schedule.stage, schedule.microbatch), shape)
    counts = np.bincount(index, minlength=int(np.prod(shape))).reshape(shape)
    _raise_first(schedule, counts[StageWork.FORWARD] != 1, "forward", counts[StageWork.FORWARD])
    backward = counts[StageWork.BACKWARD] + counts[StageWork.INPUT_GRADIENT]
    _raise_first(schedule, backward != 1, "backward", backward)
    weights = counts[StageWork.BACKWARD] + counts[StageWork.WEIGHT_GRADIENT]
    _raise_first(schedule, weights != 1, "gradient of weights", weights)


def _raise_first(
    schedule: Schedule, wrong: BoolArray, name: str, counts: NDArray[np.int64]
) -> None:
    if not wrong.any():
        return
    stage, microbatch = (int(axis[0]) for axis in np.nonzero(wrong))
    raise _error(
        schedule,
        f"stage {stage} has the {name} of microbatch {microbatch} {counts[stage, microbatch]} "
        "times, not once",
    )


def _no_costs(schedule: Schedule) -> StageCosts:
    stages, devices = (0.0,) * schedule.num_stages, (0.0,) * schedule.num_devices
    nothing = (0,) * schedule.num_stages
    return StageCosts(
        forward_s=stages,
        input_gradient_s=stages,
        weight_gradient_s=stages,
        send_s=stages[1:],
        activation_bytes=nothing,
        weight_gradient_bytes=nothing,
        state_bytes=(0,) * schedule.num_devices,
        after_s=devices,
    )
