"""Shards of a matrix over tensor-parallel ranks: along one dimension, in equal blocks.

A fused projection (queries, keys and values in one matrix) is several matrices side by side: each
of its ``blocks`` is cut alike, and a rank's piece holds its part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorCut:
    """A tensor in ``num_pieces`` along ``dim``."""

    dim: int
    num_pieces: int
    blocks: int = 1

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """The piece of one rank."""
        parts = [
            block.chunk(self.num_pieces, self.dim)[index]
            for block in whole.chunk(self.blocks, self.dim)
        ]
        return torch.cat(parts, self.dim).contiguous()

    def whole(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor of all pieces in the order of ranks."""
        split = [piece.chunk(self.blocks, self.dim) for piece in pieces]
        parts = [split[index][block] for block in range(self.blocks) for index in range(len(split))]
        return torch.cat(parts, self.dim).contiguous()
