"""Made-up text: every sequence of a step follows from the seed, the step and its number."""

from __future__ import annotations

import torch
from torch.nn import functional

from hocket.transformer import Transformer

_STEPS_APART = 1 << 32


def token_batch(
    model: Transformer, sequences: range, *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the ids that follow them, for some sequences of a step's batch."""
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(seed * 7919 + step * _STEPS_APART + sequence)
        rows.append(torch.randint(model.vocabulary, (model.sequence + 1,), generator=generator))
    text = torch.stack(rows)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean surprise per token; in double precision where logits are, else in single."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
