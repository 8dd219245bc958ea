"""Build one stage, dividing each part as soon as it is there so that little is held whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hocket.runtime.parallel.model import Embedding, Head, Slice, Stage, TransformerBlock, fill
from hocket.transformer import Recompute, Transformer

Divide = Callable[[nn.Module], nn.Module]
"""Divides a part of a stage over ranks; gives it back."""


def build_stage(
    model: Transformer,
    part: Slice,
    *,
    recompute: Recompute = "none",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    divide: Divide = lambda module: module,
) -> Stage:
    """The stage with its first values, each of its parts divided."""
    place = device or torch.device("cpu")
    stage = Stage()

    def finished(module: nn.Module, name: str) -> nn.Module:
        module = module.to_empty(device=place).to(dtype)
        fill(module, name, model, seed)
        return divide(module)

    with torch.device("meta"):
        embedding = Embedding(model) if part.has_embedding else None
        head = Head(model) if part.has_head else None
    if embedding is not None:
        stage.embedding = finished(embedding, "embedding")
    for number in part.layers:
        with torch.device("meta"):
            block = TransformerBlock(model, recompute)
        stage.layers[str(number)] = finished(block, f"layers.{number}")
    if head is not None:
        stage.head = finished(head, "head")
    return stage


def whole_model(model: Transformer, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Stage:
    """The model in one piece, as one device holds it."""
    part = Slice(first_layer=0, num_layers=model.layers, has_embedding=True, has_head=True)
    return build_stage(model, part, seed=seed, dtype=dtype)
