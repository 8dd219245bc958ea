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
def use_of_rows(columns: Columns, amount: FloatArray, jobs: int, rows: FloatArray) -> None:
    """What amounts of columns use of every row: minus progress, time, devices."""
    rows[:] = 0.0
    time, pools = rows[jobs:], rows[2 * jobs :]
    for c in range(amount.shape[0]):
        a, b, x = columns.job_a[c], columns.job_b[c], amount[c]
        rows[a] -= columns.rate_a[c] * x
        rows[b] -= columns.rate_b[c] * x
        time[a] += x
        time[b] += x
        pools[columns.pool[c]] += columns.devices[c] * x


@compiled_entry(_TABLES)
def cost_of_columns(columns: Columns, dual: FloatArray, jobs: int, cost: FloatArray) -> None:
    """What every column costs at the duals of the rows, less what its progress is worth."""
    time, pools = dual[jobs:], dual[2 * jobs :]
    for c in range(cost.shape[0]):
        a, b = columns.job_a[c], columns.job_b[c]
        spent = time[a] + time[b] + columns.devices[c] * pools[columns.pool[c]]
        cost[c] = spent - columns.rate_a[c] * dual[a] - columns.rate_b[c] * dual[b]


@compiled_entry(_TABLES)
def set_guide(columns: Columns, weight: FloatArray, rise: FloatArray, guide: Guide) -> None:
    """The blocks of jobs and their border with pools and the level, blocks inverted.

    ``guide.diagonal`` is given; ``guide.corner`` comes back as the matrix that is to be inverted.
    A column of two jobs counts twice in their blocks: leaving out what it has between them would
    otherwise leave something that is no longer positive.
    """
    jobs, last = guide.block.shape[0], guide.corner.shape[0] - 1
    guide.border[:, :, :] = 0.0
    guide.corner[:, :] = 0.0
    for one in range(jobs):
        guide.block[one, 0] = guide.diagonal[one]
        guide.block[one, 1] = 0.0
        guide.block[one, 2] = guide.diagonal[jobs + one]
        guide.border[one, 0, last] = rise[one]
    for pool in range(last):
        guide.corner[pool, pool] = guide.diagonal[2 * jobs + pool]
    for c in range(weight.shape[0]):
        d, devices, pool = weight[c], columns.devices[c], columns.pool[c]
        is_pair = columns.job_b[c] < jobs
        guide.corner[pool, pool] += d * devices * devices
        times = 2.0 if is_pair else 1.0
        _count_job(guide, columns.job_a[c], columns.rate_a[c], d, devices, pool, times)
        if is_pair:
            _count_job(guide, columns.job_b[c], columns.rate_b[c], d, devices, pool, times)
    for one in range(jobs):
        _invert_block(guide, one)
        for i in range(last + 1):
            upper, lower = guide.border[one, 0, i], guide.border[one, 1, i]
            above = guide.block[one, 0] * upper + guide.block[one, 1] * lower
            below = guide.block[one, 1] * upper + guide.block[one, 2] * lower
            for j in range(last + 1):
                guide.corner[j, i] -= guide.border[one, 0, j] * above
                guide.corner[j, i] -= guide.border[one, 1, j] * below


@compiled
def _count_job(
    guide: Guide, one: int, rate: float, d: float, devices: float, pool: int, times: float
) -> None:
    guide.block[one, 0] += times * d * rate * rate
    guide.block[one, 1] -= times * d * rate
    guide.block[one, 2] += times * d
    guide.border[one, 0, pool] -= d * rate * devices
    guide.border[one, 1, pool] += d * devices


@compiled
def _invert_block(guide: Guide, one: int) -> None:
    upper, between, lower = guide.block[one, 0], guide.block[one, 1], guide.block[one, 2]
    size = upper * lower - between * between
    guide.block[one, 0] = lower / size
    guide.block[one, 1] = -between / size
    guide.block[one, 2] = upper / size


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
    """The matrix of a step times ``w``; rows of nobody are 0 in ``w`` and of no use in ``out``."""
    num_rows, jobs = rise.shape[0], guide.block.shape[0]
    raised = 0.0
    for row in range(jobs):
        raised += rise[row] * w[row]
    raised *= level_weight
    for row in range(num_rows):
        out[row] = guide.diagonal[row] * w[row] + raised * rise[row]
    time, pools = w[jobs:], w[2 * jobs :]
    out_time, out_pools = out[jobs:], out[2 * jobs :]
    for c in range(weight.shape[0]):
        a, b, pool = columns.job_a[c], columns.job_b[c], columns.pool[c]
        rate_a, rate_b, devices = columns.rate_a[c], columns.rate_b[c], columns.devices[c]
        q = time[a] + time[b] + devices * pools[pool] - rate_a * w[a] - rate_b * w[b]
        q *= weight[c]
        out[a] -= rate_a * q
        out_time[a] += q
        out[b] -= rate_b * q
        out_time[b] += q
        out_pools[pool] += devices * q


@compiled
def _follow(guide: Guide, rest: FloatArray, out: FloatArray) -> float:
    """What the guide makes of a rest, into ``out``; returns the product of the two."""
    jobs, size = guide.block.shape[0], guide.corner.shape[0]
    for i in range(size):
        guide.wanted[i] = rest[2 * jobs + i] if i < size - 1 else 0.0
    for one in range(jobs):
        upper, lower = rest[one], rest[jobs + one]
        above = guide.block[one, 0] * upper + guide.block[one, 1] * lower
        below = guide.block[one, 1] * upper + guide.block[one, 2] * lower
        for i in range(size):
            guide.wanted[i] -= guide.border[one, 0, i] * above + guide.border[one, 1, i] * below
        out[one] = above
        out[jobs + one] = below
    for i in range(size):
        guide.found[i] = 0.0
        for j in range(size):
            guide.found[i] += guide.inverse[i, j] * guide.wanted[j]
    product = 0.0
    for one in range(jobs):
        upper, lower = 0.0, 0.0
        for i in range(size):
            upper += guide.border[one, 0, i] * guide.found[i]
            lower += guide.border[one, 1, i] * guide.found[i]
        out[one] -= guide.block[one, 0] * upper + guide.block[one, 1] * lower
        out[jobs + one] -= guide.block[one, 1] * upper + guide.block[one, 2] * lower
        product += out[one] * rest[one] + out[jobs + one] * rest[jobs + one]
    for i in range(size - 1):
        out[2 * jobs + i] = guide.found[i]
        product += guide.found[i] * rest[2 * jobs + i]
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
