"""Rules by which changes are applied to rows: addition, or adaptive revision.

Adaptive revision (McMahan and Streeter, "Delay-tolerant algorithms for asynchronous distributed
online learning", NIPS 2014) is AdaGrad with a correction for delayed gradients. A row consists of
the value w, the sum G of all gradients, z' (the largest z so far) and, on the shard only, z. A
client sends a gradient g and the sum G_old that it had read. The shard computes b = G - G_old, the
sum of the gradients that arrived in between, and revises the steps taken for them. Without delay, b
= 0 and the rule is AdaGrad. A change is refused as a whole if it is not finite, or if it would make
a sum of absolute values (for a gradient, any of the sums above) exceed a 32-bit float. O(width) per
row.
"""

from __future__ import annotations

import math

import numpy as np

from hocket.kernels import kernel
from hocket.tables.core.message import Cells

ADD, REVISE = 0, 1
LARGEST = float(np.finfo(np.float32).max)


def cell_width(rule: int, width: int) -> int:
    """Number of floats per row as it is read: w, or w, G and z'."""
    return width if rule == ADD else 3 * width


def change_width(rule: int, width: int) -> int:
    """Number of floats per change: a delta, or g and the G_old with which it was computed."""
    return width if rule == ADD else 2 * width


def starting_cells(rule: int, num_rows: int, width: int, curvature: float) -> Cells:
    """Initial rows; ``curvature`` is the initial z'."""
    cells = np.zeros((num_rows, cell_width(rule, width)), np.float32)
    if rule == REVISE:
        cells[:, 2 * width :] = curvature
    return cells


def starting_hidden(rule: int, num_rows: int, width: int, curvature: float) -> Cells:
    """Initial state that only the shard has: z."""
    return np.full((num_rows, width if rule == REVISE else 0), curvature, np.float32)


@kernel
def size_of(cells: Cells, line: int, width: int) -> float:
    """Sum of absolute values of a line; not finite if a value or the sum is not.

    Eight partial sums let the compiler use vector additions; a single sum would be a dependent
    chain.
    """
    a = b = c = d = e = f = g = h = np.float32(0.0)
    for k in range(width // 8):
        j = 8 * k
        a += abs(cells[line, j])
        b += abs(cells[line, j + 1])
        c += abs(cells[line, j + 2])
        d += abs(cells[line, j + 3])
        e += abs(cells[line, j + 4])
        f += abs(cells[line, j + 5])
        g += abs(cells[line, j + 6])
        h += abs(cells[line, j + 7])
    total = (a + b) + (c + d) + ((e + f) + (g + h))
    for j in range(width - width % 8, width):
        total += abs(cells[line, j])
    return float(total)


@kernel
def relative(change: float, size: float) -> float:
    """Size of a change relative to its row."""
    return change / size if size > 1e-30 else change


@kernel
def is_bearable(
    rule: int, cells: Cells, hidden: Cells, row: int, changes: Cells, line: int
) -> bool:
    """True if all sums that a gradient enters, also of squares, stay within a 32-bit float."""
    if rule == ADD:
        return True
    width = hidden.shape[1]
    for j in range(width):
        gradient, total = float(changes[line, j]), float(cells[row, width + j])
        between = total - float(changes[line, width + j])
        squares = hidden[row, j] + gradient * gradient + 2 * gradient * between
        if not (abs(squares) < LARGEST and abs(total + gradient) < LARGEST):
            return False
    return True


@kernel
def apply_change(
    rule: int, rate: float, cells: Cells, hidden: Cells, row: int, changes: Cells, line: int
) -> None:
    """Apply a change to a row of a shard."""
    if rule == ADD:
        for j in range(cells.shape[1]):
            cells[row, j] += changes[line, j]
        return
    width = hidden.shape[1]
    for j in range(width):
        gradient, known = changes[line, j], changes[line, width + j]
        between = cells[row, width + j] - known
        old = rate / math.sqrt(cells[row, 2 * width + j])
        hidden[row, j] += gradient * gradient + 2 * gradient * between
        cells[row, 2 * width + j] = max(cells[row, 2 * width + j], hidden[row, j])
        new = rate / math.sqrt(cells[row, 2 * width + j])
        cells[row, j] += (old - new) * between - new * gradient
        cells[row, width + j] += gradient


@kernel
def apply_locally(
    rule: int, rate: float, cells: Cells, row: int, changes: Cells, line: int
) -> None:
    """Apply a client's own change to its cache; a gradient as an AdaGrad step."""
    if rule == ADD:
        for j in range(cells.shape[1]):
            cells[row, j] += changes[line, j]
        return
    width = cells.shape[1] // 3
    for j in range(width):
        gradient = changes[line, j]
        cells[row, 2 * width + j] += gradient * gradient
        cells[row, j] -= rate / math.sqrt(cells[row, 2 * width + j]) * gradient
        cells[row, width + j] += gradient


@kernel
def gather_change(
    rule: int, cells: Cells, row: int, pending: Cells, is_first: bool, changes: Cells, line: int
) -> None:
    """Add a change to a row's unsent changes; the first one also stores the sum G_old read."""
    width = pending.shape[1] if rule == ADD else pending.shape[1] // 2
    for j in range(width):
        pending[row, j] += changes[line, j]
    if rule == REVISE and is_first:
        for j in range(width):
            pending[row, width + j] = cells[row, width + j]
