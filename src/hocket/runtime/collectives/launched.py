"""Links between the processes that a launcher has started, measured without a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hocket.base.config import rank_variables
from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import cluster_of
from hocket.runtime.collectives.probe import probe


def probe_launched() -> tuple[int, Cluster]:
    """This rank, and the cluster that all ranks are; every one of them must call this."""
    if not {"RANK", "WORLD_SIZE"} <= rank_variables().keys():
        raise UsageError(
            "no launcher has started this: there is one rank only",
            hint="start it once per rank: torchrun --nproc-per-node 4 -m hocket probe",
        )
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    store, rank, num_ranks = next(rendezvous("env://"))
    if num_ranks < 2:
        raise UsageError("links need two ranks or more", hint="raise --nproc-per-node or --nnodes")
    cluster = cluster_of(probe(store, rank, num_ranks, "hocket probe", patience_s=60.0))
    # The first rank may hold the store: it leaves last.
    store.set(f"hocket probe/left/{rank}", "1")
    if rank == 0:
        store.wait([f"hocket probe/left/{other}" for other in range(num_ranks)])
    return rank, cluster
