"""The other side of `ForecastProcess`: answers questions until nobody asks any more."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hocket.base.errors import HocketError
from hocket.processes.child import serve
from hocket.processes.frames import Frame
from hocket.service.executors.isolation import make_private
from hocket.service.forecasts.questions import answered
from hocket.service.store.snapshot import put_together

NICENESS = 10
"""Rounds and jobs go first."""


def answer(asked: Frame) -> tuple[dict[str, Any], tuple[()]]:
    """The answer to a question about the state behind it."""
    header = asked.header
    try:
        head, *arrays = asked.buffers
        state = put_together(bytes(head), arrays)
        found = answered(header["question"], state, header["time_s"], header["asked"])
        return {"found": found}, ()
    except HocketError as error:
        return {"error": error.message, "hint": error.hint}, ()
    except Exception as error:
        # The next question may fare better.
        return {"failure": repr(error)}, ()


if __name__ == "__main__":
    make_private()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    serve(answer)
