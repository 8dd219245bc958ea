"""Compute forecasts in a separate process, so that they take no time from the deciding process.

The first question starts the process. It gets one question at a time with the state of the fleet,
and runs at low priority (`nice`). A process that dies or takes too long is replaced at the next
question.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - sent through a private pipe, never stored
import threading
from collections.abc import Mapping
from typing import Any

from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import FleetState
from hocket.processes.root_cause import ProcessError
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import WorkerGroup
from hocket.service.errors import UnavailableError
from hocket.service.forecasts.forecaster import FleetForecaster, Question

PATIENCE_S = 60.0
"""Seconds to wait for an answer; the first one includes the start of the process on a busy machine.
"""
_PROGRAM = "hocket.service.forecasts.worker"


class ForecastProcess(FleetForecaster):
    """A `FleetForecaster` that answers in another process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        super().__init__(self._ask_child)
        self._patience_s = patience_s
        self._group: WorkerGroup | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        """Held while the process is started or ended, so that one started during the shutdown does
        not stay.
        """

    def close(self) -> None:
        """End the process and the question that it works on."""
        with self._starting:
            self._is_closed = True
            if self._group is not None:
                # Callers that wait for an answer get an error and release the lock.
                self._group.kill()
        with self._turn:
            self._let_go()

    def _ask_child(
        self, question: Question, state: FleetState, time_s: float, arguments: Mapping[str, Any]
    ) -> Any:
        # Pickle is safe here, because both ends of the pipe are this program.
        request = pickle.dumps((question, state, time_s, arguments))
        group = self._living()
        try:
            group.send(0, {}, [request])
            found = group.receive(self._patience_s)
        except ProcessError:
            found = None
        if found is None:
            self._let_go()
            hint = "try again; the fleet itself goes on"
            raise UnavailableError("no answer was found in time", hint=hint)
        if "failure" in found.header:
            raise UnavailableError(f"no answer could be found: {found.header['failure']}")
        if "error" in found.header:
            raise UsageError(found.header["error"], hint=found.header["hint"])
        return pickle.loads(found.buffers[0])  # noqa: S301

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
        raise UnavailableError(
            f"the process for forecasts cannot be started: {error.strerror}"
        ) from None
