"""Sharded data parallelism (ZeRO 3) by PyTorch's FSDP2.

Every layer of the model is an FSDP unit: its weights are gathered before the layer runs and
resharded after it. FSDP2 works by module hooks, so the model itself is run, not a traced step.
FSDP2 replaces parameters by shards, so the parameter groups of the user's optimizer are changed to
the shards. Shards can be offloaded to the host, and chosen modules recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)

from hocket.base.errors import UsageError
from hocket.capture.step import apply_model
from hocket.runtime.offload.recompute import ModuleState, recomputed
from hocket.runtime.strategies.eager import EagerModel
from hocket.runtime.strategies.layer_stack import layer_paths
from hocket.runtime.trace_options import TraceOptions


class _Applied(nn.Module):
    """Wraps a model with the function that calls it, so that FSDP2's hooks surround every call."""

    def __init__(self, model: nn.Module, recipe: TraceOptions) -> None:
        super().__init__()
        self.model, self._apply_to = model, recipe.forward or apply_model

    def forward(self, batch: Any) -> Any:
        return self._apply_to(self.model, batch)


class ShardedModel(EagerModel):
    """A model whose weights are sharded over replicas."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: TraceOptions,
        axis: Any,
        *,
        recomputed: Sequence[str] = (),
        is_offloaded: bool = False,
    ) -> None:
        """``axis`` is the data-parallel mesh; ``recomputed`` modules save only their input.

        With ``is_offloaded``, shards and optimizer states are on the host.
        """
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        _refuse_states(optimizer)
        for path in recomputed:
            _recompute(model.get_submodule(path))
        policy = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
        for path in layer_paths(model):
            layer = model.get_submodule(path)
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=axis, offload_policy=policy)
        self._applied = _Applied(model, recipe)
        fully_shard(self._applied, mesh=axis, offload_policy=policy)
        for module in self._applied.modules():
            if isinstance(module, FSDPModule):
                # Losses are already weighted by the part of each rank, so gradients are summed
                # and not averaged. Gloo has no sum that multiplies by a factor.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # Shards are new objects under the old names.
        after = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [after[before[id(parameter)]] for parameter in group["params"]]
        super().__init__(model, recipe)

    def _apply(self, batch: Any, model: Any = None) -> Any:
        return self._applied(batch)


def _recompute(module: nn.Module) -> None:
    """Patch a module's forward with activation checkpointing: only its input is saved."""
    forward, state = module.forward, ModuleState([module])

    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recomputed(state, forward, args, kwargs)

    module.forward = called


def _refuse_states(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise UsageError(
            "the optimizer has made steps before its parameters were sharded",
            hint="make a new one, and load a checkpoint after prepare",
        )
