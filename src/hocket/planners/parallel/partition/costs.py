"""What layers cost, as the partition of layers over stages needs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.errors import UsageError


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerCosts:
    """What the layers of a model cost per microbatch, in order.

    Embedding and output layer are layers too, with ``counts`` false: they take time and memory, but
    every stage needs a layer that counts. The first axis of backward and activations is the way to
    run a layer: one row, or one for each kind of recomputation.
    """

    forward_s: FloatArray
    """[layer, device kind]."""
    backward_s: FloatArray
    """[way, layer, device kind], with what is computed again."""
    activation_bytes: LongArray
    """[way, layer]: kept of one microbatch from its forward to its backward."""
    state_bytes: LongArray
    """[layer]: weights, gradients, optimizer state."""
    send_s: FloatArray
    """[layer]: one transfer, in either direction, where a stage ends after this layer."""
    counts: BoolArray
    """[layer]: whether it is a layer in the sense of "layers per stage"."""

    def __post_init__(self) -> None:
        num_layers, num_kinds = np.shape(self.forward_s)
        num_ways = len(self.backward_s)
        shapes = {
            "backward_s": (num_ways, num_layers, num_kinds),
            "activation_bytes": (num_ways, num_layers),
            "state_bytes": (num_layers,),
            "send_s": (num_layers,),
            "counts": (num_layers,),
        }
        for name, shape in shapes.items():
            found = np.shape(getattr(self, name))
            if found != shape:
                raise UsageError(
                    f"{name} has the shape {found}, expected {shape}",
                    hint="give one value per layer, way and device kind",
                )
        for name in ("forward_s", *shapes):
            values = np.asarray(getattr(self, name))
            if not np.all(np.isfinite(values) & (values >= 0)):
                raise UsageError(
                    f"{name} has an entry that is negative or not finite",
                    hint="costs are finite and 0 or more",
                )

    @property
    def num_layers(self) -> int:
        """Layers, with those that do not count."""
        return len(self.state_bytes)

    @property
    def num_ways(self) -> int:
        """Ways in which a layer can be run."""
        return len(self.backward_s)
