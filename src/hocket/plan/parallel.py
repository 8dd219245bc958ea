"""The plan of a parallel training run: how a transformer is divided, and who works when.

It stands beside `Plan`, which places single ops: here every device runs its stage's slice of the
model, and the decision is the division, the devices of each stage and the pipeline's schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.hardware.cluster import Cluster
from hocket.plan.schedule import Schedule
from hocket.transformer import Division, Transformer

PARALLEL_SCHEMA = "hocket.parallel/1"


@dataclass(frozen=True, eq=False, kw_only=True)
class StageCosts:
    """What one pipeline's virtual stages cost per microbatch, and its devices per step.

    Times are those of one device of the stage, with the collectives inside the stage included.
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    """A full backward takes ``input_gradient_s + weight_gradient_s``; recomputation counts as the
    gradient of the inputs."""
    send_s: tuple[float, ...]
    """Time from the end of a stage to the start of the next, in either direction; one less than
    there are stages."""
    activation_bytes: tuple[int, ...]
    """What a stage keeps of a microbatch from its forward to the end of its backward."""
    weight_gradient_bytes: tuple[int, ...]
    """Of that, what is kept until the gradient of the weights, where this comes later."""
    state_bytes: tuple[int, ...]
    """Per device: weights, gradients, optimizer state and working buffers."""
    after_s: tuple[float, ...]
    """Per device: what follows the last backward (gradients not hidden, optimizer)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ParallelPlan:
    """Every decision about one parallel run."""

    model: Transformer
    cluster: Cluster
    division: Division
    devices: tuple[tuple[str, ...], ...]
    """Names of the devices of each pipeline rank, tensor parallel fastest, then context, data."""
    schedule: Schedule
    costs: StageCosts
    step_s: float
    """Predicted time of a step."""
    peak_bytes: tuple[int, ...]
    """Predicted peak of one device of each pipeline rank."""
    notes: Mapping[str, Any] = field(default_factory=dict)
