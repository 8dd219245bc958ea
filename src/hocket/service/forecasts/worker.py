"""The process behind `ForecastProcess`: answers questions until its input ends."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251 - sent through a private pipe, never stored
from typing import Any

from hocket.base.errors import HocketError
from hocket.processes.child import serve
from hocket.processes.frames import Frame
from hocket.service.executors.isolation import make_private
from hocket.service.forecasts.forecaster import answer

NICENESS = 10
"""Niceness of the process: rounds and jobs have priority."""


def answer_frame(request: Frame) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Answer one question; an error is an answer too."""
    try:
        return {}, (pickle.dumps(answer(*pickle.loads(request.buffers[0]))),)  # noqa: S301
    except HocketError as error:
        return {"error": error.message, "hint": error.hint}, ()
    except Exception as error:
        # The next question may succeed.
        return {"failure": repr(error)}, ()


if __name__ == "__main__":
    make_private()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    serve(answer_frame)
