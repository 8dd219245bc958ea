"""Where a rank stands in a division, and with whom it works.

Ranks count tensor parallel fastest, then data, then pipeline, as divisions do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hocket.base.errors import UsageError
from hocket.transformer import Division


class Mesh:
    """The ranks of a division, seen by one of them."""

    def __init__(self, division: Division, device: torch.device) -> None:
        """All ranks call it together."""
        needed, running = division.num_devices, _world_size()
        if needed != running:
            raise UsageError(
                f"the division takes {needed} ranks, and {running} "
                f"{'is' if running == 1 else 'are'} running",
                hint="start one per device: hocket launch plan.json script.py, or torchrun "
                f"--nproc-per-node {needed} script.py",
            )
        self.division, self.device = division, device
        self._sizes = (division.pipeline, division.data, division.tensor)
        self.rank = dist.get_rank()
        rest, self.tensor_rank = divmod(self.rank, division.tensor)
        self.pipeline_rank, self.data_rank = divmod(rest, division.data)
        self.directions = (dist.new_group(), dist.new_group())
        """Groups of all ranks for what goes to earlier and to later stages."""
        self.axes = init_device_mesh(device.type, self._sizes, mesh_dim_names=("pp", "dp", "tp"))

    def rank_of(self, *, pipeline: int, data: int, tensor: int) -> int:
        """The rank at a place."""
        return (pipeline * self._sizes[1] + data) * self._sizes[2] + tensor

    @property
    def pipeline_ranks(self) -> list[int]:
        """The ranks of this rank's pipeline, first stage first."""
        return [
            self.rank_of(pipeline=stage, data=self.data_rank, tensor=self.tensor_rank)
            for stage in range(self._sizes[0])
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


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
