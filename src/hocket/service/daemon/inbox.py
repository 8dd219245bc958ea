"""Commands that wait to be decided: what people ask goes before what the engine tells.

A node that dies ends hundreds of attempts at once, and each is a decision of some milliseconds.
Only a few of them go into one batch, so that nobody who asks waits for all of them.
"""

from __future__ import annotations

import threading
from collections import deque

from hocket.service.daemon.decider import Request

MAX_ASKED = 64
"""Commands of people and processes in one batch: more would make the first wait for the last."""
MAX_TOLD = 3
"""Outcomes in one batch."""


class Inbox:
    """Two queues behind one bell."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self._asked: deque[Request] = deque()
        self._told: deque[Request] = deque()

    def put(self, request: Request, *, is_told: bool = False) -> None:
        """Add a command; ``is_told`` for what the engine tells."""
        with self._bell:
            (self._told if is_told else self._asked).append(request)
            self._bell.notify()

    def ring(self) -> None:
        """Let `take` return though nothing came."""
        with self._bell:
            self._bell.notify()

    def take(self, wait_s: float) -> list[Request]:
        """The next batch; waits so long where there is none."""
        with self._bell:
            if not self._asked and not self._told and wait_s > 0.0:
                self._bell.wait(wait_s)
            asked = [self._asked.popleft() for _ in range(min(len(self._asked), MAX_ASKED))]
            told = [self._told.popleft() for _ in range(min(len(self._told), MAX_TOLD))]
        return asked + told

    def take_all(self) -> list[Request]:
        """Everything, at once."""
        with self._bell:
            requests = [*self._asked, *self._told]
            self._asked.clear()
            self._told.clear()
        return requests
