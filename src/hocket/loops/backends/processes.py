"""Processes of this machine on shared memory, for code that threads would disturb.

Each worker is a process of its own on a core of its own. The caller hands out a tile when the tiles
that it follows have ended; a worker that dies is named, with the tile that it was running.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dataclasses
import json
import os
import selectors
import subprocess
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from hocket.base.config import environment_anywhere
from hocket.base.errors import RunError
from hocket.loops.backends.segments import SharedArrays, plain_scalars, scalar_of
from hocket.loops.job import AnyArray, Job, exchange, finish

Results = list[tuple[Any, ...]]


class ProcessTeam:
    """Persistent worker processes with their shared arrays."""

    def __init__(self, num_workers: int) -> None:
        self.shared = SharedArrays()
        cores = sorted(os.sched_getaffinity(0))
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "hocket.loops.backends.worker", str(cores[w % len(cores)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment_anywhere(),
            )
            for w in range(num_workers)
        ]

    def tell(self, worker: int, request: dict[str, Any], doing: str) -> None:
        """Send one request."""
        pipe = self.processes[worker].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise self._died(worker, doing) from error

    def hear(self, worker: int, doing: str) -> dict[str, Any]:
        """Read one answer; raises what the worker raised, or that it died."""
        pipe = self.processes[worker].stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise self._died(worker, doing)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            name, message = answer["error"]
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(message)
            raise RunError(f"worker {worker} failed: {name}: {message}", where=doing)
        return answer

    def _died(self, worker: int, doing: str) -> RunError:
        process = self.processes[worker]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        return RunError(
            f"worker {worker} (process {process.pid}) died with status {process.returncode}",
            hint="the arrays are as they were before the call; call again, a new team is started",
            where=doing,
        )

    def close(self) -> None:
        """End the workers and give the memory back."""
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            if process.poll() is None:
                process.kill()
                process.wait()
        self.shared.close()


@lru_cache(maxsize=4)
def team(num_workers: int) -> ProcessTeam:
    """The worker processes of this process."""
    started = ProcessTeam(num_workers)
    atexit.register(started.close)
    return started


def run_on_processes(job: Job) -> Results:
    """Carry out a job; the caller's arrays change only when all tiles have ended."""
    workers = team(job.tiling.num_workers)
    try:
        return _run(job, workers)
    except BaseException:
        # Workers may be in the middle of tiles: none of them is used again.
        team.cache_clear()
        atexit.unregister(workers.close)
        workers.close()
        raise


def _run(job: Job, workers: ProcessTeam) -> Results:
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


def _own(job: Job, shared: SharedArrays) -> dict[str, AnyArray]:
    return {name: shared.arrays[name] for name in job.values if name in shared.arrays}


def _send(job: Job, workers: ProcessTeam) -> list[dict[str, AnyArray]]:
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
        workers.tell(worker, {"job": request}, "starting")
    for worker in range(job.tiling.num_workers):
        workers.hear(worker, "starting")
    return replicas


def _run_tiles(
    job: Job, workers: ProcessTeam, step: int | None, ended: set[int], results: Results
) -> None:
    """Hand each worker its next tile as soon as those that it follows have ended."""
    waiting = [
        [n for n, t in enumerate(job.tiling.tiles) if t.worker == w and step in (None, t.step)]
        for w in range(job.tiling.num_workers)
    ]
    running: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    for worker, process in enumerate(workers.processes):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, worker)
    with selector:
        while any(waiting) or running:
            for worker, queue in enumerate(waiting):
                if worker in running or not queue:
                    continue
                tile = job.tiling.tiles[queue[0]]
                if all(other in ended for other in tile.after):
                    running[worker] = queue.pop(0)
                    lead = job.leading(tile)[len(job.tiling.order) :]
                    workers.tell(worker, {"bounds": list(map(int, lead))}, f"tile {tile.place}")
            for key, _ in selector.select():
                worker = key.data
                place = job.tiling.tiles[running[worker]].place
                answer = workers.hear(worker, f"tile {place}")
                number = running.pop(worker)
                results[number] = tuple(map(scalar_of, answer["result"]))
                ended.add(number)
