"""One tile after another in this thread: the serial order whose bits all other back ends give."""

from __future__ import annotations

from typing import Any

from hocket.loops.job import LoopJob, arguments_for, exchange, finish


def run_in_turn(job: LoopJob) -> list[tuple[Any, ...]]:
    """Carry out a job; the result of every tile in the order of tiles."""
    kernel = job.kernel()
    workers = range(job.tiling.num_workers)
    replicas = [{name: job.replica(name) for name in job.replicated} for _ in workers]
    arguments = [arguments_for(job, own) for own in replicas]
    results: list[tuple[Any, ...]] = []
    step = 0
    for tile in job.tiling.tiles:
        if tile.step != step:
            step = tile.step
            exchange(job, replicas)
        results.append(kernel(*job.leading(tile), *arguments[tile.worker]))
    exchange(job, replicas)
    finish(job, replicas)
    return results
