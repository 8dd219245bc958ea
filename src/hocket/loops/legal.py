"""Find the schedules that a set of dependence vectors allows.

- independent: there is no vector.
- 1-D: a dimension, real or virtual, is 0 in all vectors.
- 2-D: every vector is 0 in at least one of two dimensions; a rotation if iterations may run in any
  order, a wavefront if two loops carry an order.
- skewed (Wolf and Lam 1991): the inner loop is shifted by the outer one until no component is
  negative.

O(vectors × dimensions²).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from hocket.loops.dependence import Vector
from hocket.loops.form import Atom

MAX_SKEW = 8
Interval = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """Division of the iteration space, independent of the data."""

    kind: str
    """``independent``, ``1d``, ``rotation``, ``wavefront`` or ``skewed``."""
    space: Atom | None = None
    time: Atom | None = None
    skew: int = 0

    @property
    def keeps_order(self) -> bool:
        """True if dependent iterations run in the order of the loop itself."""
        return self.kind != "rotation"

    @property
    def is_listed(self) -> bool:
        """True if iterations are picked from a list rather than from ranges."""
        return any(atom is not None and atom.kind == "key" for atom in (self.space, self.time))


def legal_shapes(
    vectors: Sequence[Vector], dims: Sequence[Atom], signs: Sequence[int], *, ordered: bool
) -> Iterator[Shape]:
    """All shapes that respect the vectors; ``signs`` is -1 for a loop that counts down."""
    if not vectors:
        yield Shape("independent", dims[0])
        return
    atoms = sorted({atom for vector in vectors for atom in vector.distance} | set(dims))
    lines = [atom for atom in atoms if all(vector.distance.get(atom) == 0 for vector in vectors)]
    for atom in lines:
        yield Shape("1d", atom)
    atoms = [atom for atom in atoms if atom not in lines]
    # If no vector states a step along a loop, any serial order is as good as the loop's own.
    if not lines and not ordered and not any(_has_direction(vector, dims) for vector in vectors):
        for one, other in combinations(atoms, 2):
            if all(
                0 in (vector.distance.get(one), vector.distance.get(other)) for vector in vectors
            ):
                yield Shape("rotation", one, other)
    if len(dims) == 2:
        skew = _least_skew(vectors, dims, signs)
        if skew is not None:
            yield Shape("skewed" if skew else "wavefront", dims[0], dims[1], skew)


def _has_direction(vector: Vector, dims: Sequence[Atom]) -> bool:
    """True if a vector is a fixed step along a loop: the user has written that order, so it is
    kept.
    """
    return any(vector.distance.get(dim) for dim in dims)


def _least_skew(
    vectors: Sequence[Vector], dims: Sequence[Atom], signs: Sequence[int]
) -> int | None:
    steps = [step for vector in vectors for step in _directions(vector, dims, signs)]
    # The smallest skew, because a larger one makes lower blocks start later.
    for skew in range(MAX_SKEW + 1):
        # 0 times an infinite component would be NaN.
        if all((skew * outer[0] if skew else 0.0) + inner[0] >= 0 for outer, inner in steps):
            return skew
    return None


def _directions(
    vector: Vector, dims: Sequence[Atom], signs: Sequence[int]
) -> Iterator[tuple[Interval, ...]]:
    """Yield the lexicographically positive steps of a vector, as one interval per dimension.

    Either access may come first, so both signs are followed. An unknown component is split into 0
    and positive; components after a positive one stay unknown.
    """
    for sign in (1, -1):
        whole: list[Interval] = []
        for dim, dim_sign in zip(dims, signs, strict=True):
            value = vector.distance.get(dim)
            whole.append((-math.inf, math.inf) if value is None else (sign * dim_sign * value,) * 2)
        for first, (low, high) in enumerate(whole):
            if any(not before[0] <= 0 <= before[1] for before in whole[:first]):
                break
            if high >= 1:
                zeros = [(0.0, 0.0)] * first
                yield (*zeros, (max(low, 1.0), high), *whole[first + 1 :])
