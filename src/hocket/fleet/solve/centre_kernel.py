"""The compiled part of central max-min: a homogeneous path with a step ahead and a correction.

Beside columns and rows there are two numbers, a scale that all answers are divided by and the gap
of the scaled objective, so that the path may start anywhere (Andersen, Roos and Terlaky, 2003).
Equations of a step are solved by class, with ``kinds + 2`` unknowns, and then for the level and the
duals of devices, which all classes have in common.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.centre import CentreProgram, Path
from hocket.kernels import kernel

_MAX_STEPS = 60
_EXACT = 1e-8
_LEAST_CENTRING = 1e-4
_NEAREST, _LONGEST = 0.99, 0.999
"""Longest step, as a part of the distance to the boundary, and of the full step."""
_AT, _UNPAID, _TO, _ONCE, _AHEAD = 0, 1, 2, 3, 4
"""Uses of columns: the point, what costs lack, what is wanted, steps of the scale and the rest."""
_LEFT, _DUAL, _LACKING, _RATIO, _WANTED, _GOAL = 0, 1, 2, 3, 4, 5
_DUAL_ONCE, _DUAL_AHEAD, _LEFT_AHEAD = 6, 7, 8
"""Uses of rows: what is left, its dual, what limits lack, their ratio, right sides, steps."""


@kernel
def follow_path(program: CentreProgram, path: Path) -> tuple[float, float]:
    """Columns at the end of the path are in ``by_column[0]``; returns their scale, and what no
    level can exceed."""
    column, row = path.by_column, path.by_row
    _start(program, path)
    scale, rest, num_rows = 1.0, 1.0, 0.0
    for at in range(row.shape[1]):
        num_rows += program.num_rows_alike[at]
    far = more = less = 0.0
    before = np.inf
    for _ in range(_MAX_STEPS):
        lack = _measure(program, path, scale, rest)
        gap = _dot(program.num_rows_alike, row[_LEFT], row[_DUAL])
        middle = (gap + scale * rest) / (num_rows + 1.0)
        worst = max(_largest(row[_LACKING]), _largest(column[_UNPAID]))
        is_close = gap <= _EXACT * scale * scale
        if is_close and worst <= _EXACT * scale:
            break
        if is_close and worst >= before:
            # Rounding takes more than steps gain from here on.
            _move(path, -far)
            scale -= far * more
            break
        before = worst
        for at in range(row.shape[1]):
            row[_RATIO, at] = row[_LEFT, at] / row[_DUAL, at]
            row[_WANTED, at] = program.limit[at]
            row[_GOAL, at] = -row[_LEFT, at] * row[_DUAL, at]
        for at in range(column.shape[1]):
            column[_TO, at] = 0.0
        column[_TO, -1] = program.reward
        _invert_classes(program, path)
        _solve(program, path, _ONCE, _DUAL_ONCE)
        more, less = _step(program, path, 1.0, scale, rest, lack, -scale * rest)
        ahead = min(1.0, _reach(path, scale, rest, more, less))
        centring = max((1.0 - ahead) ** 3, _LEAST_CENTRING)
        for at in range(row.shape[1]):
            row[_GOAL, at] += centring * middle - row[_LEFT_AHEAD, at] * row[_DUAL_AHEAD, at]
        goal = centring * middle - scale * rest - more * less
        more, less = _step(program, path, 1.0 - centring, scale, rest, lack, goal)
        far = min(_NEAREST * _reach(path, scale, rest, more, less), _LONGEST)
        # Equations that cannot be solved any more lead nowhere.
        if not (far > 0.0 and abs(more) < np.inf):
            break
        _move(path, far)
        scale, rest = scale + far * more, rest + far * less
    return scale, _dot(program.num_rows_alike, program.limit, row[_DUAL]) / scale


@kernel
def _start(program: CentreProgram, path: Path) -> None:
    """The columns that keep all limits best in squares, the shortest duals, both moved inside."""
    column, row = path.by_column, path.by_row
    for at in range(row.shape[1]):
        row[_RATIO, at] = 1.0
        row[_WANTED, at] = program.limit[at]
    for at in range(column.shape[1]):
        column[_TO, at] = 0.0
    _invert_classes(program, path)
    _solve(program, path, _AT, _LEFT)
    for at in range(row.shape[1]):
        row[_LEFT, at] = -row[_LEFT, at]
        row[_WANTED, at] = 0.0
    column[_TO, -1] = program.reward
    _solve(program, path, _ONCE, _DUAL)
    for use in (_LEFT, _DUAL):
        lowest = np.inf
        for at in range(row.shape[1]):
            lowest = min(lowest, row[use, at])
        # Rounding must not decide on which side of the border it starts.
        if lowest <= _EXACT:
            for at in range(row.shape[1]):
                row[use, at] += 1.0 - lowest


@kernel
def _measure(program: CentreProgram, path: Path, scale: float, rest: float) -> float:
    """Compute the residuals of columns and rows; returns that of the objective."""
    column, row = path.by_column, path.by_row
    _use(program, column[_AT], row[_LACKING])
    for at in range(row.shape[1]):
        row[_LACKING, at] += row[_LEFT, at] - program.limit[at] * scale
    _pay(program, row[_DUAL], column[_UNPAID])
    for at in range(column.shape[1]):
        column[_UNPAID, at] = -column[_UNPAID, at]
    column[_UNPAID, -1] += program.reward * scale
    bound = _dot(program.num_rows_alike, program.limit, row[_DUAL])
    return float(rest - program.reward * column[_AT, -1] + bound)


@kernel
def _step(
    program: CentreProgram,
    path: Path,
    part: float,
    scale: float,
    rest: float,
    lack: float,
    goal: float,
) -> tuple[float, float]:
    """A step that makes up a part of what lacks, to products as in ``_GOAL``; returns that of the
    scale and of the rest."""
    column, row = path.by_column, path.by_row
    for at in range(column.shape[1]):
        column[_TO, at] = part * column[_UNPAID, at]
    for at in range(row.shape[1]):
        row[_WANTED, at] = -part * row[_LACKING, at] - row[_GOAL, at] / row[_DUAL, at]
    _solve(program, path, _AHEAD, _DUAL_AHEAD)
    alike, limit = program.num_rows_alike, program.limit
    gained = part * lack + goal / scale - program.reward * column[_AHEAD, -1]
    gained += _dot(alike, limit, row[_DUAL_AHEAD])
    lost = rest / scale + program.reward * column[_ONCE, -1]
    lost -= _dot(alike, limit, row[_DUAL_ONCE])
    more = gained / lost
    for at in range(column.shape[1]):
        column[_AHEAD, at] += more * column[_ONCE, at]
    for at in range(row.shape[1]):
        row[_DUAL_AHEAD, at] += more * row[_DUAL_ONCE, at]
        left = row[_GOAL, at] - row[_LEFT, at] * row[_DUAL_AHEAD, at]
        row[_LEFT_AHEAD, at] = left / row[_DUAL, at]
    return more, (goal - rest * more) / scale


@kernel
def _reach(path: Path, scale: float, rest: float, more: float, less: float) -> float:
    """Step length that keeps everything positive."""
    row = path.by_row
    far = 1e9
    if more < 0.0:
        far = min(far, -scale / more)
    if less < 0.0:
        far = min(far, -rest / less)
    for at in range(row.shape[1]):
        if row[_LEFT_AHEAD, at] < 0.0:
            far = min(far, -row[_LEFT, at] / row[_LEFT_AHEAD, at])
        if row[_DUAL_AHEAD, at] < 0.0:
            far = min(far, -row[_DUAL, at] / row[_DUAL_AHEAD, at])
    return far


@kernel
def _move(path: Path, far: float) -> None:
    """Go so much of the step ahead."""
    column, row = path.by_column, path.by_row
    for at in range(column.shape[1]):
        column[_AT, at] += far * column[_AHEAD, at]
    for at in range(row.shape[1]):
        row[_LEFT, at] += far * row[_LEFT_AHEAD, at]
        row[_DUAL, at] += far * row[_DUAL_AHEAD, at]


@kernel
def _dot(weight: FloatArray, one: FloatArray, other: FloatArray) -> float:
    total = 0.0
    for at in range(one.shape[0]):
        total += weight[at] * one[at] * other[at]
    return total


@kernel
def _largest(values: FloatArray) -> float:
    largest = 0.0
    for at in range(values.shape[0]):
        largest = max(largest, abs(values[at]))
    return largest


@kernel
def _use(program: CentreProgram, column: FloatArray, row: FloatArray) -> None:
    """Use of every row by the columns."""
    num_classes, num_kinds = program.least.shape
    progress = num_classes * num_kinds
    time, devices = progress + num_classes, progress + 2 * num_classes
    for j in range(num_kinds):
        row[devices + j] = 0.0
    for a in range(num_classes):
        row[progress + a], row[time + a] = program.level[a] * column[-1], 0.0
        for j in range(num_kinds):
            share = column[a * num_kinds + j]
            row[a * num_kinds + j] = program.least[a, j] * share
            row[progress + a] += program.progress[a, j] * share
            row[time + a] += program.time[a, j] * share
            row[devices + j] += program.num_alike[a] * program.devices[a, j] * share


@kernel
def _pay(program: CentreProgram, dual: FloatArray, column: FloatArray) -> None:
    """Cost of every column at the duals of the rows."""
    num_classes, num_kinds = program.least.shape
    progress = num_classes * num_kinds
    time, devices = progress + num_classes, progress + 2 * num_classes
    column[-1] = 0.0
    for a in range(num_classes):
        column[-1] += program.num_alike[a] * program.level[a] * dual[progress + a]
        for j in range(num_kinds):
            at = a * num_kinds + j
            column[at] = program.least[a, j] * dual[at]
            column[at] += program.progress[a, j] * dual[progress + a]
            column[at] += program.time[a, j] * dual[time + a]
            column[at] += program.devices[a, j] * dual[devices + j]


@kernel
def _invert_classes(program: CentreProgram, path: Path) -> None:
    """Inverses of the equations of every class, for the ratios of the moment."""
    num_classes, num_kinds = program.least.shape
    size = num_kinds + 2
    for a in range(num_classes):
        _set_class(program, path, a)
        _eliminate(path.block, size, size)
        for line in range(size):
            for right in range(size):
                path.inverse[a, line, right] = path.block[line, size + right]


@kernel
def _set_class(program: CentreProgram, path: Path, a: int) -> None:
    """Shares and duals of a class, beside ones on the diagonal."""
    num_classes, num_kinds = program.least.shape
    block, ratio = path.block, path.by_row[_RATIO]
    size, progress = num_kinds + 2, num_classes * num_kinds + a
    for line in range(size):
        for right in range(2 * size):
            block[line, right] = 0.0
        block[line, size + line] = 1.0
    for j in range(num_kinds):
        least = program.least[a, j]
        block[j, j] = least * least / ratio[a * num_kinds + j]
        block[j, num_kinds] = block[num_kinds, j] = program.progress[a, j]
        block[j, num_kinds + 1] = block[num_kinds + 1, j] = program.time[a, j]
    block[num_kinds, num_kinds] = -ratio[progress]
    block[num_kinds + 1, num_kinds + 1] = -ratio[progress + num_classes]


@kernel
def _solve(program: CentreProgram, path: Path, to_column: int, to_row: int) -> None:
    """Columns and duals at which columns cost what ``_TO`` wants, and take what ``_WANTED`` does
    and ``_RATIO`` times the dual."""
    num_classes, num_kinds = program.least.shape
    column, dual, inverse = path.by_column[to_column], path.by_row[to_row], path.inverse
    ratio, wanted = path.by_row[_RATIO], path.by_row[_WANTED]
    progress = num_classes * num_kinds
    devices, block = progress + 2 * num_classes, path.block
    _solve_classes(program, path, column, dual)
    _set_common(program, path, column, dual)
    _eliminate(block, num_kinds + 1, 1)
    for j in range(num_kinds):
        dual[devices + j] = block[j, num_kinds + 1]
    column[-1] = block[num_kinds, num_kinds + 1]
    for a in range(num_classes):
        for line in range(num_kinds + 2):
            change = inverse[a, line, num_kinds] * program.level[a] * column[-1]
            for j in range(num_kinds):
                change += inverse[a, line, j] * program.devices[a, j] * dual[devices + j]
            if line < num_kinds:
                at = a * num_kinds + line
                column[at] -= change
                dual[at] = (program.least[a, line] * column[at] - wanted[at]) / ratio[at]
            else:
                dual[progress + (line - num_kinds) * num_classes + a] -= change


@kernel
def _solve_classes(
    program: CentreProgram, path: Path, column: FloatArray, dual: FloatArray
) -> None:
    """Shares and duals of every class as if the level and all duals of devices were 0."""
    num_classes, num_kinds = program.least.shape
    ratio, wanted, progress = path.by_row[_RATIO], path.by_row[_WANTED], num_classes * num_kinds
    for a in range(num_classes):
        for line in range(num_kinds + 2):
            value = 0.0
            for j in range(num_kinds):
                at = a * num_kinds + j
                right = path.by_column[_TO, at] + program.least[a, j] * wanted[at] / ratio[at]
                value += path.inverse[a, line, j] * right
            value += path.inverse[a, line, num_kinds] * wanted[progress + a]
            value += path.inverse[a, line, num_kinds + 1] * wanted[progress + num_classes + a]
            if line < num_kinds:
                column[a * num_kinds + line] = value
            else:
                dual[progress + (line - num_kinds) * num_classes + a] = value


@kernel
def _set_common(program: CentreProgram, path: Path, column: FloatArray, dual: FloatArray) -> None:
    """Use of every type by all classes, and the cost of the level."""
    num_classes, num_kinds = program.least.shape
    block, inverse, right = path.block, path.inverse, num_kinds + 1
    devices, progress = num_classes * (num_kinds + 2), num_classes * num_kinds
    for line in range(num_kinds + 1):
        for other in range(num_kinds + 2):
            block[line, other] = 0.0
    for j in range(num_kinds):
        block[j, j] = -path.by_row[_RATIO, devices + j]
        block[j, right] = path.by_row[_WANTED, devices + j]
    block[num_kinds, right] = path.by_column[_TO, -1]
    for a in range(num_classes):
        for line in range(num_kinds + 1):
            is_share = line < num_kinds
            factor = program.devices[a, line] if is_share else program.level[a]
            alone = column[a * num_kinds + line] if is_share else dual[progress + a]
            weight = program.num_alike[a] * factor
            for j in range(num_kinds):
                block[line, j] -= weight * inverse[a, line, j] * program.devices[a, j]
            block[line, num_kinds] -= weight * inverse[a, line, num_kinds] * program.level[a]
            block[line, right] -= weight * alone


@kernel
def _eliminate(block: FloatArray, size: int, num_right: int) -> None:
    """Solve by Gauss's method; answers stand where the right sides stood."""
    stop = size + num_right
    for at in range(size):
        best = at
        for line in range(at + 1, size):
            if abs(block[line, at]) > abs(block[best, at]):
                best = line
        if best != at:
            for right in range(at, stop):
                block[at, right], block[best, right] = block[best, right], block[at, right]
        pivot = block[at, at]
        for right in range(at, stop):
            block[at, right] /= pivot
        for line in range(size):
            factor = block[line, at]
            if line != at and factor != 0.0:
                for right in range(at, stop):
                    block[line, right] -= factor * block[at, right]
