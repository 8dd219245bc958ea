"""The largest batch, sequence or depth that fits: few tries, because each is a capture.

Bytes grow with the size asked for, nearly along a line; the next size tried is where the line
through the nearest two tries meets the budget (regula falsi), kept between what fits and what does
not, and their middle where the line gains little. About log(size) tries at most.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_TRIES = 16


def largest(least_bytes: Callable[[int], int], budget_bytes: int, start: int, most: int) -> int:
    """The largest size from 1 to ``most`` whose fewest bytes fit; 0 where not even 1 does."""
    tried: dict[int, int] = {}

    def needed(size: int) -> int:
        if size not in tried:
            tried[size] = least_bytes(size)
        return tried[size]

    size = min(start, most)
    while needed(size) <= budget_bytes and size < most:
        size = min(2 * size, most)
    while needed(size) > budget_bytes and size > 1:
        size = max(size // 2, 1)
    for _ in range(MAX_TRIES):
        fits = max((s for s, b in tried.items() if b <= budget_bytes), default=0)
        above = min(
            (s for s, b in tried.items() if b > budget_bytes and s > fits), default=most + 1
        )
        if above - fits <= 1 or fits == 0:
            return fits
        slope = (needed(above) - needed(fits)) / (above - fits)
        step = int((budget_bytes - needed(fits)) / slope) if slope > 0 else 0
        guess = fits + step
        # Beside the line's own answer its neighbour is tried, which closes the bracket.
        if guess <= fits:
            guess = fits + 1
        if guess >= above:
            guess = above - 1
        needed(guess)
    return max((s for s, b in tried.items() if b <= budget_bytes), default=0)
