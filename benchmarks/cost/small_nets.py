"""Nets of narrow or recurrent layers, for ``predict_configs.py``: those of the benchmarks of waves.

ResNet-56 at the size of CIFAR (He et al. 2016) has 16 to 64 channels; two layers of an LSTM read
words, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "waves"))
import workloads

Built = tuple[nn.Module, dict[str, torch.Tensor]]
VOCABULARY, WIDTH = 10_000, 650


def resnet56(batch: int = 256, seq: int = 32, dtype: str = "float32") -> Built:
    """Images of 32 x 32, whatever ``seq`` is."""
    number = getattr(torch, dtype)
    model, given = workloads.resnet56(batch)
    return model.to(number), {**given, "images": given["images"].to(number)}


def words(batch: int = 32, seq: int = 35, dtype: str = "float32") -> Built:
    """Zaremba et al. 2014, medium: 650 units, 10,000 words."""
    model = workloads.Words(VOCABULARY, WIDTH).to(getattr(torch, dtype))
    return model, {"input_ids": torch.randint(VOCABULARY, (batch, seq))}
