"""The thread of a rank that executes planned collectives, one after the other.

Collectives of the process group have all their data at submission (`put`). Sums of priority
gradient sync (`begin`) start before all data is there, and get their chunks one by one. If a rank
dies or hangs, the error of every surviving rank names it; a broken link ends the group with an
error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch.distributed as dist

from hocket.base.errors import RunError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import cluster_of
from hocket.plan.sections.communication import Collective
from hocket.runtime.collectives import rank_events
from hocket.runtime.collectives.agreed_plans import AgreedPlan, AgreedPlans
from hocket.runtime.collectives.link_probe import probe
from hocket.runtime.collectives.peer_sockets import AHEAD_S, close_all, connect_all
from hocket.runtime.collectives.rank_events import RankEvents, explained
from hocket.runtime.collectives.rank_tables import RankTables, tables_of
from hocket.runtime.collectives.tree_executor import Connections, RunState, TreeRun

_SLICE_S = 0.1
_START_S = 60.0
"""Seconds to wait for ranks that start late."""


@dataclass(eq=False)
class CollectiveJob:
    """A collective of the process group."""

    collective: Collective
    root: int
    take: Callable[[], np.ndarray[Any, Any]]
    """Returns a flat copy of this rank's input, which becomes the result."""
    give: Callable[[np.ndarray[Any, Any]], None]
    fail: Callable[[BaseException], None]


class TreeThread:
    """Executes collectives in the order of submission, which must be the same on all ranks."""

    def __init__(
        self, store: Any, rank: int, num_ranks: int, cluster: Callable[[], Cluster | None],
        timeout_s: float = inf,
    ) -> None:  # fmt: skip
        """``cluster`` returns the known links, or None; then the first collective measures them.

        After ``timeout_s`` without progress a collective fails, even if all ranks are alive.
        """
        self.rank, self.num_ranks, self._store = rank, num_ranks, store
        self._given, self._timeout_s = cluster, timeout_s
        self._jobs: queue.SimpleQueue[CollectiveJob | TreeRun | None] = queue.SimpleQueue()
        self._events = RankEvents(store, rank, num_ranks)
        self._sockets: list[Any] = []
        self._connections: Connections | None = None
        self._plans: AgreedPlans | None = None
        self._num_begun = 0
        self._error: BaseException | None = None
        self._is_closing = False
        self._notify = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hocket collectives", daemon=True)
        # A thread inside the store's C++ does not survive the end of the interpreter.
        atexit.register(self.close)

    @property
    def cluster(self) -> Cluster | None:
        """The links that collectives are planned for; None before the first collective."""
        return self._plans.cluster if self._plans is not None else None

    def open(self) -> AgreedPlans:
        """Measure the links if they are not known, and connect; every rank must call it once."""
        if self._plans is None:
            cluster, cut = self._given(), list[int]()
            if cluster is None:
                found = probe(self._store, self.rank, self.num_ranks, "links", patience_s=_START_S)
                cluster, cut = cluster_of(found), found.cut_from(self.rank)
            self._sockets = connect_all(
                self._store, self.rank, self.num_ranks, "sockets", patience_s=_START_S,
                without=cut,
                ahead_bytes=AHEAD_S * max(link.bandwidth_bps for link in cluster.links),
            )  # fmt: skip
            self._connections = Connections(
                [-1 if each is None else each.fileno() for each in self._sockets]
            )
            self._plans = AgreedPlans(self._store, self.rank, cluster, self.num_ranks, "links")
        return self._plans

    def put(self, job: CollectiveJob) -> None:
        """Submit a collective."""
        self._enqueue(job)

    def begin(self, tables: RankTables, data: np.ndarray[Any, Any]) -> TreeRun:
        """Start a sum whose chunks become ready one by one."""
        run = self._new_run(tables, data, notify_fd=self._notify, is_ready=False)
        self._enqueue(run)
        return run

    def wait(self, run: TreeRun, first: int, stop: int) -> None:
        """Wait until chunks ``first`` to ``stop`` (exclusive) are summed; raises if the thread
        failed."""
        final = run.final[first:stop]
        while not final.all():
            if self._error is not None:
                raise RunError(str(self._error))
            # The C code signals this eventfd after each sum, because it never calls Python.
            if select.select([self._notify], [], [], _SLICE_S)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._notify)

    def agreed(self, key: str, text: str) -> str:
        """Return the ``text`` of rank 0 on every rank."""
        if self.rank == 0:
            self._store.set(f"agreed/{key}", text)
        return str(self._store.get(f"agreed/{key}").decode())

    def close(self) -> None:
        """Finish submitted collectives, or abandon them if other ranks do not respond."""
        atexit.unregister(self.close)
        self._jobs.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=rank_events.ANSWER_S)
            self._is_closing = True
            self._thread.join(timeout=rank_events.ANSWER_S)
        close_all(self._sockets, at_once=self._error is not None)

    # ── the thread ──

    def _enqueue(self, job: CollectiveJob | TreeRun) -> None:
        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()

    def _new_run(self, tables: RankTables, data: np.ndarray[Any, Any], **options: Any) -> TreeRun:
        assert self._connections is not None
        self._num_begun += 1
        return TreeRun(tables, self._connections, data, sequence=self._num_begun, **options)

    def _run(self) -> None:
        job: CollectiveJob | TreeRun | None = None
        try:
            while (job := self._next()) is not None:
                if isinstance(job, TreeRun):
                    self._finish(job, f"step {self._num_begun}")
                else:
                    self._execute(job)
        except BaseException as error:
            self._error = explained(error)
            close_all(self._sockets)
            while job is not None:
                if isinstance(job, CollectiveJob):
                    job.fail(self._error)
                job = self._jobs.get()

    def _next(self) -> CollectiveJob | TreeRun | None:
        """Return the next job; answers calls of other ranks while there is none."""
        while True:
            try:
                return self._jobs.get(timeout=2 * _SLICE_S)
            except queue.Empty:
                self._events.follow()

    def _execute(self, job: CollectiveJob) -> None:
        data = job.take()
        plan = self.open().plan(job.collective, job.root, data.nbytes)
        tables = tables_of(plan.section, self.rank, data.size, data.itemsize, plan.rate_bps)
        self._finish(self._new_run(tables, data), f"{job.collective} of {data.nbytes} bytes")
        job.give(data)

    def _finish(self, run: TreeRun, what: str) -> None:
        moved, since_s, call_s = -1, time.monotonic(), rank_events.CALL_S
        while (state := run.advance(_SLICE_S)) != RunState.DONE:
            peer = int(run.failed_peer[0])
            if state == RunState.MISMATCH:
                raise RunError(
                    f"rank {peer} does something else than this rank, which is in {what}",
                    hint="all ranks must call the same collectives with tensors of the same size",
                )
            if state == RunState.CLOSED:
                why = f"rank {peer} broke its connection to rank {self.rank} off in {what}"
                # A dead rank does not answer the call, whose error names it. If all ranks answer,
                # the link has failed.
                self._events.call(why)
                self._events.fail(why)
            if self._is_closing:
                raise RunError(f"the group was closed in {what}")
            has_moved = run.num_moved != moved
            try:
                self._events.follow()
            except dist.DistError:
                # The rank that hosts the store may end once it is done; its data still arrives.
                if not has_moved:
                    raise
            if has_moved:
                moved, since_s, call_s = run.num_moved, time.monotonic(), rank_events.CALL_S
            elif time.monotonic() - since_s > self._timeout_s:
                raise RunError(f"nothing has moved in {what} for {self._timeout_s:.0f} s")
            elif time.monotonic() - since_s > call_s:
                self._events.call(f"nothing moves in {what}")
                # All ranks have answered, so the data is slow: each further call waits longer.
                call_s *= 2

    def plan(self, num_bytes: int) -> AgreedPlan:
        """Return the plan for a sum of ``num_bytes``."""
        return self.open().plan("allreduce", 0, num_bytes)
