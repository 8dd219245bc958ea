"""Cut the iteration space into tiles with balanced numbers of iterations.

The space is a grid of row blocks and column blocks: of the outer and inner loop, or of the values
of two keys. 1-D: each worker has its own row blocks or column blocks. Rotation (Gemulla et al.
2011): every column block moves from worker to worker, so that in each step no two workers share
one. Wavefront: row blocks are assigned to the workers round-robin, and a tile waits for the tile
above it. Rows are cut at exact cumulative counts. O(iterations + keys).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.loops.legal import Shape
from hocket.loops.space import Space

MAX_BLOCKS_PER_WORKER = 8
"""Maximum number of row blocks per worker in a skewed wavefront; low blocks start sooner."""
MIN_TILE = 8192
"""Minimum number of iterations of a wavefront's tile, so that waiting for other tiles costs little.
"""


@dataclass(frozen=True)
class Tile:
    """Work of one worker in one step; it waits for the tiles ``after``."""

    worker: int
    step: int
    bounds: tuple[int, ...]
    num_iterations: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class TileCosts:
    """Times that make up a pass; the defaults count everything in iterations."""

    iteration_s: float = 1.0
    start_s: float = 0.0
    """Time to start a tile on a worker."""
    handed_s: float = 0.0
    """Time to move rows to a tile from each tile for which it waits."""
    exchange_s: float = 0.0
    """Time to add up the workers' replicas."""
    has_barriers: bool = False
    """True if all workers exchange their replicas after every step."""


@dataclass(frozen=True)
class Tiling:
    """All tiles, in a serial order that gives the same result; iterations by range or by list."""

    tiles: tuple[Tile, ...]
    num_workers: int
    order: tuple[LongArray, ...] = ()
    """For tiles over lists: the values of the loop variables, ordered by tile."""
    skew: int = 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the schedule."""
        return 1 + max((tile.step for tile in self.tiles), default=0)

    @property
    def num_iterations(self) -> int:
        """Number of iterations of all tiles; ranges of one loop include those of inner loops."""
        return sum(tile.num_iterations for tile in self.tiles)

    def spans(self, costs: TileCosts) -> list[tuple[float, float]]:
        """Start and end of every tile if each worker runs its tiles in order."""
        found: list[tuple[float, float]] = []
        free = [0.0] * self.num_workers
        step = 0
        for tile in self.tiles:
            if costs.has_barriers and tile.step != step:
                step, free = tile.step, [max(free) + costs.exchange_s] * self.num_workers
            ready = [found[other][1] + costs.handed_s for other in tile.after]
            start = max([free[tile.worker], *ready])
            start_s = costs.start_s if tile.num_iterations else 0.0
            end = start + start_s + tile.num_iterations * costs.iteration_s
            found.append((start, end))
            free[tile.worker] = end
        return found

    @property
    def imbalance(self) -> float:
        """Schedule length divided by that of perfectly balanced work, in iterations."""
        total = self.num_iterations
        longest = max((end for _, end in self.spans(TileCosts())), default=0.0)
        return longest * self.num_workers / total if total else 1.0


def balanced_cuts(ends: LongArray, num_parts: int) -> LongArray:
    """Positions that cut weights with the cumulative sums ``ends`` into nearly equal parts."""
    targets = ends[-1] * np.arange(num_parts + 1, dtype=np.float64) / num_parts
    after = np.searchsorted(ends, targets, side="left")
    # A cut moves to the nearer side of the value that it would split.
    before = np.maximum(after - 1, 0)
    cuts = np.where(targets - ends[before] < ends[after] - targets, before, after)
    # Rounding must not move the first or the last position.
    cuts[0], cuts[-1] = 0, len(ends) - 1
    found: LongArray = cuts.astype(np.int64)
    return found


def parts_of(keys: LongArray, num_parts: int) -> LongArray:
    """Part of every iteration: equal keys are in one part, and parts have nearly equal counts."""
    low = int(keys.min(initial=0))
    if int(keys.max(initial=0)) - low <= 4 * len(keys) + 1024:
        place = keys - low  # counting is faster than sorting
        counts = np.bincount(place)
    else:
        _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    cuts = balanced_cuts(pointers(counts), num_parts)
    return np.searchsorted(cuts[1:-1], place, side="right").astype(np.int64)


def tiling_of(space: Space, shape: Shape, num_workers: int, num_steps: int = 1) -> Tiling:
    """Cut a space for a shape; ``num_steps`` > 1 splits the work of buffered one-step schedules."""
    if shape.is_listed:
        return _listed(space, shape, num_workers, num_steps)
    is_nest = space.reading.depth == 2
    weights = space.inner_lengths if is_nest else space.trip_counts
    ends = None if weights is None else pointers(weights)
    num_rows, num_columns = _grid_size(space, shape, num_workers, num_steps)
    if ends is None:
        # Listing equal weights would take longer than the iterations themselves if these are short.
        rows = (2 * len(space.outer) * np.arange(num_rows + 1) + num_rows) // (2 * num_rows)
    else:
        rows = balanced_cuts(ends, num_rows)
    cuts = [0]
    if is_nest:
        low, high = _inner_span(space, shape.skew)
        num_columns = max(min(num_columns, high - low), 1) if _is_wavefront(shape) else num_columns
        cuts = [low + (high - low) * part // num_columns for part in range(num_columns + 1)]
        counts = _counts(space, shape.skew, rows, cuts)
    else:
        counts = np.diff(rows if ends is None else ends[rows])[:, None]
    start, step = space.outer.start, space.outer.step

    def bounds_of(row: int, column: int) -> tuple[int, ...]:
        outer = start + int(rows[row]) * step, start + int(rows[row + 1]) * step
        return (*outer, *cuts[column : column + 2]) if is_nest else outer

    return Tiling(_scheduled(counts, bounds_of, shape, num_workers), num_workers, skew=shape.skew)


def _is_wavefront(shape: Shape) -> bool:
    return shape.kind in ("wavefront", "skewed")


def _grid_size(space: Space, shape: Shape, num_workers: int, num_steps: int) -> tuple[int, int]:
    """Number of row blocks and column blocks of a grid over ranges."""
    if shape.kind == "rotation":
        return num_workers, num_workers
    if not _is_wavefront(shape):
        is_outer = shape.space == space.reading.dims[0]
        return (num_workers * num_steps, 1) if is_outer else (1, num_workers)
    # Without skew, two blocks of rows per worker suffice. With skew, a block of h rows starts h
    # later, so blocks are low.
    most = num_workers * (MAX_BLOCKS_PER_WORKER if shape.skew else 2)
    # Twice as many columns as rows; tiles have MIN_TILE iterations if that leaves enough for all
    # workers.
    wanted = max(num_workers, math.isqrt(space.num_iterations // (2 * MIN_TILE)))
    wanted = -(-wanted // num_workers) * num_workers
    num_rows = max(min(wanted, most, len(space.outer)), 1)
    return num_rows, max(2 * num_rows, 4 * num_workers)


def _scheduled(
    counts: LongArray, bounds_of: Callable[[int, int], tuple[int, ...]], shape: Shape,
    num_workers: int,
) -> tuple[Tile, ...]:  # fmt: skip
    """The tiles of a grid, each with its worker, its step and the tiles that it waits for."""
    num_rows, num_columns = counts.shape
    per_worker = max(num_rows // num_workers, 1)
    is_wavefront = _is_wavefront(shape)

    def slot(row: int, column: int) -> tuple[int, int]:
        """Step and worker of a tile."""
        if shape.kind == "rotation":
            return (column - row) % num_workers, row
        if is_wavefront:
            return row + column, row % num_workers
        if num_rows == 1 and num_columns > 1 and not shape.is_listed:
            return 0, column
        # Each worker's rows follow each other, whatever the number of steps.
        return (column, row) if shape.is_listed else (row % per_worker, row // per_worker)

    cells = [(*slot(row, column), row, column) for row, column in np.ndindex(counts.shape)]
    numbers: dict[tuple[int, int], int] = {}
    tiles: list[Tile] = []
    for step, worker, row, column in sorted(cells, key=lambda cell: (cell[0], cell[2])):
        after: tuple[int, ...] = ()
        if is_wavefront and row:
            # A tile needs the tiles above it and to its left. The left one belongs to the same
            # worker, which runs its tiles in order.
            after = (numbers[row - 1, column],)
        elif shape.kind == "rotation" and step:
            # The column block arrives from the worker that had it in the previous step.
            after = (numbers[(row + 1) % num_workers, column],)
        numbers[row, column] = len(tiles)
        tiles.append(Tile(worker, step, bounds_of(row, column), int(counts[row, column]), after))
    return tuple(tiles)


def _inner_span(space: Space, skew: int) -> tuple[int, int]:
    """Least value and greatest + 1 of the skewed coordinate of the second loop.

    The coordinate increases in the loop's own direction.
    """
    first, step = _inner_firsts(space, skew)
    kept = space.inner_lengths > 0
    if not kept.any():
        return 0, 0
    last = first + (space.inner_lengths - 1) * abs(step)
    return int(first[kept].min()), int(last[kept].max()) + 1


def _inner_firsts(space: Space, skew: int) -> tuple[LongArray, int]:
    """Skewed start of the second loop for each outer value, and the loop's step."""
    starts, _, step = space.inner_ranges
    sign, outer_sign = (1 if step > 0 else -1), (1 if space.outer.step > 0 else -1)
    return sign * starts + skew * outer_sign * space.outer_values, step


def _counts(space: Space, skew: int, rows: LongArray, columns: list[int]) -> LongArray:
    """Number of iterations of every tile."""
    first, step = _inner_firsts(space, skew)
    edges = np.asarray(columns)[None, :]
    counts = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int64)
    for block, (start, stop) in enumerate(itertools.pairwise(rows)):
        below = -(-(edges - first[start:stop, None]) // abs(step))
        below = np.clip(below, 0, space.inner_lengths[start:stop, None])
        counts[block] = np.diff(below, axis=1).sum(axis=0)
    return counts


def _listed(space: Space, shape: Shape, num_workers: int, num_steps: int) -> Tiling:
    """Tiles whose iterations are picked by key; inside a tile they keep the loop's order."""
    assert shape.space is not None
    rows = parts_of(space.key(shape.space), num_workers)
    if shape.time is None:
        # With one key and several steps, each worker's part is cut in the loop's own order.
        columns = np.arange(len(rows), dtype=np.int64) * num_steps // max(len(rows), 1)
        num_columns = num_steps
    else:
        columns, num_columns = parts_of(space.key(shape.time), num_workers), num_workers
    tile_of = rows * num_columns + columns
    counts = np.bincount(tile_of, minlength=num_workers * num_columns)
    starts = pointers(counts)

    def bounds_of(row: int, column: int) -> tuple[int, ...]:
        tile = row * num_columns + column
        return int(starts[tile]), int(starts[tile + 1])

    picked = np.argsort(tile_of, kind="stable")
    order = tuple(np.ascontiguousarray(column[picked]) for column in space.columns)
    grid = counts.reshape(num_workers, num_columns)
    return Tiling(_scheduled(grid, bounds_of, shape, num_workers), num_workers, order)
