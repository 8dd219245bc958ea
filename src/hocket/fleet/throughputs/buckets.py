"""What the sums of gradients add to a step of data-parallel training.

Gradients are summed around a ring in buckets, each as soon as the backward pass has made all of it
and the bucket before is done (Li et al., PyTorch Distributed, VLDB 2020). So what a model makes
early is hidden by the rest of the backward pass, and what it makes last, such as the gradient of a
large embedding, never is. O(gradients) per gang and path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.collectives import RingPath, ring_all_reduce_s
from hocket.cost.parallel.efficiency import CONSTANTS
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.gradient_buckets import BUCKET_BYTES


@dataclass(frozen=True, eq=False, kw_only=True)
class Gradients:
    """What all members sum in each step, in the order in which the backward pass makes it."""

    ready_s: FloatArray
    """Time from the gradient to the end of the backward pass, negated: ascending, at most 0."""
    size_bytes: FloatArray

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients."""
        return int(self.size_bytes.sum())

    def scaled(self, factor: float) -> Gradients:
        """The same where everything takes ``factor`` times as long."""
        return Gradients(ready_s=self.ready_s * factor, size_bytes=self.size_bytes)


def gradients_of(graph: Graph, op_start_s: FloatArray, op_end_s: FloatArray) -> Gradients:
    """The gradients of a step whose ops start and end so; none in inference."""
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    made = np.flatnonzero((graph.tensor_role == Role.GRADIENT) & (graph.held_bytes > 0))
    made = made[graph.tensor_producer[made] >= 0]
    ready_s: FloatArray = np.zeros(0)
    size_bytes: FloatArray = np.zeros(0)
    if not len(backward):
        return Gradients(ready_s=ready_s, size_bytes=size_bytes)
    if len(made):
        ready_s = op_end_s[graph.tensor_producer[made]]
        size_bytes = graph.tensor_bytes[made].astype(np.float64)
    else:
        # Some formats keep no gradients: as large as the parameters, they come as time passes.
        total_bytes = graph.bytes_by_role().get(Role.PARAMETER.name.lower(), 0)
        op_s = (op_end_s - op_start_s)[backward]
        share = op_s / max(float(op_s.sum()), 1e-300)
        ready_s, size_bytes = op_end_s[backward], total_bytes * share
    end_s = max(float(op_end_s[backward].max(initial=0.0)), float(ready_s.max(initial=0.0)))
    order = np.argsort(ready_s, kind="stable")
    return in_buckets(Gradients(ready_s=ready_s[order] - end_s, size_bytes=size_bytes[order]))


def in_buckets(gradients: Gradients) -> Gradients:
    """Gradients put together until a bucket is full; a bucket is ready when its last part is."""
    ready_s: list[float] = []
    size_bytes: list[float] = []
    filled = np.inf
    for at_s, more in zip(gradients.ready_s.tolist(), gradients.size_bytes.tolist(), strict=True):
        if filled >= BUCKET_BYTES:
            ready_s.append(at_s)
            size_bytes.append(0.0)
        ready_s[-1] = at_s
        size_bytes[-1] += more
        filled = size_bytes[-1]
    return Gradients(ready_s=np.array(ready_s), size_bytes=np.array(size_bytes))


def exposed_s(buckets: Gradients, gang: int, path: RingPath) -> float:
    """How much later a step of a gang ends than that of one device.

    A part of the sums is never hidden, by the rule of `hocket.cost.parallel`: they take memory
    bandwidth and processors from the work beside them.
    """
    sums_s = ring_all_reduce_s(buckets.size_bytes, gang, path.latency_s, path.bandwidth_bps)
    done_s = -np.inf
    for ready_s, sum_s in zip(buckets.ready_s.tolist(), sums_s.tolist(), strict=True):
        done_s = max(done_s, ready_s) + sum_s
    return float(max(CONSTANTS.never_hidden * sums_s.sum(), done_s, 0.0))
