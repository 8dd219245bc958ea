"""The compiled part of the interior-point method: products with the program, conjugate gradients.

Every column of the program touches one or two jobs and one pool, so the equations of a step have a
2 x 2 block for each job, a few entries between jobs that may share devices, a border of one row
per pool and one rank for the level. The blocks and the border are inverted exactly and precondition
conjugate gradients for the rest. O(columns) per iteration.
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.pair_tables import Preconditioner, ShareColumns
from hocket.kernels import kernel


@kernel
def use_of_rows(columns: ShareColumns, amount: FloatArray, jobs: int, rows: FloatArray) -> None:
    """Use of every row by amounts of columns: minus progress, time, devices."""
    rows[:] = 0.0
    time, pools = rows[jobs:], rows[2 * jobs :]
    for c in range(amount.shape[0]):
        a, b, x = columns.job_a[c], columns.job_b[c], amount[c]
        rows[a] -= columns.rate_a[c] * x
        rows[b] -= columns.rate_b[c] * x
        time[a] += x
        time[b] += x
        pools[columns.pool[c]] += columns.devices[c] * x


@kernel
def cost_of_columns(columns: ShareColumns, dual: FloatArray, jobs: int, cost: FloatArray) -> None:
    """Reduced cost of every column: its cost at the duals less the worth of its progress."""
    time, pools = dual[jobs:], dual[2 * jobs :]
    for c in range(cost.shape[0]):
        a, b = columns.job_a[c], columns.job_b[c]
        spent = time[a] + time[b] + columns.devices[c] * pools[columns.pool[c]]
        cost[c] = spent - columns.rate_a[c] * dual[a] - columns.rate_b[c] * dual[b]


@kernel
def set_guide(
    columns: ShareColumns, weight: FloatArray, rise: FloatArray, guide: Preconditioner
) -> None:
    """The inverted blocks of jobs, and their border with pools and the level.

    ``guide.diagonal`` is given; ``guide.corner`` comes back as the matrix that is to be inverted.
    A column of two jobs counts twice in their blocks: leaving out what it has between them would
    otherwise leave something that is no longer positive.
    """
    jobs, last = guide.block.shape[0], guide.corner.shape[0] - 1
    guide.border[:, :] = 0.0
    guide.corner[:, :] = 0.0
    for one in range(jobs):
        guide.block[one, 0] = guide.diagonal[one]
        guide.block[one, 1] = 0.0
        guide.block[one, 2] = guide.diagonal[jobs + one]
        guide.border[last, one] = rise[one]
    for pool in range(last):
        guide.corner[pool, pool] = guide.diagonal[2 * jobs + pool]
    for c in range(weight.shape[0]):
        devices, pool, d = columns.devices[c], columns.pool[c], weight[c]
        guide.corner[pool, pool] += d * devices * devices
        times = 2.0 if columns.job_b[c] < jobs else 1.0
        for place in range(2):
            one = columns.job_b[c] if place else columns.job_a[c]
            rate = columns.rate_b[c] if place else columns.rate_a[c]
            if one < jobs:
                guide.block[one, 0] += times * d * rate * rate
                guide.block[one, 1] -= times * d * rate
                guide.block[one, 2] += times * d
                guide.border[pool, one] -= d * rate * devices
                guide.border[pool, jobs + one] += d * devices
    for one in range(jobs):
        upper, between, lower = guide.block[one, 0], guide.block[one, 1], guide.block[one, 2]
        size = upper * lower - between * between
        guide.block[one, 0] = lower / size
        guide.block[one, 1] = -between / size
        guide.block[one, 2] = upper / size
    for i in range(last + 1):
        _apply_blocks(guide, guide.border[i], guide.inner[i])
    for i in range(last + 1):
        for j in range(last + 1):
            for row in range(2 * jobs):
                guide.corner[i, j] -= guide.border[i, row] * guide.inner[j, row]


@kernel
def _apply_blocks(guide: Preconditioner, rest: FloatArray, out: FloatArray) -> None:
    """The inverse of the blocks times ``rest``."""
    jobs = guide.block.shape[0]
    for one in range(jobs):
        upper, lower = rest[one], rest[jobs + one]
        out[one] = guide.block[one, 0] * upper + guide.block[one, 1] * lower
        out[jobs + one] = guide.block[one, 1] * upper + guide.block[one, 2] * lower


@kernel
def _apply(
    columns: ShareColumns,
    weight: FloatArray,
    rise: FloatArray,
    level_weight: float,
    guide: Preconditioner,
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


@kernel
def _follow(guide: Preconditioner, rest: FloatArray, out: FloatArray) -> float:
    """Apply the preconditioner to a residual, into ``out``; returns the product of the two."""
    jobs, size = guide.block.shape[0], guide.corner.shape[0]
    _apply_blocks(guide, rest, out)
    for i in range(size):
        wanted = rest[2 * jobs + i] if i < size - 1 else 0.0
        for row in range(2 * jobs):
            wanted -= guide.border[i, row] * out[row]
        guide.wanted[i] = wanted
    product = 0.0
    for i in range(size):
        found = 0.0
        for j in range(size):
            found += guide.inverse[i, j] * guide.wanted[j]
        for row in range(2 * jobs):
            out[row] -= found * guide.inner[i, row]
        if i < size - 1:
            out[2 * jobs + i] = found
            product += found * rest[2 * jobs + i]
    for row in range(2 * jobs):
        product += out[row] * rest[row]
    return product


@kernel
def solve_step(
    columns: ShareColumns,
    weight: FloatArray,
    rise: FloatArray,
    level_weight: float,
    guide: Preconditioner,
    right: FloatArray,
    step: FloatArray,
    tolerance: float,
    max_iterations: int,
) -> int:
    """Conjugate gradients from ``step`` to where the rest is ``tolerance`` times the right side."""
    rest, led, direction, image = guide.work[0], guide.work[1], guide.work[2], guide.work[3]
    num_rows = rise.shape[0]
    enough = tolerance * tolerance * _follow(guide, right, led)
    _apply(columns, weight, rise, level_weight, guide, step, image)
    for row in range(num_rows):
        rest[row] = right[row] - image[row]
    product = _follow(guide, rest, led)
    for row in range(num_rows):
        direction[row] = led[row]
    iterations = 0
    while iterations < max_iterations and product > enough:
        _apply(columns, weight, rise, level_weight, guide, direction, image)
        curve = 0.0
        for row in range(num_rows):
            curve += direction[row] * image[row]
        length = product / curve
        for row in range(num_rows):
            step[row] += length * direction[row]
            rest[row] -= length * image[row]
        before, product = product, _follow(guide, rest, led)
        for row in range(num_rows):
            direction[row] = led[row] + product / before * direction[row]
        iterations += 1
    return iterations
