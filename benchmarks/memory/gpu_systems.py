"""Ways to train under a cap: each makes ``step(batch)`` out of a model on its device.

Plain PyTorch, its activation checkpointing, its offloading of activations, its budget for saved
activations under ``torch.compile``, FSDP2 with everything on the host, and hocket.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpu_models import DEVICE, forward
from torch import nn

GIB = 2**30
Step = Callable[[Any], Any]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """The update of all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **options)


def plain(model: nn.Module, batch: Any, micro: int, context: Any = None, loss_of: Any = forward
          ) -> Step:  # fmt: skip
    """Plain PyTorch in ``micro`` parts."""
    optimizer = adamw(model, fused=True)

    def step(batch: Any) -> torch.Tensor:
        total = torch.zeros((), device=DEVICE)
        for part in zip(*(tensor.chunk(micro) for tensor in batch), strict=True):
            with context() if context else torch.enable_grad():
                loss = loss_of(model, part) / micro
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _checkpoint_layers(model: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)


def checkpointed(model: Any, batch: Any, micro: int) -> Step:
    """Full activation checkpointing."""
    _checkpoint_layers(model)
    return plain(model, batch, micro)


def saved_on_cpu(model: nn.Module, batch: Any, micro: int) -> Step:
    """PyTorch's own offloading of activations."""
    pins = DEVICE == "cuda"
    return plain(model, batch, micro, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pins))


def activation_budget(share: float) -> Callable[..., Step]:
    """``torch.compile`` with a budget for saved activations."""

    def make(model: nn.Module, batch: Any, micro: int) -> Step:
        import torch._functorch.config as settings

        settings.activation_memory_budget = share
        torch._dynamo.reset()
        compiled = torch.compile(model)
        return plain(model, batch, micro, loss_of=lambda _, part: forward(compiled, part))

    return make


def fsdp_offload(model: Any, batch: Any, micro: int) -> Step:
    """FSDP2 on one rank with everything on the host, and activation checkpointing."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        store = dist.HashStore()
        backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),
    }
    _checkpoint_layers(model)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return plain(model, batch, micro, loss_of=lambda sharded, part: sharded(*part))


def ours(budget: int, notes: dict[str, Any], loss_of: Any = forward) -> Callable[..., Step]:
    """``hocket.prepare(memory=, async_update=True)``."""

    def make(model: nn.Module, batch: Any, micro: int) -> Step:
        import hocket

        began = time.perf_counter()
        train = hocket.prepare(
            model, adamw(model), batch, forward=loss_of, memory=budget, async_update=True
        )
        kept = train.memory
        notes["prepare_s"] = time.perf_counter() - began
        notes["predicted_peak_gib"] = kept.peak_bytes / GIB
        notes["predicted_step_s"] = kept.step_s
        notes["loss_chunks"] = kept.section.loss_chunks
        notes["blocks"] = Counter(
            f"{b.activations}/{b.checkpoint}/{b.parameters}/{b.update}" for b in kept.section.blocks
        )

        def step(batch: Any) -> torch.Tensor:
            loss: torch.Tensor = train.step(batch)
            notes["launched"] = train.replays
            return loss

        return step

    return make
