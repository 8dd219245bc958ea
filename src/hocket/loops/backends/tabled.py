"""Arrays that go through tables: rows are read before a tile, its changes are added after it.

A worker sees its own changes at once and those of others at most one step late
(`hocket.tables`, staleness 1); nobody waits for a step of all. With adaptive revision what a tile
subtracts from a row is taken for a gradient, and the table takes AdaGrad steps that repair what
the gradient could not know. The sums of squares are kept from one call to the next while the array
is as the last call left it. Rows travel as 32-bit floats.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.backends.team import Abandoned, team
from hocket.loops.job import AnyArray, LoopJob, arguments_for, finish
from hocket.loops.prefetch import touched_rows
from hocket.tables import Layout, Node, ShardServer, TableSpec, Worker, local_tables

Rows = Mapping[str, NDArray[np.int64]]
STALENESS = 1
"""Steps that a worker may be ahead of what it knows of others."""


@dataclass(frozen=True)
class KeptTable:
    """What adaptive revision knows after a call, and the array as that call left it."""

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
    """Carry out a job on threads that share tables of this process."""
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
    """A worker that fails lets nobody wait for its clock; only the first failure is told."""
    try:
        yield
    except BaseException as error:
        if not failed.acquire(blocking=False):
            raise Abandoned from error
        for node in nodes:
            node.close()
        raise
