"""Ray workers, also on other machines: each has its own memory, and changed cells are moved.

A tile answers with the cells that it changed; before a worker runs a tile it gets the changes that
it has not seen of all tiles that have ended. Tiles that run at the same time touch no common cell,
so the order in which changes arrive does not matter. A worker that dies is named and started again,
and the pass is repeated from its beginning: the caller's arrays change only when a pass has ended.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from hocket.base.errors import RunError
from hocket.base.extras import require
from hocket.loops.compile import CompileOptions, compiled
from hocket.loops.job import AnyArray, LoopJob, exchange, finish

Results = list[tuple[Any, ...]]
Changes = dict[str, tuple[AnyArray, AnyArray]]
"""Array -> places of cells, counted through, and their new values."""
MAX_RESTARTS = 3
_log = logging.getLogger("hocket.loops")


class RayMember:
    """What runs in a Ray worker: a kernel, arrays, and one tile after another."""

    def load(
        self,
        text: str,
        options: CompileOptions,
        arguments: Sequence[str],
        values: dict[str, Any],
        aliases: dict[str, str],
        changing: Sequence[str],
        orders: Sequence[AnyArray],
    ) -> int:
        """Take a job; arrays that the loop changes become this worker's own."""
        self.kernel = compiled(text, options)
        own = {name: values[name].copy() for name in changing}
        self.values = {**values, **own}
        self.changing = own
        self.orders = list(orders)
        self.arguments = [self.values[aliases.get(name, name)] for name in arguments]
        return len(own)

    def run(
        self, leading: Sequence[int], seen: Sequence[Changes], shared: Sequence[str]
    ) -> tuple[tuple[Any, ...], Changes]:
        """Apply what others changed, run a tile, and tell what it changed."""
        for changes in seen:
            for name, (places, cells) in changes.items():
                self.changing[name].ravel()[places] = cells
        before = {name: self.changing[name].copy() for name in shared}
        result = self.kernel(*self.orders, *leading, *self.arguments) or ()
        changed: Changes = {}
        for name in shared:
            # Compared as bytes: a cell that became NaN or minus zero has changed too.
            one, other = _bytes(before[name]), _bytes(self.changing[name])
            places = np.flatnonzero((one != other).any(axis=1))
            changed[name] = places, self.changing[name].ravel()[places]
        return result, changed

    def fetch(self, names: Sequence[str]) -> dict[str, AnyArray]:
        """This worker's own arrays."""
        return {name: self.changing[name] for name in names}

    def store(self, arrays: dict[str, AnyArray]) -> None:
        """Replace the content of own arrays."""
        for name, array in arrays.items():
            self.changing[name][...] = array


def _bytes(array: AnyArray) -> AnyArray:
    flat = np.ascontiguousarray(array).view(np.uint8)
    found: AnyArray = flat.reshape(-1, array.dtype.itemsize)
    return found


def run_on_ray(job: LoopJob) -> Results:
    """Carry out a job on the Ray cluster that this process is connected to, or a local one."""
    require("ray", "the back end 'ray'")
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
    shared = sorted(job.written - set(job.replicated))
    _load(ray, job, contiguous, members)
    values = {name: contiguous[name].copy() for name in sorted(job.written)}
    local = dataclasses.replace(job, values={**job.values, **values})
    results: Results = [()] * len(job.tiling.tiles)
    log: list[Changes] = []
    seen = [0] * len(members)
    ended: set[int] = set()
    steps = range(job.tiling.num_steps) if job.needs_barriers else [None]
    for step in steps:
        _run_tiles(ray, job, members, step, shared, (ended, results, log, seen))
        if job.needs_barriers:
            replicas = _fetched(ray, job, members)
            exchange(local, replicas)
            merged = {name: replicas[0][name] for name in job.buffered}
            _all(ray, [member.store.remote(merged) for member in members], "an exchange")
    for changes in log:
        for name, (places, cells) in changes.items():
            values[name].ravel()[places] = cells
    finish(local, _fetched(ray, job, members))
    for name in sorted(job.written):
        job.values[name][...] = values[name]
    return results


def _load(ray: Any, job: LoopJob, contiguous: dict[str, Any], members: list[Any]) -> None:
    """One copy of everything goes to the store; replicas differ only in what they become."""
    started = dict(contiguous)
    for name in job.replicated:
        started[name] = job.replica(name)
    stored = ray.put(started)
    orders = ray.put(list(job.tiling.order))
    changing = sorted(set(job.written) | set(job.replicated))
    loads = [
        member.load.remote(
            job.source.text, job.options, job.source.arguments, stored, dict(job.aliases),
            changing, orders,
        )
        for member in members
    ]  # fmt: skip
    _all(ray, loads, "the start")


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
    shared: list[str],
    state: tuple[set[int], Results, list[Changes], list[int]],
) -> None:
    """Hand each worker its next tile as soon as those that it follows have ended."""
    ended, results, log, seen = state
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
                news = log[seen[worker] :]
                seen[worker] = len(log)
                running[members[worker].run.remote(leading, news, shared)] = worker, number
        ready, _ = ray.wait(list(running), num_returns=1)
        for call in ready:
            worker, number = running.pop(call)
            result, changes = _one(ray, call, worker, f"tile {job.tiling.tiles[number].place}")
            results[number] = tuple(result)
            log.append(changes)
            ended.add(number)
