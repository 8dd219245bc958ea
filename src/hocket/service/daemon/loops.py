"""Two threads around `Decider` and `Reconciler`: one decides and commits, one acts.

Deciding never waits for the executor, whose calls may take seconds, and acting never waits for the
disk. Commands that arrive during a commit form the next batch. Users' commands go before reports of
the executor.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from hocket.fleet.rounds.dependencies import next_limit_s
from hocket.service.daemon import commands
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.decider import Command, Decider, Request
from hocket.service.daemon.reconciler import Reconciler
from hocket.service.daemon.service_state import ServiceState, name_of
from hocket.service.errors import UnavailableError
from hocket.service.executors.executor import AttemptName
from hocket.service.store.tables import Batch

# A node that dies ends hundreds of attempts at once, and each is a decision of some milliseconds.
# Only a few of them go into one batch, so that no user's command waits for all of them.

MAX_ASKED = 64
"""Maximum number of commands of users and processes in one batch; with more, the first would wait
long for the last.
"""
MAX_REPORTS = 3
"""Maximum number of executor reports in one batch."""


class Inbox:
    """Two queues, of commands and of reports, with one condition that wakes the reader."""

    def __init__(self) -> None:
        self._event_notifier = threading.Condition()
        self._asked: deque[Request] = deque()
        self._reports: deque[Request] = deque()

    def put(self, request: Request, *, is_report: bool = False) -> None:
        """Add a command; ``is_report`` for reports of the executor."""
        with self._event_notifier:
            (self._reports if is_report else self._asked).append(request)
            self._event_notifier.notify()

    def ring(self) -> None:
        """Wake `take`, which may then return an empty batch."""
        with self._event_notifier:
            self._event_notifier.notify()

    def take(self, wait_s: float) -> list[Request]:
        """The next batch; waits up to ``wait_s`` for one."""
        with self._event_notifier:
            if not self._asked and not self._reports and wait_s > 0.0:
                self._event_notifier.wait(wait_s)
            asked = [self._asked.popleft() for _ in range(min(len(self._asked), MAX_ASKED))]
            reports = [self._reports.popleft() for _ in range(min(len(self._reports), MAX_REPORTS))]
        return asked + reports

    def take_all(self) -> list[Request]:
        """Everything in both queues, without a limit."""
        with self._event_notifier:
            requests = [*self._asked, *self._reports]
            self._asked.clear()
            self._reports.clear()
        return requests


_MAX_NAMES = 64
_IDLE_S = 1.0
_RETRY_S = 0.5
_LOG = logging.getLogger("hocket.service")
Item = TypeVar("Item")


class Loops:
    """The two threads; `ask` and `report` queue commands for them."""

    def __init__(self, decider: Decider, clock: Clock, poll_s: float) -> None:
        self.is_closing = False
        self.trouble: str = ""
        """Reason why no round can begin; empty if none was due or the last one began."""
        self._decider = decider
        self._clock = clock
        self._poll_s = poll_s
        self._inbox = Inbox()
        self._changed: queue.SimpleQueue[AttemptName | None] = queue.SimpleQueue()
        self._committed = threading.Condition()
        self._next_tick_try_s = 0.0
        self._threads: list[threading.Thread] = []
        self.observers: list[Callable[[ServiceState, Batch], None]] = []
        """Functions that the deciding thread calls after each commit; they must be fast."""
        decider.on_commit = self._after_commit

    def start(self, reconciler: Reconciler) -> None:
        """Start both threads: one decides, one talks to the executor."""
        decides = threading.Thread(target=self._decide_forever, name="fleet-decides", daemon=True)
        acts = threading.Thread(
            target=self._act_forever, args=(reconciler,), name="fleet-acts", daemon=True
        )
        self._threads = [decides, acts]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the current batch; commands that wait are refused."""
        self.is_closing = True
        self._inbox.ring()
        self._changed.put(None)
        for thread in self._threads:
            thread.join()
        with self._committed:
            self._committed.notify_all()
        self._refuse_waiting()

    @property
    def are_alive(self) -> bool:
        """True if commands are executed."""
        threads = self._threads
        return bool(threads) and not self.is_closing and all(one.is_alive() for one in threads)

    def ask(self, command: Command) -> Future[Any]:
        """Queue a command; the future is answered after its commit."""
        return self._post(Request(command), is_report=False)

    def report(self, command: Command) -> Future[Any]:
        """Queue a report of the executor; a batch takes fewer of these than of users' commands."""
        return self._post(Request(command), is_report=True)

    def _post(self, request: Request, *, is_report: bool) -> Future[Any]:
        self._inbox.put(request, is_report=is_report)
        if self.is_closing:
            # The reading thread may have ended already, so nobody would take the request.
            self._refuse_waiting()
        return request.future

    def wait(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``is_so()`` holds, which only a commit can change, or until ``timeout_s`` has
        passed.
        """
        with self._committed:
            self._committed.wait_for(lambda: is_so() or self.is_closing, timeout_s)

    # ── deciding ──

    def _decide_forever(self) -> None:
        while not self.is_closing:
            now_s = self._clock.now_s()
            wait_s = min(max(self._next_tick_s() - now_s, 0.0), _IDLE_S)
            requests = self._inbox.take(wait_s)
            tick = Request(commands.tick)
            if self._next_tick_s() <= self._clock.now_s():
                requests.append(tick)
            if requests:
                self._decider.decide(requests)
            self._mind(tick)

    def _mind(self, tick: Request) -> None:
        """Record whether a round could begin; if not, it is retried after a delay."""
        if not tick.future.done():
            return
        error = tick.future.exception()
        self.trouble = "" if error is None else f"no round can begin: {error}"
        if error is not None:
            self._next_tick_try_s = self._clock.now_s() + _RETRY_S

    def _next_tick_s(self) -> float:
        state = self._decider.service_state.state
        return max(min(float(state.next_tick_s), next_limit_s(state)), self._next_tick_try_s)

    def _after_commit(self, service_state: ServiceState, batch: Batch) -> None:
        for record in batch.attempts:
            if record.ended_s is None and record.started_s is not None:
                self._changed.put(name_of(record))
        for observe in self.observers:
            try:
                observe(service_state, batch)
            except Exception:
                # The commit is valid even if an observer fails.
                _LOG.exception("a commit could not be observed")
        with self._committed:
            self._committed.notify_all()

    def _refuse_waiting(self) -> None:
        for request in self._inbox.take_all():
            request.future.set_exception(UnavailableError("the service ends"))

    # ── acting ──

    def _act_forever(self, reconciler: Reconciler) -> None:
        next_look_s = time.monotonic()
        while not self.is_closing:
            wait_s = max(next_look_s - time.monotonic(), 0.0)
            names = _taken(self._changed, wait_s, _MAX_NAMES)
            if time.monotonic() >= next_look_s:
                self._safely(reconciler, reconciler.look)
                next_look_s = time.monotonic() + self._poll_s
            else:
                known = [name for name in names if name is not None]
                self._safely(reconciler, partial(reconciler.apply, known))

    @staticmethod
    def _safely(reconciler: Reconciler, act: Callable[[], None]) -> None:
        """Call the reconciler; an unexpected exception is recorded, and polling continues."""
        try:
            act()
        except Exception as error:
            reconciler.trouble = f"the engine failed: {error!r}"
            _LOG.exception("the engine failed")


def _taken(source: queue.SimpleQueue[Item], wait_s: float, most: int) -> list[Item]:
    """Take up to ``most`` items of a queue; waits up to ``wait_s`` if it is empty."""
    items: list[Item] = []
    try:
        items.append(source.get(timeout=wait_s) if wait_s > 0.0 else source.get_nowait())
        while len(items) < most:
            items.append(source.get_nowait())
    except queue.Empty:
        pass
    return items
