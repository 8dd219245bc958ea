"""Cutting the iteration space into tiles, balanced by what they hold.

1-D: one tile per worker. Rotation (Gemulla et al. 2011): worker w runs time part (w + c) mod P in
step c, so no two workers share a part. Wavefront: row blocks are dealt to the workers in turn; a
tile waits for the one above it. Parts are cut at exact cumulative counts: one bincount and one
searchsorted, O(iterations + keys).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.loops.legal import Shape
from hocket.loops.space import Space

MAX_BLOCKS_PER_WORKER = 8
"""Row blocks of a skewed wavefront for each worker: starting costs one part in this many."""
MIN_TILE = 8192
"""Iterations of a wavefront's tile, so that handing tiles over costs little."""


@dataclass(frozen=True)
class Tile:
    """A piece of work for one worker; ``after`` are the tiles that must have ended."""

    worker: int
    step: int
    bounds: tuple[int, ...]
    num_iterations: int
    after: tuple[int, ...] = ()
    place: tuple[int, int] = (0, 0)
    """Space and time part."""


@dataclass(frozen=True)
class TileCosts:
    """Times that make up a pass; by default everything is counted in iterations."""

    iteration_s: float = 1.0
    start_s: float = 0.0
    """Waking a worker for a tile."""
    handed_s: float = 0.0
    """Moving rows to a tile from the tiles before it."""
    exchange_s: float = 0.0
    """Adding up the workers' own arrays."""
    has_barriers: bool = False
    """True if that is done after every step."""


@dataclass(frozen=True)
class Tiling:
    """All tiles in a serial order that gives the same result; iterations by range or by list."""

    tiles: tuple[Tile, ...]
    num_workers: int
    order: tuple[LongArray, ...] = ()
    """For listed tiles: the loop variables in the order in which tiles pick them."""
    skew: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the schedule."""
        return 1 + max((tile.step for tile in self.tiles), default=0)

    @property
    def num_iterations(self) -> int:
        """Of all tiles, with loops inside counted by their turns."""
        return sum(tile.num_iterations for tile in self.tiles)

    def spans(self, costs: TileCosts) -> list[tuple[float, float]]:
        """Start and end of every tile when each worker takes its tiles in turn."""
        found: list[tuple[float, float]] = []
        free = [0.0] * self.num_workers
        step = 0
        for tile in self.tiles:
            if costs.has_barriers and tile.step != step:
                step, free = tile.step, [max(free) + costs.exchange_s] * self.num_workers
            ready = [found[other][1] + costs.handed_s for other in tile.after]
            start = max([free[tile.worker], *ready])
            end = start + costs.start_s + tile.num_iterations * costs.iteration_s
            found.append((start, end))
            free[tile.worker] = end
        return found

    @property
    def imbalance(self) -> float:
        """Time of the schedule over that of perfectly shared work, by counts of iterations."""
        total = self.num_iterations
        longest = max((end for _, end in self.spans(TileCosts())), default=0.0)
        return longest * self.num_workers / total if total else 1.0


def balanced_cuts(weights: LongArray, num_parts: int) -> LongArray:
    """Positions that cut ``weights`` into parts of nearly equal sums."""
    ends = np.cumsum(weights)
    total = int(ends[-1]) if len(ends) else 0
    targets = total * np.arange(1, num_parts, dtype=np.float64) / num_parts
    inner = np.searchsorted(ends, targets, side="left") + 1 if len(ends) else targets.astype(int)
    if len(ends):
        # A cut goes to the nearer side of the value that it would split.
        before = np.where(inner >= 2, ends[np.maximum(inner - 2, 0)], 0)
        nearer = targets - before < ends[inner - 1] - targets
        inner = np.where(nearer, inner - 1, inner)
    return np.concatenate([[0], np.maximum.accumulate(inner), [len(weights)]]).astype(np.int64)


def parts_of(keys: LongArray, num_parts: int) -> LongArray:
    """The part of every iteration, so that equal keys share a part and parts hold equal counts."""
    if not len(keys):
        return np.zeros(0, dtype=np.int64)
    low = int(keys.min())
    span = int(keys.max()) - low + 1
    if span <= 4 * len(keys) + 1024:
        counts = np.bincount(keys - low, minlength=span)
        cuts = balanced_cuts(counts, num_parts)
        return np.searchsorted(cuts[1:-1], keys - low, side="right").astype(np.int64)
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    cuts = balanced_cuts(counts, num_parts)
    return np.searchsorted(cuts[1:-1], place, side="right").astype(np.int64)


def tiling_of(space: Space, shape: Shape, num_workers: int, num_steps: int = 1) -> Tiling:
    """Cut a space for a shape; ``num_steps`` > 1 splits buffered work where there is one step."""
    if shape.is_listed:
        return _listed(space, shape, num_workers, num_steps)
    if shape.kind in ("independent", "1d") and shape.space == space.reading.dims[0]:
        return _rows(space, num_workers, num_steps)
    if shape.kind == "1d":
        return _columns(space, num_workers)
    if shape.kind == "rotation":
        return _rotated_blocks(space, shape, num_workers)
    return _wavefront(space, shape, num_workers)


# ── ranges ───────────────────────────────────────────────────────────────────────────────────────


def _weights(space: Space) -> LongArray:
    """Work per outer iteration."""
    if space.reading.depth == 2:
        return space.inner_lengths
    return space.trip_counts


def _outer_bounds(space: Space, first: int, last: int) -> tuple[int, int]:
    start, step = space.outer.start, space.outer.step
    return start + first * step, start + last * step


def _rows(space: Space, num_workers: int, num_steps: int) -> Tiling:
    weights = _weights(space)
    cuts = balanced_cuts(weights, num_workers * num_steps)
    sums = np.concatenate([[0], np.cumsum(weights)])
    rest = _everything(space) if space.reading.depth == 2 else ()
    tiles = []
    for step in range(num_steps):
        for worker in range(num_workers):
            # Each worker's rows follow each other, whatever the number of steps.
            part = worker * num_steps + step
            first, last = int(cuts[part]), int(cuts[part + 1])
            bounds = (*_outer_bounds(space, first, last), *rest)
            tiles.append(Tile(worker, step, bounds, int(sums[last] - sums[first])))
    return Tiling(tuple(tiles), num_workers)


def _inner_span(space: Space, skew: int) -> tuple[int, int]:
    """Least and greatest + 1 of the second loop's coordinate, in its own direction, skewed."""
    starts, _, step = space.inner_ranges
    kept = space.inner_lengths > 0
    if not kept.any():
        return 0, 0
    sign, outer_sign = (1 if step > 0 else -1), (1 if space.outer.step > 0 else -1)
    first = sign * starts[kept] + skew * outer_sign * space.outer_values[kept]
    last = first + (space.inner_lengths[kept] - 1) * abs(step)
    return int(first.min()), int(last.max()) + 1


def _everything(space: Space) -> tuple[int, int]:
    return _inner_span(space, 0)


def _whole_outer(space: Space) -> tuple[int, int]:
    return _outer_bounds(space, 0, len(space.outer))


def _columns(space: Space, num_workers: int) -> Tiling:
    """Tiles of all rows and some columns."""
    low, high = _inner_span(space, 0)
    cuts = [low + (high - low) * part // num_workers for part in range(num_workers + 1)]
    share = space.num_iterations // num_workers
    tiles = [
        Tile(worker, 0, (*_whole_outer(space), cuts[worker], cuts[worker + 1]), share)
        for worker in range(num_workers)
    ]
    return Tiling(tuple(tiles), num_workers)


def _rotated_blocks(space: Space, shape: Shape, num_workers: int) -> Tiling:
    """Rotation over two real loops: blocks of rows and of columns."""
    rows = balanced_cuts(space.inner_lengths, num_workers)
    low, high = _inner_span(space, 0)
    columns = [low + (high - low) * part // num_workers for part in range(num_workers + 1)]
    sums = np.concatenate([[0], np.cumsum(space.inner_lengths)])
    tiles: list[Tile] = []
    for step in range(num_workers):
        for worker in range(num_workers):
            part = (worker + step) % num_workers
            outer = _outer_bounds(space, int(rows[worker]), int(rows[worker + 1]))
            count = int(sums[rows[worker + 1]] - sums[rows[worker]]) // num_workers
            before = ((step - 1) * num_workers + (worker + 1) % num_workers,) if step else ()
            bounds = (*outer, columns[part], columns[part + 1])
            tiles.append(Tile(worker, step, bounds, count, before, (worker, part)))
    return Tiling(tuple(tiles), num_workers)


def _wavefront(space: Space, shape: Shape, num_workers: int) -> Tiling:
    """Tiles over (outer, skewed inner); tile (s, t) follows (s-1, t) and (s, t-1)."""
    # Without skew two blocks of rows per worker do; with skew a block starts as much later as it is
    # high, so blocks are low.
    most = num_workers * (MAX_BLOCKS_PER_WORKER if shape.skew else 2)
    # Twice as many columns as rows: tiles of MIN_TILE where there is enough for all workers.
    wanted = max(num_workers, math.isqrt(space.num_iterations // (2 * MIN_TILE)))
    wanted = -(-wanted // num_workers) * num_workers
    num_rows = max(min(wanted, most, len(space.outer)), 1)
    low, high = _inner_span(space, shape.skew)
    num_columns = max(min(max(2 * num_rows, 4 * num_workers), high - low), 1)
    rows = balanced_cuts(space.inner_lengths, num_rows)
    columns = [low + (high - low) * part // num_columns for part in range(num_columns + 1)]
    counts = _counts(space, shape.skew, rows, columns)
    number_of: dict[tuple[int, int], int] = {}
    tiles: list[Tile] = []
    for step in range(num_rows + num_columns - 1):
        for row in range(max(0, step - num_columns + 1), min(num_rows, step + 1)):
            column = step - row
            if not counts[row, column]:
                continue
            outer = _outer_bounds(space, int(rows[row]), int(rows[row + 1]))
            bounds = (*outer, columns[column], columns[column + 1])
            number_of[row, column] = len(tiles)
            tiles.append(
                Tile(row % num_workers, step, bounds, int(counts[row, column]),
                     _above(number_of, row, column), (row, column))
            )  # fmt: skip
    return Tiling(tuple(tiles), num_workers, skew=shape.skew)


def _above(number_of: dict[tuple[int, int], int], row: int, column: int) -> tuple[int, ...]:
    """Tiles of earlier rows that must have ended, so that all up to this column have.

    Where the tile right above is empty, the nearest one before it stands for its row, and the rows
    above that one are looked at too.
    """
    found: list[int] = []
    reached = -1
    for other in range(row - 1, -1, -1):
        for candidate in range(column, reached, -1):
            if (other, candidate) in number_of:
                found.append(number_of[other, candidate])
                reached = candidate
                break
        if reached == column:
            break
    return tuple(found)


def _counts(space: Space, skew: int, rows: LongArray, columns: list[int]) -> LongArray:
    """Iterations of every tile."""
    starts, _, step = space.inner_ranges
    sign, outer_sign = (1 if step > 0 else -1), (1 if space.outer.step > 0 else -1)
    first = sign * starts + skew * outer_sign * space.outer_values
    edges = np.asarray(columns, dtype=np.int64)
    counts = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int64)
    for block in range(len(rows) - 1):
        part = slice(int(rows[block]), int(rows[block + 1]))
        below = -(-(edges[None, :] - first[part, None]) // abs(step))
        below = np.clip(below, 0, space.inner_lengths[part, None])
        counts[block] = np.diff(below, axis=1).sum(axis=0)
    return counts


# ── lists ────────────────────────────────────────────────────────────────────────────────────────


def _listed(space: Space, shape: Shape, num_workers: int, num_steps: int) -> Tiling:
    """Tiles whose iterations are picked by key; the loop's own order is kept inside a tile."""
    assert shape.space is not None
    space_part = parts_of(space.key(shape.space), num_workers)
    if shape.time is None:
        size = max(len(space_part), 1)
        # One key, several steps: each worker's share is cut in the loop's own order.
        time_part = np.arange(len(space_part), dtype=np.int64) * num_steps // size
        num_parts, rotates = num_steps, False
    else:
        time_part = parts_of(space.key(shape.time), num_workers)
        num_parts, rotates = num_workers, True
    tile_of = space_part * num_parts + time_part
    picked = np.argsort(tile_of, kind="stable")
    starts = pointers(np.bincount(tile_of, minlength=num_workers * num_parts))
    tiles: list[Tile] = []
    for step in range(num_parts):
        for worker in range(num_workers):
            part = (worker + step) % num_workers if rotates else step
            tile = worker * num_parts + part
            first, last = int(starts[tile]), int(starts[tile + 1])
            before = ((step - 1) * num_workers + (worker + 1) % num_workers,)
            after = before if rotates and step and num_workers > 1 else ()
            tiles.append(Tile(worker, step, (first, last), last - first, after, (worker, part)))
    order = tuple(np.ascontiguousarray(column[picked]) for column in space.columns)
    return Tiling(tuple(tiles), num_workers, order)
