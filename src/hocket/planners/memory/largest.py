"""Find the largest batch, sequence or depth that fits, with few tries (each is a capture).

Memory grows nearly linearly or quadratically with the size. After a few small tries, the next size
is where the curve through the nearest tries meets the budget, between the largest size that fits
and the smallest that does not. At the end the next larger size is tried, which proves that it does
not fit. If the curve misleads, bisection takes over: at most about 2 log(size) tries, mostly
five.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

MAX_TRIES = 40
FARTHEST = 8
"""Largest ratio of the next size tried and the largest that is known to fit. Captures of deep
models are slow, and a curve through small sizes may be wrong."""


def largest(least_bytes: Callable[[int], int], budget_bytes: int, start: int, most: int) -> int:
    """Return the largest size from 1 to ``most`` whose fewest bytes fit; 0 if not even 1 fits."""
    tried: dict[int, int] = {}
    size, lengths = min(start, most), list[int]()
    for _ in range(MAX_TRIES):
        tried[size] = least_bytes(size)
        fits = max((s for s, b in tried.items() if b <= budget_bytes), default=0)
        above = min((s for s in tried if s > fits), default=most + 1)
        lengths.append(above - fits)
        if above - fits <= 1:
            break
        # If two tries on the curve have not halved the interval, the next try bisects it.
        is_slow = len(lengths) > 2 and lengths[-1] > lengths[-3] // 2
        if above in tried and fits in tried and is_slow:
            size, lengths = (fits + above) // 2, []
        else:
            size = _next_size(tried, budget_bytes, fits, above)
    return max((s for s, b in tried.items() if b <= budget_bytes), default=0)


def _next_size(tried: Mapping[int, int], budget_bytes: int, fits: int, above: int) -> int:
    """Size between ``fits`` and ``above`` at which a curve through the tries meets the budget."""
    if len(tried) == 1:
        size = 2 * fits if fits else above // 2
        return min(max(size, fits + 1), above - 1)
    last = min(above - 1, FARTHEST * max(fits, 1)) if fits else above - 1
    # The ends of the interval come first, then the tries next to them: three points at most.
    near = sorted(tried, key=lambda s: (s not in (fits, above), abs(s - (fits or above)), s))[:3]
    sizes = np.arange(fits + 1, last + 1)
    curve = np.polynomial.Polynomial.fit(near, [float(tried[s]) for s in near], len(near) - 1)
    # Half a byte of tolerance, because a fitted curve meets its points only up to rounding.
    within = curve(sizes) <= budget_bytes + 0.5
    # One less than the first size above the budget: if the curve is right, the next try is that
    # size, and both together end the search.
    return int(sizes[max(int(np.argmin(within)) - 1, 0)]) if not within.all() else last
