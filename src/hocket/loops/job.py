"""One call of one loop, ready to run: a kernel, its tiles, and the memory that they use.

Every back end runs the same tiles in an order that their ``after`` allows, so all back ends give
the same bits. Arrays that are private, summed, buffered or in tables have a replica per worker.
Replicas are merged here, in a fixed order of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.compile import CompileOptions, Kernel, compiled
from hocket.loops.generate import KernelSource
from hocket.loops.prefetch import Prefetch
from hocket.loops.tiles import Tile, Tiling

AnyArray = NDArray[Any]


@dataclass(frozen=True)
class LoopJob:
    """A loop with its tiles, its data and its replicas."""

    source: KernelSource
    options: CompileOptions
    tiling: Tiling
    values: Mapping[str, Any]
    """Arrays and scalars by name; a reduction starts at its neutral element."""
    private: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    buffered: tuple[str, ...] = ()
    last_worker: int = 0
    """Worker of the last iteration, whose private arrays are copied to the user's."""
    written: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Owner of each array by name; several names may refer to one array."""
    tabled: Mapping[str, float | None] = field(default_factory=dict)
    """Arrays updated through tables: the step size of adaptive revision, or None for addition."""
    kept: dict[str, Any] = field(default_factory=dict)
    """State of adaptive tables, which persists between calls."""
    find_prefetch: Callable[[], Prefetch | None] = lambda: None
    """Function that returns the plan for finding the rows of written arrays that a tile accesses.
    """

    @property
    def replicated(self) -> tuple[str, ...]:
        """Arrays of which each worker has a replica."""
        return (*self.private, *self.summed, *self.buffered, *self.tabled)

    def kernel(self) -> Kernel:
        """The compiled kernel."""
        return compiled(self.source.text, self.options)

    def leading(self, tile: Tile) -> tuple[Any, ...]:
        """The kernel's first arguments, which select a tile."""
        if self.tiling.order:
            return (*self.tiling.order, *tile.bounds)
        return (*tile.bounds, self.tiling.skew) if len(tile.bounds) == 4 else tile.bounds

    def replica(self, name: str) -> AnyArray:
        """A worker's initial replica of an array."""
        shared: AnyArray = self.values[name]
        return np.zeros_like(shared) if name in self.summed else shared.copy()

    def replicas(self) -> list[dict[str, AnyArray]]:
        """The replicas of every worker."""
        return [
            {name: self.replica(name) for name in self.replicated}
            for _ in range(self.tiling.num_workers)
        ]


def arguments_for(job: LoopJob, replicas: Mapping[str, AnyArray]) -> tuple[Any, ...]:
    """The kernel's arguments after the tile's bounds, for one worker."""
    names = job.source.arguments
    return tuple(replicas.get(job.aliases.get(name, name), job.values[name]) for name in names)


def run_in_turn(job: LoopJob) -> list[tuple[Any, ...]]:
    """Run one tile after another in this thread; other back ends give the same bits."""
    kernel, replicas = job.kernel(), job.replicas()
    arguments = [arguments_for(job, own) for own in replicas]
    results: list[tuple[Any, ...]] = []
    step = 0
    for tile in job.tiling.tiles:
        if tile.step != step:
            step = tile.step
            exchange(job, replicas)
        results.append(kernel(*job.leading(tile), *arguments[tile.worker]))
    exchange(job, replicas)
    finish(job, replicas)
    return results


def exchange(job: LoopJob, replicas: list[dict[str, AnyArray]]) -> None:
    """Add all workers' changes to the buffered arrays between two steps."""
    for name in job.buffered:
        shared: AnyArray = job.values[name]
        merged = shared.copy()
        for own in replicas:
            # A fixed order of workers, because sums of floats depend on the order.
            merged += own[name] - shared
        shared[...] = merged
        for own in replicas:
            own[name][...] = merged


def finish(job: LoopJob, replicas: list[dict[str, AnyArray]]) -> None:
    """Copy the last iteration's private arrays to the user's, and add up the summed arrays."""
    for name in job.private:
        # The serial loop would leave the values of its last iteration in the array.
        job.values[name][...] = replicas[job.last_worker][name]
    for name in job.summed:
        shared: AnyArray = job.values[name]
        for own in replicas:
            shared += own[name]
