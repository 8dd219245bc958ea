"""One choice per layer inside a stage: as fast as its memory allows.

Layers can often be run in more than one way (keep activations, or compute them again), each with a
time and a memory. Choosing one way per layer so that the sum of times is least and the sum of bytes
stays within a limit is the knapsack problem with one choice per class. It is solved exactly: the
multiplier of the linear relaxation gives a bound for every partial choice, and of partial choices
only those remain that no other beats in both time and memory. O(layers · ways · states), and states
are few where layers are alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray

_STATES_PER_LAYER = 4096
"""Partial choices for which there is room; beyond, the best choice that was found is taken."""


class ChoiceState(NamedTuple):
    """One knapsack: the caller fills ways, times and bytes per layer; the rest is scratch."""

    num_ways: LongArray
    time_s: FloatArray
    """Layers x ways."""
    memory_bytes: LongArray
    """Layers x ways."""
    chosen: LongArray
    """The way of each layer, after solving."""
    trial: LongArray
    relaxed_s: FloatArray
    """Relaxed time of all layers from one on."""
    least_bytes: LongArray
    """Least memory of all layers from one on."""
    pool_s: FloatArray
    """Time of partial choices."""
    pool: LongArray
    """[partial choice, 3]: bytes, the partial choice that it extends, and the way added."""
    layer_start: LongArray
    """Where the partial choices of each number of layers begin in the pool."""
    head: LongArray
    num_inexact: LongArray
    """How often the pool was too small."""


def new_choices(num_layers: int, num_ways: int, states_per_layer: int = 0) -> ChoiceState:
    """Room for stages of up to ``num_layers`` layers with up to ``num_ways`` ways each."""
    room = num_layers * (states_per_layer or _STATES_PER_LAYER if num_ways > 1 else 1) + 2
    whole = np.zeros(num_layers + 2, dtype=np.int64)
    return ChoiceState(
        num_ways=whole.copy(),
        time_s=np.zeros((num_layers, num_ways)),
        memory_bytes=np.zeros((num_layers, num_ways), dtype=np.int64),
        chosen=whole.copy(),
        trial=whole.copy(),
        relaxed_s=np.zeros(num_layers + 2),
        least_bytes=whole.copy(),
        pool_s=np.zeros(room),
        pool=np.zeros((room, 3), dtype=np.int64),
        layer_start=whole.copy(),
        head=np.zeros(num_ways, dtype=np.int64),
        num_inexact=np.zeros(1, dtype=np.int64),
    )
