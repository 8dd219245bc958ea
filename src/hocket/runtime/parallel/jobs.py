"""From a division and its schedule to the job that ranks carry out."""

from __future__ import annotations

from typing import Any

from hocket.plan.sections.schedule import Schedule
from hocket.runtime.parallel.job import Actions, TrainingJob
from hocket.runtime.parallel.refusals import DataProgram, data_program
from hocket.simulate.pipeline import WORK_LETTERS
from hocket.transformer import ParallelConfig, Transformer
from hocket.transformer.stages import stage_layers

TRAINED_DTYPES = ("bfloat16", "float32")
"""Types in which our trainer holds weights; others need losses or products that are scaled."""


def make_job(
    model: Transformer,
    division: ParallelConfig,
    schedule: Schedule,
    *,
    data: DataProgram | None = None,
    **options: Any,
) -> TrainingJob:
    """The job of a division with its schedule; ``options`` are the other fields of `TrainingJob`.

    ``data`` overrides the program that is known to give the right gradients.
    """
    return TrainingJob(
        model=model,
        division=division,
        layers=stage_layers(model, division),
        actions=actions_of(schedule),
        device_of_stage=tuple(schedule.device_of_stage.tolist()),
        data=data or data_program(division, splits_backward=schedule.splits_backward),
        **options,
    )


def actions_of(schedule: Schedule) -> Actions:
    """By pipeline rank: virtual stage, letter and microbatch of each action."""
    works, stages = schedule.work.tolist(), schedule.stage.tolist()
    microbatches, start = schedule.microbatch.tolist(), schedule.start.tolist()
    return tuple(
        tuple(
            (stages[index], WORK_LETTERS[works[index]], microbatches[index])
            for index in range(start[device], start[device + 1])
        )
        for device in range(schedule.num_devices)
    )
