"""A model of your own: a function that returns the model and a batch.

hocket capture examples/mymodel.py:build -o g.json.gz
"""

import torch
from torch import nn


class Classifier(nn.Module):
    """A small network that returns its own loss."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), *(nn.Linear(width, width) for _ in range(4))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(rows)), labels)


def build(batch: int = 16) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and one batch; built under ``torch.device("meta")`` they would take no memory."""
    return Classifier(), {
        "rows": torch.randn(batch, 32),
        "labels": torch.randint(10, (batch,)),
    }
