"""What a rank is told about one parallel run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hocket.runtime.parallel.refusals import DataProgram
from hocket.transformer import Experts, ParallelConfig, Transformer

Actions = tuple[tuple[tuple[int, str, int], ...], ...]
"""By pipeline rank: virtual stage, letter and microbatch of each action, in order.

Letters are those of PyTorch's pipelines: F forward, B backward, I and W its halves for inputs and
weights.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One model trained for some steps with one division."""

    model: Transformer
    division: ParallelConfig
    layers: tuple[int, ...]
    """Layers of each virtual stage."""
    actions: Actions
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
    def from_dict(data: Mapping[str, Any]) -> TrainingJob:
        """The job of `as_dict` after a way as JSON."""
        model, division = dict(data["model"]), dict(data["division"])
        if model["experts"] is not None:
            model["experts"] = Experts(**model["experts"])
        for key in ("layers", "shares"):
            if division[key] is not None:
                division[key] = tuple(division[key])
        given = {
            "model": Transformer(**model),
            "division": ParallelConfig(**division),
            "layers": tuple(data["layers"]),
            "actions": tuple(
                tuple((stage, letter, microbatch) for stage, letter, microbatch in row)
                for row in data["actions"]
            ),
            "device_of_stage": tuple(data["device_of_stage"]),
            "data": DataProgram(**data["data"]),
        }
        return TrainingJob(**{**data, **given})
