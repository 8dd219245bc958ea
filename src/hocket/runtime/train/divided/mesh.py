"""Where a rank stands in a config, and with whom it works.

Ranks of a config count tensor parallel fastest, then data, then pipeline. Ranks of shares count
replica by replica, and each replica has stages of its own number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hocket.base.errors import UsageError
from hocket.transformer import ParallelConfig


class Mesh:
    """The ranks of a config, seen by one of them."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        """All ranks call it together."""
        _require_ranks(config.num_devices)
        self.device, self.rank = device, dist.get_rank()
        self._sizes = (config.pipeline, config.data, config.tensor)
        rest, self.tensor_rank = divmod(self.rank, config.tensor)
        self.pipeline_rank, self.data_rank = divmod(rest, config.data)
        self.directions = (dist.new_group(), dist.new_group())
        """Groups of all ranks for what goes to earlier and to later stages."""
        self.axes = init_device_mesh(device.type, self._sizes, mesh_dim_names=("pp", "dp", "tp"))

    def rank_of(self, *, pipeline: int, data: int, tensor: int) -> int:
        """The rank at a place."""
        return (pipeline * self._sizes[1] + data) * self._sizes[2] + tensor

    def num_stages(self, replica: int) -> int:
        """Pipeline ranks of a replica."""
        return self._sizes[0]

    @property
    def pipeline_ranks(self) -> list[int]:
        """The ranks of this rank's pipeline, first stage first."""
        return [
            self.rank_of(pipeline=stage, data=self.data_rank, tensor=self.tensor_rank)
            for stage in range(self.num_stages(self.data_rank))
        ]

    @property
    def pipeline_group(self) -> Any:
        """The same, as a group."""
        return self.axes["pp"].get_group()

    @property
    def data_group(self) -> Any:
        """Ranks that hold the same weights."""
        return self.axes["dp"].get_group()

    @property
    def tensor_group(self) -> Any:
        """Ranks that hold parts of the same matrices."""
        return self.axes["tp"].get_group()

    def partner_groups(
        self, stages: Iterable[tuple[int, ...]], backend: str | None
    ) -> dict[tuple[int, ...], Any]:
        """The ranks that hold a weight, by its stage in each replica, in one order for all.

        The groups are for gradients alone: collectives that overlap with the backward pass must
        not come between those of batch norms and losses. ``backend`` is one that plans of one
        axis alone may have.
        """
        pipelines, replicas, parts = self._sizes
        groups = {
            (pipeline, part): dist.new_group(
                [self.rank_of(pipeline=pipeline, data=data, tensor=part)
                 for data in range(replicas)],
                backend=backend,
            )
            for pipeline in range(pipelines)
            for part in range(parts)
        }  # fmt: skip
        own = groups[self.pipeline_rank, self.tensor_rank]
        return dict.fromkeys(sorted(set(stages)), own)

    def sum_over_replicas(self, own: torch.Tensor) -> Any:
        """Begin to add what each replica has; all ranks of a replica have the same."""
        return dist.all_reduce(own, group=self.data_group, async_op=True)

    def of_replicas(self, own: torch.Tensor) -> list[torch.Tensor]:
        """What each replica has, in order; tensors of one shape."""
        found = [torch.empty_like(own) for _ in range(self._sizes[1])]
        dist.all_gather(found, own, group=self.data_group)
        return found


class UnevenMesh(Mesh):
    """The ranks of replicas of which each has a pipeline of its own length.

    Stages count in their order, and the parts of divided matrices inside each stage.
    """

    def __init__(self, num_stages: Sequence[int], device: torch.device, *, tensor: int = 1) -> None:
        """``num_stages`` of each replica; all ranks call it together."""
        _require_ranks(tensor * sum(num_stages))
        self.device, self.rank = device, dist.get_rank()
        self._num_stages, self._tensor = tuple(num_stages), tensor
        self._first = [tensor * stages for stages in (0, *accumulate(num_stages))][:-1]
        self.data_rank = max(r for r, first in enumerate(self._first) if first <= self.rank)
        self.pipeline_rank, self.tensor_rank = divmod(
            self.rank - self._first[self.data_rank], tensor
        )
        self.directions = (dist.new_group(), dist.new_group())
        pipelines = {
            (replica, part): dist.new_group(self._pipeline(replica, part))
            for replica in range(len(num_stages))
            for part in range(tensor)
        }
        self._pipeline_group = pipelines[self.data_rank, self.tensor_rank]
        self._tensor_group = self._group_of_parts() if tensor > 1 else None

    def _pipeline(self, replica: int, part: int) -> list[int]:
        stages = range(self._num_stages[replica])
        return [self.rank_of(pipeline=stage, data=replica, tensor=part) for stage in stages]

    def _group_of_parts(self) -> Any:
        own = None
        for first in range(0, dist.get_world_size(), self._tensor):
            group = dist.new_group(list(range(first, first + self._tensor)))
            own = group if first <= self.rank < first + self._tensor else own
        return own

    def rank_of(self, *, pipeline: int, data: int, tensor: int) -> int:
        """The rank at a place."""
        return self._first[data] + pipeline * self._tensor + tensor

    def num_stages(self, replica: int) -> int:
        """Pipeline ranks of a replica."""
        return self._num_stages[replica]

    @property
    def pipeline_group(self) -> Any:
        """The ranks of this rank's pipeline."""
        return self._pipeline_group

    @property
    def tensor_group(self) -> Any:
        """Ranks that hold parts of the same matrices."""
        return self._tensor_group

    def partner_groups(
        self, stages: Iterable[tuple[int, ...]], backend: str | None
    ) -> dict[tuple[int, ...], Any]:
        """The ranks that hold a weight, by its stage in each replica; all ranks ask together."""
        found: dict[tuple[int, ...], Any] = {}
        for place in sorted(set(stages)):
            for part in range(self._tensor):
                group = dist.new_group([
                    self.rank_of(pipeline=stage, data=replica, tensor=part)
                    for replica, stage in enumerate(place)
                ], backend=backend)  # fmt: skip
                if part == self.tensor_rank:
                    found[place] = group
        return found

    def sum_over_replicas(self, own: torch.Tensor) -> Any:
        """Begin to add what each replica has: its first rank speaks for it."""
        if self.rank != self._first[self.data_rank]:
            own.zero_()
        return dist.all_reduce(own, async_op=True)

    def of_replicas(self, own: torch.Tensor) -> list[torch.Tensor]:
        """What each replica has, in order; tensors of one shape."""
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return [found[first] for first in self._first]


def _require_ranks(needed: int) -> None:
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if needed != running:
        raise UsageError(
            f"the plan takes {needed} ranks, and {running} "
            f"{'is' if running == 1 else 'are'} running",
            hint="start one per device: hocket launch plan.json script.py, or torchrun "
            f"--nproc-per-node {needed} script.py",
        )
