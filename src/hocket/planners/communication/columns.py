"""The best mix of many patterns under few capacities, by column generation, solved exactly.

Gilmore and Gomory (1961): maximise the sum of weights such that the patterns in use stay within the
capacity of every row. Dual prices of the rows determine the cost of a pattern; the caller finds the
cheapest of all patterns, and while it costs less than 1 it enters the basis (revised simplex
method, capacities perturbed slightly so that ties cannot stall it). The last basis is solved again
in exact fractions, and is accepted as optimal only if weights, slack and prices hold exactly.
O(rows²) per step plus the caller's search; the number of steps is a few times that of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Payload = TypeVar("Payload")
_TOLERANCE = 1e-9
CHEAP = 0.999
"""A pattern below this cost improves the mix, so a search may stop when it finds one."""
_PERTURBATION = 1e-7
"""Relative change of the capacities, different for each row, so that no ratios are equal."""


@dataclass(frozen=True)
class Pattern(Generic[Payload]):
    """A candidate of the mix, and how much of each row's capacity one unit of it uses."""

    usage: Mapping[int, int]
    payload: Payload


@dataclass(frozen=True)
class Mix(Generic[Payload]):
    """The optimum: weights of patterns, and the dual prices that prove it."""

    value: Fraction
    weighted: tuple[tuple[Fraction, Pattern[Payload]], ...]
    price: tuple[Fraction, ...]


Cheapest = Callable[[Sequence[float] | Sequence[Fraction]], Pattern[Payload]]
"""Returns the pattern of least cost under prices of the rows, or any that costs less than
`CHEAP`."""


def best_mix(capacity: Sequence[int], cheapest: Cheapest[Payload]) -> Mix[Payload]:
    """Return the mix of patterns with the largest total weight within the capacity of each row."""
    basis = _Basis[Payload](capacity)
    while True:
        price = basis.prices()
        lowest = int(np.argmin(price))
        # A row with a negative price has unused capacity: its slack enters the basis.
        if price[lowest] < -_TOLERANCE:
            basis.enter(lowest)
            continue
        pattern = cheapest(np.maximum(price, 0.0).tolist())
        cost = sum(price[row] * times for row, times in pattern.usage.items())
        if cost < 1 - _TOLERANCE:
            basis.enter(pattern)
            continue
        mix = basis.exact()
        # The floating-point basis may be wrong by rounding; then no proof is possible.
        if mix is None:
            raise ArithmeticError("the last basis does not hold in exact fractions")
        pattern = cheapest(mix.price)
        if sum(mix.price[row] * times for row, times in pattern.usage.items()) >= 1:
            return mix
        basis.enter(pattern)


class _Basis(Generic[Payload]):
    """For each row one pattern or a slack variable, and the inverse of their matrix."""

    def __init__(self, capacity: Sequence[int]) -> None:
        count = len(capacity)
        self.capacity = capacity
        # Multiples of the golden ratio modulo 1: no two of them are equal, so no two ratios tie.
        scale = 1 + _PERTURBATION * ((np.arange(1, count + 1) * 0.6180339887498949) % 1.0)
        self.inverse: NDArray[np.float64] = np.eye(count)
        self.level: NDArray[np.float64] = np.array(capacity, dtype=np.float64) * scale
        self.members: list[Pattern[Payload] | int] = list(range(count))
        self.worth = np.zeros(count)

    def prices(self) -> NDArray[np.float64]:
        """Dual price of each row."""
        found: NDArray[np.float64] = self.worth @ self.inverse
        return found

    def enter(self, member: Pattern[Payload] | int) -> None:
        """Take a pattern, or the slack of a row, into the basis."""
        if isinstance(member, int):
            direction = self.inverse[:, member].copy()
        else:
            rows = list(member.usage)
            direction = self.inverse[:, rows] @ np.array([float(member.usage[r]) for r in rows])
        # Ratio test: the member that reaches zero first leaves the basis.
        usable = direction > _TOLERANCE
        if not usable.any():
            raise ArithmeticError("a pattern that takes nothing of any row")
        ratio = np.where(usable, self.level, np.inf) / np.where(usable, direction, 1.0)
        leaving = int(np.argmin(ratio))
        step = ratio[leaving]
        row = self.inverse[leaving] / direction[leaving]
        direction[leaving] = 0.0
        self.level -= step * direction
        self.level[leaving] = step
        self.inverse -= np.outer(direction, row)
        self.inverse[leaving] = row
        self.members[leaving] = member
        self.worth[leaving] = 0.0 if isinstance(member, int) else 1.0

    def exact(self) -> Mix[Payload] | None:
        """Return weights and prices of this basis as fractions; None if one is negative."""
        slack = {member for member in self.members if isinstance(member, int)}
        patterns = [member for member in self.members if not isinstance(member, int)]
        rows = [row for row in range(len(self.capacity)) if row not in slack]
        matrix = [[pattern.usage.get(row, 0) for pattern in patterns] for row in rows]
        weights = solve_exactly(matrix, [self.capacity[row] for row in rows])
        columns = [list(column) for column in zip(*matrix, strict=True)]
        dual = solve_exactly(columns, [1] * len(patterns))
        if weights is None or dual is None or min(*weights, *dual, Fraction(0)) < 0:
            return None
        used = [Fraction(0)] * len(self.capacity)
        for weight, pattern in zip(weights, patterns, strict=True):
            for row, times in pattern.usage.items():
                used[row] += weight * times
        if any(taken > there for taken, there in zip(used, self.capacity, strict=True)):
            return None
        price = [Fraction(0)] * len(self.capacity)
        for row, value in zip(rows, dual, strict=True):
            price[row] = value
        weighted = [(w, p) for w, p in zip(weights, patterns, strict=True) if w > 0]
        return Mix(sum(weights, Fraction(0)), tuple(weighted), tuple(price))


def solve_exactly(matrix: list[list[int]], right: Sequence[int]) -> list[Fraction] | None:
    """Return the solution of a square system in fractions (Bareiss, 1968); None if there is
    none."""
    size = len(matrix)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    last = 1
    for step in range(size):
        pivot = next((r for r in range(step, size) if rows[r][step]), None)
        if pivot is None:
            return None
        rows[step], rows[pivot] = rows[pivot], rows[step]
        top = rows[step]
        lead = top[step]
        for r in range(step + 1, size):
            row, factor = rows[r], rows[r][step]
            for c in range(step + 1, size + 1):
                # Bareiss: this division has no remainder, and numbers stay those of determinants.
                row[c] = (lead * row[c] - factor * top[c]) // last
            row[step] = 0
        last = lead
    solution = [Fraction(0)] * size
    for step in range(size - 1, -1, -1):
        row = rows[step]
        known = sum((row[c] * solution[c] for c in range(step + 1, size)), Fraction(0))
        solution[step] = (row[size] - known) / row[step]
    return solution
