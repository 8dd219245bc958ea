"""The training of a transformer: work that is divided over devices rather than placed op by op."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hocket.base import fields
from hocket.cost.parallel.coefficients import (
    Coefficients,
    coefficients_from_dict,
    coefficients_to_dict,
)
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import SOFTWARES
from hocket.transformer.counts import step_flops
from hocket.transformer.files import model_from_dict, model_to_dict
from hocket.transformer.shape import Transformer

DTYPES = ("float16", "bfloat16", "float8", "float32")
_MAX_BATCH = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, with which program, and how that program's times are fitted."""

    model: Transformer
    global_batch: int
    """Sequences per step."""
    software: Software
    coefficients: Coefficients = field(default_factory=Coefficients)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @cached_property
    def content_hash(self) -> str:
        """Changes with all that matters for a plan: shape, batch and arithmetic."""
        data = self.to_data()
        data["model"] = {k: v for k, v in data["model"].items() if k not in ("name", "source")}
        del data["coefficients"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @cached_property
    def step_flops(self) -> float:
        """Arithmetic of one step without recomputation: what MFU counts."""
        return step_flops(self.model, self.global_batch, "model")

    def to_data(self) -> dict[str, Any]:
        """The training as plain data; programs are named."""
        return {
            "model": model_to_dict(self.model),
            "global_batch": self.global_batch,
            "software": self.software.name,
            "dtype": self.software.dtype,
            "coefficients": coefficients_to_dict(self.coefficients),
        }

    @classmethod
    def from_data(cls, data: object, path: str) -> Training:
        """The training of such data, read strictly; raises `InputFileError`."""
        keys = ("model", "global_batch", "software", "dtype", "coefficients")
        entry = fields.record(data, path, required=keys)
        name = fields.text(entry["software"], f"{path}.software")
        program = SOFTWARES.get(name) or Software(name=name)
        dtype = fields.choice(entry["dtype"], f"{path}.dtype", DTYPES)
        return cls(
            model=model_from_dict(fields.mapping(entry["model"], f"{path}.model")),
            global_batch=fields.integer(
                entry["global_batch"], f"{path}.global_batch", 1, _MAX_BATCH
            ),
            software=replace(program, dtype=dtype),
            coefficients=coefficients_from_dict(entry["coefficients"]),
        )
