"""A worker process: told of a job, it runs its tiles on shared memory and answers for each.

Started as ``python -m hocket.loops.backends.worker`` with its core. It gets the source of the
kernel that was made from the user's function and compiles it as the caller would, so the bits are
the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from hocket.loops.backends.segments import AttachedArrays, plain_scalars, scalar_of
from hocket.loops.compile import CompileOptions, compiled
from hocket.processes.child import serve
from hocket.processes.frames import Frame


class TileWorker:
    """Answers for one caller."""

    def __init__(self) -> None:
        self._attached = AttachedArrays()
        self._job: dict[str, Any] = {}
        self._arguments: list[Any] = []
        self._orders: list[Any] = []

    def answer(self, asked: Frame) -> tuple[dict[str, Any], tuple[()]]:
        """Take a job, or run one of its tiles."""
        try:
            if "job" in asked.header:
                self._take(asked.header["job"])
                return {"ready": True}, ()
            return {"result": self._run(asked.header["bounds"])}, ()
        except Exception as error:
            return {"error": [type(error).__name__, str(error).partition("\n")[0]]}, ()

    def _take(self, job: dict[str, Any]) -> None:
        self._job = job
        self._arguments = [
            self._attached.get(job["arrays"][name]) if name in job["arrays"]
            else scalar_of(job["scalars"][name])
            for name in job["arguments"]
        ]  # fmt: skip
        self._orders = [self._attached.get(described) for described in job["orders"]]

    def _run(self, bounds: list[int]) -> list[Any]:
        kernel = compiled(self._job["text"], CompileOptions(**self._job["options"]))
        found = kernel(*self._orders, *bounds, *self._arguments)
        if not found:
            return []
        numbered = {str(place): value for place, value in enumerate(found)}
        return list(plain_scalars(numbered).values())


if __name__ == "__main__":
    # The first argument is for the crew.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {int(sys.argv[2])})
    serve(TileWorker().answer)
