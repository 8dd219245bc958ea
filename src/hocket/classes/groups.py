"""Which classes share a part: balanced k-means on class embeddings, then moves that even the work.

After Wang et al., "sensAI: ConvNets decomposition via class parallelism" (MLSys 2021): classes that
look alike need the same channels, so they are put together. Each round gives the classes with most
to lose their nearest centre that has a free place; then classes move or change places while that
lowers the work of the heaviest group, so that groups may become unequal. O(rounds · n · k).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.errors import UsageError
from hocket.base.parts import even_parts

Groups = tuple[tuple[int, ...], ...]
_ROUNDS = 300
_STARTS = 10


def even_sizes(num_classes: int, num_parts: int) -> tuple[int, ...]:
    """How many classes each part gets where all get as equally many as possible."""
    if not 1 <= num_parts <= num_classes:
        raise UsageError(
            f"{num_classes} classes cannot be put into {num_parts} parts",
            hint=f"ask for 1 to {num_classes} parts",
        )
    return even_parts(num_classes, num_parts)


def balanced_groups(embeddings: FloatArray, sizes: tuple[int, ...], seed: int = 0) -> Groups:
    """Classes in groups of the given sizes, those with near embeddings together."""
    if sum(sizes) != len(embeddings):
        raise UsageError(f"sizes {sizes} do not add up to {len(embeddings)} classes")
    rng = np.random.default_rng(seed)
    found = [_clustered(embeddings, sizes, rng) for _ in range(_STARTS)]
    _, labels = min(found, key=lambda each: each[0])
    groups = [tuple(np.flatnonzero(labels == part).tolist()) for part in range(len(sizes))]
    return tuple(sorted(groups))


def _clustered(
    points: FloatArray, sizes: tuple[int, ...], rng: np.random.Generator
) -> tuple[float, LongArray]:
    centres = _spread(points, len(sizes), rng)
    labels = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        far = np.linalg.norm(points[:, None] - centres[None], axis=2)
        now = _placed(far, sizes)
        if np.array_equal(now, labels):
            break
        labels = now
        centres = np.stack([points[labels == part].mean(axis=0) for part in range(len(sizes))])
    inertia = float(((points - centres[labels]) ** 2).sum())
    return inertia, labels


def _spread(points: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """First centres by k-means++: each far from those before it, at random."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < count:
        gap = np.min(((points[:, None] - points[chosen][None]) ** 2).sum(axis=2), axis=1)
        gap[chosen] = 0.0
        total = gap.sum()
        free = np.setdiff1d(np.arange(len(points)), chosen)
        is_same = total <= 0
        chosen.append(int(rng.choice(free) if is_same else rng.choice(len(gap), p=gap / total)))
    return points[chosen].copy()


def _placed(far: FloatArray, sizes: tuple[int, ...]) -> LongArray:
    free = list(sizes)
    labels = np.zeros(len(far), dtype=np.int64)
    for point in np.argsort(far.min(axis=1) - far.max(axis=1), kind="stable"):
        part = next(int(part) for part in np.argsort(far[point], kind="stable") if free[part])
        labels[point], free[part] = part, free[part] - 1
    return labels


def evened(groups: Groups, work_of: Callable[[tuple[int, ...]], float]) -> Groups:
    """Groups after moves and exchanges of single classes that lower the heaviest group's work."""
    now = [tuple(group) for group in groups]
    work = [work_of(group) for group in now]
    while True:
        heavy = int(np.argmax(work))
        best: tuple[float, int, tuple[int, ...], tuple[int, ...]] | None = None
        for other in range(len(now)):
            if other == heavy:
                continue
            for first, second in _changes(now[heavy], now[other]):
                higher = max(work_of(first), work_of(second))
                if higher < work[heavy] * (1 - 1e-9) and (best is None or higher < best[0]):
                    best = (higher, other, first, second)
        if best is None:
            return tuple(sorted(now))
        _, other, now[heavy], now[other] = best
        work[heavy], work[other] = work_of(now[heavy]), work_of(now[other])


def _changes(
    first: tuple[int, ...], second: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Both groups after one class moved to the second, or after two changed places."""
    found = []
    for leaving in first:
        rest = tuple(each for each in first if each != leaving)
        if rest:
            found.append((rest, tuple(sorted((*second, leaving)))))
        for coming in second:
            stay = tuple(each for each in second if each != coming)
            found.append((tuple(sorted((*rest, coming))), tuple(sorted((*stay, leaving)))))
    return found
