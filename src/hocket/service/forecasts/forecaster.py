"""Forecasts on request: one question at a time, and few that wait.

A forecast of a large fleet occupies a core for a second or two. So only one is computed at a time,
and further requests are refused at once if some wait already, because a waiting thread serves
nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.fleet.explain import Explanation, explain
from hocket.fleet.forecast import (
    Forecast,
    affordable_events,
    affordable_grain_s,
    at_moment,
    forecast,
    resized,
)
from hocket.fleet.rounds.state import WAITING, FleetState
from hocket.fleet.what_if import TwoFutures, what_if
from hocket.service.errors import BusyError

MAX_ASKED = 3
"""Maximum number of pending requests, including the one that is being answered."""


_PAGE_PART = 3
"""Divisor of an explanation's work limit that gives the limit for the queue of a page."""


def _starts(state: FleetState, numbers: Sequence[int]) -> Forecast:
    """Forecast the starts of waiting jobs, for a page with many viewers."""
    return forecast(
        state,
        until_started=numbers,
        grain_s=affordable_grain_s(state),
        max_events=max(affordable_events(state) // _PAGE_PART, 20),
    )


def _forecast(state: FleetState, policy: str | None, num_devices: Mapping[str, int]) -> Forecast:
    add, remove = resized(state, num_devices)
    return forecast(state, policy=policy, add=add, remove=remove)


Question = Callable[..., Any]
Answer = Callable[[Question, FleetState, float, Mapping[str, Any]], Any]


def answer(
    question: Question, state: FleetState, time_s: float, arguments: Mapping[str, Any]
) -> Any:
    """Answer a question about a state at a moment of its round."""
    return question(at_moment(state, time_s), **arguments)


class FleetForecaster:
    """Answers questions of several threads, by default in this process.

    All methods raise `BusyError` if too many requests wait, and `UsageError` if a question has no
    answer. ``time_s`` is the current time.
    """

    def __init__(self, answer_one: Answer = answer) -> None:
        self._answer_one = answer_one
        self._places = threading.BoundedSemaphore(MAX_ASKED)
        self._turn = threading.Lock()

    def explain(self, state: FleetState, time_s: float, number: int) -> Explanation:
        """Explain what a job does or waits for, and when it is expected to start."""
        if state.jobs.rows["phase"][state.row_of(number)] != WAITING:
            # This needs no look into the future.
            return explain(at_moment(state, time_s), number)
        found: Explanation = self._ask(explain, state, time_s, number=number)
        return found

    def starts(self, state: FleetState, time_s: float, numbers: Sequence[int]) -> Forecast:
        """Forecast of when these jobs get devices."""
        found: Forecast = self._ask(_starts, state, time_s, numbers=list(numbers))
        return found

    def forecast(
        self, state: FleetState, time_s: float, policy: str | None, num_devices: Mapping[str, int]
    ) -> Forecast:
        """Forecast of the jobs under a policy, with other numbers of devices."""
        arguments = {"policy": policy, "num_devices": dict(num_devices)}
        found: Forecast = self._ask(_forecast, state, time_s, **arguments)
        return found

    def what_if(
        self, state: FleetState, time_s: float, policy: str | None, num_devices: Mapping[str, int]
    ) -> TwoFutures:
        """Two forecasts: under the given policy and devices, and under the present ones."""
        arguments = {"policy": policy, "num_devices": dict(num_devices)}
        found: TwoFutures = self._ask(what_if, state, time_s, **arguments)
        return found

    def close(self) -> None:
        """Answer no more."""

    def _ask(self, question: Question, state: FleetState, time_s: float, **arguments: Any) -> Any:
        if not self._places.acquire(blocking=False):
            raise BusyError("other questions are being answered", hint="try again in a moment")
        try:
            with self._turn:
                return self._answer_one(question, state, time_s, arguments)
        finally:
            self._places.release()
