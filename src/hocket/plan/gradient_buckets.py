"""Gradient buckets of data parallelism: one definition for the simulator and for the runtime.

Gradients with the same key (the ranks that reduce them, their dtype) fill a bucket in the order in
which the backward pass makes them. The sizes are the defaults of DistributedDataParallel: a small
first bucket, so that the first all-reduce starts early, then large ones. O(gradients).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

BUCKET_BYTES = 25 * 2**20
"""Size of all buckets but the first: ``bucket_cap_mb`` of DistributedDataParallel."""
FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket of each key."""


def fill_buckets(gradients: Iterable[tuple[Hashable, int]]) -> Iterator[list[int]]:
    """Yield the positions of each bucket's gradients, given as (key, bytes).

    Buckets come in the order in which they are full; those that are not full come last.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    limit_bytes: dict[Hashable, int] = {}
    for position, (key, num_bytes) in enumerate(gradients):
        open_buckets.setdefault(key, []).append(position)
        filled_bytes[key] = filled_bytes.get(key, 0) + num_bytes
        if filled_bytes[key] >= limit_bytes.get(key, FIRST_BUCKET_BYTES):
            # A gradient is never split, so a bucket may exceed its size.
            yield open_buckets.pop(key)
            filled_bytes[key], limit_bytes[key] = 0, BUCKET_BYTES
    yield from open_buckets.values()
