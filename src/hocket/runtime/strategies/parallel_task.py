"""Input of parallel strategies on one rank, and the check that all ranks have the same model.

`ParallelTask` extends the training task by options of parallel plans, `RankPart` is the part of one
rank in such a plan, and `agree_on_model` compares models and broadcasts the weights of rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors
from hocket.plan.make import ON_THIS_MACHINE
from hocket.plan.problem import Problem
from hocket.plan.sections import Schedule
from hocket.runtime.collectives.priority_sync import Propagation
from hocket.runtime.strategies.budget import budget_strategy
from hocket.runtime.strategies.placed import Placing, placed_strategy
from hocket.runtime.strategies.rank_mesh import RankMesh
from hocket.runtime.strategies.stage_cuts import StageCuts
from hocket.runtime.strategies.waves import WaveOrder
from hocket.runtime.strategy import Strategy, TrainingTask


class ParallelWarning(UserWarning):
    """A parallel plan is executed differently than planned, or than a user may expect."""


@dataclass(frozen=True, kw_only=True)
class ParallelTask(TrainingTask):
    """A training task on several ranks; ``batch`` is the global batch."""

    memory: int | str | None = None
    """Memory budget of each device, for data parallelism."""
    costs_of: Problem | None = None
    """The planned problem, whose costs predict the step time of this rank."""
    reduce_backend: str | None = None
    """Backend of torch.distributed for gradients, if it differs from that of other collectives."""
    overlaps: bool = True
    """True if gradients are reduced during the backward pass; CUDA graph replay cannot do that."""
    predicted_s: float | None = None
    start_propagation: Callable[[], Propagation] | None = None
    """Starts priority gradient sync, if the plan has it; each rank calls it once."""
    waves: WaveOrder | None = None
    """Order in which two streams run the microbatches of this rank, if the plan has waves."""

    def on_one_device(self, batch: Any, seed: int | None) -> Strategy:
        """Prepare the full model on the device of this rank; random draws use ``seed``."""
        options = replace(self.options, seed=seed)
        alone = replace(self, batch=batch, options=options, is_ranked=False)
        if self.memory is None:
            placing = Placing(alone=self.device, costs_of=self.costs_of)
            return placed_strategy(alone, placing).strategy
        # Gradients are held until they are summed over ranks, so dry runs count them as with
        # accumulation.
        options = replace(options, accumulate=max(2, options.accumulate))
        return budget_strategy(
            replace(alone, options=options), None, ON_THIS_MACHINE, self.memory
        ).strategy


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The part of one rank in a parallel training."""

    mesh: RankMesh
    batch_split: Sequence[int]
    """Samples of each replica, or proportions of them."""
    microbatches: Sequence[int]
    """Samples of each microbatch of this rank's replica, or proportions of them."""
    zero: int = 0
    tensor: int = 1
    joins_norms: bool = True
    """True if all replicas run the same layers at the same time, so that batch norms can sum
    statistics over replicas."""
    pipeline: tuple[StageCuts, Schedule] | None = None
    recomputed: Sequence[str] = ()
    """Modules that are recomputed in the backward pass, if weights are sharded."""
    is_offloaded: bool = False
    """True if sharded weights and optimizer states are kept on the host."""


def agree_on_model(model: nn.Module, device: torch.device) -> None:
    """Refuse ranks with different models, and broadcast the weights of rank 0.

    With different models, ranks would issue different collectives and deadlock.
    """
    text = [(name, list(t.shape), str(t.dtype), t.is_meta) for name, _, t in model_tensors(model)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.blake2b(repr(text).encode()).hexdigest())
    if others := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise UsageError(
            f"rank {others[0]} has built another model than rank 0",
            hint="build the same model on every rank: names, shapes, types and device",
        )
    for _, _, tensor in model_tensors(model):
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, 0)
            if dist.get_rank():
                tensor.data.copy_(sent)
