"""Tiles on the pinned threads of this process.

A worker takes its tiles in order and waits only for the tiles that each one names.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
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
    failed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.ended = [False] * self.num_tiles

    def wait_for(self, tiles: tuple[int, ...]) -> None:
        if all(self.ended[tile] for tile in tiles):
            return
        with self.changed:
            while not all(self.ended[tile] for tile in tiles):
                if self.failed:
                    raise Abandoned
                self.changed.wait()

    def end(self, tile: int) -> None:
        with self.changed:
            self.ended[tile] = True
            self.changed.notify_all()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
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

    def task(worker: int, step: int | None = None) -> Callable[[], None]:
        mine = [
            number
            for number, tile in enumerate(tiling.tiles)
            if tile.worker == worker and (step is None or tile.step == step)
        ]

        def work() -> None:
            try:
                for number in mine:
                    tile = tiling.tiles[number]
                    progress.wait_for(tile.after)
                    if progress.failed:
                        raise Abandoned
                    results[number] = kernel(*job.leading(tile), *arguments[worker])
                    progress.end(number)
            except BaseException:
                progress.fail()
                raise

        return work

    if job.needs_barriers:
        for step in range(tiling.num_steps):
            team(tiling.num_workers).together(functools.partial(task, step=step), progress.fail)
            exchange(job, replicas)
    else:
        team(tiling.num_workers).together(task, progress.fail)
    finish(job, replicas)
    return results
