"""The compiled part of the interior-point method: products with the program, conjugate gradients.

Every column of the program touches one or two jobs and one pool, so the equations of a step have a
2 x 2 block for each job, a few entries between jobs that may share devices, a border of one row
per pool and one rank for the level. In the end few pairs are used, nearly without circles, so trees
of the strongest pairs are inverted exactly, with the border (Vaidya, 1991, has trees for such
matrices), and guide conjugate gradients through the rest. O(columns) per iteration.
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.pair_tables import Beside, Guide, ShareColumns
from hocket.kernels import kernel

_STRONG = 1e-2


@kernel
def use_of_rows(columns: ShareColumns, amount: FloatArray, jobs: int, rows: FloatArray) -> None:
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


@kernel
def cost_of_columns(columns: ShareColumns, dual: FloatArray, jobs: int, cost: FloatArray) -> None:
    """What every column costs at the duals of the rows, less what its progress is worth."""
    time, pools = dual[jobs:], dual[2 * jobs :]
    for c in range(cost.shape[0]):
        a, b = columns.job_a[c], columns.job_b[c]
        spent = time[a] + time[b] + columns.devices[c] * pools[columns.pool[c]]
        cost[c] = spent - columns.rate_a[c] * dual[a] - columns.rate_b[c] * dual[b]


@kernel
def _strength(columns: ShareColumns, weight: FloatArray, time: FloatArray, c: int) -> float:
    """How much of what two jobs have in the matrix lies between them, at most 1."""
    return float(weight[c] * weight[c] / (time[columns.job_a[c]] * time[columns.job_b[c]]))


@kernel
def _strongest(
    columns: ShareColumns,
    weight: FloatArray,
    beside: Beside,
    guide: Guide,
    time: FloatArray,
    one: int,
) -> int:
    """The column with the partner that has most in common with a job and has no place yet."""
    best, chosen = 0.0, -1
    for at in range(beside.ptr[one], beside.ptr[one + 1]):
        c, other = beside.column[at], beside.other[at]
        if guide.place[other] < 0 and other != one:
            strength = _strength(columns, weight, time, c)
            if strength > best:
                best, chosen = strength, at
    return chosen


@kernel
def _plant(columns: ShareColumns, weight: FloatArray, beside: Beside, guide: Guide) -> None:
    """An order of the jobs and a later partner for each: the trees that are inverted exactly.

    Jobs that are strongly bound to one other job only go first, as leaves, again and again.
    """
    jobs = guide.block.shape[0]
    time, bonds = guide.work[0], guide.work[1]
    for one in range(jobs):
        time[one] = guide.diagonal[jobs + one]
        guide.place[one] = -1
    for c in range(weight.shape[0]):
        time[columns.job_a[c]] += weight[c]
        if columns.job_b[c] < jobs:
            time[columns.job_b[c]] += weight[c]
    head = tail = 0
    for one in range(jobs):
        bonds[one] = 0.0
        for at in range(beside.ptr[one], beside.ptr[one + 1]):
            if _strength(columns, weight, time, beside.column[at]) > _STRONG:
                bonds[one] += 1.0
        if bonds[one] <= 1.0:
            guide.order[tail] = one
            tail += 1
    scan = 0
    # Leaves wait in the order itself; where none is left, the next job in line is taken.
    while head < jobs:
        if head == tail:
            while guide.place[scan] >= 0 or bonds[scan] <= 1.0:
                scan += 1
            bonds[scan] = 0.0
            guide.order[tail] = scan
            tail += 1
        one = guide.order[head]
        guide.place[one] = head
        head += 1
        chosen = _strongest(columns, weight, beside, guide, time, one)
        guide.parent[one] = beside.other[chosen] if chosen >= 0 else jobs
        for at in range(beside.ptr[one], beside.ptr[one + 1]):
            other = beside.other[at]
            if bonds[other] > 1.0 and _strength(columns, weight, time, beside.column[at]) > _STRONG:
                bonds[other] -= 1.0
                if bonds[other] <= 1.0:
                    guide.order[tail] = other
                    tail += 1
    for row in range(2 * jobs):
        time[row] = 0.0
        bonds[row] = 0.0


@kernel
def set_guide(
    columns: ShareColumns, weight: FloatArray, rise: FloatArray, beside: Beside, guide: Guide
) -> None:
    """The trees of jobs and their border with pools and the level, inverted.

    ``guide.diagonal`` is given; ``guide.corner`` comes back as the matrix that is to be inverted.
    A column of two jobs that are not neighbours in a tree counts twice in their blocks: leaving out
    what it has between them would otherwise leave something that is no longer positive.
    """
    jobs, last = guide.block.shape[0], guide.corner.shape[0] - 1
    _plant(columns, weight, beside, guide)
    guide.border[:, :] = 0.0
    guide.corner[:, :] = 0.0
    guide.edge[:, :] = 0.0
    for one in range(jobs):
        guide.block[one, 0] = guide.diagonal[one]
        guide.block[one, 1] = 0.0
        guide.block[one, 2] = guide.diagonal[jobs + one]
        guide.border[last, one] = rise[one]
    for pool in range(last):
        guide.corner[pool, pool] = guide.diagonal[2 * jobs + pool]
    for c in range(weight.shape[0]):
        _count_column(columns, c, weight[c], guide, jobs)
    for at in range(jobs):
        _grow(guide, guide.order[at], jobs)
    for i in range(last + 1):
        _climb_trees(guide, guide.border[i], guide.inner[i])
    for i in range(last + 1):
        for j in range(last + 1):
            for row in range(2 * jobs):
                guide.corner[i, j] -= guide.border[i, row] * guide.inner[j, row]


@kernel
def _count_column(columns: ShareColumns, c: int, d: float, guide: Guide, jobs: int) -> None:
    a, b, devices, pool = columns.job_a[c], columns.job_b[c], columns.devices[c], columns.pool[c]
    rate_a, rate_b = columns.rate_a[c], columns.rate_b[c]
    guide.corner[pool, pool] += d * devices * devices
    times = 1.0
    if b < jobs:
        child, rate_child, rate_parent = a, rate_a, rate_b
        if guide.parent[b] == a:
            child, rate_child, rate_parent = b, rate_b, rate_a
        if guide.parent[a] == b or guide.parent[b] == a:
            guide.edge[child, 0] += d * rate_child * rate_parent
            guide.edge[child, 1] -= d * rate_child
            guide.edge[child, 2] -= d * rate_parent
            guide.edge[child, 3] += d
        else:
            times = 2.0
        _count_job(guide, b, rate_b, d, devices, pool, times, jobs)
    _count_job(guide, a, rate_a, d, devices, pool, times, jobs)


@kernel
def _count_job(
    guide: Guide,
    one: int,
    rate: float,
    d: float,
    devices: float,
    pool: int,
    times: float,
    jobs: int,
) -> None:
    guide.block[one, 0] += times * d * rate * rate
    guide.block[one, 1] -= times * d * rate
    guide.block[one, 2] += times * d
    guide.border[pool, one] -= d * rate * devices
    guide.border[pool, jobs + one] += d * devices


@kernel
def _grow(guide: Guide, one: int, jobs: int) -> None:
    """Invert the block of a job, and take it out of the block of its neighbour."""
    upper, between, lower = guide.block[one, 0], guide.block[one, 1], guide.block[one, 2]
    size = upper * lower - between * between
    upper, between, lower = lower / size, -between / size, upper / size
    guide.block[one, 0] = upper
    guide.block[one, 1] = between
    guide.block[one, 2] = lower
    parent = guide.parent[one]
    if parent < jobs:
        e, f, g, h = guide.edge[one, 0], guide.edge[one, 1], guide.edge[one, 2], guide.edge[one, 3]
        guide.block[parent, 0] -= upper * e * e + 2.0 * between * e * g + lower * g * g
        guide.block[parent, 1] -= e * (upper * f + between * h) + g * (between * f + lower * h)
        guide.block[parent, 2] -= upper * f * f + 2.0 * between * f * h + lower * h * h


@kernel
def _climb_trees(guide: Guide, rest: FloatArray, out: FloatArray) -> None:
    """The trees' inverse times ``rest``: from the leaves to the roots and back."""
    jobs = guide.block.shape[0]
    for row in range(2 * jobs):
        out[row] = rest[row]
    for at in range(jobs):
        one = guide.order[at]
        upper, lower = out[one], out[jobs + one]
        above = guide.block[one, 0] * upper + guide.block[one, 1] * lower
        below = guide.block[one, 1] * upper + guide.block[one, 2] * lower
        out[one] = above
        out[jobs + one] = below
        parent = guide.parent[one]
        if parent < jobs:
            out[parent] -= guide.edge[one, 0] * above + guide.edge[one, 2] * below
            out[jobs + parent] -= guide.edge[one, 1] * above + guide.edge[one, 3] * below
    for at in range(jobs - 1, -1, -1):
        one = guide.order[at]
        parent = guide.parent[one]
        if parent < jobs:
            upper = guide.edge[one, 0] * out[parent] + guide.edge[one, 1] * out[jobs + parent]
            lower = guide.edge[one, 2] * out[parent] + guide.edge[one, 3] * out[jobs + parent]
            out[one] -= guide.block[one, 0] * upper + guide.block[one, 1] * lower
            out[jobs + one] -= guide.block[one, 1] * upper + guide.block[one, 2] * lower


@kernel
def _apply(
    columns: ShareColumns,
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


@kernel
def _follow(guide: Guide, rest: FloatArray, out: FloatArray) -> float:
    """What the guide makes of a rest, into ``out``; returns the product of the two."""
    jobs, size = guide.block.shape[0], guide.corner.shape[0]
    _climb_trees(guide, rest, out)
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
