"""Answers in a process of their own, which takes no time from the one that decides.

It is started by the first question and asked one question at a time: what is asked, and the state
behind it. It yields to everything else on the machine (`nice`). One that dies or takes too
long is started anew for the next question.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import FleetState
from hocket.processes.root_cause import ProcessError
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import WorkerGroup
from hocket.service.errors import UnavailableError
from hocket.service.forecasts.forecaster import FleetForecaster
from hocket.service.store.snapshot import take_apart

PATIENCE_S = 60.0
"""The first answer includes the start of the process; a machine may be busy with better things."""
_PROGRAM = "hocket.service.forecasts.worker"


class ForecastProcess(FleetForecaster):
    """An `FleetForecaster` beside this process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        super().__init__(self._ask_child)
        self._patience_s = patience_s
        self._group: WorkerGroup | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        """A process that is started while the service ends must not outlive it."""

    def close(self) -> None:
        """End the process, and with it the question that it works on."""
        with self._starting:
            self._is_closed = True
            if self._group is not None:
                # Callers that wait for an answer get an error and release the lock.
                self._group.kill()
        with self._turn:
            self._let_go()

    def _ask_child(
        self, question: str, state: FleetState, time_s: float, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        head, arrays = take_apart(state)
        answer = self._answer(
            {"question": question, "time_s": time_s, "asked": dict(asked)},
            [head, *(array.tobytes() for array in arrays)],
        )
        if "failure" in answer:
            raise UnavailableError(f"no answer could be found: {answer['failure']}")
        if "error" in answer:
            raise UsageError(answer["error"], hint=answer["hint"])
        found: dict[str, Any] = answer["found"]
        return found

    def _answer(self, asked: dict[str, Any], state: list[bytes]) -> dict[str, Any]:
        group = self._living()
        try:
            group.send(0, asked, state)
            answer = group.receive(self._patience_s)
        except ProcessError:
            answer = None
        if answer is None:
            self._let_go()
            hint = "try again; the fleet itself goes on"
            raise UnavailableError("no answer was found in time", hint=hint)
        return answer.header

    def _living(self) -> WorkerGroup:
        with self._starting:
            if self._is_closed:
                raise UnavailableError("the service ends")
            self._group = self._group or _started()
            return self._group

    def _let_go(self) -> None:
        with self._starting:
            group, self._group = self._group, None
        if group is not None:
            group.close()


def _started() -> WorkerGroup:
    spec = WorkerSpec(name="the forecast", module=_PROGRAM, folder="/", shows_output=True)
    try:
        return WorkerGroup([spec]).__enter__()
    except OSError as error:
        raise UnavailableError(f"nobody can be asked: {error.strerror}") from None
