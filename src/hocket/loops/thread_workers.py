"""Run tiles on pinned threads of this process.

A worker runs its tiles in order and waits only for the tiles that each of them names. With buffered
arrays there is a barrier after each step. Rows of arrays in tables are read before a tile and
updated after it. Kernels run without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.job import AnyArray, LoopJob, arguments_for, exchange, finish
from hocket.loops.prefetch import touched_rows
from hocket.tables import Node, TableSpec, local_tables

# Workers are started once, and each is pinned to one core: threads that migrate could run two
# kernels on one core.

Task = Callable[[], None]


class ThreadTeam:
    """Persistent worker threads, one per worker."""

    def __init__(self, num_workers: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._workers = [
            ThreadPoolExecutor(
                1, f"loop worker {worker}", _pin, initargs=(cores[worker % len(cores)],)
            )
            for worker in range(num_workers)
        ]
        self._turn = threading.Lock()

    def together(
        self, task_of: Callable[[int], Task], abandon: Callable[[], None] = lambda: None
    ) -> None:
        """Run one task on each worker; raises the exception of the first worker that failed.

        ``abandon`` is called if the wait is interrupted. Workers finish their current task before
        they start another.
        """
        # Two threads of the program may run loops at the same time, and each loop needs all
        # workers.
        with self._turn:
            futures = [each.submit(task_of(worker)) for worker, each in enumerate(self._workers)]
            try:
                wait(futures)
            except BaseException:
                abandon()
                raise
        for error in (future.exception() for future in futures):
            if error is not None and not isinstance(error, Abandoned):
                raise error


def _pin(core: int) -> None:
    """Pin this thread to a core, if the system allows it."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(threading.get_native_id(), {core})


class Abandoned(Exception):  # noqa: N818
    """Raised in a worker that stops waiting because another one failed."""


@lru_cache(maxsize=4)
def team(num_workers: int) -> ThreadTeam:
    """The worker threads of this process; a forked child starts its own."""
    return ThreadTeam(num_workers)


os.register_at_fork(after_in_child=team.cache_clear)


# Arrays in tables: a worker sees its own changes at once, and those of others at most one step late
# (`hocket.tables`, staleness 1). There is no barrier after a step. With adaptive revision, the
# amount that a tile subtracts from a row is treated as a gradient, and the table takes AdaGrad
# steps that correct for gradients the tile had not seen. The sums of squares persist between calls
# if the array is unchanged since the last call. Rows are sent as 32-bit floats.

Rows = Mapping[str, NDArray[np.int64]]
STALENESS = 1
"""Number of steps by which other workers' changes may be late when a worker reads a row."""


@dataclass(frozen=True)
class KeptTable:
    """State of adaptive revision after a call, and the array's content at the end of that call."""

    left: AnyArray
    cells: NDArray[np.float32]
    hidden: NDArray[np.float32]


class TabledArrays:
    """One worker's replicas of arrays, filled from its tables."""

    def __init__(self, node: Node, arrays: Mapping[str, AnyArray]) -> None:
        self.node, self.worker, self.arrays = node, node.workers[0], dict(arrays)
        self._start = {name: array.copy() for name, array in arrays.items()}
        self._before: dict[str, AnyArray] = {}

    def pull(self, rows: Rows) -> None:
        """Read a tile's rows from the tables."""
        for name, array in self.arrays.items():
            # Only the tile's rows, because a read waits until every row in it is fresh enough.
            places = rows[name]
            added = self.worker[name].get(places).reshape(len(places), *array.shape[1:])
            array[places] = self._start[name][places] + added.astype(array.dtype)
            self._before[name] = array[places]

    def push(self, rows: Rows) -> None:
        """Add a tile's changes to the tables and end the step."""
        for name, array in self.arrays.items():
            change = (array[rows[name]] - self._before[name]).reshape(len(rows[name]), -1)
            is_gradient = self.worker[name].spec.is_adaptive
            self.worker[name].inc(rows[name], -change if is_gradient else change)
        self.worker.clock()


@contextlib.contextmanager
def _tables(job: LoopJob, replicas: Sequence[dict[str, AnyArray]]) -> Iterator[list[TabledArrays]]:
    """Tables for a job's arrays, with one client per worker; at the end they are added to the
    arrays.
    """
    if not job.tabled:
        yield []
        return
    specs = [
        TableSpec(
            name, len(job.values[name]), max(math.prod(job.values[name].shape[1:]), 1),
            staleness=STALENESS, mode="essp", is_adaptive=rate is not None, rate=rate or 0.1,
        )
        for name, rate in sorted(job.tabled.items())
    ]  # fmt: skip
    with local_tables(specs, num_clients=len(replicas)) as group:
        (server,) = group.servers
        for place, spec in enumerate(specs):
            kept = job.kept.get(spec.name)
            if kept is not None and np.array_equal(kept.left, job.values[spec.name]):
                state = server.states[place]
                state.cells[...], state.hidden[...] = kept.cells, kept.hidden
                state.cells[:, : spec.width] = 0.0  # a table holds what is added to the array
        yield [
            TabledArrays(node, {name: own[name] for name in job.tabled})
            for node, own in zip(group.nodes, replicas, strict=True)
        ]
        for node in group.nodes:
            node.flush()
        for place, spec in enumerate(specs):
            array, state = job.values[spec.name], server.states[place]
            array += server.cells(place).reshape(array.shape).astype(array.dtype)
            if spec.is_adaptive:
                copies = array.copy(), state.cells.copy(), state.hidden.copy()
                job.kept[spec.name] = KeptTable(*copies)


@dataclass
class _Progress:
    """Records which tiles have ended and lets workers wait for them."""

    num_tiles: int
    ended: list[bool] = field(init=False)
    failed_at: float = math.inf
    """Lowest index of a failed tile; tiles before it still run, because one of them may fail too.
    """
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.ended = [False] * self.num_tiles

    def wait_for(self, number: int, tiles: tuple[int, ...]) -> None:
        if self.failed_at > number and all(self.ended[tile] for tile in tiles):
            return  # without the lock: a tile that has ended stays ended
        with self.changed:
            while self.failed_at > number and not all(self.ended[tile] for tile in tiles):
                self.changed.wait()
        if self.failed_at < number:
            raise Abandoned

    def end(self, tile: int) -> None:
        with self.changed:
            self.ended[tile] = True
            self.changed.notify_all()

    def fail(self, number: float = -1) -> None:
        with self.changed:
            # The serial loop would raise the error of the first failed tile.
            self.failed_at = min(self.failed_at, number)
            self.changed.notify_all()


def run_on_threads(job: LoopJob) -> list[tuple[Any, ...]]:
    """Run a job and return the results of all tiles, in the order of tiles."""
    tiling, kernel, replicas = job.tiling, job.kernel(), job.replicas()
    arguments = [arguments_for(job, own) for own in replicas]
    results: list[tuple[Any, ...]] = [()] * len(tiling.tiles)
    progress = _Progress(len(tiling.tiles))
    errors: dict[int, BaseException] = {}
    # Only buffered arrays are exchanged between steps, so only they need a barrier.
    queues: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, tile in enumerate(tiling.tiles):
        queues[tile.worker, tile.step if job.buffered else 0].append(number)

    def run_tile(number: int, worker: int) -> None:
        leading = job.leading(tiling.tiles[number])
        if not tables:
            results[number] = kernel(*leading, *arguments[worker])
            return
        named = dict(zip(job.source.arguments, arguments[worker], strict=True))
        rows = touched_rows(job.find_prefetch(), tables[worker].arrays, leading, named)
        tables[worker].pull(rows)
        results[number] = kernel(*leading, *arguments[worker])
        tables[worker].push(rows)

    def work(step: int, worker: int) -> None:
        for number in queues[worker, step]:
            progress.wait_for(number, tiling.tiles[number].after)
            try:
                run_tile(number, worker)
            except BaseException as error:
                if not (tables and errors):  # the others fail because tables are closed
                    errors[number] = error
                progress.fail(number)
                for table in tables:
                    table.node.close()
                raise Abandoned from error
            progress.end(number)

    with _tables(job, replicas) as tables:
        for step in range(tiling.num_steps if job.buffered else 1):
            workers = team(tiling.num_workers)
            workers.together(lambda n, at=step: functools.partial(work, at, n), progress.fail)  # type: ignore[misc]
            if errors:
                # The serial loop reaches the lowest-numbered tile first.
                raise errors[min(errors)]
            exchange(job, replicas)
        finish(job, replicas)
    return results
