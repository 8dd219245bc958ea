"""Mixed precision by name: apply a model under autocast, as ``--amp`` requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hocket.base.errors import unknown_name
from hocket.capture.step import Forward, apply_model

AMP_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtypes by their common names."""
LARGE_PARAMETERS = 1_000_000_000
"""Minimum number of parameters at which a float32 model is planned under bf16 autocast by default,
because such models are rarely trained in plain float32."""


def amp_forward(
    name: str | None, device: str = "cuda", inner: Forward | None = None
) -> Forward | None:
    """Forward that calls ``inner``, or the model, under autocast of the named dtype.

    Without a name, ``inner`` is returned.
    """
    if name is None:
        return inner
    if name not in AMP_DTYPES:
        raise unknown_name("autocast type", name, AMP_DTYPES)
    dtype = AMP_DTYPES[name]
    kind = "cpu" if device == "cpu" else "cuda"

    def forward(model: nn.Module, batch: Any) -> Any:
        with torch.autocast(kind, dtype):
            return (inner or apply_model)(model, batch)

    vars(forward)["name"] = getattr(inner, "name", "")
    return forward


def usual_amp(model: nn.Module, device: str) -> str | None:
    """Default autocast of a model: bf16 for large float32 models."""
    floats = [p for p in model.parameters() if p.is_floating_point()]
    is_float32 = all(p.dtype == torch.float32 for p in floats)
    is_large = sum(p.numel() for p in floats) >= LARGE_PARAMETERS
    return "bf16" if is_large and is_float32 and device != "cpu" else None
