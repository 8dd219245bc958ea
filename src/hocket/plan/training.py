"""The training of a transformer: work that is split over devices instead of placed op by op."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hocket.base import fields as checked
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

TRAINING_DTYPES = ("float16", "bfloat16", "float8", "float32")
_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class TransformerTraining:
    """The model, the global batch, the training program and the fitted coefficients of its
    times."""

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
        """Hash of shape, batch and program, but not of names and fitted coefficients."""
        data = self.to_data()
        # Names and fitted times do not change what is trained, so plans stay valid when they
        # change.
        data["model"] = {k: v for k, v in data["model"].items() if k not in ("name", "source")}
        del data["coefficients"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @cached_property
    def step_flops(self) -> float:
        """FLOPs of one step without recomputation, as MFU counts them."""
        return step_flops(self.model, self.global_batch, "model")

    @cached_property
    def causal_share(self) -> float:
        """Fraction of `step_flops` without pairs of tokens that the causal mask excludes."""
        return step_flops(self.model, self.global_batch, "model-causal") / self.step_flops

    def to_data(self) -> dict[str, Any]:
        """The training as plain data."""
        return {
            "model": model_to_dict(self.model),
            "global_batch": self.global_batch,
            "software": _software_data(self.software),
            "coefficients": coefficients_to_dict(self.coefficients),
        }

    @classmethod
    def from_data(cls, data: object, path: str) -> TransformerTraining:
        """Read the training from plain data; raises `InputFileError`."""
        keys = ("model", "global_batch", "software", "coefficients")
        entry = checked.record(data, path, required=keys)
        batch = checked.integer(entry["global_batch"], f"{path}.global_batch", 1, _MAX)
        return cls(
            model=model_from_dict(checked.mapping(entry["model"], f"{path}.model")),
            global_batch=batch,
            software=_software(entry["software"], f"{path}.software"),
            coefficients=coefficients_from_dict(entry["coefficients"]),
        )


def _software_data(software: Software) -> dict[str, Any]:
    """Return the training program's name and dtype, and its settings that are not the defaults."""
    usual = _usual(software.name)
    settings = {name: getattr(software, name) for name in _settings()}
    changed = {name: value for name, value in settings.items() if value != getattr(usual, name)}
    return {"name": software.name, "dtype": software.dtype, **changed}


def _software(data: object, path: str) -> Software:
    entry = checked.record(data, path, required=("name", "dtype"), optional=tuple(_settings()))
    settings = {
        name: _setting(name, value, f"{path}.{name}")
        for name, value in entry.items()
        if name not in ("name", "dtype")
    }
    dtype = checked.choice(entry["dtype"], f"{path}.dtype", TRAINING_DTYPES)
    usual = _usual(checked.text(entry["name"], f"{path}.name"))
    return replace(usual, dtype=dtype, **settings)


def _usual(name: str) -> Software:
    return SOFTWARES.get(name) or Software(name=name)


@cache
def _settings() -> dict[str, Any]:
    """Return the scalar settings of training programs, with their types."""
    hints = get_type_hints(Software)
    others = ("name", "dtype", "overheads")
    return {f.name: hints[f.name] for f in fields(Software) if f.name not in others}


def _setting(name: str, value: object, path: str) -> Any:
    kind = _settings()[name]
    if get_origin(kind) is Literal:
        return checked.choice(value, path, get_args(kind))
    if kind is bool:
        return checked.flag(value, path)
    if kind is float:
        return checked.number(value, path, 0, _MAX)
    if value is None and type(None) in get_args(kind):
        return None
    return checked.integer(value, path, 0, _MAX)
