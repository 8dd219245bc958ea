"""Replicas while they are being expanded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.sections import Replica


class Pass(NamedTuple):
    """Forward and backward of one microbatch."""

    op: IntArray
    """Per op of the graph: its number; -1 where it is not repeated."""
    tensor: IntArray
    """Per tensor of the graph, likewise."""
    priority: FloatArray
    recompute: IntArray
    """Per op of the graph: the number of its second run, before the backward pass; -1 for none."""
    recompute_priority: FloatArray
    """Likewise."""


@dataclass
class ReplicaCopy:
    """One replica while it is being expanded."""

    replica: Replica
    device_of: IntArray
    """Per op of the graph: the device of its stage."""
    tensor: IntArray
    """Per tensor of the graph: its number here, as the last microbatch has it."""
    parts: IntArray
    """Tensors of the graph that are added up over microbatches; see `added_parts`."""
    finals: IntArray
    """Ops of the graph that make a gradient out of the sums of its parts, once."""
    label: str
    peers: list[IntArray]
    """``device_of`` of every replica that reduces gradients with this one, its own included; those
    that do the same at the same time may stand for each other (see `hocket.simulate.symmetry`)."""
    parts_peers: list[IntArray]
    """Likewise, of every tensor-parallel rank of the replica."""
    sums: IntArray
    """Per tensor of the graph: the one that holds the sum so far; -1 where nothing is added."""
    num_shards: int = 1
    """Of how many parts of parameters and state it keeps one."""
    passes: list[Pass] = field(default_factory=list)
    """Per microbatch."""
