"""State of a replica during expansion: its devices, and the expanded ops and tensors so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.sections import Replica


class Pass(NamedTuple):
    """Expanded ops and tensors of one microbatch's forward and backward pass."""

    op: IntArray
    """Per op of the graph: its expanded op; -1 if it runs once per step."""
    tensor: IntArray
    """Per tensor of the graph: its expanded tensor; -1 for none."""
    priority: FloatArray
    recompute: IntArray
    """Per op of the graph: its recomputed op; -1 for none."""
    recompute_priority: FloatArray
    """Per op of the graph: priority of its recomputed op."""


@dataclass
class ReplicaCopy:
    """One replica during expansion."""

    replica: Replica
    device_of: IntArray
    """Per op of the graph: the device of its stage."""
    tensor: IntArray
    """Per tensor of the graph: its expanded tensor in the latest microbatch."""
    parts: IntArray
    """Tensors of the graph that microbatches accumulate; see `added_parts`."""
    finals: IntArray
    """Ops of the graph that add the accumulated parts of a gradient, once per step."""
    label: str
    peers: list[IntArray]
    """``device_of`` of every replica that reduces gradients with this one, including itself and
    replicas that are not simulated because another one stands for them (see
    `hocket.simulate.symmetry`)."""
    parts_peers: list[IntArray]
    """``device_of`` of every tensor-parallel rank of the replica."""
    sums: IntArray
    """Per tensor of the graph: the expanded tensor with its current sum; -1 if it is not
    accumulated."""
    num_shards: int = 1
    """Number of shards of parameters and optimizer state, of which the replica keeps one."""
    passes: list[Pass] = field(default_factory=list)
    """Forward and backward pass of each microbatch."""
