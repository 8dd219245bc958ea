"""Tiles on the pinned threads of this process.

A worker takes its tiles in order and waits only for the tiles that each one names.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.loops.backends.tabled import run_on_threads_through_tables
from hocket.loops.backends.team import Abandoned, team
from hocket.loops.job import LoopJob, arguments_for, exchange, finish

Results = list[tuple[Any, ...]]


@dataclass
class _Progress:
    """Which tiles have ended."""

    num_tiles: int
    ended: list[bool] = field(init=False)
    failed_at: float = math.inf
    """The first tile that failed; those before it go on, as one of them may fail, too."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.ended = [False] * self.num_tiles

    def wait_for(self, number: int, tiles: tuple[int, ...]) -> None:
        if self.failed_at < number:
            raise Abandoned
        if all(self.ended[tile] for tile in tiles):
            return
        with self.changed:
            while not all(self.ended[tile] for tile in tiles):
                if self.failed_at < number:
                    raise Abandoned
                self.changed.wait()

    def end(self, tile: int) -> None:
        with self.changed:
            self.ended[tile] = True
            self.changed.notify_all()

    def fail(self, number: float = -1) -> None:
        with self.changed:
            self.failed_at = min(self.failed_at, number)
            self.changed.notify_all()


def run_on_threads(job: LoopJob) -> Results:
    """Carry out a job; the result of every tile in the order of tiles."""
    if job.tabled:
        return run_on_threads_through_tables(job)
    tiling = job.tiling
    kernel = job.kernel()
    replicas = [
        {name: job.replica(name) for name in job.replicated} for _ in range(tiling.num_workers)
    ]
    arguments = [arguments_for(job, own) for own in replicas]
    results: Results = [()] * len(tiling.tiles)
    progress = _Progress(len(tiling.tiles))
    errors: dict[int, BaseException] = {}

    def task(worker: int, step: int | None = None) -> Callable[[], None]:
        mine = [
            number
            for number, tile in enumerate(tiling.tiles)
            if tile.worker == worker and (step is None or tile.step == step)
        ]

        def work() -> None:
            for number in mine:
                tile = tiling.tiles[number]
                progress.wait_for(number, tile.after)
                try:
                    results[number] = kernel(*job.leading(tile), *arguments[worker])
                except BaseException as error:
                    errors[number] = error
                    progress.fail(number)
                    raise Abandoned from error
                progress.end(number)

        return work

    if job.needs_barriers:
        for step in range(tiling.num_steps):
            team(tiling.num_workers).together(functools.partial(task, step=step), progress.fail)
            _raise_first(errors)
            exchange(job, replicas)
    else:
        team(tiling.num_workers).together(task, progress.fail)
        _raise_first(errors)
    finish(job, replicas)
    return results


def _raise_first(errors: Mapping[int, BaseException]) -> None:
    """Raise what the first failing tile raised, which the loop as written would reach first."""
    if errors:
        raise errors[min(errors)]
