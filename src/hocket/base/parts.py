"""A whole number in even parts: layers of stages, samples of microbatches, classes of parts."""

from __future__ import annotations


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """As many parts as asked for, which differ by at most one, the larger ones first."""
    share, rest = divmod(total, count)
    return (share + 1,) * rest + (share,) * (count - rest)
