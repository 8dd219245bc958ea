"""What ranks make sure of before they train: the same model, and the same first weights."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors


def require_same_everywhere(model: nn.Module, device: torch.device) -> None:
    """Refuse ranks that have built different models: they would wait for each other for ever."""
    text = [(name, list(t.shape), str(t.dtype), t.is_meta) for name, _, t in model_tensors(model)]
    digest = int.from_bytes(hashlib.blake2b(repr(text).encode(), digest_size=7).digest(), "big")
    own = torch.tensor([digest], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    others = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if others:
        raise UsageError(
            f"rank {others[0]} has built another model than rank 0",
            hint="build the same model on every rank: names, shapes, types and device",
        )


@torch.no_grad()
def share_weights(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights of rank 0, so that none starts from draws of its own."""
    for _, _, tensor in model_tensors(model):
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, 0)
            if dist.get_rank():
                tensor.data.copy_(sent)
