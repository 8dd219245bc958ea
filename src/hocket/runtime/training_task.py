"""The input of every strategy, and the result of preparing one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.runtime.strategies.batch_split import Count
from hocket.runtime.strategy import Correction, Strategy
from hocket.runtime.train.batches import Padding
from hocket.runtime.train.trace_options import TraceOptions


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the training loop."""

    accumulate: int = 1
    """Batches per update; each counts this share of the loss."""
    clip_norm: float | None = None
    """Largest norm of all gradients together."""
    seed: int | None = None
    """Of random draws, each with its own; None continues PyTorch's generator."""
    outputs: bool = False
    """True if all that the model returns is kept, not only single numbers."""
    max_shapes: int = 8
    """Shapes of batches of each kind that are traced."""
    pad: Padding | None = None
    """Makes each batch one of few shapes."""
    replay: bool = True
    """True if a step on one CUDA device is replayed as a CUDA graph."""
    async_update: bool = False
    """Within a memory budget, updates on the host run into the next step: faster, but a parameter
    that is read between steps may not have its update yet; ``state_dict()`` waits for it."""


class Prepared(NamedTuple):
    """A strategy, the plan that it executes, and the predicted step time."""

    strategy: Strategy
    plan: Plan
    step_s: float | None
    """Predicted on the plan's devices, also where others emulate them; None where nobody knows."""
    searched: SavedPlan | None = None
    """The placement that was found for several devices of this process, where none was given."""
    correction: Correction | None = None
    """Replaces the memory plan by another one if the first steps show that it is faster."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Model, optimizer, batch and options of a training, whatever the strategy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """A whole batch of all ranks."""
    recipe: TraceOptions
    options: LoopOptions
    device: torch.device
    """Of this process."""
    is_ranked: bool = False
    """True where several ranks were started."""
    count: Count | None = None
    weights: str | Path | None = None
    reduce_dtype: torch.dtype | None = None
