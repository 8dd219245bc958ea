"""Pinned threads of this process: compiled kernels run without the interpreter's lock.

Workers are started once and stay on one core each; a pool whose threads wander runs two kernels on
one core.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from queue import SimpleQueue

Task = Callable[[], None]
Ended = SimpleQueue[BaseException | None]
"""Where the ends of one call's tasks are told; an interrupted call leaves none to the next."""


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
