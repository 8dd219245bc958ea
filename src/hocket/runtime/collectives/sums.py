"""One rank's thread that sums chunks which become ready one by one, step after step.

The executor takes the most urgent of those that are ready. A rank that dies or stands still is
named; links are not mended here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from typing import Any

import numpy as np

from hocket.base.errors import RunError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import cluster_of
from hocket.runtime.collectives.carry import Carry, CarryState, Connections
from hocket.runtime.collectives.events import CALL_S, Events, NeedsMendError, explained
from hocket.runtime.collectives.layout import RankLayout
from hocket.runtime.collectives.plans import AgreedPlan, AgreedPlans
from hocket.runtime.collectives.probe import probe
from hocket.runtime.collectives.wires import AHEAD_S, close_all, connect_all

_SLICE_S = 0.1


class SumExchange:
    """One rank's thread that sums the chunks of one step after the other."""

    def __init__(self, store: Any, rank: int, num_ranks: int, cluster: Cluster | None) -> None:
        self._store, self.rank, self.num_ranks = store, rank, num_ranks
        if cluster is None:
            cluster = cluster_of(probe(store, rank, num_ranks, "links", patience_s=60.0))
        self._plans = AgreedPlans(store, rank, cluster, num_ranks, "links")
        ahead_bytes = AHEAD_S * max(link.bandwidth_bps for link in cluster.links)
        self._sockets = connect_all(
            store, rank, num_ranks, "wires", patience_s=60.0, ahead_bytes=ahead_bytes
        )
        self._connections = Connections([-1 if s is None else s.fileno() for s in self._sockets])
        self._events = Events(store, rank, num_ranks)
        self._changed = threading.Condition()
        self._carries: list[Carry] = []
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._note = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hocket priority", daemon=True)
        # A thread inside the store's C++ does not survive the end of the interpreter.
        atexit.register(self.close)

    def plan(self, num_bytes: int) -> AgreedPlan:
        """For sums of so many bytes."""
        return self._plans.plan("allreduce", 0, num_bytes)

    def begin(self, layout: RankLayout, data: np.ndarray[Any, Any]) -> Carry:
        """The sums of one more step; chunks become ready one by one."""
        with self._changed:
            number = self._num_done + len(self._carries)
            carry = Carry(
                layout, self._connections, data, sequence=number, note_fd=self._note,
                is_ready=False,
            )  # fmt: skip
            self._carries.append(carry)
            self._changed.notify_all()
        if not self._thread.is_alive() and self._error is None:
            self._thread.start()
        return carry

    def wait(self, carry: Carry, first: int, stop: int) -> None:
        """Until some chunks are summed; raises where that cannot be any more."""
        final = carry.final[first:stop]
        while not final.all():
            if self._error is not None:
                raise RunError(str(self._error))
            # The executor raises this with every sum; it never calls Python.
            if select.select([self._note], [], [], _SLICE_S)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._note)

    def agreed(self, key: str, text: str) -> str:
        """What the first rank says."""
        if self.rank == 0:
            self._store.set(f"agreed/{key}", text)
        return str(self._store.get(f"agreed/{key}").decode())

    def close(self) -> None:
        """Let go of all links, once the sums under way are done."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        close_all(self._sockets, at_once=self._error is not None)

    # ── the thread ──

    def _run(self) -> None:
        try:
            while (carry := self._next()) is not None:
                self._finish(carry)
                with self._changed:
                    self._carries.pop(0)
                    self._num_done += 1
                    self._changed.notify_all()
        except NeedsMendError as reason:
            self._error = RunError(f"{reason}; links are not mended under priorities")
        except BaseException as error:
            self._error = explained(error)
        if self._error is not None:
            close_all(self._sockets)

    def _next(self) -> Carry | None:
        while True:
            with self._changed:
                if not self._carries and not self._is_closed:
                    self._changed.wait(2 * _SLICE_S)
                if self._carries:
                    return self._carries[0]
                if self._is_closed:
                    return None
            self._events.follow()

    def _finish(self, carry: Carry) -> None:
        what, moved, since_s, call_s = f"step {self._num_done}", -1, time.monotonic(), CALL_S
        while (state := carry.go_on(_SLICE_S)) != CarryState.DONE:
            if state == CarryState.GARBLED:
                raise RunError(f"rank {int(carry.who[0])} says in {what} what makes no sense")
            if state == CarryState.CLOSED:
                self._blame(int(carry.who[0]), what)
            if self._is_closed and carry.num_ready[0] == 0:
                return
            self._events.follow()
            if carry.num_moved != moved:
                moved, since_s, call_s = carry.num_moved, time.monotonic(), CALL_S
            elif time.monotonic() - since_s > call_s:
                self._events.call(what)
                call_s *= 2

    def _blame(self, peer: int, what: str) -> None:
        """Name the rank that went first: one that has raised an error leaves word of whose."""
        time.sleep(0.3)
        key = f"left/{peer}"
        first = int(self._store.get(key)) if self._store.check([key]) else peer
        self._store.set(f"left/{self.rank}", str(first))
        raise RunError(f"rank {first} broke its connection off in {what}")
