"""Tiles on the pinned threads of this process.

A worker takes its tiles in order and waits only for the tiles that each one names.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.job import AnyArray, LoopJob, arguments_for, exchange, finish
from hocket.loops.prefetch import touched_rows
from hocket.tables import Layout, Node, ShardServer, TableSpec, Worker, local_tables

# Pinned threads of this process: compiled kernels run without the interpreter's lock.
#
# Workers are started once and stay on one core each; a pool whose threads wander runs two kernels
# on one core.

Task = Callable[[], None]
Ended = SimpleQueue[BaseException | None]
"""Where the ends of one call's tasks are reported; an interrupted call leaves none to the next."""


class ThreadTeam:
    """Persistent workers."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._tasks: list[SimpleQueue[tuple[Task, Ended]]] = []
        self._turn = threading.Lock()
        cores = sorted(os.sched_getaffinity(0))
        for worker in range(num_workers):
            tasks: SimpleQueue[tuple[Task, Ended]] = SimpleQueue()
            self._tasks.append(tasks)
            core = cores[worker % len(cores)]
            threading.Thread(
                target=self._work, args=(tasks, core), name=f"loop worker {worker}", daemon=True
            ).start()

    def _work(self, tasks: SimpleQueue[tuple[Task, Ended]], core: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), {core})
        while True:
            task, ended = tasks.get()
            try:
                task()
            except BaseException as error:  # handed to the caller
                ended.put(error)
            else:
                ended.put(None)

    def together(
        self, task_of: Callable[[int], Task], abandon: Callable[[], None] = lambda: None
    ) -> None:
        """Run one task on each worker; raises what the first of them raised.

        ``abandon`` is called where this is interrupted. What workers are in the middle of they end,
        before they take up anything else.
        """
        ended: Ended = SimpleQueue()
        with self._turn:
            try:
                for worker, tasks in enumerate(self._tasks):
                    tasks.put((task_of(worker), ended))
                errors = [ended.get() for _ in self._tasks]
            except BaseException:
                abandon()
                raise
        for error in errors:
            if error is not None and not isinstance(error, Abandoned):
                raise error


class Abandoned(Exception):  # noqa: N818
    """Another worker failed; this one stops waiting."""


@lru_cache(maxsize=4)
def team(num_workers: int) -> ThreadTeam:
    """The workers of this process; a forked child starts its own."""
    return ThreadTeam(num_workers)


os.register_at_fork(after_in_child=team.cache_clear)


# Arrays that go through tables: rows are read before a tile, its changes are added after it.
#
# A worker sees its own changes at once and those of others at most one step late (`hocket.tables`,
# staleness 1); nobody waits for a step of all. With adaptive revision what a tile subtracts from a
# row is taken for a gradient, and the table takes AdaGrad steps that repair what the gradient could
# not know. The sums of squares are kept from one call to the next while the array is as the last
# call left it. Rows travel as 32-bit floats.

Rows = Mapping[str, NDArray[np.int64]]
STALENESS = 1
"""Steps that a worker may be ahead of what it knows of others."""


@dataclass(frozen=True)
class KeptTable:
    """State of adaptive revision after a call, and the array as that call left it."""

    left: AnyArray
    cells: NDArray[np.float32]
    hidden: NDArray[np.float32]


def layout_of(job: LoopJob, mode: str) -> Layout:
    """One table per array, one client per worker."""
    specs = [
        TableSpec(
            name, len(job.values[name]), max(math.prod(job.values[name].shape[1:]), 1),
            staleness=STALENESS, mode=mode, is_adaptive=rule == "revise", rate=job.rate,
        )
        for name, rule in sorted(job.tabled.items())
    ]  # fmt: skip
    return Layout(tuple(specs), 1, job.tiling.num_workers)


def take_up(job: LoopJob, server: ShardServer) -> None:
    """Give a new shard what an earlier call left, for arrays that nobody changed since."""
    for place, spec in enumerate(server.layout.tables):
        kept = job.kept.get(spec.name)
        if kept is not None and np.array_equal(kept.left, job.values[spec.name]):
            state = server.states[place]
            state.cells[...], state.hidden[...] = kept.cells, kept.hidden
            state.cells[:, : spec.width] = 0.0  # a table holds what is added to the array


def put_back(job: LoopJob, server: ShardServer) -> None:
    """Add what the tables hold to the arrays, and keep what the next call goes on with."""
    for place, spec in enumerate(server.layout.tables):
        array, state = job.values[spec.name], server.states[place]
        array += server.cells(place).reshape(array.shape).astype(array.dtype)
        if spec.is_adaptive:
            job.kept[spec.name] = KeptTable(array.copy(), state.cells.copy(), state.hidden.copy())


class TabledArrays:
    """One worker's own arrays, filled from its tables."""

    def __init__(self, worker: Worker, arrays: Mapping[str, AnyArray]) -> None:
        self.worker, self.arrays = worker, dict(arrays)
        self._start = {name: array.copy() for name, array in arrays.items()}
        self._before: dict[str, AnyArray] = {}

    def pull(self, rows: Rows) -> None:
        """Read the rows of a tile."""
        for name, array in self.arrays.items():
            places = rows[name]
            added = self.worker[name].get(places).reshape(len(places), *array.shape[1:])
            array[places] = self._start[name][places] + added.astype(array.dtype)
            self._before[name] = array[places]

    def push(self, rows: Rows) -> None:
        """Add what the tile changed, and end the step."""
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
    """A worker that fails lets nobody wait for its clock; only the first failure is reported."""
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
    """Run a job; the result of every tile in the order of tiles."""
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
