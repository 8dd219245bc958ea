"""The plan of a parallel training run: how a transformer is divided, and who works when.

It stands beside `Plan`, which places single ops: here every device runs its stage's slice of the
model, and the decision is the division, the devices of each stage and the pipeline's schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.cost.parallel.costs import StageCosts
from hocket.hardware.cluster import Cluster
from hocket.plan.schedule import Schedule
from hocket.transformer import Division, Transformer

__all__ = ["PARALLEL_SCHEMA", "ParallelPlan", "StageCosts"]

PARALLEL_SCHEMA = "hocket.parallel/1"


@dataclass(frozen=True, eq=False, kw_only=True)
class ParallelPlan:
    """Every decision about one parallel run."""

    model: Transformer
    cluster: Cluster
    division: Division
    devices: tuple[tuple[str, ...], ...]
    """Names of the devices of each pipeline rank, tensor parallel fastest, then context, data."""
    schedule: Schedule
    dtype: str = "bfloat16"
    """Arithmetic of matrix products: float16, bfloat16, float8 or float32."""
    costs: StageCosts
    step_s: float
    """Predicted time of a step."""
    peak_bytes: tuple[int, ...]
    """Predicted peak of one device of each pipeline rank."""
    notes: Mapping[str, Any] = field(default_factory=dict)
