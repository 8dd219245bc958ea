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
        told.append(f"{num_norms} batch norm{'s' * (num_norms > 1)} see {_seen(shares)}")
    if (graph.rng_order >= 0).any():
        told.append("dropout draws other masks of the same distribution")
    return told


def _seen(shares: Shares) -> str:
    """The samples over which a batch norm takes its mean."""
    sizes = sorted({size for r in shares.replicas for size in r.microbatches}, reverse=True)
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} or {sizes[-1]}"
    if len(sizes) > 2:
        each = f"{sizes[-1]} to {sizes[0]}"
    is_whole = all(len(replica.microbatches) == 1 for replica in shares.replicas)
    if is_whole and not shares.is_staged:
        return (
            f"all {shares.num_samples} samples with hocket launch, by sums over devices; with "
            f"hocket run the {each} of their own device"
        )
    return f"{each} samples at a time, as where gradients are accumulated"


def _num_norms(graph: Graph) -> int:
    kinds = [index for index, kind in enumerate(graph.kinds) if _NORM in kind]
    is_forward = graph.op_phase == Phase.FORWARD
    return int((np.isin(graph.op_kind, kinds) & is_forward).sum())
