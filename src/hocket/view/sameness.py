"""What a plan that shares out a batch keeps of the training of one device, in words."""

from __future__ import annotations

import numpy as np

from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import Shares

_NORM = "batch_norm"


def kept_training(graph: Graph, shares: Shares) -> list[str]:
    """What was seen of the model's samples, and what becomes of batch norm and dropout."""
    is_split = len(shares.replicas) > 1 or len(shares.replicas[0].microbatches) > 1
    if not is_split:
        return []
    told = []
    samples = graph.meta.get("samples")
    if isinstance(samples, str):
        told.append(f"the training of one device with all {shares.num_samples} samples: {samples}")
    if num_norms := _num_norms(graph):
        is_whole = all(len(replica.microbatches) == 1 for replica in shares.replicas)
        joined = is_whole and not shares.is_staged
        seen = "all samples, by sums over replicas" if joined and not shares.sharded else (
            "one microbatch at a time, as they do where gradients are accumulated")  # fmt: skip
        told.append(f"{num_norms} batch norm{'s' * (num_norms > 1)} see {seen}")
    if bool((graph.rng_order >= 0).any()):
        told.append("dropout draws other masks of the same distribution")
    return told


def _num_norms(graph: Graph) -> int:
    kinds = [index for index, kind in enumerate(graph.kinds) if _NORM in kind]
    is_forward = graph.op_phase == Phase.FORWARD
    return int((np.isin(graph.op_kind, kinds) & is_forward).sum())
