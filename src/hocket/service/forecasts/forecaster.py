"""Forecasts on request: one question at a time, and few that wait.

A forecast of a large fleet takes a core for a second or two. So only one is made at a time, and
further requests are refused at once when some wait already: a waiting thread serves nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from hocket.fleet.explain import Explanation, explain
from hocket.fleet.forecast import Forecast, at_moment
from hocket.fleet.rounds.state import WAITING, FleetState
from hocket.fleet.what_if import TwoFutures
from hocket.service.errors import BusyError
from hocket.service.forecasts.questions import (
    answered,
    explanation_of,
    forecast_of,
    what_if_of,
)

MAX_ASKED = 3
"""Maximum pending requests: one that is being answered, and those that wait."""


class _Ask(Protocol):
    def __call__(
        self, question: str, state: FleetState, time_s: float, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """An answer, made by one thread at a time."""


class FleetForecaster:
    """Answers from several threads' questions; all methods raise `BusyError` where too many ask,
    and `UsageError` where the question has no answer. ``time_s`` is now."""

    def __init__(self, ask: _Ask) -> None:
        self._ask_one = ask
        self._places = threading.BoundedSemaphore(MAX_ASKED)
        self._turn = threading.Lock()

    def explain(self, state: FleetState, time_s: float, number: int) -> Explanation:
        """Explain what a job does or waits for, and when it is expected to start."""
        if state.jobs.rows["phase"][state.row_of(number)] != WAITING:
            # Nobody has to look ahead for that.
            return explain(at_moment(state, time_s), number)
        return explanation_of(self._ask("explain", state, time_s, number=number))

    def starts(self, state: FleetState, time_s: float, numbers: Sequence[int]) -> Forecast:
        """When these jobs are expected to get devices."""
        return forecast_of(self._ask("starts", state, time_s, numbers=list(numbers)))

    def forecast(
        self, state: FleetState, time_s: float, policy: str | None, num_devices: Mapping[str, int]
    ) -> Forecast:
        """Forecast of the jobs under a policy, with other numbers of devices."""
        asked = {"policy": policy, "num_devices": dict(num_devices)}
        return forecast_of(self._ask("forecast", state, time_s, **asked))

    def what_if(
        self, state: FleetState, time_s: float, policy: str | None, num_devices: Mapping[str, int]
    ) -> TwoFutures:
        """The same against things as they are."""
        asked = {"policy": policy, "num_devices": dict(num_devices)}
        return what_if_of(self._ask("what-if", state, time_s, **asked))

    def close(self) -> None:
        """Answer no more."""

    def _ask(self, question: str, state: FleetState, time_s: float, **asked: Any) -> dict[str, Any]:
        with self._place(), self._turn:
            return self._ask_one(question, state, time_s, asked)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise BusyError("other questions are being answered", hint="try again in a moment")
        try:
            yield
        finally:
            self._places.release()


class InProcessForecaster(FleetForecaster):
    """Answers in this process, whose other threads it holds up: for small fleets and tests."""

    def __init__(self) -> None:
        super().__init__(answered)
