"""The compiled part of the interior-point method: products with the program, conjugate gradients.

Every column of the program touches one or two jobs and one pool, so the equations of a step have a
2 x 2 block for each job, a few entries between jobs that may share devices, a border of one row
per pool and one rank for the level. The blocks with their border are inverted exactly and guide
conjugate gradients (Hestenes and Stiefel, 1952) through the rest. O(columns) per iteration.
"""

from __future__ import annotations

from hocket.arrays import FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.fleet.solve.pair_tables import Columns, Guide

_TABLES = "hocket.fleet.solve.pair_tables"


@compiled_entry(_TABLES)
def use_of_rows(columns: Columns, amount: FloatArray, rows: FloatArray) -> None:
    """What amounts of columns use of every row: minus progress, time, devices."""
    rows[:] = 0.0
    for c in range(amount.shape[0]):
        a, b, x = columns.row_a[c], columns.row_b[c], amount[c]
        rows[a] -= columns.rate_a[c] * x
        rows[b] -= columns.rate_b[c] * x
        rows[a + 1] += x
        rows[b + 1] += x
        rows[columns.row_pool[c]] += columns.devices[c] * x


@compiled_entry(_TABLES)
def cost_of_columns(columns: Columns, dual: FloatArray, cost: FloatArray) -> None:
    """What every column costs at the duals of the rows, less what its progress is worth."""
    for c in range(cost.shape[0]):
        a, b = columns.row_a[c], columns.row_b[c]
        spent = dual[a + 1] + dual[b + 1] + columns.devices[c] * dual[columns.row_pool[c]]
        cost[c] = spent - columns.rate_a[c] * dual[a] - columns.rate_b[c] * dual[b]


@compiled_entry(_TABLES)
def set_guide(columns: Columns, weight: FloatArray, rise: FloatArray, guide: Guide) -> None:
    """The blocks of jobs and their border with pools and the level, blocks inverted.

    ``guide.diagonal`` is given; ``guide.corner`` comes back as the matrix that is to be inverted.
    A column of two jobs counts twice in their blocks: leaving out what it has between them would
    otherwise leave something that is no longer positive.
    """
    num_rows, last = rise.shape[0], guide.corner.shape[0] - 1
    num_pools, first_pool = last, num_rows - last
    guide.border[:, :] = 0.0
    guide.corner[:, :] = 0.0
    for row in range(0, first_pool, 2):
        guide.block[row, 0] = guide.diagonal[row]
        guide.block[row, 1] = 0.0
        guide.block[row + 1, 1] = guide.diagonal[row + 1]
        guide.border[row, last] = rise[row]
    for pool in range(num_pools):
        guide.corner[pool, pool] = guide.diagonal[first_pool + pool]
    for c in range(weight.shape[0]):
        a, b, d, devices = columns.row_a[c], columns.row_b[c], weight[c], columns.devices[c]
        pool = columns.row_pool[c] - first_pool
        is_pair = b < first_pool
        guide.corner[pool, pool] += d * devices * devices
        _count_job(guide, a, columns.rate_a[c], d, devices, pool, 2.0 if is_pair else 1.0)
        if is_pair:
            _count_job(guide, b, columns.rate_b[c], d, devices, pool, 2.0)
    for row in range(0, first_pool, 2):
        _invert_block(guide, row)
        for i in range(last + 1):
            for k in range(2):
                mine = guide.block[row + k, 0] * guide.border[row, i]
                mine += guide.block[row + k, 1] * guide.border[row + 1, i]
                for j in range(last + 1):
                    guide.corner[j, i] -= guide.border[row + k, j] * mine


@compiled
def _count_job(
    guide: Guide, row: int, rate: float, d: float, devices: float, pool: int, times: float
) -> None:
    guide.block[row, 0] += times * d * rate * rate
    guide.block[row, 1] -= times * d * rate
    guide.block[row + 1, 1] += times * d
    guide.border[row, pool] -= d * rate * devices
    guide.border[row + 1, pool] += d * devices


@compiled
def _invert_block(guide: Guide, row: int) -> None:
    upper, between, lower = guide.block[row, 0], guide.block[row, 1], guide.block[row + 1, 1]
    size = upper * lower - between * between
    guide.block[row, 0] = lower / size
    guide.block[row, 1] = -between / size
    guide.block[row + 1, 0] = -between / size
    guide.block[row + 1, 1] = upper / size


@compiled
def _apply(
    columns: Columns,
    weight: FloatArray,
    rise: FloatArray,
    level_weight: float,
    guide: Guide,
    w: FloatArray,
    out: FloatArray,
) -> None:
    """The matrix of a step times ``w``."""
    num_rows = rise.shape[0]
    raised = 0.0
    for row in range(num_rows):
        raised += rise[row] * w[row]
    raised *= level_weight
    for row in range(num_rows):
        out[row] = guide.diagonal[row] * w[row] + raised * rise[row]
    w[num_rows] = 0.0
    w[num_rows + 1] = 0.0
    for c in range(weight.shape[0]):
        a, b, pool = columns.row_a[c], columns.row_b[c], columns.row_pool[c]
        rate_a, rate_b, devices = columns.rate_a[c], columns.rate_b[c], columns.devices[c]
        q = w[a + 1] + w[b + 1] + devices * w[pool] - rate_a * w[a] - rate_b * w[b]
        q *= weight[c]
        out[a] -= rate_a * q
        out[a + 1] += q
        out[b] -= rate_b * q
        out[b + 1] += q
        out[pool] += devices * q


@compiled
def _follow(guide: Guide, rest: FloatArray, out: FloatArray) -> float:
    """What the guide makes of a rest, into ``out``; returns the product of the two."""
    num_rows, size = guide.diagonal.shape[0], guide.corner.shape[0]
    first_pool = num_rows - size + 1
    for i in range(size):
        guide.wanted[i] = rest[first_pool + i] if i < size - 1 else 0.0
    for row in range(0, first_pool, 2):
        upper, lower = rest[row], rest[row + 1]
        out[row] = guide.block[row, 0] * upper + guide.block[row, 1] * lower
        out[row + 1] = guide.block[row + 1, 0] * upper + guide.block[row + 1, 1] * lower
        for i in range(size):
            guide.wanted[i] -= guide.border[row, i] * out[row]
            guide.wanted[i] -= guide.border[row + 1, i] * out[row + 1]
    for i in range(size):
        guide.found[i] = 0.0
        for j in range(size):
            guide.found[i] += guide.inverse[i, j] * guide.wanted[j]
    product = 0.0
    for row in range(0, first_pool, 2):
        upper, lower = 0.0, 0.0
        for i in range(size):
            upper += guide.border[row, i] * guide.found[i]
            lower += guide.border[row + 1, i] * guide.found[i]
        out[row] -= guide.block[row, 0] * upper + guide.block[row, 1] * lower
        out[row + 1] -= guide.block[row + 1, 0] * upper + guide.block[row + 1, 1] * lower
        product += out[row] * rest[row] + out[row + 1] * rest[row + 1]
    for i in range(size - 1):
        out[first_pool + i] = guide.found[i]
        product += guide.found[i] * rest[first_pool + i]
    return product


@compiled_entry(_TABLES)
def solve_step(
    columns: Columns,
    weight: FloatArray,
    rise: FloatArray,
    level_weight: float,
    guide: Guide,
    right: FloatArray,
    step: FloatArray,
    tolerance: float,
    max_iterations: int,
) -> int:
    """Conjugate gradients from ``step`` to where the rest is ``tolerance`` times the right side."""
    rest, led, way, image = guide.work[0], guide.work[1], guide.work[2], guide.work[3]
    num_rows = rise.shape[0]
    enough = tolerance * tolerance * _follow(guide, right, led)
    _apply(columns, weight, rise, level_weight, guide, step, image)
    for row in range(num_rows):
        rest[row] = right[row] - image[row]
    product = _follow(guide, rest, led)
    for row in range(num_rows):
        way[row] = led[row]
    iterations = 0
    while iterations < max_iterations and product > enough:
        _apply(columns, weight, rise, level_weight, guide, way, image)
        curve = 0.0
        for row in range(num_rows):
            curve += way[row] * image[row]
        length = product / curve
        for row in range(num_rows):
            step[row] += length * way[row]
            rest[row] -= length * image[row]
        before, product = product, _follow(guide, rest, led)
        for row in range(num_rows):
            way[row] = led[row] + product / before * way[row]
        iterations += 1
    return iterations
