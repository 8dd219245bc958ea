"""``hocket.priority.wrap``: gradients in the order in which the next forward pass needs them.

torch.distributed.init_process_group("gloo")          # or "hocket"
hocket.priority.wrap(model, optimizer)
for batch in batches:                                  # the loop stays as it is
    loss = loss_of(model(batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Every rank ends with the same parameters as after synchronous training on the averaged gradients.
docs/how-to/priority.md says when it helps.
"""

# ruff: noqa: E402

from __future__ import annotations

from itertools import count
from typing import Any

from hocket.base.extras import require

require("torch", "propagation by priority")

import torch
import torch.distributed as dist

from hocket.api.planned import find_cluster
from hocket.base.errors import UsageError
from hocket.runtime.collectives.group import PlannedGroup, given_cluster
from hocket.runtime.collectives.propagation import Propagation
from hocket.runtime.collectives.slices import SLICE_BYTES
from hocket.runtime.collectives.sums import SumExchange

__all__ = ["Propagation", "wrap"]
_number = count()


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    crosses: bool | None = None,
    slice_bytes: int = SLICE_BYTES,
    dtype: torch.dtype | None = None,
) -> Propagation:
    """Let the gradients of a model travel by priority, between all ranks of the default group.

    ``crosses``: whether layers of the next forward pass wait for their own sums alone (True), all
    for all sums (False), or whichever pays, found in the first steps (None). All ranks start from
    the parameters of the first. Gradients are summed in their own type, or in ``dtype``; parameters
    may be on a GPU, whose gradients are staged in the host's memory. Several backward passes make
    one update where all but the last are within ``no_sync()`` of what is returned.
    """
    if not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised",
            hint='call torch.distributed.init_process_group("gloo") first',
        )
    if slice_bytes < 4:
        raise UsageError(f"slice_bytes is {slice_bytes}, a number takes 4")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks < 2:
        raise UsageError("there is one rank only: nothing travels", hint="leave wrap out")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)
    world: Any = dist.group.WORLD
    known = world.worker.cluster if isinstance(world, PlannedGroup) and world.worker else None
    cluster = known or given_cluster(range(num_ranks), find_cluster)
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"hocket priority {next(_number)}", c10d._get_default_store())
    exchange = SumExchange(store, rank, num_ranks, cluster)
    return Propagation(
        model, optimizer, exchange, crosses=crosses, slice_bytes=slice_bytes, dtype=dtype
    )
