"""Run tiles on pinned threads of this process.

A worker runs its tiles in order and waits only for the tiles that each one names. With buffered
arrays all workers meet after each step; arrays in tables are read before a tile and updated after
it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.job import AnyArray, LoopJob, arguments_for, exchange, finish
from hocket.loops.prefetch import touched_rows
from hocket.tables import Layout, Node, ShardServer, TableSpec, Worker, local_tables

# Kernels run without the interpreter's lock. Workers are started once and each stays on one core:
# threads that move may run two kernels on one core.

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
        """Run one task on each worker; raises the exception of the first that failed.

        ``abandon`` is called if the wait is interrupted. Workers finish their current task before
        they start another.
        """
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


# Arrays in tables: a tile's rows are read before the tile runs, its changes are added after it.
#
# A worker sees its own changes at once and those of others at most one step late (`hocket.tables`,
# staleness 1); there is no barrier after a step. With adaptive revision, the amount that a tile
# subtracts from a row is treated as a gradient, and the table takes AdaGrad steps that correct for
# gradients the tile had not seen. The sums of squares are kept from one call to the next if the
# array is unchanged since the last call. Rows are sent as 32-bit floats.

Rows = Mapping[str, NDArray[np.int64]]
STALENESS = 1
"""Steps by which the changes of other workers may be late when a worker reads a row."""


@dataclass(frozen=True)
class KeptTable:
    """State of adaptive revision after a call, and the array's content at the end of that call."""

    left: AnyArray
    cells: NDArray[np.float32]
    hidden: NDArray[np.float32]


def layout_of(job: LoopJob, mode: str) -> Layout:
    """Layout of tables for a job: one table per array, one client per worker."""
    specs = [
        TableSpec(
            name, len(job.values[name]), max(math.prod(job.values[name].shape[1:]), 1),
            staleness=STALENESS, mode=mode, is_adaptive=rule == "revise", rate=job.rate,
        )
        for name, rule in sorted(job.tabled.items())
    ]  # fmt: skip
    return Layout(tuple(specs), 1, job.tiling.num_workers)


def take_up(job: LoopJob, server: ShardServer) -> None:
    """Load the state of an earlier call into a new shard, for arrays unchanged since then."""
    for place, spec in enumerate(server.layout.tables):
        kept = job.kept.get(spec.name)
        if kept is not None and np.array_equal(kept.left, job.values[spec.name]):
            state = server.states[place]
            state.cells[...], state.hidden[...] = kept.cells, kept.hidden
            state.cells[:, : spec.width] = 0.0  # a table holds what is added to the array


def put_back(job: LoopJob, server: ShardServer) -> None:
    """Add the tables' contents to the arrays, and keep adaptive state for the next call."""
    for place, spec in enumerate(server.layout.tables):
        array, state = job.values[spec.name], server.states[place]
        array += server.cells(place).reshape(array.shape).astype(array.dtype)
        if spec.is_adaptive:
            job.kept[spec.name] = KeptTable(array.copy(), state.cells.copy(), state.hidden.copy())


class TabledArrays:
    """One worker's replicas of arrays, filled from its tables."""

    def __init__(self, worker: Worker, arrays: Mapping[str, AnyArray]) -> None:
        self.worker, self.arrays = worker, dict(arrays)
        self._start = {name: array.copy() for name, array in arrays.items()}
        self._before: dict[str, AnyArray] = {}

    def pull(self, rows: Rows) -> None:
        """Read a tile's rows from the tables."""
        for name, array in self.arrays.items():
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


def run_on_threads_through_tables(job: LoopJob) -> list[tuple[Any, ...]]:
    """Run a job on threads that share tables of this process."""
    tiling, kernel = job.tiling, job.kernel()
    workers = range(tiling.num_workers)
    replicas = [{name: job.replica(name) for name in job.replicated} for _ in workers]
    results: list[tuple[Any, ...]] = [()] * len(tiling.tiles)
    layout, prefetch = layout_of(job, "essp"), job.find_prefetch()
    with local_tables(layout.tables, num_clients=layout.num_clients) as group:
        take_up(job, group.servers[0])
        failed = threading.Lock()

        def work(number: int) -> None:
            own = {name: replicas[number][name] for name in job.tabled}
            tables = TabledArrays(group.nodes[number].workers[0], own)
            arguments = arguments_for(job, replicas[number])
            named = dict(zip(job.source.arguments, arguments, strict=True))
            with _ending(group.nodes, failed):
                for place, tile in enumerate(tiling.tiles):
                    if tile.worker != number:
                        continue
                    leading = job.leading(tile)
                    rows = touched_rows(prefetch, tables.arrays, leading, named)
                    tables.pull(rows)
                    results[place] = kernel(*leading, *arguments)
                    tables.push(rows)

        team(tiling.num_workers).together(lambda number: lambda: work(number))
        for node in group.nodes:
            node.flush()
        finish(job, replicas)
        put_back(job, group.servers[0])
    return results


@contextlib.contextmanager
def _ending(nodes: Sequence[Node], failed: threading.Lock) -> Iterator[None]:
    """Close all nodes if a worker fails, so that no worker waits for its clock.

    Only the first error is reported.
    """
    try:
        yield
    except BaseException as error:
        if not failed.acquire(blocking=False):
            raise Abandoned from error
        for node in nodes:
            node.close()
        raise


Results = list[tuple[Any, ...]]


@dataclass
class _Progress:
    """Records which tiles have ended and lets workers wait for them."""

    num_tiles: int
    ended: list[bool] = field(init=False)
    failed_at: float = math.inf
    """Lowest number of a failed tile; tiles before it still run, as one of them may fail, too."""
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
    """Run a job and return the results of all tiles, in the order of tiles."""
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
    """Raise the error of the lowest-numbered failed tile, which the serial loop reaches first."""
    if errors:
        raise errors[min(errors)]
