"""Pinned threads of this process: compiled kernels run without the interpreter's lock.

Workers are started once and stay on one core each; a pool whose threads wander runs two kernels on
one core. A worker takes its tiles in order and waits only for the tiles that each one names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from hocket.loops.job import LoopJob, arguments_for, exchange, finish

Results = list[tuple[Any, ...]]


class ThreadTeam:
    """Persistent workers."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._tasks: list[SimpleQueue[Callable[[], None]]] = []
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._turn = threading.Lock()
        cores = sorted(os.sched_getaffinity(0))
        for worker in range(num_workers):
            tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
            self._tasks.append(tasks)
            core = cores[worker % len(cores)]
            threading.Thread(
                target=self._work, args=(tasks, core), name=f"loop worker {worker}", daemon=True
            ).start()

    def _work(self, tasks: SimpleQueue[Callable[[], None]], core: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), {core})
        while True:
            task = tasks.get()
            try:
                task()
            except BaseException as error:  # handed to the caller
                self._ended.put(error)
            else:
                self._ended.put(None)

    def together(self, task_of: Callable[[int], Callable[[], None]]) -> None:
        """Run one task on each worker; raises what the first of them raised."""
        with self._turn:
            for worker, tasks in enumerate(self._tasks):
                tasks.put(task_of(worker))
            errors = [self._ended.get() for _ in self._tasks]
        for error in errors:
            if error is not None and not isinstance(error, _Abandoned):
                raise error


class _Abandoned(Exception):  # noqa: N818
    """Another worker failed; this one stops waiting."""


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
                    raise _Abandoned
                self.changed.wait()

    def end(self, tile: int) -> None:
        with self.changed:
            self.ended[tile] = True
            self.changed.notify_all()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@lru_cache(maxsize=4)
def team(num_workers: int) -> ThreadTeam:
    """The workers of this process; a forked child starts its own."""
    return ThreadTeam(num_workers)


os.register_at_fork(after_in_child=team.cache_clear)


def run_on_threads(job: LoopJob) -> Results:
    """Carry out a job; the result of every tile in the order of tiles."""
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
                    results[number] = kernel(*job.leading(tile), *arguments[worker])
                    progress.end(number)
            except BaseException:
                progress.fail()
                raise

        return work

    if job.needs_barriers:
        for step in range(tiling.num_steps):
            team(tiling.num_workers).together(functools.partial(task, step=step))
            exchange(job, replicas)
    else:
        team(tiling.num_workers).together(task)
    finish(job, replicas)
    return results
