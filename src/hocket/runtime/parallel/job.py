"""What a rank is told about one parallel run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hocket.plan.schedule import Schedule, Work
from hocket.runtime.parallel.refusals import DataProgram, data_program
from hocket.transformer import Division, Experts, Transformer

LETTERS: Mapping[Work, str] = {
    Work.FORWARD: "F",
    Work.BACKWARD: "B",
    Work.INPUT_GRADIENT: "I",
    Work.WEIGHT_GRADIENT: "W",
}
"""How PyTorch's pipelines name what is done."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model trained for some steps with one division."""

    model: Transformer
    division: Division
    layers: tuple[int, ...]
    """Layers of each virtual stage."""
    actions: tuple[tuple[tuple[int, str, int], ...], ...]
    """By pipeline rank: virtual stage, letter and microbatch of each action, in order."""
    device_of_stage: tuple[int, ...]
    data: DataProgram
    steps: int = 1
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3
    wants_gradients: bool = False
    """Whether ranks report the gradients of the first step."""

    def as_dict(self) -> dict[str, Any]:
        """The job as JSON data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Job:
        """The job of `as_dict` after a way as JSON."""
        model, division = dict(data["model"]), dict(data["division"])
        if model["experts"] is not None:
            model["experts"] = Experts(**model["experts"])
        if division["layers"] is not None:
            division["layers"] = tuple(division["layers"])
        given = {
            "model": Transformer(**model),
            "division": Division(**division),
            "layers": tuple(data["layers"]),
            "actions": tuple(
                tuple((stage, letter, microbatch) for stage, letter, microbatch in row)
                for row in data["actions"]
            ),
            "device_of_stage": tuple(data["device_of_stage"]),
            "data": DataProgram(**data["data"]),
        }
        return Job(**{**data, **given})


def make_job(
    model: Transformer,
    division: Division,
    schedule: Schedule,
    *,
    data: DataProgram | None = None,
    **options: Any,
) -> Job:
    """The job of a division with its schedule; ``options`` are the remaining fields of `Job`.

    ``data`` overrides the program that is known to give the right gradients.
    """
    return Job(
        model=model,
        division=division,
        layers=division.layers or even_layers(model.layers, division.num_stages),
        actions=actions_of(schedule),
        device_of_stage=tuple(schedule.device_of_stage.tolist()),
        data=data or data_program(division, splits_backward=schedule.splits_backward),
        **options,
    )


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, where they are divided evenly; earlier stages get what remains."""
    least, extra = divmod(num_layers, num_stages)
    return tuple(least + (stage < extra) for stage in range(num_stages))


def actions_of(schedule: Schedule) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """By pipeline rank: virtual stage, letter and microbatch of each action."""
    works, stages = schedule.work.tolist(), schedule.stage.tolist()
    microbatches, start = schedule.microbatch.tolist(), schedule.start.tolist()
    return tuple(
        tuple(
            (stages[index], LETTERS[Work(works[index])], microbatches[index])
            for index in range(start[device], start[device + 1])
        )
        for device in range(schedule.num_devices)
    )
