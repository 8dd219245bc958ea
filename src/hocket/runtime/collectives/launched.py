"""Links between the processes that a launcher has started, measured without a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hocket.base.config import rank_variables
from hocket.base.errors import RunError, UsageError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import cluster_of
from hocket.runtime.collectives.probe import probe

_PATIENCE_S = 60.0


def probe_launched() -> tuple[int, Cluster]:
    """This rank, and the cluster that all ranks are; every one of them must call this."""
    if not {"RANK", "WORLD_SIZE"} <= rank_variables().keys():
        raise UsageError(
            "no launcher has started this: there is one rank only",
            hint="start it once per rank: torchrun --nproc-per-node 4 -m hocket probe",
        )
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    try:
        store, rank, num_ranks = next(rendezvous("env://", timeout=timedelta(seconds=_PATIENCE_S)))
    # Of a missing or wrong address, and of one where nobody is.
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the ranks do not meet: {str(error).partition(chr(10))[0]}",
            hint="MASTER_ADDR and MASTER_PORT say where; torchrun sets them",
        ) from None
    if num_ranks < 2:
        raise UsageError("links need two ranks or more", hint="raise --nproc-per-node or --nnodes")
    cluster = cluster_of(probe(store, rank, num_ranks, "hocket probe", patience_s=_PATIENCE_S))
    # The first rank may hold the store: it leaves last.
    store.set(f"hocket probe/left/{rank}", "1")
    if rank == 0:
        store.wait([f"hocket probe/left/{other}" for other in range(num_ranks)])
    return rank, cluster
