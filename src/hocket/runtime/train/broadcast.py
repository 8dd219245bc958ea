"""Broadcasts of optimizer states (tensors and numbers) and of texts from one rank to all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def broadcast_slots(slots: Mapping[str, Any], owner: int, device: torch.device) -> dict[str, Any]:
    """Broadcast the state entries ``slots`` of rank ``owner``: first their names, then the tensors.

    Collective: all ranks call it together. Tensors are sent through ``device``; the owner gets its
    own tensors back.
    """
    is_owner = owner == dist.get_rank()
    found: dict[str, Any] = {}
    for entry in json.loads(broadcast_text(_listed(slots) if is_owner else "", owner, device)):
        key, value, shape = entry
        if shape is None:
            found[key] = value
            continue
        dtype = getattr(torch, value)
        own = slots[key] if is_owner else torch.empty(shape, dtype=dtype, device=device)
        sent = own.detach().to(device).contiguous()
        dist.broadcast(sent, owner)
        found[key] = own if is_owner else sent
    return found


def _listed(slots: Mapping[str, Any]) -> str:
    return json.dumps([
        [key, str(v.dtype).removeprefix("torch."), list(v.shape)]
        if isinstance(v, torch.Tensor) else [key, v, None] for key, v in slots.items()
    ])  # fmt: skip


def broadcast_text(text: str, owner: int, device: torch.device) -> str:
    """Broadcast the text of rank ``owner``. Collective: all ranks call it together."""
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, owner)
    sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if owner == dist.get_rank():
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(sent, owner)
    return bytes(sent.cpu().tolist()).decode()
