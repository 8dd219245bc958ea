"""Ray workers, also on other machines: the rows of a tile are fetched in bulk and given back.

The arrays that the loop writes stay with the caller (`row_store`); a worker finds the rows that its
tile touches by what is left of the body (`hocket.loops.prefetch`), fetches them with one message,
and gives back those that changed. Ray places the workers, hands out tiles and tells who died. A
worker that dies is named and started again, and the pass is repeated from its beginning: the
caller's arrays change only when a pass has ended.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.base.errors import RunError
from hocket.base.extras import require
from hocket.loops.backends.row_store import RemoteRows, RowStore
from hocket.loops.backends.tabled import TabledArrays, put_back, served_tables
from hocket.loops.compile import CompileOptions, compiled
from hocket.loops.generate import KernelSource
from hocket.loops.job import AnyArray, LoopJob, exchange, finish
from hocket.loops.prefetch import Prefetch, touched_rows
from hocket.tables import Layout, Node
from hocket.tables.address import client_port

Results = list[tuple[Any, ...]]
MAX_RESTARTS = 3
_log = logging.getLogger("hocket.loops")


@dataclass(frozen=True)
class RayLoad:
    """What a worker needs for a pass; its arrays come beside it, through Ray's store."""

    source: KernelSource
    options: CompileOptions
    aliases: dict[str, str]
    own: tuple[str, ...]
    """Arrays of which each worker has its own."""
    shapes: dict[str, tuple[tuple[int, ...], str]]
    """Shape and type of the arrays whose rows stay with the caller."""
    prefetch: Prefetch | None
    address: str
    token: str = field(repr=False)
    layout: Layout | None = None
    """Of arrays that go through tables."""
    tables_at: str = ""


class RayMember:
    """What runs in a Ray worker: a kernel, arrays, and one tile after another."""

    tabled: TabledArrays | None = None
    node: Node | None = None

    def load(
        self, load: RayLoad, values: dict[str, Any], orders: Sequence[AnyArray], number: int = 0
    ) -> int:
        """Take a job; arrays of its own are copied, those with rows elsewhere are empty."""
        self.prefetch, self.orders = load.prefetch, list(orders)
        self.kernel = compiled(load.source.text, load.options)
        self.own = {name: values[name].copy() for name in load.own}
        self.shared = {name: np.zeros(shape, kind) for name, (shape, kind) in load.shapes.items()}
        self.remote = RemoteRows(load.address, load.token, self.shared)
        given = {**values, **self.own, **self.shared}
        self.values = {name: given[load.aliases.get(name, name)] for name in load.source.arguments}
        if load.layout is not None:
            port = client_port(load.layout, number, [load.tables_at])
            self.node = Node(load.layout, number, port).__enter__()
            own = {table.name: self.own[table.name] for table in load.layout.tables}
            self.tabled = TabledArrays(self.node.workers[0], own)
        return len(self.shared)

    def run(self, leading: Sequence[int]) -> tuple[Any, ...]:
        """Fetch the rows of a tile, run it, give back what it changed."""
        first = (*self.orders, *leading)
        tabled = {} if self.tabled is None else self.tabled.arrays
        rows = touched_rows(self.prefetch, self.shared | tabled, first, self.values)
        self.remote.read(rows)
        if self.tabled is not None:
            self.tabled.pull(rows)
        before = self.remote.taken(rows)
        result: tuple[Any, ...] = self.kernel(*first, *self.values.values()) or ()
        self.remote.write(rows, before)
        if self.tabled is not None:
            self.tabled.push(rows)
        return result

    def flush(self) -> None:
        """See to it that the tables have everything."""
        if self.node is not None:
            self.node.flush()
            self.node.close()

    def fetch(self, names: Sequence[str]) -> dict[str, AnyArray]:
        """This worker's own arrays."""
        return {name: self.own[name] for name in names}

    def store(self, arrays: dict[str, AnyArray]) -> None:
        """Replace the content of own arrays."""
        for name, array in arrays.items():
            self.own[name][...] = array


def run_on_ray(job: LoopJob) -> Results:
    """Carry out a job on the Ray cluster that this process is connected to, or a local one."""
    require("ray", "the back end 'ray'")
    require("zmq", "the back end 'ray'")
    import ray

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    contiguous = {
        name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        for name, value in job.values.items()
    }
    for attempt in range(MAX_RESTARTS + 1):
        # Ray's own types are not typed.
        actor: Any = ray.remote(num_cpus=1)(RayMember)
        members = [actor.remote() for _ in range(job.tiling.num_workers)]
        try:
            return _pass(ray, job, contiguous, members)
        except _Died as died:
            message = f"loop worker {died.worker} died at {died.doing}"
            if attempt == MAX_RESTARTS:
                raise RunError(message, hint="see the logs of Ray", where="ray") from died
            _log.warning("%s: started again from the beginning of the pass", message)
        finally:
            for member in members:
                ray.kill(member)
    raise AssertionError("not reached")


class _Died(Exception):  # noqa: N818
    def __init__(self, worker: int, doing: str) -> None:
        super().__init__(worker, doing)
        self.worker, self.doing = worker, doing


def _pass(ray: Any, job: LoopJob, contiguous: dict[str, Any], members: list[Any]) -> Results:
    values = {name: contiguous[name].copy() for name in sorted(job.written)}
    local = dataclasses.replace(job, values={**job.values, **values})
    shared = {name: array for name, array in values.items() if name not in job.replicated}
    results: Results = [()] * len(job.tiling.tiles)
    ended: set[int] = set()
    host = ray.util.get_node_ip_address()
    with ExitStack() as stack:
        store = stack.enter_context(RowStore(shared, host))
        tables = stack.enter_context(served_tables(local, host)) if job.tabled else None
        load = RayLoad(
            job.source, job.options, dict(job.aliases), job.replicated,
            {name: (array.shape, array.dtype.str) for name, array in shared.items()},
            job.find_prefetch(), store.address, store.token,
            tables[0].layout if tables else None, tables[1] if tables else "",
        )  # fmt: skip
        started = {name: value for name, value in contiguous.items() if name not in shared}
        started |= {name: job.replica(name) for name in job.replicated}
        stored, orders = ray.put(started), ray.put(list(job.tiling.order))
        loads = [member.load.remote(load, stored, orders, n) for n, member in enumerate(members)]
        _all(ray, loads, "the start")
        for step in range(job.tiling.num_steps) if job.needs_barriers else [None]:
            _run_tiles(ray, job, members, step, ended, results)
            if job.needs_barriers:
                replicas = _fetched(ray, job, members)
                exchange(local, replicas)
                merged = {name: replicas[0][name] for name in job.buffered}
                _all(ray, [member.store.remote(merged) for member in members], "an exchange")
        finish(local, _fetched(ray, job, members))
        if tables is not None:
            _all(ray, [member.flush.remote() for member in members], "its end")
            put_back(local, tables[0])
    for name in sorted(job.written):
        job.values[name][...] = values[name]
    return results


def _all(ray: Any, calls: list[Any], doing: str) -> list[Any]:
    return [_one(ray, call, worker, doing) for worker, call in enumerate(calls)]


def _one(ray: Any, call: Any, worker: int, doing: str) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayActorError as error:
        raise _Died(worker, doing) from error
    except ray.exceptions.RayTaskError as error:
        # As if the loop had raised it here.
        raise error.cause if isinstance(error.cause, Exception) else error from None


def _fetched(ray: Any, job: LoopJob, members: list[Any]) -> list[dict[str, AnyArray]]:
    found = _all(ray, [member.fetch.remote(job.replicated) for member in members], "its end")
    return [{name: array.copy() for name, array in each.items()} for each in found]


def _run_tiles(
    ray: Any,
    job: LoopJob,
    members: list[Any],
    step: int | None,
    ended: set[int],
    results: Results,
) -> None:
    """Hand each worker its next tile as soon as those that it follows have ended."""
    waiting = [
        [n for n, t in enumerate(job.tiling.tiles) if t.worker == w and step in (None, t.step)]
        for w in range(job.tiling.num_workers)
    ]
    running: dict[Any, tuple[int, int]] = {}
    while any(waiting) or running:
        busy = {worker for worker, _ in running.values()}
        for worker, queue in enumerate(waiting):
            if worker in busy or not queue:
                continue
            tile = job.tiling.tiles[queue[0]]
            if all(other in ended for other in tile.after):
                number = queue.pop(0)
                leading = [int(part) for part in job.leading(tile)[len(job.tiling.order) :]]
                running[members[worker].run.remote(leading)] = worker, number
        ready, _ = ray.wait(list(running), num_returns=1)
        for call in ready:
            worker, number = running.pop(call)
            result = _one(ray, call, worker, f"tile {job.tiling.tiles[number].place}")
            results[number] = tuple(result)
            ended.add(number)
