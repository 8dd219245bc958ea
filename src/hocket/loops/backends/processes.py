"""Processes of this machine on shared memory, for code that threads would disturb.

Each worker is a process of its own on a core of its own. The caller hands out a tile when the tiles
that it follows have ended; a worker that dies is named, with the tile that it was running.
"""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import os
from functools import lru_cache
from typing import Any

import numpy as np

from hocket.base.errors import RunError
from hocket.loops.backends.segments import SharedArrays, plain_scalars, scalar_of
from hocket.loops.job import AnyArray, LoopJob, exchange, finish
from hocket.processes.root_cause import ProcessError
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import WorkerGroup

Results = list[tuple[Any, ...]]


class ProcessTeam:
    """Persistent worker processes with their shared arrays."""

    def __init__(self, num_workers: int) -> None:
        self.shared = SharedArrays()
        cores = sorted(os.sched_getaffinity(0))
        specs = [
            WorkerSpec(
                name=f"worker {worker}",
                module="hocket.loops.backends.worker",
                arguments=(str(cores[worker % len(cores)]),),
                shows_output=True,
            )
            for worker in range(num_workers)
        ]
        self._doing = ["starting"] * num_workers
        self.group = WorkerGroup(specs).__enter__()

    def send(self, worker: int, request: dict[str, Any], doing: str) -> None:
        """Send one request."""
        self._doing[worker] = doing
        self.group.send(worker, request)

    def receive(self) -> tuple[int, dict[str, Any]]:
        """The next answer and whose it is; raises what the worker raised, or that it died."""
        try:
            message = self.group.receive()
        except ProcessError as error:
            raise RunError(
                error.message,
                hint="the arrays are as they were before the call; call again, new workers are "
                "started",
                where=self._doing[error.root_cause.index],
            ) from error
        assert message is not None, "workers end only when they are ended"
        worker, answer = message.sender, message.header
        if "error" in answer:
            name, text = answer["error"]
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(text)
            raise RunError(f"worker {worker} failed: {name}: {text}", where=self._doing[worker])
        return worker, answer

    def close(self) -> None:
        """End the workers and give the memory back."""
        self.group.close()
        self.shared.close()


def team(num_workers: int) -> ProcessTeam:
    """The worker processes of this process; a forked one starts its own."""
    return _team_of(os.getpid(), num_workers)


@lru_cache(maxsize=4)
def _team_of(process_id: int, num_workers: int) -> ProcessTeam:
    started = ProcessTeam(num_workers)
    atexit.register(started.close)
    return started


def run_on_processes(job: LoopJob) -> Results:
    """Carry out a job; the caller's arrays change only when all tiles have ended."""
    workers = team(job.tiling.num_workers)
    try:
        return _run(job, workers)
    except BaseException:
        # Workers may be in the middle of tiles: none of them is used again.
        _team_of.cache_clear()
        atexit.unregister(workers.close)
        workers.close()
        raise


def _run(job: LoopJob, workers: ProcessTeam) -> Results:
    shared, values = workers.shared, job.values
    replicas = _send(job, workers)
    local = dataclasses.replace(job, values={**values, **_own(job, shared)})
    results: Results = [()] * len(job.tiling.tiles)
    steps = range(job.tiling.num_steps) if job.needs_barriers else [None]
    ended: set[int] = set()
    for step in steps:
        _run_tiles(job, workers, step, ended, results)
        if job.needs_barriers:
            exchange(local, replicas)
    finish(local, replicas)
    for name in sorted(job.written):
        values[name][...] = local.values[name]
    return results


def _own(job: LoopJob, shared: SharedArrays) -> dict[str, AnyArray]:
    return {name: shared.arrays[name] for name in job.values if name in shared.arrays}


def _send(job: LoopJob, workers: ProcessTeam) -> list[dict[str, AnyArray]]:
    """Put all arrays into shared memory and tell every worker where they are."""
    shared = workers.shared
    arrays = {}
    for name, value in job.values.items():
        if isinstance(value, np.ndarray) and job.aliases.get(name, name) == name:
            arrays[name] = shared.put(name, value)
    for name, owner in job.aliases.items():
        if name != owner:
            arrays[name] = arrays[owner]
    orders = [shared.put(f"order {k}", order) for k, order in enumerate(job.tiling.order)]
    replicas: list[dict[str, AnyArray]] = []
    for worker in range(job.tiling.num_workers):
        own = dict(arrays)
        mine: dict[str, AnyArray] = {}
        for name in job.replicated:
            key = f"{name} of {worker}"
            own[name] = shared.put(key, job.replica(name))
            mine[name] = shared.arrays[key]
        replicas.append(mine)
        request = {
            "text": job.source.text, "options": dataclasses.asdict(job.options),
            "arguments": list(job.source.arguments), "scalars": plain_scalars(job.values),
            "arrays": {
                name: own[job.aliases.get(name, name)].as_data() for name in arrays
            },
            "orders": [each.as_data() for each in orders],
        }  # fmt: skip
        workers.send(worker, {"job": request}, "starting")
    for _ in range(job.tiling.num_workers):
        workers.receive()
    return replicas


def _run_tiles(
    job: LoopJob, workers: ProcessTeam, step: int | None, ended: set[int], results: Results
) -> None:
    """Hand each worker its next tile as soon as those that it follows have ended."""
    waiting = [
        [n for n, t in enumerate(job.tiling.tiles) if t.worker == w and step in (None, t.step)]
        for w in range(job.tiling.num_workers)
    ]
    running: dict[int, int] = {}
    while any(waiting) or running:
        for worker, queue in enumerate(waiting):
            if worker in running or not queue:
                continue
            tile = job.tiling.tiles[queue[0]]
            if all(other in ended for other in tile.after):
                running[worker] = queue.pop(0)
                lead = job.leading(tile)[len(job.tiling.order) :]
                workers.send(worker, {"bounds": list(map(int, lead))}, f"tile {tile.place}")
        worker, answer = workers.receive()
        number = running.pop(worker)
        results[number] = tuple(map(scalar_of, answer["result"]))
        ended.add(number)
