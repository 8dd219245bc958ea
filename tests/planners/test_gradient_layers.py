"""Layers of a training step, as the order of gradients sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hocket
from hocket.base.errors import UsageError
from hocket.graph.build import GraphBuilder
from hocket.graph.graph import Phase
from hocket.planners.communication.priority import layers_of


def test_layers_stand_in_the_order_of_their_first_use_and_hold_all_time() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(16, 2)
            self.first = torch.nn.Linear(4, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x))).mean()

    graph = hocket.capture(Net(), torch.ones(3, 4))
    op_s = np.random.default_rng(0).uniform(1.0, 2.0, graph.num_ops)
    layers = layers_of(graph, op_s)
    sizes = [layer.gradient_bytes for layer in layers]
    assert sorted(sizes[:2]) == [16 * 4, 4 * 16 * 4]
    assert sorted(sizes[2:]) == [2 * 4, 16 * 2 * 4]
    for phase, name in ((Phase.FORWARD, "forward_s"), (Phase.BACKWARD, "backward_s")):
        spent_s = sum(getattr(layer, name) for layer in layers)
        assert spent_s == pytest.approx(op_s[graph.op_phase == phase].sum())
    assert sum(layer.backward_s for layer in layers[2:]) > 0


def test_a_graph_without_training_is_told() -> None:
    builder = GraphBuilder("inference")
    builder.op("only")
    with pytest.raises(UsageError, match="no training step"):
        layers_of(builder.build(), np.zeros(1))
