"""Data, pipeline and tensor-parallel index of a rank, and its process groups.

`RankMesh` is created from a config in Megatron's rank order, or from replicas with individual
numbers of stages. Torch's `DeviceMesh` is not used, because it needs the same number of stages in
all replicas. FSDP2 gets a `DeviceMesh` of the data-parallel axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hocket.base.errors import UsageError
from hocket.transformer import ParallelConfig

RankTable = Sequence[Sequence[Sequence[int]]]
"""Global ranks, indexed by replica, stage and tensor-parallel rank."""


class RankMesh:
    """The ranks of a parallel training, as seen from this rank."""

    def __init__(self, ranks: RankTable, device: torch.device) -> None:
        """All ranks must call this with the same table, because it creates process groups."""
        places = {
            rank: (replica, stage, part)
            for replica, stages in enumerate(ranks)
            for stage, parts in enumerate(stages)
            for part, rank in enumerate(parts)
        }
        _require_ranks(len(places))
        self.device, self.rank, self._ranks = device, dist.get_rank(), ranks
        self.data_rank, self.pipeline_rank, self.tensor_rank = places[self.rank]
        self.directions = (dist.new_group(), dist.new_group())
        """Two groups of all ranks: for messages to earlier and to later stages."""
        self.pipeline_ranks = [stage[self.tensor_rank] for stage in ranks[self.data_rank]]
        self.pipeline_group = _own_group(
            [list(pipeline) for stages in ranks for pipeline in zip(*stages, strict=True)]
        )
        self.tensor_group = _own_group([list(parts) for stages in ranks for parts in stages])
        self.data_group: Any = None
        """Ranks that hold the same weights; None if replicas have different stages."""
        if len({len(stages) for stages in ranks}) == 1:
            self.data_group = _own_group([
                list(alike)
                for stage in zip(*ranks, strict=True)
                for alike in zip(*stage, strict=True)
            ])  # fmt: skip

    @classmethod
    def of_config(cls, config: ParallelConfig, device: torch.device) -> RankMesh:
        """Number ranks as Megatron does: the tensor index varies fastest, then data, pipeline."""
        data, tensor = config.data, config.tensor
        return cls([
            [[(stage * data + replica) * tensor + part for part in range(tensor)]
             for stage in range(config.pipeline)]
            for replica in range(data)
        ], device)  # fmt: skip

    @classmethod
    def of_replicas(
        cls, num_stages: Sequence[int], device: torch.device, *, tensor: int = 1
    ) -> RankMesh:
        """Number ranks replica by replica, each with its own number of stages."""
        first = (0, *accumulate(num_stages))
        return cls([
            [[(start + stage) * tensor + part for part in range(tensor)] for stage in range(count)]
            # `first` has one entry more, the total number of stages.
            for start, count in zip(first, num_stages, strict=False)
        ], device)  # fmt: skip

    def rank_of(self, *, pipeline: int, data: int, tensor: int) -> int:
        """Return the global rank at a pipeline, data and tensor index."""
        return self._ranks[data][pipeline][tensor]

    @property
    def data_axis(self) -> DeviceMesh:
        """The replicas' axis as a `DeviceMesh` for FSDP2."""
        return DeviceMesh.from_group(self.data_group, self.device.type)

    def partner_groups(
        self, stages: Iterable[tuple[int, ...]], backend: str | None
    ) -> dict[tuple[int, ...], Any]:
        """Return groups of ranks that hold the same weights, by the stage in each replica.

        The groups are for gradients only: collectives that overlap with the backward pass must not
        be interleaved with collectives of batch norms and losses.
        """
        found: dict[tuple[int, ...], Any] = {}
        for place in sorted(set(stages)):
            holders = [self._ranks[replica][stage] for replica, stage in enumerate(place)]
            members = [list(alike) for alike in zip(*holders, strict=True)]
            found[place] = _own_group(members, backend)
        return found

    def sum_over_replicas(self, own: torch.Tensor) -> Any:
        """Start to sum a value over replicas; only the first rank of a replica contributes."""
        if self.pipeline_rank or self.tensor_rank:
            # Stages and tensor-parallel ranks hold copies of the value, which must count once.
            own.zero_()
        return dist.all_reduce(own, async_op=True)

    def of_each_replica(self, own: Any) -> list[Any]:
        """Gather an object from the first rank of each replica, in order."""
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return [found[stages[0][0]] for stages in self._ranks]


def _own_group(groups: list[list[int]], backend: str | None = None) -> Any:
    """Create all groups, which every rank must do together; return the group of this rank."""
    return dist.new_subgroups_by_enumeration(groups, backend=backend)[0]  # type: ignore[no-untyped-call]


def _require_ranks(needed: int) -> None:
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if needed != running:
        raise UsageError(
            f"the plan takes {needed} ranks, and {running} "
            f"{'is' if running == 1 else 'are'} running",
            hint="start one per device: hocket launch plan.json script.py, or torchrun "
            f"--nproc-per-node {needed} script.py",
        )
