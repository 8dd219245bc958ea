"""An LSTM's units: cut out of all its gates and of what it remembers.

torch-pruning (1.6) cuts the wrong rows and columns of an LSTM; this takes its place. A unit is a
row in each of the four gates, and a column of the weights that read the state before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_pruning.pruner.function import BasePruningFunc

from hocket.base.errors import UsageError

_GATES = 4
_PLAIN = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def check_recurrent(net: nn.Module) -> None:
    """Raise `UsageError` where a net remembers in a way that cannot be cut."""
    for name, module in net.named_modules():
        if not isinstance(module, nn.RNNBase):
            continue
        if not isinstance(module, nn.LSTM) or set(module._flat_weights_names) - set(_PLAIN):
            raise UsageError(
                f"{name} ({module}) cannot be cut",
                hint="use torch.nn.LSTM of one layer and direction, several one after the other",
            )


class UnitsOfLSTM(BasePruningFunc):  # type: ignore[misc]
    """How the dependency graph cuts an LSTM of one layer."""

    def prune_out_channels(self, layer: nn.LSTM, idxs: list[int]) -> nn.LSTM:
        """Cut units."""
        kept = _left(layer.hidden_size, idxs)
        rows = torch.cat([kept + gate * layer.hidden_size for gate in range(_GATES)])
        layer.hidden_size = len(kept)
        for name in layer._flat_weights_names:
            weight = getattr(layer, name).data[rows]
            _set(layer, name, weight[:, kept] if name == "weight_hh_l0" else weight)
        return layer

    def prune_in_channels(self, layer: nn.LSTM, idxs: list[int]) -> nn.LSTM:
        """Cut inputs."""
        kept = _left(layer.input_size, idxs)
        layer.input_size = len(kept)
        weight: Any = layer.weight_ih_l0
        _set(layer, "weight_ih_l0", weight.data[:, kept])
        return layer

    def get_out_channels(self, layer: nn.LSTM) -> int:
        """Its units."""
        return layer.hidden_size

    def get_in_channels(self, layer: nn.LSTM) -> int:
        """Its inputs."""
        return layer.input_size


def _left(size: int, gone: list[int]) -> torch.Tensor:
    return torch.tensor(sorted(set(range(size)) - set(gone)))


def _set(layer: nn.LSTM, name: str, value: Any) -> None:
    setattr(layer, name, nn.Parameter(value.clone()))
