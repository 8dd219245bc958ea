"""Split an integer into nearly equal parts: layers into stages, samples into microbatches."""

from __future__ import annotations


def even_parts(total: int, count: int) -> tuple[int, ...]:
    """Parts that add up to ``total`` and differ by at most one, larger ones first."""
    share, rest = divmod(total, count)
    return (share + 1,) * rest + (share,) * (count - rest)
