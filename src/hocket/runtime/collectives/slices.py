"""How gradients are cut for propagation by priority, and which tree carries which slice.

P3 (Jayarajan et al., MLSys 2019): layers are needed in the order of the forward pass, gradients
come in the reverse one. Cut into slices of about as much as keeps a link busy for a few messages, a
gradient that is needed soon overtakes a large one that came before. Every slice goes over one tree,
those of all trees in proportion to their shares (always to the one that is furthest behind): the
place of the sharded servers of P3 is taken by the roots of the trees. O(slices · trees).
"""

from __future__ import annotations

from collections.abc import Sequence

SLICE_BYTES = 160_000
"""40,000 numbers, as in P3."""

Chunk = tuple[int, int, int]
"""Tree, first byte, byte after the last."""


def slices(
    layer_bytes: Sequence[int], shares: Sequence[float], *, item_bytes: int = 4,
    slice_bytes: int = SLICE_BYTES,
) -> tuple[list[Chunk], list[tuple[int, int]]]:  # fmt: skip
    """Chunks in the order of the layers, and for each layer its first chunk and the one after."""
    size = max(slice_bytes // item_bytes, 1) * item_bytes
    chunks: list[Chunk] = []
    ends, carried, at = [], [0.0] * len(shares), 0
    for num_bytes in layer_bytes:
        first, stop = len(chunks), at + num_bytes
        while at < stop:
            tree = min(range(len(shares)), key=lambda n: (carried[n] / shares[n], n))
            piece = min(size, stop - at)
            chunks.append((tree, at, at + piece))
            carried[tree] += piece
            at += piece
        ends.append((first, len(chunks)))
    return chunks, ends
